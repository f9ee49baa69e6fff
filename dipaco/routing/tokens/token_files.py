"""Token files: rows of tokens as raw little-endian integers, read through a memory map."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dipaco.base.errors import ConfigurationError, IntegrityError


def token_dtype(vocabulary_size: int, *, marked: bool = False) -> np.dtype:
    """Return the type of a token in a file: two bytes if the vocabulary allows it, else four.

    Tokens that are marked (`dipaco.modules.marked_tokens`) need a sign.
    """
    if marked:
        return np.dtype("<i2" if vocabulary_size <= 2**15 else "<i4")
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def open_tokens(
    path: Path, sequence_length: int, vocabulary_size: int, *, marked: bool = False
) -> np.memmap | np.ndarray:
    """Open a token file read-only as [N, sequence_length]; an empty file is [0, sequence_length].

    Raises IntegrityError if the size of the file is not a whole number of rows.
    """
    dtype = token_dtype(vocabulary_size, marked=marked)
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
        if piece.dtype.kind == "i":
            piece = np.maximum(piece, ~piece)
        if piece.size and int(piece.max()) >= vocabulary_size:
            raise IntegrityError(
                f"{source} holds the token {int(piece.max())}, but the vocabulary has only "
                f"{vocabulary_size} pieces"
            )


def even_sample(rows: np.ndarray, count: int | None) -> np.ndarray:
    """Return at most `count` of `rows`, evenly spread; all of them for None."""
    if count is None or count >= len(rows):
        return rows
    chosen = np.linspace(0, max(len(rows) - 1, 0), num=count).round().astype(np.int64)
    return rows[chosen]


def scoring_windows(
    tokens: Sequence[int] | np.ndarray,
    sequence_length: int,
    prefix_tokens: int,
    padding: int,
) -> np.ndarray:
    """Return the windows of one document as rows, int64 [n, sequence_length].

    Windows follow each other by `sequence_length - prefix_tokens`, so that scoring each without
    its first `prefix_tokens` positions scores every later token of the document exactly once,
    with at least that much context (the paper leaves out the routed prefix, section 2.4). The
    last row is filled up with `padding`. A document of at most `prefix_tokens` tokens has no rows.

    Raises ConfigurationError if the prefix leaves nothing to score.
    """
    stride = window_stride(sequence_length, prefix_tokens)
    document = np.asarray(tokens, dtype=np.int64)
    count = max(0, -(-(len(document) - prefix_tokens) // stride))
    padded = np.full(prefix_tokens + count * stride, padding, dtype=np.int64)
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


def pack_documents(lengths: Sequence[int] | np.ndarray, sequence_length: int) -> list[list[int]]:
    """Return which documents share a row, by their indices: the longest first, each where the
    least room is left over. None may be longer than a row.

    Between two documents there is one token of padding, which tells them apart.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # what is in `by_room`, ascending
    for index in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = int(lengths[index])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, sequence_length
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(index)
        left = room - length - 1
        if left > 0:
            if left not in by_room:
                bisect.insort(rooms, left)
            by_room.setdefault(left, []).append(row)
    return rows
