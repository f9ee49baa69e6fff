"""A score: how likely a model finds held-out tokens, as a sum that can be added up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
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
    def total(scores: Iterable[Score]) -> Score:
        """Add scores up, so that every token counts alike."""
        scores = tuple(scores)
        return Score(math.fsum(score.nll for score in scores), sum(s.tokens for s in scores))
