"""The documents of an evaluation as scoring windows on disk, with a few bytes per document in
memory.

Every token after a document's routing prefix is scored exactly once.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from dipaco.base.files import storage_errors
from dipaco.protocol.plan import RunPlan
from dipaco.routing.documents.corpus import Document
from dipaco.routing.routers.document_routing import DocumentRouter
from dipaco.routing.tokens.chat_tokens import ChatEncoder
from dipaco.routing.tokens.token_corpus import encoded
from dipaco.routing.tokens.token_files import scoring_windows, token_dtype, window_stride

# How many documents are routed at once.
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class DocumentWindows:
    """N documents that have a token to score, and their windows, R rows.

    Row r scores its tokens from `prefix_tokens` on, `row_tokens[r] - prefix_tokens` of them. The
    rows of a document follow each other.
    """

    rows: np.ndarray
    """[R, sequence_length], a memory map; the last row of a document is padded. Those of chats
    are marked."""
    row_tokens: np.ndarray
    """int32 [R]: tokens of a row without its padding."""
    row_documents: np.ndarray
    """int64 [R]: the document of each row."""
    document_tokens: np.ndarray
    """int64 [N]: the scored tokens of each document."""
    ranked: np.ndarray
    """int64 [N, K]: the paths that the run's router would send a document to, the best first."""
    label_numbers: np.ndarray
    """int32 [N]: index in `label_names`, -1 without a label."""
    label_names: tuple[str, ...]
    prefix_tokens: int
    short_documents: int
    """Documents left out: they end within the routing prefix, or are chats without an answer
    behind it."""

    def __len__(self) -> int:
        return len(self.ranked)

    @property
    def paths(self) -> np.ndarray:
        """Return the path that the run's router sends each document to, int64 [N]."""
        return self.ranked[:, 0]

    def rows_of_documents(self, chosen: np.ndarray) -> np.ndarray:
        """Return the rows of some documents, int64; `chosen` is bool [N]."""
        return np.flatnonzero(chosen[self.row_documents])

    def scored(self, rows: np.ndarray, targets: int) -> np.ndarray:
        """Return which of the first targets of some rows count, bool [B, targets]."""
        behind = np.arange(1, targets + 1)[None, :] >= self.prefix_tokens
        return behind & (self.rows[rows, 1 : targets + 1] >= 0)


def collect_windows(
    router: DocumentRouter,
    documents: Iterable[Document],
    plan: RunPlan,
    folder: Path,
    *,
    ranked: int = 1,
) -> DocumentWindows:
    """Make tokens of documents as the run's shards were made, route each to its `ranked` best
    paths, and write their scoring windows to `folder`.

    They are all texts or all chats. Memory is bounded by some hundred documents at a time, beside
    some 50 bytes for each document. Raises StorageError when the disk is full, ConfigurationError
    for chats where the run has no chat template.
    """
    length, prefix_tokens = plan.model.sequence_length, plan.routing.prefix_tokens
    documents = iter(documents)
    first = next(documents, None)
    documents = chain([] if first is None else [first], documents)
    encoder: ChatEncoder | None = None
    if first is not None and first.chat is not None:
        encoder = ChatEncoder(router.tokenizer, prefix_tokens)
    dtype = token_dtype(plan.model.vocabulary_size, marked=encoder is not None)
    padding = plan.model.padding_token
    file = folder / "windows.bin"
    names: dict[str, int] = {}
    counts, scored, paths, labels = array("q"), array("q"), array("q"), array("q")
    short = 0
    with (
        contextlib.closing(encoder) if encoder else contextlib.nullcontext(),
        storage_errors(folder),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as handle:
            while chunk := [(one, False) for one in islice(documents, _DOCUMENTS_AT_ONCE)]:
                tokenised = encoded(chunk, router.tokenizer, chats=encoder)
                chosen = [item for item in tokenised if (item.tokens[prefix_tokens:] >= 0).any()]
                short += len(chunk) - len(chosen)
                if not chosen:
                    continue
                seen = [x.tokens if x.beginning is None else x.beginning for x in chosen]
                found = router.nearest_paths(seen, ranked, [item.label for item in chosen])
                paths.extend(found.reshape(-1).tolist())
                for item in chosen:
                    windows = scoring_windows(item.tokens, length, prefix_tokens, padding)
                    handle.write(windows.astype(dtype).tobytes())
                    counts.append(len(item.tokens))
                    scored.append(int((item.tokens[prefix_tokens:] >= 0).sum()))
                    known = None if item.label is None else names.setdefault(item.label, len(names))
                    labels.append(-1 if known is None else known)
    sizes = np.array(counts, dtype=np.int64)
    row_documents, row_tokens = _rows_of(sizes, length, prefix_tokens)
    shape = (len(row_documents), length)
    return DocumentWindows(
        rows=np.memmap(file, dtype, "r", shape=shape) if counts else np.empty(shape, dtype),
        row_tokens=row_tokens,
        row_documents=row_documents,
        document_tokens=np.array(scored, dtype=np.int64),
        ranked=np.array(paths, dtype=np.int64).reshape(-1, ranked),
        label_numbers=np.array(labels, dtype=np.int32),
        label_names=tuple(names),
        prefix_tokens=prefix_tokens,
        short_documents=short,
    )


def _rows_of(sizes: np.ndarray, length: int, prefix_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for documents of these `sizes` [N], the document of each row, int64 [R], and how many
    of its tokens are in it, int32 [R]."""
    stride = window_stride(length, prefix_tokens)
    row_counts = -(-(sizes - prefix_tokens) // stride)
    row_documents = np.repeat(np.arange(len(sizes)), row_counts)
    first_rows = np.cumsum(row_counts) - row_counts
    ordinals = np.arange(len(row_documents)) - first_rows[row_documents]
    row_tokens = np.minimum(sizes[row_documents] - ordinals * stride, length)
    return row_documents, row_tokens.astype(np.int32)
