"""Log-probabilities as a client is shown them: of a token, and of the likeliest in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of a text with its log-probability, and the likeliest tokens in its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def scored(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Return the scores of tokens by logits [T, V], with the `top` likeliest of each place.

    Of the model itself: neither temperature nor what is never chosen changes them.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(list(tokens))[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return [
        TokenScore(token, logprob, list(zip(places, values, strict=True)))
        for token, logprob, places, values in zip(
            tokens, own, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
