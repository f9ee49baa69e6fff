"""Which tokens are to be learned, said by the tokens themselves.

A token that is only read, such as a question of a chat, is written as its complement, a negative
number. So the mark goes wherever tokens go: through shards, batches and passes. Texts have none.
"""

from __future__ import annotations

import torch

from dipaco.protocol.config import PAD_TOKEN


def plain_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens without their marks."""
    return torch.where(tokens < 0, ~tokens, tokens)


def learned_targets(targets: torch.Tensor) -> torch.Tensor:
    """Return targets with padding in place of those that are not to be learned."""
    return targets.masked_fill(targets < 0, PAD_TOKEN)


def are_marked(tokens: torch.Tensor) -> bool:
    """Tell whether tokens on the CPU are those of chats, which always have a mark."""
    return bool((tokens < 0).any())


def documents_apart(tokens: torch.Tensor) -> torch.Tensor:
    """Return which position sees which, bool [B, 1, T, T], for rows of several documents [B, T]
    with a token of padding between them: all that is before it in its own document."""
    padding = tokens == PAD_TOKEN
    documents = padding.cumsum(dim=1) - padding.long()  # what is behind padding is another one
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()
