"""Router documents and how the paths score them (DiPaCo section 2.4.2).

A discriminative router learns from labels: for each document of a sample, the path under which
its text is likeliest. No machine holds all paths. So the sample is a blob (`RouterDocuments`), each
path is scored by itself by a machine that holds it, and its scores are another blob
(`DocumentScores`). Both are safetensors files with one metadata entry, so the same content has
the same bytes; the formats are described in `docs/protocol.md`. No network here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from dipaco.modules.blobs import is_sha256
from dipaco.modules.canonical_file import read_arrays, write_arrays
from dipaco.modules.config import PAD_TOKEN
from dipaco.modules.errors import IntegrityError
from dipaco.modules.evaluate import row_losses
from dipaco.modules.grid import module_name_is_valid
from dipaco.modules.transformer import PathModel, target_mask

DOCUMENTS_FORMAT = "dipaco-router-documents/1"
SCORES_FORMAT = "dipaco-document-scores/1"

GREATEST_DOCUMENTS = 2**20
GREATEST_DOCUMENT_TOKENS = 2**17
GREATEST_HEADER_BYTES = 2**20
# Far above the loss of any model that has seen text; a worse score is a mistake or a lie.
GREATEST_TOKEN_NLL = 1e4
# Slices of a multiple of this many rows give the bits of one pass over all rows.
SCORING_BATCH = 16

_REQUEST_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, eq=False)
class RouterDocuments:
    """A sample of training documents: `tokens` int32 [N, T], each row the first T tokens of one
    document, filled up with padding; what counts in a score is behind the first `prefix_tokens`.

    Raises IntegrityError for tokens of another kind.
    """

    tokens: np.ndarray
    prefix_tokens: int

    def __post_init__(self) -> None:
        rows = self.tokens
        if rows.ndim != 2 or rows.dtype != np.int32:
            raise IntegrityError(f"router documents must be int32 [N, T], got {rows.dtype}")
        if not (1 <= len(rows) <= GREATEST_DOCUMENTS) or rows.shape[1] > GREATEST_DOCUMENT_TOKENS:
            raise IntegrityError(f"router documents have the impossible shape {rows.shape}")
        if not 1 <= self.prefix_tokens < rows.shape[1]:
            raise IntegrityError(
                f"router documents of {rows.shape[1]} tokens leave nothing to score behind a "
                f"prefix of {self.prefix_tokens}"
            )
        if int(rows.min()) < 0:
            raise IntegrityError("router documents have a negative token")

    @classmethod
    def from_documents(
        cls, documents: Iterable[np.ndarray], sequence_length: int, prefix_tokens: int
    ) -> RouterDocuments:
        """Cut or pad documents, each its tokens, to rows of `sequence_length`."""
        rows = []
        for document in documents:
            row = np.full(sequence_length, PAD_TOKEN, dtype=np.int32)
            start = np.asarray(document[:sequence_length], dtype=np.int32)
            row[: len(start)] = start
            rows.append(row)
        return cls(np.stack(rows), prefix_tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def targets(self) -> np.ndarray:
        """Tokens of each row that a score counts, int64 [N]; the same for every path."""
        mask = target_mask(torch.from_numpy(self.tokens.astype(np.int64)), self.prefix_tokens)
        return mask.sum(dim=1).numpy().astype(np.int64)

    def prefixes(self) -> list[np.ndarray]:
        """Return the first tokens of every document without padding: what a router sees."""
        starts = self.tokens[:, : self.prefix_tokens]
        return [row[row != PAD_TOKEN] for row in starts]

    def to_bytes(self) -> bytes:
        """Return the blob: the same documents always have the same bytes."""
        header = {"format": DOCUMENTS_FORMAT, "prefix_tokens": self.prefix_tokens}
        return write_arrays({"tokens": np.ascontiguousarray(self.tokens)}, "documents", header)

    @classmethod
    def from_bytes(cls, data: bytes, vocabulary_size: int | None = None) -> RouterDocuments:
        """Read the blob, believing nothing. Raises IntegrityError with what is wrong."""
        header, arrays = _read(data, "documents", DOCUMENTS_FORMAT, "a sample of router documents")
        tokens, prefix = arrays.get("tokens"), header.get("prefix_tokens")
        if tokens is None or len(arrays) != 1 or type(prefix) is not int:
            raise IntegrityError("router documents lack their tokens or the length of the prefix")
        documents = cls(tokens, prefix)
        if vocabulary_size is not None and int(tokens.max()) >= vocabulary_size:
            raise IntegrityError(
                f"router documents have the token {int(tokens.max())}, the vocabulary ends at "
                f"{vocabulary_size - 1}"
            )
        return documents


@dataclass(frozen=True, eq=False)
class DocumentScores:
    """One path's scores of the router documents.

    `nll` float64 [N] is the summed negative log-likelihood in nats of each document after its
    prefix, `tokens` int64 [N] how many tokens that is. `request` is the id of the score request,
    16 hexadecimal digits, `states` the digest of each module of the path that scored.
    Raises IntegrityError for scores that cannot be.
    """

    request: str
    path: int
    states: Mapping[str, str]
    nll: np.ndarray
    tokens: np.ndarray

    def __post_init__(self) -> None:
        where = f"the scores of path {self.path}"
        if not isinstance(self.request, str) or not _REQUEST_ID.fullmatch(self.request):
            raise IntegrityError(f"{where} name no score request")
        if type(self.path) is not int or not 0 <= self.path < 2**20:
            raise IntegrityError("document scores name no path")
        if not self.states or not all(
            module_name_is_valid(module) and isinstance(digest, str) and is_sha256(digest)
            for module, digest in self.states.items()
        ):
            raise IntegrityError(f"{where} do not say which module states gave them")
        if self.nll.dtype != np.float64 or self.tokens.dtype != np.int64:
            raise IntegrityError(f"{where} are {self.nll.dtype} and {self.tokens.dtype} numbers")
        if self.nll.ndim != 1 or self.nll.shape != self.tokens.shape:
            raise IntegrityError(f"{where} have shapes {self.nll.shape} and {self.tokens.shape}")
        if not np.isfinite(self.nll).all() or (self.nll < 0).any() or (self.tokens < 0).any():
            raise IntegrityError(f"{where} have a number that is negative or not finite")
        if (self.tokens > GREATEST_DOCUMENT_TOKENS).any() or (
            self.nll > self.tokens * GREATEST_TOKEN_NLL
        ).any():
            raise IntegrityError(f"{where} have a number that is impossibly large")

    def check_documents(self, documents: RouterDocuments) -> None:
        """Raise IntegrityError unless these are scores of exactly these documents."""
        if len(self.nll) != len(documents) or not np.array_equal(self.tokens, documents.targets):
            raise IntegrityError(f"the scores of path {self.path} are of other documents")

    def to_bytes(self) -> bytes:
        """Return the blob: the same scores always have the same bytes."""
        header = {
            "format": SCORES_FORMAT,
            "request": self.request,
            "path": self.path,
            "states": dict(self.states),
        }
        return write_arrays({"nll": self.nll, "tokens": self.tokens}, "scores", header)

    @classmethod
    def from_bytes(
        cls, data: bytes, documents: int, *, request: str | None = None, path: int | None = None
    ) -> DocumentScores:
        """Read the scores of `documents` documents, believing nothing.

        Where given, they must answer `request` and be of `path`. Raises IntegrityError with what
        is wrong. `check_documents` compares the counts of tokens too.
        """
        header, arrays = _read(data, "scores", SCORES_FORMAT, "a file of document scores")
        if set(arrays) != {"nll", "tokens"} or set(header) != {
            "format", "request", "path", "states",
        }:  # fmt: skip
            raise IntegrityError("document scores lack a part, or have one too many")
        states = header["states"]
        if not isinstance(states, dict):
            raise IntegrityError("document scores do not say which module states gave them")
        scores = cls(header["request"], header["path"], states, arrays["nll"], arrays["tokens"])
        if len(scores.nll) != documents:
            raise IntegrityError(
                f"the scores of path {scores.path} are of {len(scores.nll)} documents, not "
                f"{documents}"
            )
        if request is not None and scores.request != request:
            raise IntegrityError(f"the scores answer the request {scores.request}, not {request}")
        if path is not None and scores.path != path:
            raise IntegrityError(f"the scores are of path {scores.path}, not {path}")
        return scores


def greatest_scores_bytes(documents: int) -> int:
    """Return the most bytes that the scores of so many documents can have; bounds a transfer."""
    return 8 + GREATEST_HEADER_BYTES + 16 * documents


def score_router_documents(
    model: PathModel,
    documents: RouterDocuments,
    *,
    start: int = 0,
    stop: int | None = None,
    device: torch.device | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores that `model` gives rows `start` to `stop`: nll float64 and tokens int64.

    A peer scores slice by slice between inner steps; slices that begin at multiples of
    `SCORING_BATCH` together give the bits of one pass. The caller loads the state to be scored
    into the model. Called by the peer and by `dipaco-bootstrap prepare --from`.
    """
    rows = documents.tokens[start:stop]
    return row_losses(model, rows, documents.prefix_tokens, SCORING_BATCH, device)


def _read(
    data: bytes, entry: str, format_name: str, what: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    limit = GREATEST_HEADER_BYTES
    return read_arrays(data, entry, format_name, what, greatest_header_bytes=limit)
