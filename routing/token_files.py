"""Token files: rows of tokens as raw little-endian integers, read through a memory map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from dipaco.modules.errors import IntegrityError


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the type of a token in a file: two bytes if the vocabulary allows it, else four."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def open_tokens(path: Path, sequence_length: int, vocabulary_size: int) -> np.memmap | np.ndarray:
    """Open a token file read-only as [N, sequence_length]; an empty file is [0, sequence_length].

    Raises IntegrityError if the size of the file is not a whole number of rows. Called by
    `RunDirectory`.
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
