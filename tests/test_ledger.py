"""What became of own work: in a state by name, put on top, or never merged; once in all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest
from dipaco.modules.state import StateReference
from dipaco.peer.member.actions import DropPart, JoinParts
from dipaco.peer.member.descent import Descent
from dipaco.peer.member.ledger import GREATEST_PARTS, MOST_PARTS, STALE_ROUNDS, Ledger
from hypothesis import example, given, settings
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
        self.tail: Counter[int] = Counter()
        """Work since the last cut."""
        self.parts: dict[int, Counter[int]] = {}
        self.contributions: dict[str, Counter[int]] = {}
        """What this peer gave to the step that came to a state."""

    @property
    def local(self) -> Counter[int]:
        """Work in the local parameters that is not in the anchor."""
        return sum((self.parts[part] for part in self.ledger.unmerged), Counter(self.tail))

    def train(self, round_index: int) -> None:
        self.trained[round_index] += 1
        self.tail[round_index] += 1

    def cut(
        self,
        round_index: int,
        stood_on: Collection[int] = (),
        *likelier: Collection[int],
        held: frozenset[str] = frozenset(),
        is_clear: bool = True,
    ) -> None:
        self.parts[round_index], self.tail = self.tail, Counter()
        done = self.ledger.cut(
            round_index,
            self.anchor,
            self.descent,
            stood_on,
            *likelier,
            held=held,
            is_clear=is_clear,
        )
        for action in done:
            if isinstance(action, JoinParts):
                self.parts[action.newer] += self.parts.pop(action.older)
            elif isinstance(action, DropPart):
                del self.parts[action.part]
        assert set(self.parts) == set(self.ledger.parts)

    def commit(
        self,
        round_index: int,
        group: str,
        *,
        is_whole: bool = False,
        stood_on: Collection[int] = (),
        likelier: Collection[Collection[int]] = (),
        held: frozenset[str] = frozenset(),
        is_clear: bool = True,
    ) -> StateReference:
        self.cut(round_index, stood_on, *likelier, held=held, is_clear=is_clear)
        state = self.family.commit(self.anchor, round_index, set(group) | {ME})
        self.contributions[state.digest] = self.local
        self.ledger.committed(
            round_index, frozenset({*group, ME}), is_whole=is_whole, is_last_signed=is_whole
        )
        self.anchor = state
        return state

    def miss(self, round_index: int, group: str) -> StateReference:
        """Others commit with this peer's contribution, and it does not learn of that."""
        self.cut(round_index)
        state = self.family.commit(self.anchor, round_index, set(group) | {ME})
        self.contributions[state.digest] = self.local
        return state

    def fail(self, round_index: int) -> None:
        """Nobody came."""
        self.cut(round_index)
        self.ledger.uncut(round_index)
        self.tail += self.parts.pop(round_index)

    def adopt(self, state: StateReference) -> None:
        self.ledger.adopt(state, self.anchor, self.descent)
        self.anchor = state

    def counted(self) -> Counter[int]:
        """Work in the anchor's chain, and in the local parameters."""
        found = Counter(self.local)
        for certificate in self.family.chain(self.anchor):
            found += self.contributions.get(certificate.statement.digest, Counter())
        return found


def began(family: Family) -> Trainer:
    return Trainer(family, family.commit(genesis(), 0, "ABC"))


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


def test_in_a_calm_swarm_old_parts_are_joined_and_not_lost() -> None:
    family = Family()
    peer = began(family)
    fork = peer.anchor
    for round_index in range(1, 12):
        peer.train(round_index)
        peer.commit(round_index, "", is_whole=True)
    assert len(peer.ledger.parts) == MOST_PARTS
    peer.adopt(family.commits(fork, range(1, 12), "AB"))
    # The first part may lie before the fork as well as behind it, and is not joined to the rest.
    assert peer.counted() == peer.trained - Counter({1: 1}) or peer.counted() == peer.trained


def test_parts_between_which_a_known_chain_parts_are_not_joined() -> None:
    """A newcomer that nobody has seen yet goes on from the state before the newest."""
    family = Family()
    peer = began(family)
    states = []
    for round_index in (1, 2, 3):
        peer.train(round_index)
        states.append(peer.commit(round_index, "", is_whole=True))
    side = family.commits(states[0], (2, 3), "X")
    for round_index in (4, 5):
        peer.train(round_index)
        peer.commit(round_index, "", is_whole=True)
    peer.adopt(side)
    assert peer.local == Counter({2: 1, 3: 1, 4: 1, 5: 1})
    assert peer.counted() == peer.trained


def test_work_that_others_may_have_committed_without_what_came_next_stays_apart() -> None:
    """The network splits in the middle of a reduce: the others have the result, this peer not."""
    family, elsewhere = Family(), Family()
    peer = began(family)
    peer.train(1)
    fork = peer.commit(1, "A")
    peer.train(2)
    peer.cut(2)
    theirs = elsewhere.commit(fork, 2, {"A", "B", "C", ME})
    peer.contributions[theirs.digest] = peer.local
    for round_index, group in ((3, "A"), (4, ""), (5, "")):
        peer.train(round_index)
        peer.commit(round_index, group, stood_on={0, 1})
    family.book.add_all(elsewhere.chain(theirs))
    peer.adopt(theirs)
    assert peer.counted() == peer.trained


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_work_of_which_others_are_known_to_have_committed_a_part_stays_apart_from_the_rest(
    missed: int,
) -> None:
    """Nothing of it is in the anchor: one group had it, and this peer stayed where it was."""
    family = Family()
    peer = began(family)
    theirs = peer.anchor
    for round_index in range(1, MOST_PARTS + 2):
        peer.train(round_index)
        if round_index == missed:
            theirs = peer.miss(round_index, "AB")
        else:
            peer.cut(round_index)  # A group had formed, and nothing came of it.
    assert len(peer.ledger.parts) == MOST_PARTS
    peer.adopt(theirs)
    assert peer.counted() == peer.trained


@pytest.mark.parametrize("alone_before", [1, 2, 3])
def test_what_others_may_have_committed_stays_apart_also_behind_own_chains_that_lost(
    alone_before: int,
) -> None:
    """Who was alone gave way, met another in a reduce that a split broke, and is alone again."""
    family, elsewhere = Family(), Family()
    peer = began(family)
    theirs = peer.anchor
    for round_index in range(1, alone_before + 1):
        peer.train(round_index)
        peer.commit(round_index, "")
    broken = alone_before + 1
    fork = family.commits(theirs, range(1, broken), "AB")
    peer.adopt(fork)
    peer.train(broken)
    peer.cut(broken)
    committed = elsewhere.commit(fork, broken, {"A", ME})
    peer.contributions[committed.digest] = peer.local
    for round_index in range(broken + 1, broken + 5):
        peer.train(round_index)
        peer.commit(round_index, "", stood_on={fork.last_round})
    family.book.add_all(elsewhere.chain(committed))
    peer.adopt(family.commit(committed, broken + 4, "AB"))
    assert peer.counted() == peer.trained


def test_a_lone_commit_that_others_may_pass_by_is_kept_beside_rounds_that_came_to_nothing() -> None:
    """One part is in the anchor, the others stand on the state before it, and nobody is a majority
    any more."""
    family = Family()
    peer = began(family)
    fork = peer.anchor
    peer.train(1)
    peer.commit(1, "A", stood_on={0})
    theirs = family.commits(fork, range(1, 3), "BC")
    for round_index in range(2, 3 * MOST_PARTS):
        peer.train(round_index)
        peer.cut(round_index, stood_on={0})  # A group had formed, and nothing came of it.
        assert len(peer.ledger.parts) <= MOST_PARTS
    peer.adopt(family.commits(theirs, range(3, 2 * MOST_PARTS), "BC"))
    assert peer.counted() == peer.trained


def test_who_steps_alone_and_gives_way_again_and_again_loses_nothing() -> None:
    """Its old commits lie between the parts, and lost long ago; the others go on from before."""
    family = Family()
    peer = began(family)
    theirs = seen = peer.anchor
    for round_index in range(1, 2 * MOST_PARTS):
        peer.train(round_index)
        peer.commit(round_index, "", stood_on={seen.last_round})
        theirs = family.commit(theirs, round_index, "AB")
        if round_index != MOST_PARTS:  # Once it hears of them a round later.
            peer.adopt(theirs)
            seen = theirs
    assert peer.counted() == peer.trained


@pytest.mark.parametrize("fork", range(1, 7))
def test_nothing_is_joined_before_it_is_known_where_others_parted(fork: int) -> None:
    """A split is over; where the state comes from that the others hold is said a round later."""
    family = Family()
    peer = began(family)
    states = {}
    for round_index in range(1, MOST_PARTS + 2):
        peer.train(round_index)
        is_clear = round_index <= MOST_PARTS
        states[round_index] = peer.commit(round_index, "", is_whole=True, is_clear=is_clear)
    assert len(peer.ledger.parts) == GREATEST_PARTS
    theirs = family.commits(states[fork], range(fork + 1, MOST_PARTS + 2), "AB")
    peer.train(MOST_PARTS + 2)
    peer.cut(MOST_PARTS + 2)
    assert len(peer.ledger.parts) == MOST_PARTS
    peer.adopt(theirs)
    assert peer.counted() == peer.trained


@pytest.mark.parametrize("fork", range(1, 8))
@pytest.mark.parametrize("noise", [(), (3,), (2, 6)])
def test_parts_between_which_others_were_seen_last_are_not_joined(
    fork: int, noise: tuple[int, ...]
) -> None:
    """A split begins between two commits that a peer makes alone, each of them whole."""
    family = Family()
    peer = began(family)
    states = {}
    for round_index in range(1, 12):
        stood_on = {r for r in (fork, *noise) if r < round_index - 1}
        peer.train(round_index)
        states[round_index] = peer.commit(round_index, "", is_whole=True, stood_on=stood_on)
    assert len(peer.ledger.parts) == MOST_PARTS
    peer.adopt(family.commits(states[fork], range(fork + 1, 12), "AB"))
    assert peer.counted() == peer.trained


def test_others_that_fell_behind_at_many_places_keep_the_newest_parts_apart() -> None:
    family = Family()
    peer = began(family)
    states = {}
    for round_index in range(1, 12):
        peer.train(round_index)
        states[round_index] = peer.commit(round_index, "", stood_on=range(1, round_index))
    assert peer.ledger.parts == [*range(12 - MOST_PARTS, 12)]
    peer.adopt(family.commits(states[8], range(9, 12), "AB"))
    assert peer.counted() == peer.trained


@pytest.mark.parametrize("broken", [None, 2])
def test_where_not_all_can_be_kept_apart_the_likelier_forks_count(broken: int | None) -> None:
    """Others keep copies of every state, and who trains the module stands on the first alone."""
    family, elsewhere = Family(), Family()
    peer = began(family)
    theirs = fork = peer.anchor
    for round_index in range(1, 3 * MOST_PARTS):
        peer.train(round_index)
        stood_on = range(round_index - 1)
        if round_index == broken:
            peer.cut(round_index, stood_on, {fork.last_round})
            theirs = elsewhere.commit(peer.anchor, round_index, {"A", ME})
            peer.contributions[theirs.digest] = peer.local
        else:
            made = peer.commit(round_index, "", stood_on=stood_on, likelier=[{fork.last_round}])
            if round_index + 1 == broken:
                fork = made
    family.book.add_all(elsewhere.chain(theirs))
    peer.adopt(family.commits(theirs, range(theirs.last_round + 1, 3 * MOST_PARTS), "AB"))
    assert peer.counted() == peer.trained


def test_who_was_alone_for_long_loses_nothing_to_the_others() -> None:
    family = Family()
    peer = began(family)
    fork = peer.commit(1, "AB")
    for round_index in range(2, 12):
        peer.train(round_index)
        peer.commit(round_index, "")
    peer.adopt(family.commits(fork, range(2, 12), "AB"))
    assert peer.counted() == peer.trained


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
