"""What every router does: from the beginning of a document to its path, and to and from a file.

A router file is a safetensors file with one metadata entry, so it can be read by anything and has
one byte string, hence one hash. The kinds are listed in `dipaco.routing.routers.kinds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from dipaco.base.errors import IntegrityError
from dipaco.modules.canonical_file import write_arrays
from dipaco.protocol.config import Config

ROUTER_FORMAT = "dipaco-router/1"


@dataclass(frozen=True)
class Prefixes:
    """What routing may see of N documents; what the router does not need may be left out.

    `features` is float32 [N, H] (`prefix_features`), `tokens` the first tokens of each document,
    its begin token included, `labels` a label of each document, None where it has none.
    """

    features: np.ndarray | None = None
    tokens: Sequence[Sequence[int] | np.ndarray] | None = None
    labels: Sequence[str | None] | None = None


class FitConfig(Config):
    """How a router is fitted: `[router]` of a RUN.toml but for its kind (`RouterConfig`)."""

    balanced: bool = Field(
        True, description="Both kinds of k-means: make the shards about equal in tokens."
    )
    least_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="`discriminative`: a path gets documents in proportion to how many prefer "
        "it, but at least this part of an equal share.",
    )
    train_paths: int = Field(
        1,
        ge=1,
        description="Shards that a training document goes to, its best paths first (section "
        "2.4.4 of the paper).",
    )
    training_documents: int = Field(
        20_000,
        ge=1,
        description="Greatest number of documents that the router is fitted on.",
    )
    prefix_tokens: int = Field(
        32,
        ge=1,
        description="Tokens at the start of a document that routing sees. They are never scored.",
    )


@dataclass(frozen=True)
class RouterSample:
    """What a router is fitted on: N training documents.

    `weights` [N] is how much each counts for the load of its path, usually its tokens. What the
    kind of router does not look at may be left out: `features` float32 [N, H], `labels`, and `nll`
    [N, paths], the summed negative log-likelihood of each document under each path.
    """

    weights: np.ndarray
    features: np.ndarray | None = None
    labels: Sequence[str | None] | None = None
    nll: np.ndarray | None = None

    def required_features(self) -> np.ndarray:
        """Return the features. Raises ValueError if there are none."""
        if self.features is None:
            raise ValueError("a router of this kind is fitted on features")
        return self.features


class Router(ABC):
    """Sends documents to paths. Immutable, and the same on every machine.

    A kind of router has a name, says what it needs to see, is fitted to a sample, gives its arrays
    and settings for the file, and is made from them.
    """

    kind: ClassVar[str]
    needs_features: ClassVar[bool] = False
    """Whether `Prefixes.features` must be given: computing them takes the base model."""
    needs_labels: ClassVar[bool] = False
    """Whether `Prefixes.labels` must be given."""
    fitted_on_scores: ClassVar[bool] = False
    """Whether fitting needs what trained paths make of the documents (`RouterSample.nll`)."""
    kind_with_path: ClassVar[str | None] = None
    """The kind that this one becomes by `with_path`; None if no path can be added to it."""

    @classmethod
    @abstractmethod
    def from_sample(
        cls, sample: RouterSample, config: FitConfig, levels: tuple[int, ...], seed: int
    ) -> Router:
        """Fit a router for the grid with `levels` modules a level; the same arguments give the
        same router.

        Raises ConfigurationError if the sample cannot give such a router, and tells what would
        help.
        """

    def with_path(self, features: np.ndarray) -> Router:
        """Return a router with one path more, for documents of these features, float32 [N, H].

        What the other paths cost a document stays as it is. Raises as `costs` does, and ValueError
        if this kind has no `kind_with_path`.
        """
        raise ValueError(f"no path can be added to a router of kind '{self.kind}'")

    @property
    @abstractmethod
    def path_count(self) -> int:
        """Number of paths that documents are sent to."""

    @abstractmethod
    def costs(self, prefixes: Prefixes) -> np.ndarray:
        """Return how badly each document suits each path, float64 [N, paths]; the least wins.

        Raises IntegrityError for features of another width or that are not finite, ValueError if
        what the router needs is missing.
        """

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that the router file holds."""

    def settings(self) -> dict[str, Any]:
        """Return what else the router file holds: plain values, for its metadata."""
        return {}

    @classmethod
    @abstractmethod
    def from_file(cls, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> Router:
        """Make a router from what its file holds. Raises ValueError, KeyError or TypeError if that
        is wrong."""

    def nearest(self, prefixes: Prefixes, count: int) -> np.ndarray:
        """Return the `count` paths of least cost for each document, int64 [N, count], the best
        first; of equal costs the lowest path. More than one is for the overlapping shards of
        section 2.4.4.

        Raises as `costs` does, and ValueError if there are fewer paths than `count`.
        """
        if not 1 <= count <= self.path_count:
            raise ValueError(f"{count} of {self.path_count} paths cannot be chosen")
        costs = self.costs(prefixes)
        if count == 1:
            return np.argmin(costs, axis=1)[:, None]
        return np.argsort(costs, axis=1, kind="stable")[:, :count]

    def route(self, prefixes: Prefixes) -> np.ndarray:
        """Return the path of each document, int64 [N]; of equal costs the lowest path.

        Raises as `costs` does.
        """
        return self.nearest(prefixes, 1)[:, 0]

    def to_bytes(self) -> bytes:
        """Return the router file: the same router always has the same bytes."""
        header: dict[str, Any] = {"format": ROUTER_FORMAT, "kind": self.kind}
        if settings := self.settings():
            header["settings"] = settings
        return write_arrays(self.arrays(), "router", header)


class FeatureRouter(Router):
    """A router that sees the standardised features of a document's prefix (section 7.2.1).

    `mean` and `scale` [H] are of the sample that the router was fitted on. Arithmetic is in
    float64.
    """

    needs_features = True

    def __init__(self, mean: np.ndarray, scale: np.ndarray) -> None:
        self._mean = np.asarray(mean, dtype=np.float64)
        self._scale = np.asarray(scale, dtype=np.float64)
        if self._mean.ndim != 1 or self._scale.shape != self._mean.shape:
            raise ValueError("mean and scale are not two rows of equal width")
        if not (self._scale > 0).all():
            raise ValueError("a scale is not positive")

    @property
    def feature_size(self) -> int:
        """Numbers in the features of a document: the width of the base model."""
        return len(self._mean)

    @abstractmethod
    def point_costs(self, points: np.ndarray) -> np.ndarray:
        """Return the costs [N, paths] of standardised features, float64 [N, H]."""

    def costs(self, prefixes: Prefixes) -> np.ndarray:
        """Return the costs of the documents' features, float64 [N, paths]."""
        return self.point_costs(self._standardised(prefixes.features))

    def _standardised(self, features: np.ndarray | None) -> np.ndarray:
        if features is None:
            raise ValueError(f"a router of kind '{self.kind}' needs the features of the documents")
        points = np.asarray(features, dtype=np.float64)
        if points.ndim != 2 or points.shape[1] != self.feature_size:
            raise IntegrityError(
                f"the router was made for features of width {self.feature_size}, got an array of "
                f"shape {points.shape}; router and base model are of different runs"
            )
        if not np.isfinite(points).all():
            raise IntegrityError("the base model gave features that are not finite numbers")
        return (points - self._mean) / self._scale

    def _check_finite(self) -> None:
        if not all(np.isfinite(array).all() for array in self.arrays().values()):
            raise ValueError("a number is not finite")


def standardisation(features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean [H] and scale [H] of features [N, H], and the standardised features, float64."""
    points = np.asarray(features, dtype=np.float64)
    mean = points.mean(axis=0)
    scale = np.maximum(points.std(axis=0), 1e-6)
    return mean, scale, (points - mean) / scale
