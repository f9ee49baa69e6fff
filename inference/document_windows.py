"""The documents of an evaluation as scoring windows on disk, a few bytes a document in memory.

Every token after a document's routing prefix is scored exactly once and has its own number: the
scored tokens of all documents are numbered in order. Losses of any path (`losses_of_paths`) and
decisions of rerouting (`rerouting`) are arrays over these numbers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from dipaco.base.files import storage_errors
from dipaco.modules.config import BEGIN_TOKEN, END_TOKEN, PAD_TOKEN
from dipaco.modules.plan import RunPlan
from dipaco.routing.corpus import Document
from dipaco.routing.document_routing import DocumentRouter
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_files import scoring_windows, token_dtype, window_stride

# Documents that are routed at once.
_DOCUMENTS_AT_ONCE = 256
_TOKENS_AT_ONCE = 2**22

Item = TypeVar("Item")


@dataclass(frozen=True)
class TokenDocument:
    """A document as tokens, int [n] with its begin, its label, and its path if it is known."""

    tokens: np.ndarray
    label: str | None = None
    path: int | None = None


@dataclass(frozen=True)
class DocumentWindows:
    """Documents that have a token to score, N of them, and their windows, R rows.

    Row r scores its tokens from `prefix_tokens` on, `row_tokens[r] - prefix_tokens` of them, which
    have the numbers from `row_starts[r]` on. Document n has the numbers `token_starts[n]` to
    `token_starts[n + 1]` and the rows `first_rows[n]` to `first_rows[n + 1]`.
    """

    rows: np.ndarray
    """[R, sequence_length], a memory map; the last row of a document is padded."""
    row_tokens: np.ndarray
    """int32 [R]: tokens of a row without its padding."""
    row_starts: np.ndarray
    """int64 [R]"""
    first_rows: np.ndarray
    """int64 [N + 1]"""
    token_starts: np.ndarray
    """int64 [N + 1]"""
    ranked: np.ndarray
    """int64 [N, K]: the paths that the run's router would send a document to, the best first."""
    label_numbers: np.ndarray
    """int32 [N]: index in `label_names`, -1 without a label."""
    label_names: tuple[str, ...]
    prefix_tokens: int
    short_documents: int
    """Documents left out: they end within the routing prefix."""
    sha256: str
    """Of all windows and where documents begin; with a path's parameters it names its losses."""

    def __len__(self) -> int:
        return len(self.ranked)

    @property
    def paths(self) -> np.ndarray:
        """Return the path that the run's router sends each document to, int64 [N]."""
        return self.ranked[:, 0]

    @property
    def tokens(self) -> int:
        """Tokens that are scored."""
        return int(self.token_starts[-1])

    @property
    def row_documents(self) -> np.ndarray:
        """Return the document of each row, int64 [R]."""
        return np.repeat(np.arange(len(self)), np.diff(self.first_rows))

    @property
    def document_tokens(self) -> np.ndarray:
        """Return the scored tokens of each document, int64 [N]."""
        return np.diff(self.token_starts)

    def rows_of_documents(self, chosen: np.ndarray) -> np.ndarray:
        """Return the rows of some documents, int64; `chosen` is bool [N]."""
        return np.flatnonzero(chosen[self.row_documents])


def collect_windows(
    router: DocumentRouter,
    documents: Iterable[TokenDocument],
    plan: RunPlan,
    folder: Path,
    *,
    ranked: int = 1,
) -> DocumentWindows:
    """Route documents, each to its `ranked` best paths, and write their scoring windows to
    `folder`. A document whose path is known has that one alone.

    Memory is bounded by some hundred documents at a time, beside some 50 bytes for each document.
    Raises StorageError when the disk is full.
    """
    length, prefix_tokens = plan.model.sequence_length, plan.routing.prefix_tokens
    dtype = token_dtype(plan.model.vocabulary_size)
    file = folder / "windows.bin"
    names: dict[str, int] = {}
    counts, paths, labels = array("q"), array("q"), array("q")
    short = 0
    hasher = hashlib.sha256()
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as handle:
            for chunk in chunks(documents, _DOCUMENTS_AT_ONCE):
                chosen = [item for item in chunk if len(item.tokens) > prefix_tokens]
                short += len(chunk) - len(chosen)
                if not chosen:
                    continue
                paths.extend(chain.from_iterable(_routed(router, chosen, ranked)))
                for item in chosen:
                    windows = scoring_windows(item.tokens, length, prefix_tokens)
                    content = windows.astype(dtype).tobytes()
                    hasher.update(content)
                    handle.write(content)
                    counts.append(len(item.tokens))
                    known = None if item.label is None else names.setdefault(item.label, len(names))
                    labels.append(-1 if known is None else known)
    sizes = np.array(counts, dtype=np.int64)
    hasher.update(sizes.astype("<i8").tobytes())
    stride = window_stride(length, prefix_tokens)
    token_starts = np.concatenate([[0], np.cumsum(sizes - prefix_tokens)]).astype(np.int64)
    row_counts = -(-(sizes - prefix_tokens) // stride)
    first_rows = np.concatenate([[0], np.cumsum(row_counts)]).astype(np.int64)
    ordinals = np.arange(first_rows[-1]) - np.repeat(first_rows[:-1], row_counts)
    row_tokens = np.minimum(np.repeat(sizes, row_counts) - ordinals * stride, length)
    row_starts = np.repeat(token_starts[:-1], row_counts) + ordinals * stride
    shape = (int(first_rows[-1]), length)
    return DocumentWindows(
        rows=np.memmap(file, dtype, "r", shape=shape) if counts else np.empty(shape, dtype),
        row_tokens=row_tokens.astype(np.int32),
        row_starts=row_starts,
        first_rows=first_rows,
        token_starts=token_starts,
        ranked=np.array(paths, dtype=np.int64).reshape(-1, ranked),
        label_numbers=np.array(labels, dtype=np.int32),
        label_names=tuple(names),
        prefix_tokens=prefix_tokens,
        short_documents=short,
        sha256=hasher.hexdigest(),
    )


def _routed(router: DocumentRouter, documents: list[TokenDocument], count: int) -> list[list[int]]:
    """Return the paths of documents; the router is asked for those whose path is not known."""
    unknown = [item for item in documents if item.path is None]
    if not unknown:
        return [[int(item.path)] * count for item in documents if item.path is not None]
    labels = [item.label for item in unknown]
    found = iter(router.nearest_paths([d.tokens for d in unknown], count, labels).tolist())
    return [next(found) if item.path is None else [item.path] * count for item in documents]


def tokenised(router: DocumentRouter, documents: Iterable[Document]) -> Iterator[TokenDocument]:
    """Turn texts into tokens as the run's shards were made."""
    for document in documents:
        yield TokenDocument(
            np.array(router.tokenizer.document_tokens(document.text), dtype=np.int64),
            document.label,
        )


def shard_documents(
    run: RunFolder, plan: RunPlan, count: int, seed: int
) -> Iterator[TokenDocument]:
    """Yield up to `count` training documents drawn from the shards, the same for a seed.

    Shards are drawn from in proportion to their documents. A document has the path of its shard;
    where shards overlap (section 2.4.4) it may come several times, and is routed anew.

    Raises IntegrityError for a missing token file.
    """
    shards = [run.train_tokens(plan, path) for path in range(len(run.shard_index(plan).paths))]
    begins = [_document_begins(rows) for rows in shards]
    bounds = np.cumsum([0, *(len(begin) for begin in begins)])
    generator = np.random.default_rng((seed, 0x5EED))
    drawn = generator.permutation(bounds[-1])[:count]
    for number in drawn.tolist():
        shard = int(np.searchsorted(bounds, number, side="right")) - 1
        tokens, begin = shards[shard].reshape(-1), begins[shard]
        index = number - int(bounds[shard])
        end = int(begin[index + 1]) if index + 1 < len(begin) else len(tokens)
        yield TokenDocument(
            _without_padding(np.array(tokens[begin[index] : end], dtype=np.int64)),
            path=shard if plan.routing.train_paths == 1 else None,
        )


def _document_begins(rows: np.ndarray) -> np.ndarray:
    """Return where documents begin in a shard, int64; the shard is read in pieces."""
    tokens = rows.reshape(-1)
    found = [
        np.flatnonzero(tokens[start : start + _TOKENS_AT_ONCE] == BEGIN_TOKEN) + start
        for start in range(0, len(tokens), _TOKENS_AT_ONCE)
    ]
    return np.concatenate([np.empty(0, dtype=np.int64), *found])


def _without_padding(tokens: np.ndarray) -> np.ndarray:
    """Cut off the padding that fills the last row of a shard."""
    ends = np.flatnonzero(tokens == END_TOKEN)
    return tokens[: int(ends[0]) + 1] if len(ends) else tokens[tokens != PAD_TOKEN]


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield the items in lists of `size`, the last one shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
