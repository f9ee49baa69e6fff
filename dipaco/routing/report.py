"""A report of a routing: how large the shards are, how even, and whether they follow the labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field

from dipaco.protocol.config import Config
from dipaco.protocol.plan import RoutingPlan

from .shards import PathSummary


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
    paths: tuple[PathSummary, ...]


def report_routing(routing: RoutingPlan, paths: Sequence[PathSummary]) -> RoutingReport:
    """Return the report of the shards of a run."""
    tokens = np.array([path.tokens for path in paths], dtype=np.float64)
    expected = max(float(tokens.mean()), 1e-300)
    return RoutingReport(
        kind=routing.kind,
        train_paths=routing.train_paths,
        expected_tokens=expected,
        max_over_mean=float(tokens.max()) / expected,
        min_over_mean=float(tokens.min()) / expected,
        entropy_ratio=_entropy(tokens) / math.log(len(paths)) if len(paths) > 1 else 1.0,
        agreement=label_agreement([path.labels for path in paths]),
        paths=tuple(paths),
    )


def label_agreement(label_tokens: Sequence[Mapping[str, int]]) -> LabelAgreement | None:
    """Return how far paths and labels agree, from the tokens by label of each path; None if there
    are no labels. A single label and a single path agree fully."""
    names = sorted({name for counts in label_tokens for name in counts})
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
