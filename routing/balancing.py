"""Assigning points to centroids so that every centroid gets its share.

Cheapest assignment under a capacity for every centroid is a transport problem, and its solution is
again "nearest centroid", with a bias added to each centroid's squared distance. So the capacity
that is fitted on a sample also holds, approximately, for documents never seen.
"""

from __future__ import annotations

import numpy as np

_CHUNK = 8192


def squared_distances(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return |point - centroid|^2, float64 [N, K], never negative."""
    cross = points @ centroids.T
    squares = (points**2).sum(axis=1)[:, None] + (centroids**2).sum(axis=1)[None, :]
    return np.maximum(squares - 2.0 * cross, 0.0)


def nearest_centroids(
    points: np.ndarray, centroids: np.ndarray, biases: np.ndarray | None = None
) -> np.ndarray:
    """Return argmin of squared distance plus bias, int64 [N]; of equals the lowest."""
    nearest = np.empty(len(points), dtype=np.int64)
    for start in range(0, len(points), _CHUNK):
        costs = squared_distances(points[start : start + _CHUNK], centroids)
        if biases is not None:
            costs += biases
        nearest[start : start + _CHUNK] = np.argmin(costs, axis=1)
    return nearest


def balance_biases(
    distances: np.ndarray,
    weights: np.ndarray,
    biases: np.ndarray | None = None,
    *,
    tolerance: float = 0.02,
    passes: int = 200,
) -> np.ndarray:
    """Return biases, float64 [K], with which argmin(distances + biases) loads all columns alike.

    `distances` is [N, K]; `weights` [N] is what each point loads its column with. Each pass sets a
    column's bias to the value that gives exactly its share while the others stand still (the
    auction step of the transport dual), half-way, and stops when no load is further than
    `tolerance` of the share from it. Single heavy points may make that impossible; then the best
    biases found are returned. `biases` is where to start. The result sums to zero.
    """
    columns = distances.shape[1]
    current = np.zeros(columns) if biases is None else biases.astype(np.float64).copy()
    share = weights.sum() / columns
    best, best_excess = current.copy(), np.inf
    for number in range(passes):
        costs = distances + current
        loads = np.bincount(np.argmin(costs, axis=1), weights=weights, minlength=columns)
        excess = float(np.abs(loads - share).max())
        if excess < best_excess:
            best, best_excess = current.copy(), excess
        if excess <= tolerance * share or columns == 1:
            break
        column = _next_column(loads, share, number)
        current[column] += _fair_shift(costs, weights, column, share)
        current -= current.mean()
    return best - best.mean()


def _next_column(loads: np.ndarray, share: float, number: int) -> int:
    """Return the column to move: the furthest from its share, and every third pass the next one
    in turn, so that no pair of columns can trade places for ever."""
    if number % 3 == 2:
        return (number // 3) % len(loads)
    return int(np.argmax(np.abs(loads - share)))


def _fair_shift(costs: np.ndarray, weights: np.ndarray, column: int, share: float) -> float:
    """Return what to add to one column's bias so that its load is its share, others fixed."""
    others = np.delete(costs, column, axis=1).min(axis=1)
    margins = others - costs[:, column]  # the point belongs to the column while shift < margin
    order = np.argsort(-margins, kind="stable")
    loads = np.cumsum(weights[order])
    last = int(np.searchsorted(loads, share))
    last = min(max(last, 0), len(order) - 1)
    following = min(last + 1, len(order) - 1)
    return float(margins[order[last]] + margins[order[following]]) / 2.0
