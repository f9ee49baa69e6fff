"""The names of meetings and the rows that a group's members exchange."""

from __future__ import annotations

import dataclasses
import hashlib

import msgpack
import pytest
from dipaco.modules.outer import Usual
from dipaco.peer.averaging.call_codec import GREATEST_KEY_CHARACTERS
from dipaco.peer.averaging.group import (
    GREATEST_BANDWIDTH_MBIT,
    BadRowError,
    GatherRow,
    GroupRules,
    agree,
    averager_prefix,
    meeting_key,
)
from dipaco.peer.averaging.parts import AveragingFailed, AveragingRequest
from dipaco.peer.averaging.service import agree_with_leader
from dipaco.peer.member.calls import Group, Met
from hypothesis import given
from hypothesis import strategies as st

DIGEST = hashlib.sha256(b"anchor").hexdigest()
KEYS = st.tuples(
    st.sampled_from(["L0.E0", "L0.E1", "L1.E0", "P3"]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
)


@given(KEYS, KEYS)
def test_names_are_short_and_equal_only_for_equal_things(one: tuple, other: tuple) -> None:
    assert len(meeting_key(*one)) <= GREATEST_KEY_CHARACTERS
    assert (meeting_key(*one) == meeting_key(*other)) == (one == other)


@pytest.mark.parametrize(
    "arguments",
    [("L0", 0, 0, DIGEST), ("L0.E0/1", 0, 0, DIGEST), ("L0.E0", 2**32, 0, DIGEST),
     ("L0.E0", -1, 0, DIGEST), ("L0.E0", 0, 2**32, DIGEST), ("L0.E0", 0, 0, "xyz"),
     ("L0.E0", 0, 0, DIGEST.upper())],
)  # fmt: skip
def test_what_cannot_be_has_no_name(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="must"):
        meeting_key(*arguments)


def test_prefixes_of_levels_differ() -> None:
    assert averager_prefix("a", "L0") != averager_prefix("a", "L1")


ROW = GatherRow(1, "L0.E0", 7, DIGEST, 2, "QmOne", 4096, 100)
OTHER = dataclasses.replace(ROW, peer="QmTwo", path=0, tokens=100, bandwidth_mbit=10)
RULES = GroupRules(ROW, frozenset({0, 2}), 5000)


def test_row_survives_the_wire() -> None:
    assert GatherRow.from_bytes(ROW.to_bytes()) == ROW


@given(st.binary(max_size=600))
def test_any_bytes_are_a_row_or_refused(data: bytes) -> None:
    try:
        row = GatherRow.from_bytes(data)
    except ValueError:
        return
    assert isinstance(row.tokens, int)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol": 2}, "protocol"),
        ({"module": "L0.E1"}, "module"),
        ({"round_index": 8}, "round 8"),
        ({"anchor": "ab" * 32}, "anchor abababab"),
        ({"anchor": "\x1b[31m"}, "no digest"),
        ({"path": 1}, "path 1"),
        ({"peer": "QmThree"}, "another peer"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 5001}, "tokens"),
        ({"bandwidth_mbit": -1}, "bandwidth"),
        ({"tokens": True}, "tokens is not int"),
        ({"tokens": 1.5}, "tokens is not int"),
        ({"module": "x" * 600}, "bytes"),
    ],
)
def test_bad_rows_are_refused_and_named(change: dict, reason: str) -> None:
    bad = dataclasses.replace(OTHER, **change)
    with pytest.raises(BadRowError, match=reason) as caught:
        agree(b"id", ["QmOne", "QmTwo"], [ROW.to_bytes(), bad.to_bytes()], RULES)
    assert caught.value.peer == "QmTwo"
    assert "QmTwo" in str(caught.value)


def test_a_list_that_nobody_takes_is_its_leaders_fault_too() -> None:
    """Members of the list are told, so that they meet again without these two."""
    bad = dataclasses.replace(OTHER, tokens=5001)
    peers, rows = ("QmOne", "QmTwo", "QmInvented"), (ROW.to_bytes(), bad.to_bytes(), b"")
    request = AveragingRequest(
        RULES, "key", ("QmOne", "QmTwo", "QmLeader"), 1.0, None, 0.0, 0.0, 0.0, 0.0
    )
    for leader, culprits in (("QmLeader", ("QmLeader", "QmTwo")), ("QmTwo", ("QmTwo",))):
        with pytest.raises(AveragingFailed, match="refused: peer QmTwo: 5001 tokens") as caught:
            agree_with_leader(Met(Group(peers, rows), leader), request, ("notice",))
        assert caught.value.culprits == culprits
        assert caught.value.peers_seen == ("QmOne", "QmTwo")
        assert caught.value.notices == ("notice",)


def test_a_group_is_named_by_its_rows() -> None:
    rows = [ROW.to_bytes(), OTHER.to_bytes()]
    group = agree(b"id", ["QmOne", "QmTwo"], rows, RULES)
    assert [row.peer for row in group.table] == ["QmTwo", "QmOne"]
    assert agree(b"id", ["QmOne", "QmTwo"], rows, RULES) == group
    others = dataclasses.replace(OTHER, tokens=101)
    for changed in (
        agree(b"id", ["QmOne", "QmTwo"], [ROW.to_bytes(), others.to_bytes()], RULES),
        agree(b"id", ["QmTwo", "QmOne"], rows[::-1], RULES),
        agree(b"other", ["QmOne", "QmTwo"], rows, RULES),
    ):
        assert changed.group_id != group.group_id


@pytest.mark.parametrize(
    ("peers", "rows"),
    [
        (["QmOne"], [ROW]),
        (["QmOne", "QmOne"], [ROW, ROW]),
        (["QmOne", "QmTwo"], [ROW]),
        (["QmTwo", "QmThree"], [OTHER, dataclasses.replace(OTHER, peer="QmThree")]),
        (["QmOne", "QmTwo"], [dataclasses.replace(ROW, tokens=1), OTHER]),
    ],
)
def test_impossible_groups_are_refused(peers: list[str], rows: list[GatherRow]) -> None:
    with pytest.raises(BadRowError):
        agree(b"id", peers, [row.to_bytes() for row in rows], RULES)


def test_a_lied_count_or_bandwidth_is_cut_down_for_every_member() -> None:
    """By what the anchor says, in the table that goes into weights, counts and certificates."""
    liar = dataclasses.replace(
        ROW, peer="QmZ", tokens=10**12, bandwidth_mbit=GREATEST_BANDWIDTH_MBIT
    )
    members = [dataclasses.replace(ROW, peer=f"Qm{n}") for n in range(3)] + [liar]
    peers, rows = [row.peer for row in members], [row.to_bytes() for row in members]
    seen = [
        agree(b"id", peers, rows, GroupRules(own, frozenset({0, 2}), 10**13, Usual({2: 300})))
        for own in members
    ]
    assert all(group == seen[0] for group in seen)
    assert [row.tokens for row in seen[0].table] == [4096, 4096, 4096, 16 * 4096]
    assert seen[0].usual == Usual({2: 300})
    assert 2 * seen[0].shares[3] == pytest.approx(sum(seen[0].shares), rel=1e-4)
    unbounded = agree(b"id", peers, rows, GroupRules(liar, frozenset({2}), 10**13))
    assert [row.tokens for row in unbounded.table] == [4096, 4096, 4096, 16 * 4096]


def test_rows_are_small() -> None:
    assert len(msgpack.packb(dataclasses.astuple(ROW))) < 200


def test_failures_cross_processes() -> None:
    import pickle

    failure = AveragingFailed("peer Qm failed", ("a", "b"), ("a",), ("note",), "b", True)
    copied = pickle.loads(pickle.dumps(failure))
    assert vars(copied) == vars(failure)
    assert (str(copied), copied.reported, copied.is_proven) == ("peer Qm failed", "b", True)
