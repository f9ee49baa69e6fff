"""Cutting a document into rows so that every token but the routing prefix is scored once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dipaco.modules.config import PAD_TOKEN
from dipaco.modules.errors import ConfigurationError


def scoring_windows(
    tokens: Sequence[int] | np.ndarray,
    sequence_length: int,
    prefix_tokens: int,
    pad: int = PAD_TOKEN,
) -> np.ndarray:
    """Return the windows of one document as rows, int64 [n, sequence_length].

    Windows follow each other by `sequence_length - prefix_tokens`, so that scoring each without
    its first `prefix_tokens` positions scores every later token of the document exactly once,
    with at least that much context (the paper leaves out the routed prefix, section 2.4). The
    last row is padded. A document of at most `prefix_tokens` tokens has no rows.

    Raises ConfigurationError if the prefix leaves nothing to score. Called by `ShardBuilder` and
    evaluation.
    """
    stride = window_stride(sequence_length, prefix_tokens)
    document = np.asarray(tokens, dtype=np.int64)
    count = max(0, -(-(len(document) - prefix_tokens) // stride))
    padded = np.full(prefix_tokens + count * stride, pad, dtype=np.int64)
    padded[: len(document)] = document[: len(padded)]
    rows = np.arange(count)[:, None] * stride + np.arange(sequence_length)[None, :]
    return padded[rows]


def window_stride(sequence_length: int, prefix_tokens: int) -> int:
    """Return the tokens that each window adds. Raises ConfigurationError if there are none."""
    if not 1 <= prefix_tokens < sequence_length:
        raise ConfigurationError(
            f"prefix_tokens {prefix_tokens} must be at least 1 and less than sequence_length "
            f"{sequence_length}: the tokens behind the prefix are the ones that are scored"
        )
    return sequence_length - prefix_tokens
