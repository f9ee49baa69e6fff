"""The kinds of routers: choosing, fitting and reading one. A further kind is a file of its own,
added to `ROUTER_KINDS`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from dipaco.base.errors import IntegrityError
from dipaco.modules.canonical_file import read_arrays

from .discriminative import DiscriminativeRouter
from .kmeans import KMeansRouter
from .product_kmeans import ProductKMeansRouter
from .router import ROUTER_FORMAT, FitConfig, Prefixes, Router, RouterSample
from .simple_routers import LabelRouter, RandomRouter

__all__ = [
    "ROUTER_KINDS",
    "KMeansRouter",
    "Prefixes",
    "RandomRouter",
    "Router",
    "RouterConfig",
    "RouterSample",
    "fit_router",
    "load_router",
]

ROUTER_KINDS: dict[str, type[Router]] = {
    kind.kind: kind
    for kind in (
        KMeansRouter,
        ProductKMeansRouter,
        DiscriminativeRouter,
        LabelRouter,
        RandomRouter,
    )
}


class RouterConfig(FitConfig):
    """`[router]`: how documents find their path."""

    kind: str = Field(
        "kmeans", description="`kmeans`, `product_kmeans`, `discriminative`, `label` or `random`."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind not in ROUTER_KINDS:
            raise ValueError(f"kind '{self.kind}' is unknown; known: {', '.join(ROUTER_KINDS)}")
        if self.kind == LabelRouter.kind and self.train_paths > 1:
            raise ValueError(
                f"train_paths = {self.train_paths} does not go with kind = 'label': a label has "
                f"one path and no second best; leave train_paths out"
            )
        return self


def fit_router(
    config: RouterConfig, sample: RouterSample, modules_per_level: Sequence[int], seed: int
) -> Router:
    """Fit a router of the kind in `config` for a grid; the same arguments give the same router.

    Raises ConfigurationError if the sample cannot give such a router, and tells what would help.
    """
    return ROUTER_KINDS[config.kind].from_sample(sample, config, tuple(modules_per_level), seed)


def load_router(data: bytes) -> Router:
    """Read a router file. Raises IntegrityError if it is broken or of an unknown kind."""
    header, arrays = read_arrays(data, "router", ROUTER_FORMAT, "the router file")
    kind = ROUTER_KINDS.get(str(header.get("kind")))
    if kind is None:
        raise IntegrityError(
            f"the router is of kind {str(header.get('kind'))[:40]!r}, this version knows "
            f"{', '.join(sorted(ROUTER_KINDS))}; a newer version of dipaco may be needed"
        )
    try:
        settings = header.get("settings", {})
        if not isinstance(settings, dict):
            raise ValueError("its settings are not an object")
        return kind.from_file(arrays, settings)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"the router file is broken: {error}") from None
