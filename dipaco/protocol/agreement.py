"""What a view says of all that train at once: pure functions (design 4.1, rounds)."""

from __future__ import annotations

from .grid import Grid
from .view import SwarmView


def trained_in_sight(view: SwarmView, grid: Grid, path: int) -> tuple[int, int]:
    """Return how many paths are trained, of how many of which that was read.

    These include all that share a module with `path`, this peer's: whom it meets trains one.
    """
    modules = [module for module in grid.modules_of_path(path) if view.covers_module(module)]
    sharing = (shared for module in modules for shared in grid.paths_of_module(module))
    in_sight = {*view.paths(grid), *sharing}
    trained = {claim.path for claim in view.claims.values() if claim.state == "training"}
    return len(in_sight & trained), len(in_sight)
