"""Assigning points to paths so that every path gets its share.

The cheapest assignment when every path has a capacity is a transport problem. Its solution is again
"the path of least cost", with a bias added to the cost of each path. So capacities fitted on a
sample also hold, approximately, for documents never seen.
"""

from __future__ import annotations

import numpy as np

# Points compared with all centroids at a time, which bounds the memory of their distances.
_CHUNK = 8192
# The temperatures of the soft assignment, as parts of the mean distance that a point has to give
# up; biases that were near before start at a lower one.
_HOTTEST, _WARM, _COLDEST = 1.0, 0.1, 1e-4
_STEPS, _WARM_STEPS = 300, 100


def squared_distances(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return |point - centroid|^2, float64 [N, K], never negative."""
    squares = (points**2).sum(axis=1)[:, None] + (centroids**2).sum(axis=1)[None, :]
    return np.maximum(squares - 2.0 * (points @ centroids.T), 0.0)


def balance_biases(
    costs: np.ndarray,
    weights: np.ndarray,
    biases: np.ndarray | None = None,
    *,
    targets: np.ndarray | None = None,
) -> np.ndarray:
    """Return biases, float64 [K], with which argmin(costs + biases) gives columns their shares.

    `costs` is [N, K]; `weights` [N] is the load of each point; `targets` [K] are the proportions of
    the loads (default: equal); `biases` is where to start. The result sums to zero.

    Sinkhorn's steps on a soft assignment that gets harder: a column with too much load becomes
    dearer, in proportion to the temperature. The biases with the least greatest error are returned;
    heavy single points may keep every choice away from the shares.

    Raises ValueError if a target is not positive.
    """
    columns = costs.shape[1]
    shares = np.ones(columns) if targets is None else np.asarray(targets, dtype=np.float64)
    if shares.shape != (columns,) or not (shares > 0).all():
        raise ValueError("the target of every column must be positive")
    shares = shares * (weights.sum() / shares.sum())
    hottest, steps = (_HOTTEST, _STEPS) if biases is None else (_WARM, _WARM_STEPS)
    current = np.zeros(columns) if biases is None else np.asarray(biases, dtype=np.float64)
    biased = costs + current
    best, least = current, _greatest_error(biased, weights, shares)
    spread = float((biased - biased.min(axis=1, keepdims=True)).mean()) or 1.0
    for temperature in spread * np.geomspace(hottest, _COLDEST, steps):
        loads = _soft_loads(costs, current, weights, temperature)
        # A column without any load must not become infinitely cheap.
        current = current + temperature * np.log(np.maximum(loads, 1e-12 * shares) / shares)
        error = _greatest_error(costs + current, weights, shares)
        if error < least:
            best, least = current, error
    return best - best.mean()


def _soft_loads(
    costs: np.ndarray, biases: np.ndarray, weights: np.ndarray, temperature: float
) -> np.ndarray:
    loads = np.zeros(costs.shape[1])
    for start in range(0, len(costs), _CHUNK):
        parts = costs[start : start + _CHUNK] + biases
        parts = np.exp((parts.min(axis=1, keepdims=True) - parts) / temperature)
        loads += (weights[start : start + _CHUNK] / parts.sum(axis=1)) @ parts
    return loads


def _greatest_error(costs: np.ndarray, weights: np.ndarray, shares: np.ndarray) -> float:
    """Return how far the load of a column is from its share at most, as a part of that."""
    loads = np.bincount(np.argmin(costs, axis=1), weights=weights, minlength=len(shares))
    return float((np.abs(loads - shares) / shares).max())
