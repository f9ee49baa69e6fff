"""Token files that are one long array: `.npy`, and `.bin` of plain little-endian numbers.

Tools that tokenise for training write these (nanoGPT's `train.bin`, for example): all documents one
after another, each with a separator behind or before it. They are read through a memory map.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dipaco.modules.errors import CorpusError

ARRAY_SUFFIXES = (".npy", ".bin")
ROW_FIELD = "tokens"
# Looked through for separators at a time.
_PIECE_TOKENS = 2**20


class TokenArray:
    """The documents of a file, as rows like those of `datasets`, which can say where they are."""

    def __init__(self, file: Path, separator: int, bin_bytes: int) -> None:
        """Open a file. Raises CorpusError if it is not a list of whole numbers."""
        self._separator = separator
        self._position = 0
        self._tokens = _opened(file, bin_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Return where the last document that was given ends."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another reader was."""
        self._position = int(state["position"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._position < len(self._tokens):
            end = self._end_of_document(self._position)
            document = np.asarray(self._tokens[self._position : end])
            self._position = end + 1
            yield {ROW_FIELD: document}

    def _end_of_document(self, start: int) -> int:
        """Return where the next separator is, or the end of the file."""
        for begin in range(start, len(self._tokens), _PIECE_TOKENS):
            piece = self._tokens[begin : begin + _PIECE_TOKENS]
            found = np.flatnonzero(piece == self._separator)
            if len(found):
                return begin + int(found[0])
        return len(self._tokens)


def _opened(file: Path, bin_bytes: int) -> np.ndarray:
    if file.suffix == ".npy":
        try:
            tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise CorpusError(f"{file} is not an .npy file of numbers: {error}") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise CorpusError(
                f"{file} holds {tokens.dtype} of shape {tokens.shape}; a list of tokens has whole "
                "numbers and one dimension"
            )
        return tokens
    size = file.stat().st_size
    if size % bin_bytes:
        raise CorpusError(
            f"{file} has {size} bytes, which is no multiple of {bin_bytes}; say how many bytes a "
            "token has with bin_token_bytes = 4 under [data]"
        )
    return np.memmap(file, dtype=f"<u{bin_bytes}", mode="r")
