"""Copies: enough peers keep them, and few copies move when a peer comes or goes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dipaco.protocol.keeping import keepers
from dipaco.protocol.records import PeerRecord

COPIES = 3


def name(number):
    return "Qm" + "1" * 42 + chr(ord("A") + number // 8) + chr(ord("a") + number % 8)


def peer(number, state="training"):
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
def test_keepers_are_few_moves_away_from_one_another(count, copies, what):
    peers = [name(n) for n in range(count)]
    before = keepers(what, peers, copies)
    assert len(set(before)) == min(copies, count)
    assert keepers(what, [*peers[::-1], peers[0]], copies) == before
    joined = keepers(what, [*peers, name(63)], copies)
    assert len(set(before) - set(joined)) <= 1
    for gone in peers:
        left = keepers(what, [p for p in peers if p != gone], copies)
        assert set(before) - {gone} <= set(left)


def test_the_load_is_spread():
    peers = [name(n) for n in range(16)]
    load = Counter(peer for n in range(200) for peer in keepers(f"P{n}", peers, COPIES))
    assert len(load) == 16
    assert max(load.values()) < 3 * min(load.values())
