"""Who comes to a module's outer step, told by claims: pure functions (design 4.2)."""

from __future__ import annotations

from collections.abc import Callable

from dipaco.modules.grid import Grid

from .records import Holding
from .view import SwarmView


def expected_group(view: SwarmView, grid: Grid, module: str) -> frozenset[str]:
    """Return the peers that should come to a module's outer round: those that train it now."""
    return view.group(grid, module, joining=False)


def possible_group(view: SwarmView, grid: Grid, module: str) -> frozenset[str]:
    """Return the expected group and those who are about to join it."""
    return view.group(grid, module, joining=True)


def awaited_group(view: SwarmView, grid: Grid, module: str, round_index: int) -> frozenset[str]:
    """Return the peers that come to a module's outer step in a counted round, sooner or later.

    Who is in a later round already does not: it began there, or went on without a commit.
    """
    return frozenset(
        peer
        for peer in expected_group(view, grid, module)
        if view.claims[peer].round <= round_index
    )


def round_of_others(view: SwarmView, grid: Grid, path: int, me: str) -> int:
    """Return the latest counted round of those that train a module of `path`, 0 for nobody.

    A peer goes on to that round when it begins one, so that those who share a module meet.
    """
    modules = grid.modules_of_path(path)
    others = {peer for module in modules for peer in expected_group(view, grid, module)} - {me}
    return max((view.claims[peer].round for peer in others), default=0)


def trained_in_sight(view: SwarmView, grid: Grid, path: int) -> tuple[int, int]:
    """Return how many paths are trained, of how many of which that was read.

    These include all that share a module with `path`, this peer's: whom it meets trains one.
    """
    modules = [module for module in grid.modules_of_path(path) if view.covers_module(module)]
    sharing = (shared for module in modules for shared in grid.paths_of_module(module))
    in_sight = {*view.paths(grid), *sharing}
    trained = {claim.path for claim in view.claims.values() if claim.state == "training"}
    return len(in_sight & trained), len(in_sight)


def is_overtaken(
    view: SwarmView, grid: Grid, module: str, me: str, is_ahead: Callable[[Holding], bool]
) -> bool:
    """Tell whether at least half of the other trainers hold a state that `is_ahead`.

    With fixed steps a peer then stops to wait for them: they went on without it. Any group that
    may commit is so large, and a few who only say so keep nobody from waiting.
    """
    others = expected_group(view, grid, module) - {me}
    held = view.holdings.get(module, ())
    ahead = {holding.peer_id for holding in held if is_ahead(holding)} & others
    return bool(ahead) and 2 * len(ahead) >= len(others)
