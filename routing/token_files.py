"""Token files: rows of tokens as raw little-endian integers, read through a memory map."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from dipaco.modules.config import BEGIN_TOKEN, PAD_TOKEN, RoundsConfig
from dipaco.modules.errors import ConfigurationError, IntegrityError


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the type of a token in a file: two bytes if the vocabulary allows it, else four."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def open_tokens(path: Path, sequence_length: int, vocabulary_size: int) -> np.memmap | np.ndarray:
    """Open a token file read-only as [N, sequence_length]; an empty file is [0, sequence_length].

    Raises IntegrityError if the size of the file is not a whole number of rows. Called by
    `RunFolder`.
    """
    dtype = token_dtype(vocabulary_size)
    size = path.stat().st_size
    row_bytes = sequence_length * dtype.itemsize
    if size % row_bytes:
        raise IntegrityError(
            f"token file {path} has {size} bytes, not a multiple of a row of {row_bytes} bytes "
            f"({sequence_length} tokens); remove it and fetch or prepare it again"
        )
    shape = (size // row_bytes, sequence_length)
    if size == 0:  # an empty file cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def check_tokens(tokens: np.ndarray, vocabulary_size: int, source: str) -> None:
    """Raise IntegrityError if a token lies outside the vocabulary; `source` names the file.

    Reads the whole file, in pieces. Called where a file comes from somebody else, because a token
    out of range would stop the embedding with an error that says nothing.
    """
    for start in range(0, len(tokens), 4096):
        piece = tokens[start : start + 4096]
        if piece.size and int(piece.max()) >= vocabulary_size:
            raise IntegrityError(
                f"{source} holds the token {int(piece.max())}, but the vocabulary has only "
                f"{vocabulary_size} pieces"
            )


def even_sample(rows: np.ndarray, count: int | None) -> np.ndarray:
    """Return at most `count` of `rows`, evenly spread; all of them for None.

    Called by peers and by the simulator, so that they score a path on the same held-out rows.
    """
    if count is None or count >= len(rows):
        return rows
    chosen = np.linspace(0, max(len(rows) - 1, 0), num=count).round().astype(np.int64)
    return rows[chosen]


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


def is_held_back(document: Sequence[int] | np.ndarray, fraction: float) -> bool:
    """Tell whether a training document is kept from training, to choose best parameters by.

    By a hash of its tokens, so it is kept from every shard, and from those of a run's successors.
    Called by `ShardBuilder`.
    """
    if not fraction:
        return False
    data = np.asarray(document, dtype="<u4").tobytes()
    digest = hashlib.blake2b(data, digest_size=8, person=b"early-stopping").digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def are_shared(rows: np.ndarray, rounds: RoundsConfig) -> bool:
    """Tell whether the same documents choose the best parameters and give the reported losses."""
    if not rounds.early_stopping:
        return True
    return _end_of_validation(rows) is None and rounds.early_stopping_split == "shared"


def early_stopping_rows(rows: np.ndarray, rounds: RoundsConfig) -> np.ndarray:
    """Return the rows of a path's validation file [N, T] that choose its best parameters.

    They are of documents held back from the path's shard, those behind the empty row; where the
    run has none, of held-out documents as `early_stopping_split` says. At most
    `validation_sequences`, evenly spread. Peers, the simulator and anybody who checks the loss of
    best parameters use the same ones.
    """
    end = _end_of_validation(rows)
    if end is not None:
        chosen = rows[end + 1 :]
    else:
        chosen = rows if are_shared(rows, rounds) else rows[_documents(rows) % 2 == 1]
    return even_sample(chosen, rounds.validation_sequences)


def reported_rows(rows: np.ndarray, rounds: RoundsConfig, count: int | None) -> np.ndarray:
    """Return at most `count` rows (None: all) for the loss that is published and reported."""
    end = _end_of_validation(rows)
    if end is not None:
        chosen = rows[:end]
    else:
        chosen = rows if are_shared(rows, rounds) else rows[_documents(rows) % 2 == 0]
    return even_sample(chosen, count)


def _end_of_validation(rows: np.ndarray) -> int | None:
    """Return the number of the empty row, or None; no other row begins with padding."""
    empty = np.flatnonzero(rows[:, 0] == PAD_TOKEN)
    return int(empty[0]) if len(empty) else None


def _documents(rows: np.ndarray) -> np.ndarray:
    """Return the number of each row's document: every document begins a new row."""
    return np.cumsum(rows[:, 0] == BEGIN_TOKEN)
