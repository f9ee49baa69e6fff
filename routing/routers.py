"""Routers: from the features of documents to paths, and the file that a router is.

A router file is a safetensors file with one metadata entry, so it can be read by anything and has
one byte string, hence one hash. Further kinds of router are added to `ROUTER_KINDS`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import safetensors
import safetensors.numpy
from dipaco.modules.errors import IntegrityError

from .balancing import nearest_centroids, squared_distances
from .clustering import fit_kmeans
from .plan import canonical_json

ROUTER_FORMAT = "dipaco-router/1"


class Router(ABC):
    """Sends features, float32 [N, H], to paths. Immutable.

    A kind of router has a name, gives its arrays and settings for the file, and is made from them.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def path_count(self) -> int:
        """Number of paths that documents are sent to."""

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """Numbers in the features of a document: the width of the base model."""

    @abstractmethod
    def costs(self, features: np.ndarray) -> np.ndarray:
        """Return how badly each document suits each path, float64 [N, paths]; the least wins.

        Raises IntegrityError for features of another width or that are not finite.
        """

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Return what the router file holds."""

    @classmethod
    @abstractmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Router:
        """Make a router from what its file holds. Raises ValueError or KeyError if it is wrong."""

    def route(self, features: np.ndarray) -> np.ndarray:
        """Return the path of each document, int64 [N]; of equal costs the lowest path.

        Raises IntegrityError as `costs` does.
        """
        return np.argmin(self.costs(features), axis=1).astype(np.int64)

    def to_bytes(self) -> bytes:
        """Return the router file: the same router always has the same bytes."""
        header = canonical_json({"format": ROUTER_FORMAT, "kind": self.kind}).decode()
        # One metadata entry only: safetensors writes several in an arbitrary order.
        return safetensors.numpy.save(self.arrays(), metadata={"router": header})


class KMeansRouter(Router):
    """The nearest of one centroid per path (section 2.4.1, Eq. 1), on standardised features.

    cost[i, p] = |(feature_i - mean) / scale - centroid_p|^2 + bias_p. The biases are zero for
    plain k-means; a balanced fit chooses them so that the paths get equal shares of the corpus.
    Arithmetic is in float64.
    """

    kind = "kmeans"

    def __init__(
        self, mean: np.ndarray, scale: np.ndarray, centroids: np.ndarray, biases: np.ndarray
    ) -> None:
        self._mean = np.asarray(mean, dtype=np.float64)
        self._scale = np.asarray(scale, dtype=np.float64)
        self._centroids = np.asarray(centroids, dtype=np.float64)
        self._biases = np.asarray(biases, dtype=np.float64)
        if self._centroids.ndim != 2:
            raise ValueError("the centroids are not a matrix")
        paths, width = self._centroids.shape
        if self._mean.shape != (width,) or self._scale.shape != (width,):
            raise ValueError("mean and scale do not have the width of the centroids")
        if self._biases.shape != (paths,) or paths < 1:
            raise ValueError("biases and centroids differ in number")
        if not all(np.isfinite(array).all() for array in self.arrays().values()):
            raise ValueError("a number is not finite")
        if not (self._scale > 0).all():
            raise ValueError("a scale is not positive")

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
        points = np.asarray(features, dtype=np.float64)
        mean = points.mean(axis=0)
        scale = np.maximum(points.std(axis=0), 1e-6)
        centroids, biases = fit_kmeans(
            (points - mean) / scale,
            path_count,
            seed=seed,
            balanced=balanced,
            weights=weights,
            restarts=restarts,
        )
        return cls(mean, scale, centroids, biases)

    @property
    def path_count(self) -> int:
        """Number of centroids."""
        return len(self._centroids)

    @property
    def feature_size(self) -> int:
        """Width of the centroids."""
        return int(self._centroids.shape[1])

    def costs(self, features: np.ndarray) -> np.ndarray:
        """Return squared distance plus bias, float64 [N, paths]."""
        return squared_distances(self._standardised(features), self._centroids) + self._biases

    def route(self, features: np.ndarray) -> np.ndarray:
        """Return the path of each document, int64 [N], without holding all costs at once."""
        return nearest_centroids(self._standardised(features), self._centroids, self._biases)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return mean, scale, centroids and biases, float64."""
        return {
            "biases": self._biases,
            "centroids": self._centroids,
            "mean": self._mean,
            "scale": self._scale,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> KMeansRouter:
        """Make a router from mean, scale, centroids and biases."""
        return cls(arrays["mean"], arrays["scale"], arrays["centroids"], arrays["biases"])

    def _standardised(self, features: np.ndarray) -> np.ndarray:
        points = np.asarray(features, dtype=np.float64)
        if points.ndim != 2 or points.shape[1] != self.feature_size:
            raise IntegrityError(
                f"the router was made for features of width {self.feature_size}, got an array of "
                f"shape {points.shape}; router and base model are of different runs"
            )
        if not np.isfinite(points).all():
            raise IntegrityError("the base model gave features that are not finite numbers")
        return (points - self._mean) / self._scale


ROUTER_KINDS: dict[str, type[Router]] = {KMeansRouter.kind: KMeansRouter}


def load_router(data: bytes) -> Router:
    """Read a router file. Raises IntegrityError if it is broken or of an unknown kind."""
    try:
        header = _header(data)
        arrays = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"the router file is broken: {error}") from None
    if header.get("format") != ROUTER_FORMAT:
        raise IntegrityError(
            f"the router file has format {header.get('format')!r}, this version reads "
            f"{ROUTER_FORMAT!r}"
        )
    kind = ROUTER_KINDS.get(str(header.get("kind")))
    if kind is None:
        raise IntegrityError(
            f"the router is of kind {header.get('kind')!r}, this version knows "
            f"{', '.join(sorted(ROUTER_KINDS))}; a newer version of dipaco may be needed"
        )
    try:
        return kind.from_arrays(arrays)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"the router file is broken: {error}") from None


def _header(data: bytes) -> dict[str, Any]:
    """Return our entry in the metadata of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    header = json.loads(metadata["router"])
    if not isinstance(header, dict):
        raise ValueError("its metadata is not an object")
    return header
