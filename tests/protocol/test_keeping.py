"""Copies: enough peers keep them, and few copies move when a peer comes or goes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dipaco.protocol.keeping import keepers
from support.wire.peers import peer

COPIES = 3


@given(st.integers(1, 40), st.integers(1, 6), st.text(max_size=8))
def test_keepers_are_few_moves_away_from_one_another(count, copies, what):
    peers = [peer(n) for n in range(count)]
    before = keepers(what, peers, copies)
    assert len(set(before)) == min(copies, count)
    assert keepers(what, [*peers[::-1], peers[0]], copies) == before
    joined = keepers(what, [*peers, peer(63)], copies)
    assert len(set(before) - set(joined)) <= 1
    for gone in peers:
        left = keepers(what, [p for p in peers if p != gone], copies)
        assert set(before) - {gone} <= set(left)


def test_the_load_is_spread():
    peers = [peer(n) for n in range(16)]
    load = Counter(keeper for n in range(200) for keeper in keepers(f"P{n}", peers, COPIES))
    assert len(load) == 16
    assert max(load.values()) < 3 * min(load.values())
