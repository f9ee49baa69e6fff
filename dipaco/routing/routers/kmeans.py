"""k-means routing: the path of the nearest centroid (DiPaCo section 2.4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .balancing import balance_biases, squared_distances
from .fitting import fit_centroids
from .router import FeatureRouter, FitConfig, RouterSample, standardisation

_MAX_BALANCED_ITERATIONS = 20


def _balanced_centroids(
    points: np.ndarray, centroids: np.ndarray, loads: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return centroids and biases [clusters] with which the clusters have equal loads: biases that
    equalise the loads and the means of the resulting clusters, in turns."""
    biases: np.ndarray | None = None
    assignment = np.full(len(points), -1)
    for _ in range(_MAX_BALANCED_ITERATIONS):
        distances = squared_distances(points, centroids)
        biases = balance_biases(distances, loads, biases)
        previous, assignment = assignment, np.argmin(distances + biases, axis=1)
        if np.array_equal(previous, assignment):
            break
        centroids = cluster_means(points, assignment, centroids)
    return centroids, balance_biases(squared_distances(points, centroids), loads)


def cluster_means(points: np.ndarray, assignment: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return the means of the clusters; one without points keeps its centroid."""
    clusters = len(centroids)
    counts = np.bincount(assignment, minlength=clusters)
    sums = np.zeros_like(centroids)
    np.add.at(sums, assignment, points)
    used = counts > 0
    means = centroids.copy()
    means[used] = sums[used] / counts[used][:, None]
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
        mean, scale, points = standardisation(sample.required_features())
        paths = math.prod(levels)
        centroids = fit_centroids(points, paths, seed=seed)
        biases = np.zeros(paths)
        if config.balanced and paths > 1:
            centroids, biases = _balanced_centroids(points, centroids, sample.weights)
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
        return squared_distances(points, self._centroids) + self._biases

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
