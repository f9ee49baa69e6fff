"""The router stage of preparation: a sample of the documents, the router for it, and its report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dipaco.modules.plan import RunPlan, ShardIndex
from dipaco.modules.transformer import PathModel
from dipaco.routing.document_routing import prefix_features
from dipaco.routing.report import RoutingReport, routing_report
from dipaco.routing.router import Router
from dipaco.routing.routers import ROUTER_KINDS, RouterConfig, RouterSample, fit_router
from dipaco.routing.shards import PathSummary
from dipaco.routing.token_corpus import TokenCorpus


def sample_documents(
    corpus: TokenCorpus, count: int, seed: int, longer_than_tokens: int = 0
) -> np.ndarray:
    """Return the indices of at most `count` documents drawn at random, int64, ascending."""
    eligible = np.flatnonzero(corpus.lengths() > longer_than_tokens)
    generator = np.random.default_rng(seed)
    size = min(count, len(eligible))
    return np.sort(eligible[generator.choice(len(eligible), size=size, replace=False)])


def fit_corpus_router(
    corpus: TokenCorpus,
    base_model: PathModel,
    config: RouterConfig,
    modules_per_level: Sequence[int],
    seed: int,
    *,
    chosen: np.ndarray | None = None,
    nll: np.ndarray | None = None,
) -> Router:
    """Fit the router that `config` asks for to documents of the corpus.

    The features come from `base_model`, on its device. A router fitted on scores gets those of the
    `chosen` documents; others choose theirs. Raises ConfigurationError as `fit_router`
    does. Called by `Preparation`.
    """
    kind = ROUTER_KINDS[config.kind]
    if kind.needs_labels:  # of all documents: they cost nothing, and none may be missed
        labels = [corpus.label_name(index) for index in range(len(corpus))]
        sample = RouterSample(weights=corpus.lengths(), labels=labels)
        return fit_router(config, sample, modules_per_level, seed)
    if chosen is None:
        chosen = sample_documents(corpus, config.training_documents, seed)
    features = None
    if kind.needs_features:
        prefixes = [corpus.document(int(index))[: config.prefix_tokens] for index in chosen]
        features = prefix_features(base_model, prefixes, config.prefix_tokens)
    sample = RouterSample(weights=corpus.lengths()[chosen], features=features, nll=nll)
    return fit_router(config, sample, modules_per_level, seed)


def report_routing(
    plan: RunPlan, index: ShardIndex, summaries: Sequence[PathSummary]
) -> RoutingReport:
    """Return the report of the shards of a run. Called by `Preparation`."""
    return routing_report(
        kind=plan.routing.kind,
        train_paths=plan.routing.train_paths,
        batch_sequences=plan.inner.batch_sequences,
        documents=[summary.train_documents for summary in summaries],
        tokens=[summary.train_tokens for summary in summaries],
        sequences=[shard.train_sequences for shard in index.paths],
        held_out_documents=[summary.validation_documents for summary in summaries],
        held_out_sequences=[shard.validation_sequences for shard in index.paths],
        label_tokens=[summary.label_tokens for summary in summaries],
    )
