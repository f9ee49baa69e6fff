"""Assigning points to paths so that every path gets its share.

The cheapest assignment when every path has a capacity is a transport problem. Its solution is again
"the path of least cost", with a bias added to the cost of each path. So capacities fitted on a
sample also hold, approximately, for documents never seen.
"""

from __future__ import annotations

import numpy as np

# Points compared with all centroids at a time, which bounds the memory of their distances.
_CHUNK = 8192
# Up to here, moving one column at a time is enough.
_FEW_COLUMNS = 16
# A load may differ by this part of its share.
_TOLERANCE = 0.02
# Moves of one column, besides four for each.
_PASSES = 200


def squared_distances(
    points: np.ndarray, centroids: np.ndarray, centroid_squares: np.ndarray | None = None
) -> np.ndarray:
    """Return |point - centroid|^2, float64 [N, K], never negative.

    `centroid_squares` [K], what `row_squares` makes of the centroids, spares a caller with the same
    centroids for each text most of the time.
    """
    if centroid_squares is None:
        centroid_squares = row_squares(centroids)
    squares = row_squares(points)[:, None] + centroid_squares[None, :]
    return np.maximum(squares - 2.0 * (points @ centroids.T), 0.0)


def row_squares(rows: np.ndarray) -> np.ndarray:
    """Return the squared length of each row."""
    squares: np.ndarray = (rows**2).sum(axis=1)
    return squares


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
    targets: np.ndarray | None = None,
) -> np.ndarray:
    """Return biases, float64 [K], with which argmin(distances + biases) gives columns their shares.

    `distances` is [N, K]; `weights` [N] is the load of each point;
    `targets` [K] are the proportions of the loads (default: equal); `biases` is where to start.
    The result sums to zero. Raises ValueError if a target is not positive.

    A column too full becomes dearer and loses its marginal points, so moving one bias at a time to
    where its own load is right, others fixed, ends where all are (an auction for the transport
    problem). With many columns that takes long, so Sinkhorn's steps bring all near their shares
    first. It ends when every load is near its share; heavy single points may make
    that impossible, so passes are bounded and the best biases found are returned.
    """
    columns = distances.shape[1]
    current = np.zeros(columns) if biases is None else biases.astype(np.float64).copy()
    shares = np.ones(columns) if targets is None else np.asarray(targets, dtype=np.float64)
    if shares.shape != (columns,) or not (shares > 0).all():
        raise ValueError("the target of every column must be positive")
    shares = shares * (weights.sum() / shares.sum())
    if columns > _FEW_COLUMNS:
        current = _soft_biases(distances, weights, shares, current, warm=biases is not None)
    assignment = _Assignment(np.asfortranarray(distances + current))
    best, best_excess = current.copy(), np.inf
    for number in range(_PASSES + 4 * columns):
        excesses = np.abs(assignment.loads(weights) - shares) / shares
        if excesses.max() < best_excess:
            best, best_excess = current.copy(), float(excesses.max())
        if excesses.max() <= _TOLERANCE or columns == 1:
            break
        column = _next_column(excesses, number)
        shift = _fair_shift(assignment.margins(column), weights, float(shares[column]))
        assignment.shift(column, shift)
        current[column] += shift
    return best - best.mean()


class _Assignment:
    """Which column is cheapest for each row, kept up to date while single columns shift: a shift
    takes the time of one column, not of all."""

    def __init__(self, costs: np.ndarray) -> None:
        self._costs = costs
        self._nearest = np.argmin(costs, axis=1)
        self._least = costs.min(axis=1)

    def loads(self, weights: np.ndarray) -> np.ndarray:
        """Return the weight of the rows of each column, float64 [K]."""
        return np.bincount(self._nearest, weights=weights, minlength=self._costs.shape[1])

    def margins(self, column: int) -> np.ndarray:
        """Return for each row [N] how much dearer than `column` the cheapest other column is."""
        others = self._least.copy()
        own = np.flatnonzero(self._nearest == column)
        rivals = self._costs[own]
        rivals[:, column] = np.inf
        others[own] = rivals.min(axis=1)
        return others - self._costs[:, column]

    def shift(self, column: int, amount: float) -> None:
        """Add `amount` to the costs of one column."""
        self._costs[:, column] += amount
        own = np.flatnonzero(self._nearest == column)
        self._nearest[own] = np.argmin(self._costs[own], axis=1)
        self._least[own] = self._costs[own, self._nearest[own]]
        changed = self._costs[:, column]
        won = (changed < self._least) | ((changed == self._least) & (column < self._nearest))
        self._nearest[won] = column
        self._least[won] = changed[won]


def _soft_biases(
    distances: np.ndarray, weights: np.ndarray, shares: np.ndarray, biases: np.ndarray, warm: bool
) -> np.ndarray:
    """Return biases whose loads are near the shares: Sinkhorn's steps on a soft assignment that
    gets harder. One step moves every column, which a pass of `balance_biases` does not."""
    spread = float((distances - distances.min(axis=1, keepdims=True)).mean())
    first, stages = (0.03, 10) if warm else (0.3, 30)
    for temperature in np.repeat(spread * np.geomspace(first, 1e-3, stages), 1 if warm else 3):
        loads = np.zeros(len(shares))
        for start in range(0, len(distances), _CHUNK):
            parts = distances[start : start + _CHUNK] + biases
            parts = np.exp((parts.min(axis=1, keepdims=True) - parts) / max(temperature, 1e-300))
            loads += (weights[start : start + _CHUNK] / parts.sum(axis=1)) @ parts
        biases = biases + temperature * np.log(np.maximum(loads, 1e-12 * shares) / shares)
    return biases - biases.mean()


def _next_column(excesses: np.ndarray, number: int) -> int:
    """Return the column to move: the furthest from its share, and every third pass the next one
    in turn, so that no pair of columns can trade places for ever."""
    if number % 3 == 2:
        return (number // 3) % len(excesses)
    return int(np.argmax(excesses))


def _fair_shift(margins: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Return what to add to one column's bias so that its load is its share, others fixed. A row
    belongs to the column while the shift is below its margin."""
    order = np.argsort(-margins, kind="stable")
    loads = np.cumsum(weights[order])
    last = int(np.searchsorted(loads, share))
    last = min(max(last, 0), len(order) - 1)
    following = min(last + 1, len(order) - 1)
    return float(margins[order[last]] + margins[order[following]]) / 2.0
