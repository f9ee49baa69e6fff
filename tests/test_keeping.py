"""Who keeps copies: enough of them, and few that move when a peer comes or goes."""

from __future__ import annotations

from collections import Counter

import pytest
from dipaco.dht.keeping import is_best_keeper, keepers
from dipaco.dht.records import Claim, PeerRecord
from dipaco.dht.view import SwarmView
from hypothesis import given
from hypothesis import strategies as st

COPIES = 3


def name(number: int) -> str:
    return "Qm" + "1" * 42 + chr(ord("A") + number // 8) + chr(ord("a") + number % 8)


def peer(number: int, state: str = "training") -> PeerRecord:
    return PeerRecord.model_validate(
        {
            "peer_id": name(number),
            "protocol": 1,
            "software": "",
            "device": "",
            "state": state,
            "path": None,
            "tokens_per_s": 0.0,
            "round": 0,
            "reachable": "direct",
            "addresses": (),
            "bytes_up": 0,
            "bytes_down": 0,
        }
    )


@given(st.integers(1, 40), st.integers(1, 6), st.text(max_size=8))
def test_keepers_are_few_moves_away_from_one_another(count: int, copies: int, what: str) -> None:
    peers = [name(n) for n in range(count)]
    before = keepers(what, peers, copies)
    assert len(set(before)) == min(copies, count)
    assert keepers(what, [*peers[::-1], peers[0]], copies) == before
    joined = keepers(what, [*peers, name(63)], copies)
    assert len(set(before) - set(joined)) <= 1
    for gone in peers:
        left = keepers(what, [p for p in peers if p != gone], copies)
        assert set(before) - {gone} <= set(left)


def test_the_load_is_spread() -> None:
    peers = [name(n) for n in range(16)]
    load = Counter(peer for n in range(200) for peer in keepers(f"P{n}", peers, COPIES))
    assert len(load) == 16
    assert max(load.values()) < 3 * min(load.values())


@pytest.mark.parametrize("bystanders", [0, 1, 2, 6])
def test_a_paths_best_states_are_with_its_lead_and_with_as_many_others_as_there_are(
    bystanders: int,
) -> None:
    lead = Claim(peer_id=name(0), path=0, state="training", since_s=0.0, round=0)
    there = [peer(0), *(peer(1 + n, "serving") for n in range(bystanders)), peer(60, "leaving")]
    view = SwarmView(
        now_s=0.0, claims={lead.peer_id: lead}, peers={record.peer_id: record for record in there}
    )
    keeping = [r.peer_id for r in there if is_best_keeper(view, r.peer_id, 0, COPIES)]
    assert name(0) not in keeping
    assert name(60) not in keeping
    assert len(keeping) == min(COPIES - 1, bystanders)
    # Of a path that nobody trains all copies lie with others.
    orphan = [r.peer_id for r in there if is_best_keeper(view, r.peer_id, 1, COPIES)]
    assert len(orphan) == min(COPIES, bystanders + 1)
