"""The family tree of states: what a book of certificates answers."""

from __future__ import annotations

import random

import pytest
from dipaco.dht.certificates import (
    KEPT_PER_MODULE,
    LONGEST_CHAIN,
    Certificate,
    CertificateBook,
    CommitStatement,
)
from dipaco.modules.outer import Contribution

MODULE = "L0.E0"


def certificate(
    digest: str, parent: str, round_index: int, peers: str, signers: str | None = None
) -> Certificate:
    table = tuple(Contribution(path=0, peer=peer, tokens=10) for peer in sorted(peers))
    statement = CommitStatement("run", MODULE, round_index + 1, parent, digest, round_index, table)
    signed = peers if signers is None else signers
    return Certificate(statement, dict.fromkeys(signed, b""))


def book(*certificates: Certificate) -> CertificateBook:
    made = CertificateBook()
    made.add_all(certificates)
    return made


def test_a_fork_has_a_common_ancestor_and_contributors_on_both_sides() -> None:
    known = book(
        certificate("a1", "genesis", 0, "PQ"),
        certificate("a2", "a1", 1, "PQ"),
        certificate("b2", "a1", 1, "R"),
        certificate("b3", "b2", 2, "RS"),
    )
    assert known.common_ancestor(MODULE, "a2", "b3") == "a1"
    assert known.common_ancestor(MODULE, "a1", "b3") == "a1"
    assert known.contributors_since(MODULE, "a2", "a1") == {"P", "Q"}
    assert known.contributors_since(MODULE, "b3", "a1") == {"R", "S"}
    assert known.common_ancestor(MODULE, "a2", "unknown") is None


def test_work_is_found_by_name_and_round() -> None:
    known = book(certificate("a1", "genesis", 3, "PQ"), certificate("a2", "a1", 4, "P"))
    assert known.contains(MODULE, "a2", "Q", 3)
    assert not known.contains(MODULE, "a2", "Q", 4)
    assert known.recent_contributors(MODULE, "a2", 4) == {"P"}
    assert known.recent_contributors(MODULE, "a2", 3) == {"P", "Q"}


def test_only_members_of_the_group_sign() -> None:
    assert certificate("a1", "genesis", 0, "PQ", signers="PX").signers == {"P"}


@pytest.mark.parametrize("seed", range(20))
def test_merging_does_not_depend_on_the_order(seed: int) -> None:
    parts = [certificate("a1", "genesis", 0, "PQRS", signers=s) for s in ("P", "QR", "S", "PQ")]
    random.Random(seed).shuffle(parts)
    known = book(*parts, *parts)
    merged = known.get(MODULE, "a1")
    assert merged is not None
    assert merged.signers == set("PQRS")
    assert not known.add(parts[0])


def test_a_digest_keeps_its_first_statement() -> None:
    known = book(certificate("a1", "genesis", 0, "PQ"))
    assert not known.add(certificate("a1", "elsewhere", 5, "XYZ"))
    assert known.chain(MODULE, "a1")[0].statement.parent == "genesis"


def test_a_book_is_bounded_and_a_circle_ends() -> None:
    known = book(*(certificate(f"{n + 1}", f"{n}", n, "P") for n in range(3 * KEPT_PER_MODULE)))
    assert len(known.all()) == KEPT_PER_MODULE
    assert len(known.chain(MODULE, f"{3 * KEPT_PER_MODULE}")) == LONGEST_CHAIN
    circle = book(certificate("x", "y", 0, "P"), certificate("y", "x", 1, "P"))
    assert len(circle.chain(MODULE, "x")) == 2
