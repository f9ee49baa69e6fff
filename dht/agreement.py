"""Which group may commit and which state wins: pure functions (design 4.4)."""

from __future__ import annotations

from collections.abc import Iterable

from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference, heaviest

from .view import SwarmView, plausible_state


def expected_group(view: SwarmView, grid: Grid, module: str) -> frozenset[str]:
    """Return the peers that should come to a module's outer round: those that train it now."""
    paths = set(grid.paths_of_module(module))
    return frozenset(
        claim.peer_id
        for claim in view.claims.values()
        if claim.path in paths and claim.state == "training"
    )


def possible_group(view: SwarmView, grid: Grid, module: str) -> frozenset[str]:
    """Return the expected group and those who are about to join it."""
    paths = set(grid.paths_of_module(module))
    return frozenset(
        claim.peer_id
        for claim in view.claims.values()
        if claim.path in paths and claim.state != "leaving"
    )


def enough_for_commit(group_size: int, expected_size: int) -> bool:
    """Tell whether a group may commit: at least half of those with a fresh claim."""
    return 2 * group_size >= expected_size


def winning_state(
    announced: Iterable[StateReference],
    *,
    own: StateReference,
    view: SwarmView,
    grid: Grid,
    plan: RunPlan,
) -> StateReference | None:
    """Return the announced state that should replace `own`, or None.

    Counts that the elapsed time does not allow are not believed.
    """
    return heaviest(
        state
        for state in announced
        if plausible_state(state, plan, grid, view.now_s) and state.wins_over(own)
    )
