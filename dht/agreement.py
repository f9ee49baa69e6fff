"""Which group may commit and which state wins: pure functions (design 4.4)."""

from __future__ import annotations

from collections.abc import Iterable

from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan

from .records import HoldingRecord
from .view import SwarmView, plausible_holding


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
    """Tell whether a group may commit: not less than half of those with a fresh claim."""
    return 2 * group_size >= expected_size


def better_state(a: tuple[int, str], b: tuple[int, str]) -> bool:
    """Tell whether state `a` = (tokens, digest) wins over `b`: more tokens, then smaller digest."""
    return (-a[0], a[1]) < (-b[0], b[1])


def winning_state(
    holdings: Iterable[HoldingRecord],
    *,
    own: tuple[int, str],
    view: SwarmView,
    grid: Grid,
    plan: RunPlan,
) -> HoldingRecord | None:
    """Return the announced state that should replace `own` = (tokens, digest), or None.

    Counts that the elapsed time does not allow are not believed.
    """
    best: HoldingRecord | None = None
    for holding in holdings:
        if not plausible_holding(holding, plan, grid, view.now_s):
            continue
        candidate = (holding.tokens, holding.digest)
        if better_state(candidate, own if best is None else (best.tokens, best.digest)):
            best = holding
    return best
