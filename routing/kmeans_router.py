"""k-means routing: the path of the nearest centroid (DiPaCo section 2.4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .balancing import squared_distances
from .clustering import fit_kmeans
from .router import FeatureRouter, standardisation


class KMeansRouter(FeatureRouter):
    """The nearest of one centroid per path (Eq. 1), on standardised features.

    cost[i, p] = |(feature_i - mean) / scale - centroid_p|^2 + bias_p. The biases are zero for
    plain k-means; a balanced fit chooses them so that the paths get equal shares of the corpus.
    """

    kind = "kmeans"

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
