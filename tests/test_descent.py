"""Which of two states wins: contributors since the common ancestor, then tokens, then digest."""

from __future__ import annotations

import itertools
import random

import pytest
from dipaco.dht.certificates import LONGEST_CHAIN
from dipaco.modules.state import StateReference
from dipaco.peer.member.descent import Descent
from hypothesis import given
from hypothesis import strategies as st
from support.family import Family, genesis


@pytest.fixture
def family() -> Family:
    return Family()


def test_many_contributors_outweigh_one_fast_machine(family: Family) -> None:
    base = family.commit(genesis(), 0, "ABC")
    many = family.commit(base, 1, "AB")
    fast = family.commits(base, range(1, 9), "C", tokens=10**9)
    descent = Descent(family.book)
    assert descent.wins(many, fast)
    assert not descent.wins(fast, many)


def test_who_contributed_before_the_fork_counts_for_neither_side(family: Family) -> None:
    base = family.commits(genesis(), range(4), "ABCDEF")
    one = family.commit(base, 4, "A", tokens=99)
    two = family.commit(base, 4, "BC", tokens=1)
    assert Descent(family.book).wins(two, one)


def test_of_as_many_contributors_those_with_more_tokens_win(family: Family) -> None:
    base = family.commit(genesis(), 0, "AB")
    heavy, light = family.commit(base, 1, "A", tokens=11), family.commit(base, 1, "B", tokens=10)
    descent = Descent(family.book)
    assert descent.wins(heavy, light)
    assert not descent.wins(light, heavy)


def test_between_chains_that_weigh_the_same_those_decide_who_have_not_shown_themselves(
    family: Family,
) -> None:
    """Else a newcomer, and whoever saw them, would give up each other's chain for the own one."""
    base = family.commit(genesis(), 0, "ABS")
    asleep = family.commits(base, (1, 2), "AS", tokens=1)
    awake = family.commit(base, 1, "B", tokens=99)
    for shown in ("AB", "ABS"):
        descent = Descent(family.book, lambda peers, shown=shown: len(set(peers) & set(shown)))
        assert descent.wins(asleep, awake)
        assert not descent.wins(awake, asleep)


def test_of_equal_chains_the_smaller_digest_wins(family: Family) -> None:
    small = family.commit(genesis(), 0, "A", digest="1" * 64)
    great = family.commit(genesis(), 0, "B", digest="2" * 64)
    descent = Descent(family.book)
    assert descent.wins(small, great)
    assert not descent.wins(great, small)


def test_rows_that_nobody_signed_are_no_contributors(family: Family) -> None:
    signed = family.commit(genesis(), 0, "AB")
    invented = family.commit(genesis(), 0, "VWXYZ", signers="V", tokens=1)
    assert Descent(family.book).wins(signed, invented)


def test_contributors_that_weigh_nothing_win_over_nothing_certified(family: Family) -> None:
    base = family.commit(genesis(), 0, "AB")
    one = family.commit(base, 1, "A")
    on_top = family.commits(base, range(1, 9), [f"bare{n}" for n in range(12)], tokens=10**9)
    aside = family.commit(genesis(), 0, [f"bare{n}" for n in range(12)])
    descent = Descent(family.book, lambda peers: len({*peers} & {*"AB"}))
    for invented in (on_top, aside):
        for own in (base, one):
            assert not descent.wins(invented, own)
            assert descent.best([invented], own) is None
        # Where nothing is held, what is there is all there is.
        assert descent.wins(invented, StateReference.untrained("L0.E0"))
    assert descent.wins(one, on_top)


def test_a_descendant_wins_and_an_ancestor_never_does(family: Family) -> None:
    old = family.commit(genesis(), 0, "ABC")
    new = family.commit(old, 1, "A")
    descent = Descent(family.book)
    assert descent.wins(new, old)
    assert not descent.wins(old, new)


def test_a_state_without_a_certificate_wins_over_nothing(family: Family) -> None:
    invented = StateReference("L0.E0", 9, "f" * 64, 2**53, 8, 1)
    unsigned = family.commit(genesis(), 0, "AB", signers="X")
    descent = Descent(family.book)
    for state in (invented, unsigned, genesis()):
        assert not descent.wins(state, StateReference.untrained("L0.E0"))
        assert not descent.wins(state, genesis())


def test_a_state_of_an_earlier_life_gives_way_to_a_certified_one_as_new(family: Family) -> None:
    own = StateReference("L0.E0", 3, "e" * 64, 30, 2, 1)
    older = family.commits(genesis(), range(2), "AB")
    as_new = family.commit(older, 2, "AB")
    descent = Descent(family.book)
    assert not descent.wins(older, own)
    assert descent.wins(as_new, own)


def test_the_best_of_two_sides_is_the_same_for_everybody(family: Family) -> None:
    base = family.commit(genesis(), 0, "ABC")
    one, two = family.commit(base, 1, "AB"), family.commit(base, 1, "C")
    descent = Descent(family.book)
    for order in itertools.permutations([base, one, two]):
        assert descent.best(order, base) == one
        assert descent.best(order, two) == one
        assert descent.best(order, one) is None


def random_tree(seed: int) -> tuple[Family, list[StateReference]]:
    """Return states that descend from two beginnings, most of them in forks of forks."""
    chance = random.Random(seed)
    family = Family()
    states = [family.commit(genesis(), 0, peers) for peers in ("AB", "C")]
    for _ in range(12):
        parent = chance.choice(states)
        group = chance.sample("ABCDE", chance.randint(1, 4))
        states.append(
            family.commit(parent, parent.last_round + 1, group, tokens=chance.randint(1, 3))
        )
    return family, list({state.digest: state for state in states}.values())


def assert_circle(descent: Descent, *states: StateReference) -> None:
    """Each of the states, compared with it alone, loses to the next."""
    for number, state in enumerate(states):
        assert descent.wins(states[(number + 1) % len(states)], state)


def test_three_states_that_each_win_over_the_next_are_in_one_order(family: Family) -> None:
    base = family.commit(genesis(), 0, "Z")
    one = family.commit(base, 1, "ABC", tokens=1)
    side = family.commit(base, 1, "DE")
    two, three = family.commit(side, 2, "F"), family.commit(side, 2, "DE")
    descent = Descent(family.book)
    assert_circle(descent, one, two, three)
    states = [one, two, three]
    for own in states:
        assert descent.best(states, own) == (None if own is one else one)
        assert not descent.wins(own, one, among=states)


def test_in_such_a_circle_nobody_gives_up_contributors_for_fewer(family: Family) -> None:
    """If all that remains are tokens, a side counts by its heaviest state."""
    base = family.commit(genesis(), 0, "Z")
    one = family.commit(base, 1, "A", tokens=1_000_000)
    side = family.commit(base, 1, "D", tokens=1)
    two, three = family.commit(side, 2, "F", tokens=1), family.commit(side, 2, "D", tokens=2)
    descent = Descent(family.book)
    assert_circle(descent, one, two, three)
    states = [one, two, three]
    for own in states:
        assert descent.best(states, own) == (None if own is three else three)


@given(st.integers(0, 2**32))
def test_all_with_the_same_book_choose_the_same_state_whatever_they_hold(seed: int) -> None:
    family, states = random_tree(seed)
    descent = Descent(family.book)
    chosen = {(descent.best(states, own) or own).digest for own in states}
    assert len(chosen) == 1
    assert descent.best(states, genesis()) == descent.best(states[::-1], genesis())
    assert {descent.best(states, genesis())} == {s for s in states if s.digest in chosen}


@given(st.integers(0, 2**32))
def test_among_the_same_states_what_wins_is_one_order(seed: int) -> None:
    family, states = random_tree(seed)
    descent = Descent(family.book)
    wins = {
        (one, two)
        for one, two in itertools.permutations(states, 2)
        if descent.wins(one, two, among=states)
    }
    beaten = sorted(sum(pair[0] == state for pair in wins) for state in states)
    assert beaten == list(range(len(states)))


@given(st.integers(0, 2**32))
def test_of_any_two_certified_states_exactly_one_wins(seed: int) -> None:
    chance = random.Random(seed)
    family = Family()
    states = [family.commit(genesis(), 0, "AB")]
    for _ in range(12):
        parent = chance.choice(states)
        group = chance.sample("ABCDE", chance.randint(1, 4))
        states.append(
            family.commit(parent, parent.last_round + 1, group, tokens=chance.randint(1, 3))
        )
    descent = Descent(family.book)
    for one, two in itertools.combinations({state.digest: state for state in states}.values(), 2):
        assert descent.wins(one, two) != descent.wins(two, one)


@given(st.integers(0, 2**32))
def test_no_chain_gives_way_to_one_with_fewer_contributors_since_the_fork(seed: int) -> None:
    chance = random.Random(seed)
    family = Family()
    base = family.commits(genesis(), range(2), "ABC")
    sides = []
    for _ in range(2):
        side = base
        for _ in range(chance.randint(1, 4)):
            group = chance.sample("ABCDEF", chance.randint(1, 3))
            side = family.commit(side, side.last_round + 1, group, tokens=chance.choice([1, 10**6]))
        sides.append(side)
    counts = [len(family.book.contributors_since(s.module, s.digest, base.digest)) for s in sides]
    if counts[0] < counts[1]:
        assert not Descent(family.book).wins(sides[0], sides[1])


@pytest.mark.parametrize("more", [LONGEST_CHAIN - 4, LONGEST_CHAIN, LONGEST_CHAIN + 40])
def test_an_old_copy_never_wins_over_what_descends_from_it(family: Family, more: int) -> None:
    """Of a long chain the beginning is forgotten, and with it that one descends from the other."""
    old = family.commits(genesis(), range(4), "AB")
    new = family.commits(old, range(4, 4 + more), "A")
    descent = Descent(family.book)
    assert descent.wins(new, old)
    assert not descent.wins(old, new)


def test_an_old_copy_is_left_behind_by_the_honest_alone(family: Family) -> None:
    honest = {"A", "B"}
    descent = Descent(family.book, lambda contributors: len(honest.intersection(contributors)))
    old = family.commits(genesis(), range(4), "AB")
    distant = StateReference(old.module, 99, "e" * 64, 1, 98, 1)
    invented = family.commits(distant, range(99, 104), "XYZ")
    assert not descent.wins(invented, old)
