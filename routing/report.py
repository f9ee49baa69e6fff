"""A report of a routing: how large the shards are, how even, and whether they follow the labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from dipaco.modules.config import Config
from dipaco.modules.plan import RunPlan, ShardIndex
from pydantic import Field

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


def routing_report(
    *,
    kind: str,
    train_paths: int,
    batch_sequences: int,
    documents: Sequence[int],
    tokens: Sequence[int],
    sequences: Sequence[int],
    held_out_documents: Sequence[int],
    held_out_sequences: Sequence[int],
    label_tokens: Sequence[Mapping[str, int]],
) -> RoutingReport:
    """Return the report of shards given as one number, or one table of labels, for each path."""
    expected = sum(tokens) / len(tokens)
    balance = shard_balance(tokens)
    paths = tuple(
        PathReport(
            path=path,
            documents=documents[path],
            tokens=tokens[path],
            sequences=sequences[path],
            held_out_documents=held_out_documents[path],
            held_out_sequences=held_out_sequences[path],
            share=tokens[path] / max(1, sum(tokens)),
            load=tokens[path] / max(1.0, expected),
            steps_per_epoch=sequences[path] / batch_sequences,
            labels=dict(sorted(label_tokens[path].items(), key=lambda item: (-item[1], item[0]))),
        )
        for path in range(len(tokens))
    )
    return RoutingReport(
        kind=kind,
        train_paths=train_paths,
        expected_tokens=expected,
        max_over_mean=balance[0],
        min_over_mean=balance[1],
        entropy_ratio=balance[2],
        agreement=label_agreement(label_tokens),
        paths=paths,
    )


def report_routing(
    plan: RunPlan, index: ShardIndex, summaries: Sequence[PathSummary]
) -> RoutingReport:
    """Return the report of the shards of a run."""
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
