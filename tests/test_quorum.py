"""Which group may commit: more than half of those who have shown that they train."""

from __future__ import annotations

import pytest
from dipaco.modules.state import StateReference
from dipaco.peer.member.quorum import (
    PATIENCE_ROUNDS,
    RECENT_ROUNDS,
    counting_peers,
    is_majority,
    weigh,
)
from hypothesis import given
from hypothesis import strategies as st
from support.family import Family, genesis
from support.lone_member import claim, grid_of, small_plan, view_of

GRID = grid_of(small_plan())


def counting(
    family: Family,
    anchor: StateReference,
    claimed: str,
    *,
    round_index: int | None = None,
    rounds_in_vain: int = 0,
) -> frozenset[str]:
    return counting_peers(
        view_of(0.0, [claim(peer) for peer in claimed]),
        GRID,
        family.book,
        anchor,
        me="B",
        round_index=anchor.last_round + 1 if round_index is None else round_index,
        rounds_in_vain=rounds_in_vain,
    )


def test_only_those_weigh_that_have_shown_themselves() -> None:
    bare = [f"bare{number}" for number in range(1000)]
    assert weigh(["A", "B", *bare], {"A", "B", "C"}.__contains__) == 2


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_of_two_groups_without_a_common_member_one_at_most_may_commit(
    one: set[int], other: set[int]
) -> None:
    counted = [str(number) for number in range(10)]
    groups = [{str(n) for n in one}, {str(n) for n in other - one}]
    assert sum(is_majority(group, counted) for group in groups) <= 1


@pytest.mark.parametrize(
    ("group", "counted", "may"),
    [("A", "A", True), ("A", "AB", False), ("AB", "ABC", True), ("AB", "ABCD", False)],
)
def test_half_is_not_enough(group: str, counted: str, may: bool) -> None:
    assert is_majority(group, counted) is may


def test_who_comes_counts_too_and_nobody_twice() -> None:
    assert is_majority(["N", "N", "A"], "AB")
    assert not is_majority(["N", "N"], "AB")


def test_before_the_first_commit_claims_count_but_not_for_ever() -> None:
    family = Family()
    assert counting(family, genesis(), "ABC") == set("ABC")
    last = counting(family, genesis(), "ABC", rounds_in_vain=PATIENCE_ROUNDS - 1)
    assert last == set("ABC")
    assert counting(family, genesis(), "ABC", rounds_in_vain=PATIENCE_ROUNDS) == {"B"}


def test_a_claim_without_a_certificate_counts_for_nothing() -> None:
    family = Family()
    anchor = family.commit(genesis(), 0, "AB")
    assert counting(family, anchor, "ABVWXYZ") == {"A", "B"}


def test_who_claims_the_module_no_more_does_not_count() -> None:
    family = Family()
    anchor = family.commit(genesis(), 0, "ABC")
    assert counting(family, anchor, "AB") == {"A", "B"}


def test_a_signature_counts_and_a_row_alone_does_not() -> None:
    family = Family()
    anchor = family.commit(genesis(), 0, "ABC", signers="AB")
    assert counting(family, anchor, "ABC") == {"A", "B"}


def test_who_was_in_no_commit_for_some_rounds_does_not_count() -> None:
    family = Family()
    with_c = family.commit(genesis(), 0, "ABC")
    anchor = family.commits(with_c, range(1, RECENT_ROUNDS), "AB")
    assert counting(family, anchor, "ABC") == set("ABC")
    anchor = family.commit(anchor, RECENT_ROUNDS, "AB")
    assert counting(family, anchor, "ABC") == set("AB")


def test_after_a_pause_of_all_those_of_the_last_commits_count_first() -> None:
    family = Family()
    anchor = family.commit(genesis(), 0, "ABC")
    assert counting(family, anchor, "ABC", round_index=900) == set("ABC")
    late = counting(family, anchor, "ABC", round_index=900, rounds_in_vain=RECENT_ROUNDS)
    assert late == {"B"}
