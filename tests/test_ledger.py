"""What became of own work: in a state by name, put back on top, or never merged; once in all."""

from __future__ import annotations

import random
from collections import Counter

from dipaco.modules.state import StateReference
from dipaco.peer.member.descent import Descent
from dipaco.peer.member.ledger import (
    GREATEST_BUNDLES,
    GREATEST_SNAPSHOTS,
    STALE_ROUNDS,
    Ledger,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support.family import Family, genesis

ME = "M"


class Trainer:
    """Every round's work as a thing that can be counted, put where a ledger says it is."""

    def __init__(self, family: Family, anchor: StateReference) -> None:
        self.family = family
        self.descent = Descent(family.book)
        self.anchor = anchor
        self.ledger = Ledger(anchor, ME)
        self.trained: Counter[int] = Counter()
        self.local: Counter[int] = Counter()
        """Work in the local parameters that is not in the anchor."""
        self.snapshots: dict[int, Counter[int]] = {}
        self.bundles: dict[int, Counter[int]] = {}
        self.contributions: dict[str, Counter[int]] = {}
        """What this peer gave to the step that came to a state."""

    def train(self, round_index: int) -> None:
        self.trained[round_index] += 1
        self.local[round_index] += 1

    def commit(self, round_index: int, group: str) -> StateReference:
        state = self.family.commit(self.anchor, round_index, set(group) | {ME})
        self.contributions[state.digest] = Counter(self.local)
        if self.ledger.committed(round_index, frozenset(group) | {ME}):
            self.bundles[round_index] = Counter()
        first = max(self.bundles)
        self.bundles[first] += self.local
        self.local.clear()
        self.snapshots.clear()
        self.ledger.forget_all()
        self.anchor = state
        return state

    def miss(self, round_index: int, group: str) -> StateReference:
        """Others commit with this peer's contribution, and it does not learn of that."""
        state = self.family.commit(self.anchor, round_index, set(group) | {ME})
        self.contributions[state.digest] = Counter(self.local)
        self.snapshots[round_index] = Counter(self.local)
        for old in self.ledger.remember(round_index):
            del self.snapshots[old]
        return state

    def adopt(self, state: StateReference) -> None:
        reckoning = self.ledger.adopt(state, self.anchor, self.descent)
        if reckoning.merged_round is not None:
            merged = self.snapshots[reckoning.merged_round]
            self.local -= merged
            self.bundles[reckoning.merged_round] = Counter(merged)
        for first in reckoning.put_back:
            self.local += self.bundles.pop(first)
        self.ledger.forget_all()
        self.snapshots.clear()
        self.anchor = state

    def counted(self) -> Counter[int]:
        """Work in the anchor's chain, and in the local parameters."""
        found = Counter(self.local)
        for certificate in self.family.chain(self.anchor):
            found += self.contributions.get(certificate.statement.digest, Counter())
        return found


def began(family: Family) -> Trainer:
    return Trainer(family, family.commit(genesis(), 0, "ABC"))


def test_work_that_a_state_names_is_not_put_back() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    peer.adopt(family.commit(peer.commit(1, "AB"), 2, "AB"))
    assert peer.local == Counter()
    assert peer.counted() == peer.trained


def test_a_bundle_that_the_winner_lacks_is_put_back_exactly() -> None:
    family = Family()
    peer = began(family)
    fork = peer.anchor
    for round_index in (1, 2):
        peer.train(round_index)
        peer.commit(round_index, "")
    peer.train(3)
    peer.adopt(family.commits(fork, (1, 2, 3), "AB"))
    assert peer.local == Counter({1: 1, 2: 1, 3: 1})


def test_of_the_rounds_of_a_fork_only_those_behind_it_are_put_back() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    fork = peer.commit(1, "ABC")
    peer.train(2)
    peer.commit(2, "")
    peer.adopt(family.commit(fork, 2, "ABC"))
    assert peer.local == Counter({2: 1})
    assert peer.counted() == peer.trained


def test_a_missed_commit_takes_the_snapshot_and_leaves_what_came_after() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    state = peer.miss(1, "AB")
    peer.train(2)
    peer.adopt(state)
    assert peer.local == Counter({2: 1})
    assert peer.counted() == peer.trained


def test_work_of_a_missed_commit_is_put_back_when_another_fork_wins() -> None:
    family = Family()
    peer = began(family)
    fork = peer.anchor
    peer.train(1)
    peer.adopt(peer.miss(1, "A"))
    peer.adopt(family.commit(fork, 1, "BCD"))
    assert peer.local == Counter({1: 1})


def test_a_missed_round_that_nobody_merged_stays_local() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    peer.miss(1, "A")
    peer.adopt(family.commit(peer.anchor, 1, "BC"))
    assert peer.local == Counter({1: 1})


def test_groups_that_only_grow_are_one_bundle_and_a_lost_member_begins_another() -> None:
    ledger = Ledger(genesis(), ME)
    assert ledger.committed(0, frozenset("AM"))
    assert not ledger.committed(1, frozenset("AM"))
    assert not ledger.committed(2, frozenset("ABM"))
    assert ledger.committed(3, frozenset("AM"))
    assert [bundle.rounds for bundle in ledger.bundles] == [(0, 1, 2), (3,)]


def test_after_others_went_on_alone_the_next_commit_begins_a_bundle() -> None:
    """They may go on from there again, with what was before and without what came after."""
    family = Family()
    peer = began(family)
    peer.train(1)
    peer.commit(1, "AB")
    fork = family.commit(peer.anchor, 2, "XY")
    peer.adopt(fork)
    peer.train(3)
    peer.commit(3, "AB")
    peer.adopt(family.commit(fork, 3, "XYZ"))
    assert peer.local == Counter({3: 1})
    assert peer.counted() == peer.trained


def test_what_is_remembered_is_bounded() -> None:
    ledger = Ledger(genesis(), ME)
    for round_index in range(10):
        ledger.committed(round_index, frozenset({ME, str(round_index)}))
    assert len(ledger.bundles) == GREATEST_BUNDLES
    forgotten = [ledger.remember(round_index) for round_index in range(4)]
    assert forgotten == [()] * GREATEST_SNAPSHOTS + [(0,), (1,)]
    assert ledger.forget_all() == (2, 3)
    assert ledger.forget_all() == ()


def test_without_a_known_ancestor_nothing_is_merged_twice() -> None:
    """Certificates of long ago are gone: what is not known to be missing is not put back."""
    family, other = Family(), Family()
    peer = began(family)
    peer.train(1)
    peer.commit(1, "")
    far = other.commits(genesis(), range(70), "AB")
    family.book.add_all(c for c in other.chain(far)[:40])
    peer.adopt(far)
    assert peer.local == Counter()


def test_old_work_is_shortened_and_young_work_is_not() -> None:
    def weight(own_round: int, state_round: int) -> float:
        family = Family()
        anchor = family.commits(genesis(), range(own_round + 1), "AM")
        state = family.commits(anchor, range(own_round + 1, state_round + 1), "A")
        ledger = Ledger(anchor, ME)
        return ledger.adopt(state, anchor, Descent(family.book)).weight

    assert weight(3, 4) == 1.0
    assert weight(3, 3 + STALE_ROUNDS) == 1.0
    assert weight(3, 3 + 2 * STALE_ROUNDS) == 0.5
    assert weight(3, 3 + 10 * STALE_ROUNDS) == 0.1


def test_work_that_is_put_back_is_as_old_as_its_bundle() -> None:
    family = Family()
    peer = began(family)
    fork = peer.anchor
    for round_index in range(1, 9):
        peer.train(round_index)
        peer.commit(round_index, "")
    winner = family.commits(fork, range(1, 9), "AB")
    reckoning = peer.ledger.adopt(winner, peer.anchor, peer.descent)
    assert reckoning.put_back == (1,)
    assert reckoning.weight == STALE_ROUNDS / 8


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_forks_come_all_work_is_counted_exactly_once(seed: int) -> None:
    """A fork begins where a group loses members; a peer may miss a commit that has its work.

    It learns of that before it commits again, and misses as many as it remembers at most.
    """
    chance = random.Random(seed)
    family = Family()
    peer = began(family)
    others = "ABC"
    forks: list[StateReference] = []
    """Where others may have gone on without this peer."""
    merged: list[StateReference] = []
    """Commits of others with this peer's work that it does not know of."""
    for round_index in range(1, 12):
        peer.train(round_index)
        what = chance.choice(["commit", "commit", "lose", "miss", "fail", "adopt"])
        if what == "lose" and len(forks) < GREATEST_BUNDLES - 1 and len(others) > 0:
            forks.append(peer.anchor)
            others = others[:-1]
        if what in ("commit", "lose"):
            peer.commit(round_index, others)
            merged.clear()
        elif what == "miss" and len(merged) < GREATEST_SNAPSHOTS:
            merged.append(peer.miss(round_index, "AB"))
        elif what == "adopt" and (forks or merged):
            start = chance.choice([*forks, *merged, peer.anchor])
            rounds = range(start.last_round + 1, round_index + 1)
            peer.adopt(family.commits(start, rounds, "XYZ"))
            forks, others = [], "ABC"
            merged.clear()
        assert peer.counted() == peer.trained, what
