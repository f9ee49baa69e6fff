"""The kinds of routers: choosing, fitting and reading one. A further kind is a file of its own,
added to `ROUTER_KINDS`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from dipaco.base.errors import IntegrityError
from dipaco.modules.canonical_file import read_arrays
from dipaco.modules.transformer import PathModel
from dipaco.routing.tokens.token_corpus import TokenCorpus

from .discriminative import DiscriminativeRouter
from .document_routing import prefix_features
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
    "fit_corpus_router",
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
# Of documents: one path gets all of them, and its centre matters only where paths are added later.
ENOUGH_FOR_ONE_PATH = 256
# What one path may be given of documents that begin alike, as a multiple of an even share.
_MANY_ALIKE = 1.5


class RouterConfig(FitConfig):
    """`[router]`: how documents find their path."""

    kind: str = Field("kmeans", description="Kind of router.")

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


def fit_corpus_router(
    corpus: TokenCorpus,
    base_model: PathModel,
    config: RouterConfig,
    modules_per_level: Sequence[int],
    seed: int,
    *,
    chosen: np.ndarray | None = None,
    nll: np.ndarray | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Router:
    """Fit the router that `config` asks for to documents of the corpus.

    The features come from `base_model`, on its device. A router fitted on scores gets those of the
    `chosen` documents; others choose theirs. `say` is told when too many documents begin alike.
    Raises ConfigurationError as `fit_router` does.
    """
    kind = ROUTER_KINDS[config.kind]
    if kind.needs_labels:  # of all documents: they cost nothing, and none may be missed
        labels = [corpus.label_name(index) for index in range(len(corpus))]
        sample = RouterSample(weights=corpus.lengths(), labels=labels)
        return fit_router(config, sample, modules_per_level, seed)
    if chosen is None:
        is_one_path = math.prod(modules_per_level) == 1
        most = ENOUGH_FOR_ONE_PATH if is_one_path else config.training_documents
        chosen = corpus.sample(min(most, config.training_documents), seed)
    features = None
    if kind.needs_features:
        prefixes = [corpus.beginning(int(index), config.prefix_tokens) for index in chosen]
        features = prefix_features(base_model, prefixes, config.prefix_tokens)
        alike = max(Counter(prefix.tobytes() for prefix in prefixes).values()) / len(prefixes)
        if alike * math.prod(modules_per_level) > _MANY_ALIKE:
            say(
                f"{alike:.0%} of the documents begin with the same {config.prefix_tokens} tokens, "
                f"and one path gets them all; raise prefix_tokens under [router], or cut off what "
                f"they have in common"
            )
    sample = RouterSample(weights=corpus.lengths()[chosen], features=features, nll=nll)
    return fit_router(config, sample, modules_per_level, seed)


def load_router(data: bytes) -> Router:
    """Read a router file. Raises IntegrityError if it is broken or of an unknown kind."""
    header, arrays = read_arrays(data, "router", ROUTER_FORMAT, "the router file")
    kind = ROUTER_KINDS.get(str(header.get("kind")))
    if kind is None:
        raise IntegrityError(
            f"the router is of kind {header.get('kind')!r}, this version knows "
            f"{', '.join(sorted(ROUTER_KINDS))}; a newer version of dipaco may be needed"
        )
    try:
        settings = header.get("settings", {})
        if not isinstance(settings, dict):
            raise ValueError("its settings are not an object")
        return kind.from_file(arrays, settings)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"the router file is broken: {error}") from None
