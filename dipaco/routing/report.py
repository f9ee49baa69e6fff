"""A report of a routing: how large the shards are, how even, and whether they follow the labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field

from dipaco.protocol.config import Config
from dipaco.protocol.plan import RunPlan, ShardIndex

from .shards import PathSummary


class PathReport(Config):
    """The shard of one path. Tokens are without padding; a document in several shards counts in
    each of them."""

    path: int
    documents: int
    tokens: int
    sequences: int = Field(description="Rows of the token file, the last one padded.")
    held_out_documents: int
    held_out_sequences: int
    share: float = Field(description="Part of all tokens of the shards.")
    load: float = Field(description="Tokens / expected tokens.")
    steps_per_epoch: float = Field(description="Inner steps of one peer to read the shard once.")
    labels: dict[str, int] = Field(description="Tokens by label, the most first.")


class LabelAgreement(Config):
    """How well paths and labels agree, over the tokens of the documents that have a label."""

    normalised_mutual_information: float = Field(
        description="Mutual information of path and label / the mean of their entropies: 0 when "
        "the path says nothing about the label, 1 when each determines the other."
    )
    purity: float = Field(description="Part of the tokens with the commonest label of their path.")


class RoutingReport(Config):
    """What `prepare` writes to DIR/routing.json, and shows of it."""

    kind: str
    train_paths: int
    expected_tokens: float = Field(description="Tokens of a path if all had equally many.")
    max_over_mean: float = Field(description="Tokens of the largest shard / expected tokens.")
    min_over_mean: float = Field(description="Tokens of the smallest shard / expected tokens.")
    entropy_ratio: float = Field(description="Entropy of the shares / that of equal shares.")
    agreement: LabelAgreement | None = Field(description="None if there are no labels.")
    paths: tuple[PathReport, ...]


def report_routing(
    plan: RunPlan, index: ShardIndex, summaries: Sequence[PathSummary]
) -> RoutingReport:
    """Return the report of the shards of a run."""
    tokens = [summary.train_tokens for summary in summaries]
    expected = sum(tokens) / len(tokens)
    largest, smallest, entropy = shard_balance(tokens)
    paths = tuple(
        PathReport(
            path=shard.path,
            documents=summary.train_documents,
            tokens=summary.train_tokens,
            sequences=shard.train_sequences,
            held_out_documents=summary.validation_documents,
            held_out_sequences=shard.validation_sequences,
            share=summary.train_tokens / max(1, sum(tokens)),
            load=summary.train_tokens / max(1.0, expected),
            steps_per_epoch=shard.train_sequences / plan.inner.batch_sequences,
            labels=dict(sorted(summary.label_tokens.items(), key=lambda item: (-item[1], item[0]))),
        )
        for shard, summary in zip(index.paths, summaries, strict=True)
    )
    return RoutingReport(
        kind=plan.routing.kind,
        train_paths=plan.routing.train_paths,
        expected_tokens=expected,
        max_over_mean=largest,
        min_over_mean=smallest,
        entropy_ratio=entropy,
        agreement=label_agreement([summary.label_tokens for summary in summaries]),
        paths=paths,
    )


def shard_balance(tokens: Sequence[int] | np.ndarray) -> tuple[float, float, float]:
    """Return largest / mean, smallest / mean, and the entropy of the shares as a part of that of
    equal shares (1 for a single path), of the sizes of shards."""
    sizes = np.asarray(tokens, dtype=np.float64)
    mean = max(float(sizes.mean()), 1e-300)
    entropy = 1.0 if len(sizes) == 1 else _entropy(sizes) / math.log(len(sizes))
    return float(sizes.max()) / mean, float(sizes.min()) / mean, entropy


def label_agreement(label_tokens: Sequence[Mapping[str, int]]) -> LabelAgreement | None:
    """Return how far paths and labels agree, from the tokens by label of each path; None if there
    are no labels. A single label and a single path agree fully."""
    names = sorted(Counter(name for counts in label_tokens for name in counts))
    table = np.array(
        [[counts.get(name, 0) for name in names] for counts in label_tokens], dtype=np.float64
    )
    if not table.sum():
        return None
    of_paths, of_labels = _entropy(table.sum(axis=1)), _entropy(table.sum(axis=0))
    shared = of_paths + of_labels - _entropy(table.reshape(-1))
    mean = (of_paths + of_labels) / 2
    return LabelAgreement(
        normalised_mutual_information=min(1.0, max(0.0, shared / mean)) if mean > 1e-12 else 1.0,
        purity=float(table.max(axis=1).sum() / table.sum()),
    )


def _entropy(sizes: np.ndarray) -> float:
    """Return the entropy in nats of parts that need not sum to 1."""
    shares = sizes[sizes > 0] / max(float(sizes.sum()), 1e-300)
    return float(-(shares * np.log(shares)).sum())
