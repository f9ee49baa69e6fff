"""Which parts of own work are joined when there are many: those between which no fork lies."""

from __future__ import annotations

from collections import Counter

import pytest
from dipaco.peer.member.ledger import GREATEST_PARTS, MOST_PARTS
from support.counting_trainer import ME, began
from support.family import Family


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


@pytest.mark.parametrize("rounds", [12, 14])
def test_rounds_that_all_of_the_group_gave_up_take_nobodys_place(rounds: int) -> None:
    """They signed what came later, so nobody goes on from what was averaged."""
    family = Family()
    peer = began(family)
    for round_index in (1, 2):
        peer.train(round_index)
        peer.give_up(round_index, "A")
    for round_index in (3, 4):
        peer.train(round_index)
        fork = peer.commit(round_index, "A", is_whole=True)
    for round_index in range(5, rounds):
        peer.train(round_index)
        stood_on = {0, 4, 6, 8, 9} & set(range(round_index - 1))
        made = peer.commit(round_index, "", stood_on=stood_on, likelier=[()])
        fork = made if round_index == 6 else fork
    peer.adopt(family.commits(fork, range(7, rounds), "AB"))
    assert peer.counted() == peer.trained


def test_own_chains_that_lost_and_that_nobody_holds_take_nobodys_place() -> None:
    """Four steps alone were put on what the others had made; they go on from what came then."""
    family = Family()
    peer = began(family)
    theirs = peer.anchor
    for round_index in range(1, 5):
        peer.train(round_index)
        peer.commit(round_index, "")
    fork = family.commits(theirs, range(1, 5), "AB")
    peer.adopt(fork)
    for round_index in range(5, 14):
        peer.train(round_index)
        stood_on = {4, 6, 8, 9, 10} & set(range(round_index - 1))
        made = peer.commit(round_index, "", stood_on=stood_on, likelier=[()])
        fork = made if round_index == 6 else fork
    peer.adopt(family.commits(fork, range(7, 14), "AB"))
    assert peer.counted() == peer.trained


def test_a_step_of_the_same_round_before_a_restart_contains_nothing_of_what_came_after() -> None:
    """A peer that lost its disk starts anew, and finds copies of what it had made itself."""
    family = Family()
    peer = began(family)
    before = family.commits(peer.anchor, (1, 2, 3), ME, tokens=20)
    peer.train(1)
    peer.commit(1, "", held=frozenset({before.digest}))
    peer.adopt(before)
    assert peer.counted() == peer.trained


def test_a_step_of_the_same_round_that_came_after_contains_what_was_given_to_it() -> None:
    family = Family()
    peer = began(family)
    peer.train(1)
    peer.cut(1, held=frozenset({peer.anchor.digest}))
    theirs = family.commit(peer.anchor, 1, {"A", "B", ME})
    peer.contributions[theirs.digest] = peer.local
    peer.adopt(theirs)
    assert peer.counted() == peer.trained
