"""Fitting the router that `[router]` of a RUN.toml asks for, to a sample of training documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from dipaco.modules.config import Config
from dipaco.modules.errors import ConfigurationError
from pydantic import Field, model_validator
from typing_extensions import Self

from .discriminative import DiscriminativeRouter, fit_discriminative
from .kmeans import KMeansRouter
from .label_router import LabelRouter
from .product_kmeans import ProductKMeansRouter
from .random_router import RandomRouter
from .router import Router
from .routers import ROUTER_KINDS


class RouterConfig(Config):
    """`[router]`: how documents find their path."""

    kind: str = Field("kmeans", description="Kind of router.")
    balanced: bool = Field(
        True, description="k-means of both kinds: make the shards about equally large."
    )
    calibration: Literal["balanced", "paper"] = Field(
        "balanced",
        description="discriminative: load the paths alike, or in proportion to how many documents "
        "prefer them (section 7.2.1).",
    )
    least_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="discriminative: a path that fewer documents prefer than this part of an equal "
        "share learns from those on which it is the least behind; with calibration paper it is "
        "also what such a path gets.",
    )
    regularisation: float = Field(
        1e-3, gt=0, description="discriminative: L2 penalty of the logistic regression."
    )
    train_paths: int = Field(
        1,
        ge=1,
        description="Shards that a training document goes to: the best ones (section 2.4.4). "
        "Held-out documents go to the best alone.",
    )
    training_documents: int = Field(
        20_000, ge=1, description="Documents that the router is fitted on, at most."
    )
    prefix_tokens: int = Field(32, ge=1, description="Tokens that routing sees (section 2.4).")
    restarts: int = Field(8, ge=1, le=1000, description="Starts of k-means; the best one is used.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind not in ROUTER_KINDS:
            raise ValueError(f"kind '{self.kind}' is unknown; known: {', '.join(ROUTER_KINDS)}")
        if self.kind == LabelRouter.kind and self.train_paths > 1:
            raise ValueError(
                f"train_paths = {self.train_paths} does not go with kind = 'label': a label has "
                f"one path and no second best; leave train_paths out"
            )
        fitted_on_scores = ROUTER_KINDS[self.kind].fitted_on_scores
        if fitted_on_scores and "balanced" in self.model_fields_set and not self.balanced:
            raise ValueError(
                f"balanced = false is for k-means; with kind = '{self.kind}' write "
                f"calibration = 'paper'"
            )
        return self


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


def fit_router(
    config: RouterConfig, sample: RouterSample, modules_per_level: Sequence[int], seed: int
) -> Router:
    """Fit a router of the kind in `config` for a grid; the same arguments give the same router.

    Raises ConfigurationError if the sample cannot give such a router, and tells what would help.
    Called by preparation and by benchmarks.
    """
    return _FITS[config.kind](config, sample, tuple(modules_per_level), seed)


def _fit_kmeans(
    config: RouterConfig, sample: RouterSample, levels: tuple[int, ...], seed: int
) -> Router:
    return KMeansRouter.fit(
        sample.required_features(),
        math.prod(levels),
        seed=seed,
        balanced=config.balanced,
        weights=sample.weights,
        restarts=config.restarts,
    )


def _fit_product_kmeans(
    config: RouterConfig, sample: RouterSample, levels: tuple[int, ...], seed: int
) -> Router:
    return ProductKMeansRouter.fit(
        sample.required_features(),
        levels,
        seed=seed,
        balanced=config.balanced,
        weights=sample.weights,
        restarts=config.restarts,
    )


def _fit_discriminative(
    config: RouterConfig, sample: RouterSample, levels: tuple[int, ...], seed: int
) -> Router:
    if sample.nll is None:
        raise ConfigurationError(
            "a router of kind 'discriminative' learns from what trained paths make of the "
            "documents; train a run with kind = 'kmeans' under [router] first, and give it with "
            "--from RUN"
        )
    paths = math.prod(levels)
    if sample.nll.ndim != 2 or sample.nll.shape[1] != paths:
        raise ConfigurationError(
            f"the grid {' x '.join(map(str, levels))} has {paths} paths, the scores are of shape "
            f"{sample.nll.shape}; score every path of this grid"
        )
    return fit_discriminative(
        sample.required_features(),
        sample.nll,
        balanced=config.calibration == "balanced",
        weights=sample.weights,
        regularisation=config.regularisation,
        least_share=config.least_share,
        seed=seed,
    )


def _fit_label(
    config: RouterConfig, sample: RouterSample, levels: tuple[int, ...], seed: int
) -> Router:
    labels = sample.labels if sample.labels is not None else [None] * len(sample.weights)
    return LabelRouter.fit(labels, sample.weights, math.prod(levels), seed=seed)


def _fit_random(
    config: RouterConfig, sample: RouterSample, levels: tuple[int, ...], seed: int
) -> Router:
    return RandomRouter(math.prod(levels), seed)


_Fit = Callable[[RouterConfig, RouterSample, tuple[int, ...], int], Router]
_FITS: dict[str, _Fit] = {
    KMeansRouter.kind: _fit_kmeans,
    ProductKMeansRouter.kind: _fit_product_kmeans,
    DiscriminativeRouter.kind: _fit_discriminative,
    LabelRouter.kind: _fit_label,
    RandomRouter.kind: _fit_random,
}
