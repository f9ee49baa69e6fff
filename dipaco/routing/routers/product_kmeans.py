"""Product k-means: a codebook for each level of the grid (DiPaCo section 7.3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError

from .balancing import balance_biases, squared_distances
from .fitting import fit_centroids
from .kmeans import KMeansRouter, cluster_means
from .router import FeatureRouter, FitConfig, RouterSample, standardisation

_MAX_BALANCED_ITERATIONS = 10


class ProductKMeansRouter(FeatureRouter):
    """Each level chooses its module by its own slice of the standardised features.

    The features are cut into as many slices as there are levels, the first ones one longer if the
    width does not divide. Codebook l, float64 [modules of level l, width of slice l], has a
    centroid for each module of the level, and a path is the mixed-radix number of its modules,
    level 0 most significant, as in `Grid`. So paths that share a module get documents that are
    similar in the slice of its level.

    cost[i, p] = sum over l of |slice_l(i) - codebook_l[module_l(p)]|^2 + bias_p. The biases are
    zero for a plain fit; a balanced fit chooses one for each path, not for each module, because
    equally popular modules can still leave a pair of them without any document.
    """

    kind = "product_kmeans"
    kind_with_path = "kmeans"

    def __init__(
        self,
        mean: np.ndarray,
        scale: np.ndarray,
        codebooks: Sequence[np.ndarray],
        biases: np.ndarray,
    ) -> None:
        super().__init__(mean, scale)
        self._codebooks = tuple(np.asarray(book, dtype=np.float64) for book in codebooks)
        self._biases = np.asarray(biases, dtype=np.float64)
        if not self._codebooks or any(book.ndim != 2 for book in self._codebooks):
            raise ValueError("a codebook is not a matrix")
        slices = _slices(self.feature_size, len(self._codebooks))
        if any(
            book.shape[1] != part.stop - part.start or not len(book)
            for book, part in zip(self._codebooks, slices, strict=True)
        ):
            raise ValueError("a codebook does not have the width of its slice")
        if self._biases.shape != (self.path_count,):
            raise ValueError("there is not one bias for each path")
        self._check_finite()

    @classmethod
    def from_sample(
        cls, sample: RouterSample, config: FitConfig, levels: tuple[int, ...], seed: int
    ) -> ProductKMeansRouter:
        """Fit to the features of the sample."""
        features = sample.required_features()
        if len(levels) > features.shape[1]:
            raise ConfigurationError(
                f"kind = 'product_kmeans' needs at least one feature for each of the {len(levels)} "
                f"levels, and the base model has {features.shape[1]}; choose another kind"
            )
        mean, scale, points = standardisation(features)
        slices = _slices(points.shape[1], len(levels))
        codebooks = [
            fit_centroids(points[:, part], modules, seed=seed + level)
            for level, (part, modules) in enumerate(zip(slices, levels, strict=True))
        ]
        biases = np.zeros(math.prod(levels))
        if config.balanced and len(biases) > 1:
            codebooks, biases = _balanced(points, codebooks, sample.weights)
        return cls(mean, scale, codebooks, biases)

    def with_path(self, features: np.ndarray) -> KMeansRouter:
        """Return the same routing as a router of kind "kmeans", with one centroid more.

        The slices lie side by side, so a path's centroid is its modules' rows one after another.
        """
        centroids = [np.concatenate(rows) for rows in itertools.product(*self._codebooks)]
        router = KMeansRouter(self._mean, self._scale, np.stack(centroids), self._biases)
        return router.with_path(features)

    @property
    def path_count(self) -> int:
        """Product of the sizes of the codebooks."""
        return math.prod(len(book) for book in self._codebooks)

    def point_costs(self, points: np.ndarray) -> np.ndarray:
        """Return the sum of the levels' squared distances plus bias, float64 [N, paths]."""
        return _path_distances(points, self._codebooks) + self._biases

    def arrays(self) -> dict[str, np.ndarray]:
        """Return mean, scale, a codebook for each level, and the biases, float64."""
        books = {f"codebook_{level}": book for level, book in enumerate(self._codebooks)}
        return {"biases": self._biases, "mean": self._mean, "scale": self._scale, **books}

    @classmethod
    def from_file(
        cls, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]
    ) -> ProductKMeansRouter:
        """Make a router from mean, scale, codebooks and biases."""
        books = [arrays[f"codebook_{level}"] for level in range(len(arrays) - 3)]
        return cls(arrays["mean"], arrays["scale"], books, arrays["biases"])


def _slices(width: int, levels: int) -> list[slice]:
    """Return which features each level looks at."""
    sizes = [width // levels + (level < width % levels) for level in range(levels)]
    stops = np.cumsum(sizes).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def _path_distances(points: np.ndarray, codebooks: Sequence[np.ndarray]) -> np.ndarray:
    """Return for each point and path the sum of the levels' squared distances, [N, paths]."""
    total = np.zeros((len(points), 1))
    for book, part in zip(codebooks, _slices(points.shape[1], len(codebooks)), strict=True):
        distances = squared_distances(points[:, part], book)
        total = (total[:, :, None] + distances[:, None, :]).reshape(len(points), -1)
    return total


def _balanced(
    points: np.ndarray, codebooks: list[np.ndarray], loads: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Alternate between biases that equalise the loads of the paths and the means of the modules'
    slices; return codebooks and biases."""
    sizes = [len(book) for book in codebooks]
    assignment = np.full(len(points), -1)
    biases: np.ndarray | None = None
    for _ in range(_MAX_BALANCED_ITERATIONS):
        distances = _path_distances(points, codebooks)
        biases = balance_biases(distances, loads, biases)
        previous, assignment = assignment, np.argmin(distances + biases, axis=1)
        if np.array_equal(previous, assignment):
            break
        modules = np.unravel_index(assignment, sizes)
        codebooks = [
            cluster_means(points[:, part], module, book)
            for part, module, book in zip(
                _slices(points.shape[1], len(sizes)), modules, codebooks, strict=True
            )
        ]
    return codebooks, balance_biases(_path_distances(points, codebooks), loads)
