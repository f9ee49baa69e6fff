"""What became of own work: in a state by name, put on top, or never merged; once in all."""

from __future__ import annotations

import random
from collections import Counter

from dipaco.peer.member.descent import Descent
from dipaco.peer.member.ledger import MOST_PARTS, STALE_ROUNDS, Ledger
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.counting_trainer import ME, Trainer, began
from support.family import Family, genesis


def test_work_that_a_state_names_is_not_put_on_it() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    peer.adopt(family.commit(peer.commit(1, "AB"), 2, "AB"))
    assert peer.local == Counter()
    assert peer.counted() == peer.trained


def test_what_the_winner_lacks_is_put_on_it_exactly() -> None:
    family = Family()
    peer = began(family)
    fork = peer.anchor
    for round_index in (1, 2):
        peer.train(round_index)
        peer.commit(round_index, "")
    peer.train(3)
    peer.adopt(family.commits(fork, (1, 2, 3), "AB"))
    assert peer.local == Counter({1: 1, 2: 1, 3: 1})


def test_a_fork_behind_any_round_puts_back_what_came_after_it() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    fork = peer.commit(1, "ABC")
    peer.train(2)
    peer.commit(2, "ABC")
    # A newcomer's side: no member was lost when the chains parted.
    peer.adopt(family.commit(fork, 2, "ABCDEF"))
    assert peer.local == Counter({2: 1})
    assert peer.counted() == peer.trained


def test_a_fork_at_a_step_that_others_took_in_the_same_round_puts_back_the_own_one() -> None:
    family = Family()
    # Whoever leaves takes a step before its time, and the others one at the boundary.
    fork = family.commit(genesis(), 1, "A")
    peer = Trainer(family, fork)
    peer.train(1)
    peer.commit(1, "")
    peer.adopt(family.commit(fork, 1, "BC"))
    assert peer.local == Counter({1: 1})
    assert peer.counted() == peer.trained


def test_a_clock_that_was_put_back_steps_in_rounds_before_the_fork() -> None:
    family = Family()
    fork = family.commits(genesis(), range(7), "ABC")
    peer = Trainer(family, fork)
    for round_index in (9, 2, 3):
        peer.train(round_index)
        peer.commit(round_index, "")
    peer.adopt(family.commit(fork, 10, "AB"))
    assert peer.local == Counter({9: 1, 2: 1, 3: 1})
    assert peer.counted() == peer.trained


def test_a_missed_commit_takes_what_was_in_it_and_leaves_what_came_after() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    state = peer.miss(1, "AB")
    peer.train(2)
    peer.adopt(state)
    assert peer.local == Counter({2: 1})
    assert peer.counted() == peer.trained


def test_a_side_that_merged_missed_work_may_win_after_another_was_adopted() -> None:
    family = Family()
    peer = began(family)
    fork = peer.anchor
    peer.train(1)
    missed = peer.miss(1, "AB")
    peer.adopt(family.commit(fork, 1, "CDE"))
    assert peer.local == Counter({1: 1})
    peer.adopt(family.commit(missed, 2, "AB"))
    assert peer.local == Counter()
    assert peer.counted() == peer.trained


def test_work_that_was_merged_in_a_missed_round_is_not_in_the_next_commit_twice() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    missed = peer.miss(1, "AB")
    peer.train(2)
    peer.commit(2, "C")
    peer.adopt(family.commit(missed, 2, "AB"))
    assert peer.local == Counter({2: 1})
    assert peer.counted() == peer.trained


def test_a_round_that_nobody_came_to_leaves_one_growing_part() -> None:
    family = Family()
    peer = began(family)
    for round_index in (1, 2, 3):
        peer.train(round_index)
        peer.fail(round_index)
    assert peer.ledger.parts == []
    assert peer.local == peer.trained


def test_what_is_remembered_is_bounded() -> None:
    family = Family()
    peer = began(family)
    for round_index in range(1, 30):
        peer.train(round_index)
        peer.commit(round_index, str(round_index % 10))
    assert len(peer.ledger.parts) == MOST_PARTS
    for round_index in range(30, 60):
        peer.train(round_index)
        peer.miss(round_index, "A")
    assert len(peer.ledger.parts) == MOST_PARTS


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


def test_discarded_work_is_in_no_part() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    peer.commit(1, "A")
    peer.train(2)
    peer.cut(2)
    peer.ledger.discard()
    assert (peer.ledger.parts, peer.ledger.unmerged) == ([1], [])


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


def live_through(chance: random.Random, rounds: int) -> Trainer:
    """Commits, missed commits, lonely rounds and foreign states in any order."""
    family = Family()
    peer = began(family)
    starts = [peer.anchor]
    """States from which others may go on."""
    for round_index in range(1, rounds + 1):
        peer.train(round_index)
        what = chance.choice(["commit", "commit", "miss", "fail", "adopt"])
        if what == "commit":
            is_whole = chance.random() < 0.5
            starts.append(peer.commit(round_index, "AB", is_whole=is_whole))
        elif what == "miss":
            starts.append(peer.miss(round_index, "AB"))
        elif what == "fail":
            peer.fail(round_index)
        else:
            start = chance.choice(starts)
            peer.adopt(family.commits(start, range(start.last_round + 1, round_index + 1), "XYZ"))
            starts.append(peer.anchor)
    return peer


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
@example(208)
@example(1800)
def test_while_all_parts_are_remembered_work_is_counted_exactly_once(seed: int) -> None:
    peer = live_through(random.Random(seed), MOST_PARTS)
    assert peer.counted() == peer.trained


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_however_long_it_takes_no_work_is_counted_twice(seed: int) -> None:
    peer = live_through(random.Random(seed), 5 * MOST_PARTS)
    assert not peer.counted() - peer.trained
