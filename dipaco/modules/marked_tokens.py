"""Which tokens are to be learned, said by the tokens themselves.

A token that is only read, such as a question of a chat, is written as its complement, a negative
number. So the mark goes wherever tokens go: through shards, batches and passes. Texts have none.
"""

from __future__ import annotations

from typing import Final

import torch

NOT_LEARNED: Final = -1


def plain_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens without their marks."""
    return torch.where(tokens < 0, ~tokens, tokens)


def learned_targets(targets: torch.Tensor, padding: int) -> torch.Tensor:
    """Return targets with `NOT_LEARNED` in place of padding and of those that are only read."""
    return targets.masked_fill((targets < 0) | (targets == padding), NOT_LEARNED)


def are_marked(tokens: torch.Tensor) -> bool:
    """Tell whether tokens on the CPU are those of chats, which always have a mark."""
    return bool((tokens < 0).any())


def documents_apart(tokens: torch.Tensor, padding: int) -> torch.Tensor:
    """Return which position sees which, bool [B, 1, T, T], for rows of several documents [B, T]
    with a token of padding between them: all that is before it in its own document."""
    ends = tokens == padding
    documents = ends.cumsum(dim=1) - ends.long()  # what is behind padding is another one
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()
