"""Scoring sequences: the likelihood that one path gives to held-out tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from dipaco.modules.device import autocast_for, sent
from dipaco.modules.memory import AtOnce
from dipaco.modules.transformer import PathModel, target_mask, token_losses


@dataclass(frozen=True)
class LossSum:
    """Summed negative log-likelihood in nats, and the tokens it is the sum of."""

    nll: float = 0.0
    tokens: int = 0

    @property
    def loss(self) -> float | None:
        """Mean loss in nats a token, or None without tokens."""
        return self.nll / self.tokens if self.tokens else None

    @property
    def perplexity(self) -> float | None:
        """Perplexity; None without tokens, or when it is too large for a float."""
        loss = self.loss
        try:
            return None if loss is None else math.exp(loss)
        except OverflowError:
            return None

    @staticmethod
    def total(scores: Iterable[LossSum]) -> LossSum:
        """Add scores up, so that every token counts alike."""
        scores = tuple(scores)
        return LossSum(math.fsum(score.nll for score in scores), sum(s.tokens for s in scores))


# By default; more at once are hardly faster.
_SEQUENCES_AT_ONCE = 16

Rows = torch.Tensor | np.ndarray


def scoring_at_once(device: torch.device, sequences: int = _SEQUENCES_AT_ONCE) -> AtOnce:
    """Return how many sequences a device scores at once; to be kept, because it learns."""
    return AtOnce(sequences, device, "scoring")


def sum_losses(
    model: PathModel,
    tokens: Rows,
    skip_tokens: int,
    at_once: AtOnce | None = None,
    device: torch.device | None = None,
) -> tuple[float, int]:
    """Return the summed negative log-likelihood in nats of all rows, and the targets counted.

    See `row_losses`. Perplexity is the exponential of their quotient.
    """
    losses, counts = row_losses(model, tokens, skip_tokens, at_once, device)
    return float(losses.sum()), int(counts.sum())


def row_losses(
    model: PathModel,
    tokens: Rows,
    skip_tokens: int,
    at_once: AtOnce | None = None,
    device: torch.device | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's negative log-likelihood, float64 [N] in nats, and its targets, int64 [N].

    `tokens` is [N, T], of any integer type, also a memory map. A target counts if it is no padding,
    and not among the first `skip_tokens` positions (DiPaCo section 2.4: the routing prefix is
    excluded when models are compared). Rows are taken in order, as many `at_once` as memory allows,
    which may change rounding. The model stays where it is; `device` says where, by default that of
    its parameters. Raises `ConfigurationError` when not even one row fits in memory.
    """
    device = device or model.device
    at_once = at_once or scoring_at_once(device)
    losses = np.zeros(len(tokens), dtype=np.float64)
    counts = np.zeros(len(tokens), dtype=np.int64)
    start = 0

    def score(sequences: int) -> int:
        stop = min(start + sequences, len(tokens))
        batch = _without_padding(_as_int64(tokens[start:stop]), model.config.padding_token)
        losses[start:stop], counts[start:stop] = _score_batch(model, batch, skip_tokens, device)
        return stop

    while start < len(tokens):
        start = at_once.attempt(score, tokens.shape[1])
    return losses, counts


def _as_int64(rows: Rows) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows.to(torch.int64)
    return torch.from_numpy(np.array(rows, dtype=np.int64))


def _without_padding(batch: torch.Tensor, padding: int) -> torch.Tensor:
    """Cut off the columns at the end that are padding in all rows."""
    used = (batch != padding).any(dim=0).nonzero()
    return batch[:, : int(used[-1]) + 1] if len(used) else batch[:, :1]


def _score_batch(
    model: PathModel, batch: torch.Tensor, skip_tokens: int, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    mask = target_mask(batch, model.config.padding_token, skip_tokens)
    counts = mask.sum(dim=1).numpy()
    if batch.shape[1] < 2 or not mask.any():
        return np.zeros(len(batch)), counts
    moved = sent(batch, device)
    with torch.no_grad(), autocast_for(device):
        losses = token_losses(model, moved).double() * mask.to(device)
    return losses.sum(dim=1).cpu().numpy(), counts
