"""Several paths as one: all of them predict each token, weighted by how well they did lately.

A path's log-weight is minus the sum of its nats so far, those of a token `age` tokens ago times
0.9 to that power. A token costs a pass of every path.
"""

from __future__ import annotations

import torch

_FORGETTING = 0.9


def mixed_logprobs(evidence: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [...] that K paths give together. `logprobs` [K, ...] are those
    of each path; `evidence` [K, ...] is what `with_evidence` made of their nats.
    """
    return torch.logsumexp(torch.log_softmax(-evidence, dim=0) + logprobs, dim=0)


def with_evidence(evidence: torch.Tensor, nats: torch.Tensor) -> torch.Tensor:
    """Return the evidence against each path, [K, ...], after a token that cost it so many nats."""
    return _FORGETTING * evidence + nats


def mixed_losses(nats: torch.Tensor, absent: torch.Tensor | None = None) -> torch.Tensor:
    """Return the nats [B, T] of texts by a mixture, by those of each of its paths, [K, B, T].
    Paths that are `absent`, bool [K, B], are not in it."""
    evidence = torch.zeros_like(nats[:, :, 0])
    if absent is not None:
        evidence.masked_fill_(absent, torch.inf)
    mixed = torch.empty_like(nats[0])
    for place in range(nats.shape[2]):
        mixed[:, place] = -mixed_logprobs(evidence, -nats[:, :, place])
        evidence = with_evidence(evidence, nats[:, :, place])
    return mixed
