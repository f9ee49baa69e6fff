"""k-means routing: the path of the nearest centroid (DiPaCo section 2.4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError

from .balancing import balance_biases, nearest_centroids, row_squares, squared_distances
from .router import FeatureRouter, FitConfig, RouterSample, standardisation

# Lloyd's algorithm stops when an iteration gains less than this part of the sum of distances.
_LEAST_GAIN = 1e-5
_MAX_ITERATIONS, _MAX_BALANCED_ITERATIONS = 100, 20


def fit_kmeans(
    points: np.ndarray,
    clusters: int,
    *,
    seed: int,
    balanced: bool = False,
    weights: np.ndarray | None = None,
    restarts: int = 8,
) -> tuple[np.ndarray, np.ndarray]:
    """Return centroids, float64 [clusters, H], and biases, float64 [clusters].

    Of `restarts` starts the one with the least sum of squared distances wins. Clusters are ordered
    by their first coordinates, so that their numbers do not depend on chance. A balanced fit
    continues from there, alternating biases that equalise the loads with the means of the
    resulting clusters. `weights` [N] (default: all 1) count in the loads only.

    Raises ConfigurationError if there are fewer different points than clusters.
    """
    distinct = len({point.tobytes() for point in points})
    if distinct < clusters:
        raise ConfigurationError(
            f"the router needs documents with at least {clusters} different beginnings, one for "
            f"each path, and the sample has {distinct}; give more data, raise prefix_tokens or "
            f"training_documents under [router], or write fewer modules_per_level under [grid]"
        )
    generator = np.random.default_rng(seed)
    starts = (_plus_plus(points, clusters, generator) for _ in range(restarts))
    runs = (_lloyd(points, start) for start in starts)
    _, centroids = min(runs, key=lambda run: run[0])
    centroids = centroids[np.lexsort(centroids.T[::-1])]
    if not balanced or clusters == 1:
        return centroids, np.zeros(clusters)
    loads = np.ones(len(points)) if weights is None else np.asarray(weights, dtype=np.float64)
    return _balanced_lloyd(points, centroids, loads)


def _plus_plus(points: np.ndarray, clusters: int, generator: np.random.Generator) -> np.ndarray:
    """Choose starting centroids among the points, each in proportion to its squared distance from
    those already chosen (Arthur and Vassilvitskii, 2007)."""
    chosen = [int(generator.integers(len(points)))]
    distances = squared_distances(points, points[chosen])[:, 0]
    while len(chosen) < clusters:
        distances[chosen] = 0.0  # rounding must not let a chosen point be chosen again
        index = int(generator.choice(len(points), p=distances / distances.sum()))
        chosen.append(index)
        distances = np.minimum(distances, squared_distances(points, points[[index]])[:, 0])
    return points[chosen].copy()


def _lloyd(points: np.ndarray, centroids: np.ndarray) -> tuple[float, np.ndarray]:
    """Run Lloyd's algorithm until it hardly improves; return the sum of squared distances and the
    centroids."""
    inertia = np.inf
    for _ in range(_MAX_ITERATIONS):
        assignment = nearest_centroids(points, centroids)
        centroids = cluster_means(points, assignment, centroids)
        previous, inertia = inertia, _inertia(points, assignment, centroids)
        if previous - inertia <= _LEAST_GAIN * inertia and _all_used(assignment, centroids):
            break
    return inertia, centroids


def _inertia(points: np.ndarray, assignment: np.ndarray, centroids: np.ndarray) -> float:
    return float(((points - centroids[assignment]) ** 2).sum())


def _all_used(assignment: np.ndarray, centroids: np.ndarray) -> bool:
    return bool((np.bincount(assignment, minlength=len(centroids)) > 0).all())


def _balanced_lloyd(
    points: np.ndarray, centroids: np.ndarray, loads: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Alternate between biases that equalise the loads and the means of the clusters."""
    biases = np.zeros(len(centroids))
    assignment = np.full(len(points), -1)
    for number in range(_MAX_BALANCED_ITERATIONS):
        distances = squared_distances(points, centroids)
        biases = balance_biases(distances, loads, biases if number else None)
        previous, assignment = assignment, nearest_centroids(points, centroids, biases)
        if np.array_equal(previous, assignment):
            break
        centroids = cluster_means(points, assignment, centroids)
    return centroids, balance_biases(squared_distances(points, centroids), loads, biases)


def cluster_means(points: np.ndarray, assignment: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return the means of the clusters; one that lost all its points gets the worst-served one."""
    clusters = len(centroids)
    counts = np.bincount(assignment, minlength=clusters)
    used = counts > 0
    order = np.argsort(assignment, kind="stable")
    starts = (np.cumsum(counts) - counts)[used]
    means = centroids.copy()
    means[used] = np.add.reduceat(points[order], starts, axis=0) / counts[used][:, None]
    empty = np.flatnonzero(~used)
    if len(empty):
        strayed = ((points - means[assignment]) ** 2).sum(axis=1)
        means[empty] = points[np.argsort(-strayed, kind="stable")[: len(empty)]]
    return means


class KMeansRouter(FeatureRouter):
    """The nearest of one centroid per path (Eq. 1), on standardised features.

    cost[i, p] = |(feature_i - mean) / scale - centroid_p|^2 + bias_p. The biases are zero for
    plain k-means; a balanced fit chooses them so that the paths get equal shares of the corpus.
    """

    kind = "kmeans"
    kind_with_path = "kmeans"

    def __init__(
        self, mean: np.ndarray, scale: np.ndarray, centroids: np.ndarray, biases: np.ndarray
    ) -> None:
        super().__init__(mean, scale)
        self._centroids = np.asarray(centroids, dtype=np.float64)
        self._biases = np.asarray(biases, dtype=np.float64)
        self._squares = row_squares(self._centroids) if self._centroids.ndim == 2 else None
        if self._centroids.ndim != 2 or self._centroids.shape[1] != self.feature_size:
            raise ValueError("the centroids are not rows of the width of mean and scale")
        if self._biases.shape != (self.path_count,) or self.path_count < 1:
            raise ValueError("biases and centroids differ in number")
        self._check_finite()

    @classmethod
    def from_sample(
        cls, sample: RouterSample, config: FitConfig, levels: tuple[int, ...], seed: int
    ) -> KMeansRouter:
        """Fit to the features of the sample."""
        return cls.fit(
            sample.required_features(),
            math.prod(levels),
            seed=seed,
            balanced=config.balanced,
            weights=sample.weights,
            restarts=config.restarts,
        )

    @classmethod
    def fit(
        cls,
        features: np.ndarray,
        path_count: int,
        *,
        seed: int = 0,
        balanced: bool = False,
        weights: np.ndarray | None = None,
        restarts: int = 8,
    ) -> KMeansRouter:
        """Fit to the features of a sample of documents, [N, H].

        `weights` [N] is how much each document counts for balance, usually its tokens, because a
        shard is as large as its tokens. The same arguments give the same router.

        Raises ConfigurationError if there are fewer documents than paths.
        """
        mean, scale, points = standardisation(features)
        centroids, biases = fit_kmeans(
            points, path_count, seed=seed, balanced=balanced, weights=weights, restarts=restarts
        )
        return cls(mean, scale, centroids, biases)

    def with_path(self, features: np.ndarray) -> KMeansRouter:
        """Return this router with one centroid more: the mean of the features.

        Its bias is 0, the mean of those of a balanced fit.
        """
        centroid = self._standardised(features).mean(axis=0)
        return KMeansRouter(
            self._mean,
            self._scale,
            np.vstack([self._centroids, centroid]),
            np.append(self._biases, 0.0),
        )

    @property
    def path_count(self) -> int:
        """Number of centroids."""
        return len(self._centroids)

    def point_costs(self, points: np.ndarray) -> np.ndarray:
        """Return squared distance plus bias, float64 [N, paths]."""
        return squared_distances(points, self._centroids, self._squares) + self._biases

    def arrays(self) -> dict[str, np.ndarray]:
        """Return mean, scale, centroids and biases, float64."""
        return {
            "biases": self._biases,
            "centroids": self._centroids,
            "mean": self._mean,
            "scale": self._scale,
        }

    @classmethod
    def from_file(
        cls, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]
    ) -> KMeansRouter:
        """Make a router from mean, scale, centroids and biases."""
        return cls(arrays["mean"], arrays["scale"], arrays["centroids"], arrays["biases"])
