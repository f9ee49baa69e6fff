"""Perplexities of choosing a path every W tokens, from the losses under all paths (section 2.4.3).

The first `prefix_tokens` tokens of a document belong to the run's router and are not counted. From
there on a decision is made at every W-th token, so only one if W is the document's length or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dipaco.training.scoring import LossSum

from .document_windows import DocumentWindows
from .token_losses import TokenLosses

STAY: float = math.inf
"""The bonus for staying that never lets a path be left."""
GREATEST_WINDOW = 2**20
"""Tokens between two decisions, at most."""


@dataclass(frozen=True)
class Decisions:
    """When paths are chosen, D times in all; documents follow each other."""

    starts: np.ndarray
    """int64 [D]: number of the first token that a choice is for."""
    documents: np.ndarray
    """int64 [D]"""
    ordinals: np.ndarray
    """int64 [D]: how many decisions a document had before."""

    def __len__(self) -> int:
        return len(self.starts)


def decisions(documents: DocumentWindows, window: int) -> Decisions:
    """Return the decisions of rerouting every `window` tokens. Raises ValueError below 1."""
    if window < 1:
        raise ValueError(f"a window of {window} tokens is no window")
    counts = -(-documents.document_tokens // window)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ordinals = np.arange(first[-1]) - np.repeat(first[:-1], counts)
    return Decisions(
        starts=np.repeat(documents.token_starts[:-1], counts) + ordinals * window,
        documents=np.repeat(np.arange(len(documents)), counts),
        ordinals=ordinals,
    )


def choose_paths(
    logits: np.ndarray,
    made: Decisions,
    routed: np.ndarray,
    stay_bonus: float,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Return the path of each decision, int64 [D]: the greatest logit, with a bonus for staying.

    `logits` is [D, paths]; `routed` int64 [N] is where each document begins. A path is left only
    for one whose logit is greater by more than `stay_bonus`, so `STAY` never leaves the routed
    path, and a larger bonus switches less. `allowed`, bool [paths], leaves out paths.
    """
    current = np.array(routed, dtype=np.int64)
    chosen = np.empty(len(made), dtype=np.int64)
    if allowed is not None:
        logits = np.where(allowed, logits, -np.inf)
    order = np.argsort(made.ordinals, kind="stable")
    bounds = np.searchsorted(made.ordinals[order], np.arange(made.ordinals.max(initial=-1) + 2))
    for start, stop in pairwise(bounds.tolist()):
        step = order[start:stop]
        documents = made.documents[step]
        best = logits[step].argmax(axis=1)
        gain = logits[step, best] - logits[step, current[documents]]
        leave = gain > stay_bonus
        current[documents[leave]] = best[leave]
        chosen[step] = current[documents]
    return chosen


def window_sums(losses: TokenLosses, path: int, window: int) -> np.ndarray:
    """Return a path's summed negative log-likelihood from each decision to the next, fp64 [D]."""
    return _sums(losses.nll[path], decisions(losses.documents, window).starts)


def document_sums(losses: TokenLosses, path: int) -> np.ndarray:
    """Return a path's summed negative log-likelihood of each document, fp64 [N]."""
    return _sums(losses.nll[path], losses.documents.token_starts[:-1])


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, starts, dtype=np.float64) if len(starts) else np.zeros(0)


def rerouted_loss(losses: TokenLosses, choices: np.ndarray, window: int) -> LossSum:
    """Return the loss of following `choices`, int64 [D], of `decisions(documents, window)`.

    As everywhere here, over the documents of `losses.kept`. Raises ValueError if there are more or
    fewer choices than decisions, or a path without losses.
    """
    made = decisions(losses.documents, window)
    if len(choices) != len(made):
        raise ValueError(f"{len(choices)} choices for {len(made)} decisions of {window} tokens")
    kept = losses.kept[made.documents]
    used = np.unique(choices[kept]).tolist()
    unknown = sorted(set(used) - set(losses.paths))
    if unknown:
        raise ValueError(f"path {unknown[0]} was chosen, but its losses are not known")
    parts = [window_sums(losses, path, window)[kept & (choices == path)] for path in used]
    return _loss_sum(losses, [float(part.sum()) for part in parts])


def switches(losses: TokenLosses, choices: np.ndarray, window: int) -> float:
    """Return the fraction of decisions that changed the path; even the first may do so."""
    made = decisions(losses.documents, window)
    kept = losses.kept[made.documents]
    if not kept.any():
        return 0.0
    previous = np.concatenate([[0], choices[:-1]])
    first = made.ordinals == 0
    previous[first] = losses.documents.paths[made.documents[first]]
    return float((choices != previous)[kept].mean())


def routed_loss(losses: TokenLosses) -> LossSum:
    """Return the loss of routing each document once, by the run's router."""
    routed = losses.documents.paths
    return _loss_sum(
        losses, [float(document_sums(losses, p)[routed == p].sum()) for p in losses.paths]
    )


def single_path_losses(losses: TokenLosses) -> dict[int, LossSum]:
    """Return the loss of each path on all documents."""
    kept = losses.kept
    return {
        path: _loss_sum(losses, [float(document_sums(losses, path)[kept].sum())])
        for path in losses.paths
    }


def best_document_loss(losses: TokenLosses) -> LossSum:
    """Return the loss of the best path of each document, in hindsight: a bound."""
    return _least(losses, losses.documents.token_starts[:-1], losses.kept)


def best_window_loss(losses: TokenLosses, window: int) -> LossSum:
    """Return the loss of the best path of each window, in hindsight: a bound."""
    made = decisions(losses.documents, window)
    return _least(losses, made.starts, losses.kept[made.documents])


def _least(losses: TokenLosses, starts: np.ndarray, kept: np.ndarray) -> LossSum:
    """Add up the least sums of any path, one path in memory at a time."""
    least = np.full(len(starts), np.inf)
    for path in losses.paths:
        np.minimum(least, _sums(losses.nll[path], starts), out=least)
    return _loss_sum(losses, [float(least[kept].sum())])


def _loss_sum(losses: TokenLosses, sums: Sequence[float]) -> LossSum:
    return LossSum(math.fsum(sums), int(losses.documents.document_tokens[losses.kept].sum()))
