"""What scikit-learn does for routers: clusters and classes. Only `prepare` needs it.

Every fit has an explicit seed and one thread, so the same inputs give the same router on the same
machine with the same versions. Nothing depends on more: the plan names the router by its hash.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError

_MAX_ITERATIONS = 1000
_STARTS = 8
# The L2 penalty of the logistic regression, in the mean over documents.
_PENALTY = 1e-3


def fit_centroids(points: np.ndarray, clusters: int, *, seed: int) -> np.ndarray:
    """Return the centroids of k-means, float64 [clusters, H], the best of several starts.

    They are ordered by their first coordinates, so that their numbers do not depend on chance.
    Raises ConfigurationError if there are fewer different points than clusters.
    """
    distinct = len({point.tobytes() for point in points})
    if distinct < clusters:
        raise ConfigurationError(
            f"the router needs documents with at least {clusters} different beginnings, one for "
            f"each path, and the sample has {distinct}; give more data, raise prefix_tokens or "
            f"training_documents under [router], or write fewer modules_per_level under [grid]"
        )
    if clusters == 1:
        return points.mean(axis=0, keepdims=True)
    check_installed()
    # Slow to import, and needed only where a router is fitted.
    from sklearn.cluster import KMeans

    with _one_thread():
        fitted = KMeans(clusters, n_init=_STARTS, random_state=seed).fit(points)
    centroids: np.ndarray = fitted.cluster_centers_
    return centroids[np.lexsort(centroids.T[::-1])]


def fit_classes(
    points: np.ndarray, labels: np.ndarray, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight [classes, H] and bias [classes] of multinomial logistic regression: the least
    mean cross entropy plus half of `_PENALTY` times the squares of the weights.

    Every class has a point. Nothing is random: the objective is convex.
    """
    if classes == 1:
        return np.zeros((1, points.shape[1])), np.zeros(1)
    check_installed()
    from sklearn.linear_model import LogisticRegression

    # Of two classes scikit-learn has one row of weights, the second class against the first; shared
    # out to both, its squares are half as large.
    penalty = _PENALTY / 2 if classes == 2 else _PENALTY
    with _one_thread():
        fitted = LogisticRegression(
            C=1 / (penalty * len(points)), max_iter=_MAX_ITERATIONS, tol=1e-6
        ).fit(points, labels)
    weight, bias = fitted.coef_, fitted.intercept_
    if classes == 2:
        weight, bias = np.vstack([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return weight, bias


def check_installed() -> None:
    """Raise ConfigurationError if scikit-learn is not here."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError(
            "fitting a router needs scikit-learn: pip install 'dipaco[prepare]'"
        )


def _one_thread() -> Any:
    """Return a context in which sums have one order. It holds for the libraries that are loaded."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)
