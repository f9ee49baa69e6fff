"""Making the shards: every document goes to the token file of its path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from dipaco.base.blobs import BlobStore
from dipaco.base.files import link_or_copy, sha256_of_file
from dipaco.protocol.config import Config
from dipaco.protocol.plan import PathShard, ShardIndex
from dipaco.routing.new_files import NewFiles
from dipaco.routing.tokens.token_corpus import Mapped, TokenCorpus
from dipaco.routing.tokens.token_files import (
    open_tokens,
    pack_documents,
    scoring_windows,
    token_dtype,
    window_stride,
)

Part = Literal["train", "validation"]
_PARTS: tuple[Part, Part] = ("train", "validation")
# Documents routed together, and the tokens at which a chunk ends earlier: both bound memory.
_CHUNK_DOCUMENTS = 1024
_CHUNK_TOKENS = 2_000_000


class PathSummary(Config):
    """The shard of one path. Tokens are without padding; a document in several shards counts in
    each of them."""

    path: int
    documents: int
    tokens: int
    held_out_documents: int
    sequences: int = Field(0, description="Rows of the token file, the last one padded.")
    held_out_sequences: int = 0
    labels: dict[str, int] = Field({}, description="Tokens by label, the most first.")
    learned_tokens: int | None = Field(
        None, description="Of chats, the tokens that are to be learned; others are only read."
    )


@dataclass
class _PathPart:
    """What one path's file holds."""

    documents: int = 0
    tokens: int = 0
    learned: int = 0


@dataclass(frozen=True)
class Beginnings:
    """What routing sees of a chunk of documents: their first tokens and their labels."""

    tokens: tuple[np.ndarray, ...]
    labels: tuple[str | None, ...]
    paths: int
    """How many of its best paths each document is to have."""


def _chunk_at(corpus: TokenCorpus, first: int, max_documents: int, max_tokens: int) -> range:
    """Return the documents of the chunk at `first`, bounded in number and in tokens, because a
    few long documents would fill the memory."""
    stop = min(first + max_documents, len(corpus))
    start_token = int(corpus.ends[first - 1]) if first else 0
    ends = np.asarray(corpus.ends[first:stop], dtype=np.int64)
    fitting = int(np.searchsorted(ends, start_token + max_tokens, side="right"))
    return range(first, first + max(1, fitting))


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """How documents become the rows of a token file."""

    sequence_length: int
    """Tokens of a row."""
    prefix_tokens: int
    """Tokens at the beginning of a document that routing sees, and that are not scored."""
    vocabulary_size: int
    padding: int
    """The token that fills rows up."""
    marked: bool = False
    """Whether documents are chats: they share rows only as a whole (`pack_documents`), and rows
    without a token to be learned are left out."""


class ShardBuilder:
    """Routes a corpus and writes one token file per path and part.

    A path's training documents follow each other and are cut into rows, the last row padded; each
    document is in the shards of its `train_paths` best paths (section 2.4.4). A path's validation
    file holds the `scoring_windows` of the held-out documents whose best path it is, in the order
    of the corpus. The work is done in chunks of documents.
    """

    def __init__(
        self,
        folder: Path,
        rows: RowShape,
        path_count: int,
        *,
        train_paths: int = 1,
        chunk_documents: int = _CHUNK_DOCUMENTS,
        chunk_tokens: int = _CHUNK_TOKENS,
    ) -> None:
        window_stride(rows.sequence_length, rows.prefix_tokens)
        self._shape = rows
        self._path_count = path_count
        self._dtype = token_dtype(rows.vocabulary_size, marked=rows.marked)
        self._row_bytes = rows.sequence_length * self._dtype.itemsize
        self._routed_to: dict[Part, int] = {"train": train_paths, "validation": 1}
        self._chunk_documents = chunk_documents
        self._chunk_tokens = chunk_tokens
        self._files = NewFiles(folder)
        self._parts: dict[Part, list[_PathPart]] = {
            part: [_PathPart() for _ in range(path_count)] for part in _PARTS
        }
        self._labels: list[Counter[str]] = [Counter() for _ in range(path_count)]

    def build(
        self,
        train: TokenCorpus,
        validation: TokenCorpus,
        route: Callable[[Beginnings], np.ndarray],
        *,
        mapped: Mapped = map,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Write the files; `progress` gets (documents done, in all).

        `route` finds the best paths of a chunk, int64 [N, paths], and `mapped` has it done.
        """
        done, total = 0, len(train) + len(validation)
        for part, corpus in zip(_PARTS, (train, validation), strict=True):
            chunks = list(self._chunks(corpus))
            beginnings = (self._beginnings(part, corpus, chunk) for chunk in chunks)
            for chunk, paths in zip(chunks, mapped(route, beginnings), strict=True):
                self._add_chunk(part, corpus, chunk, paths)
                done += len(chunk)
                if progress:
                    progress(done, total)
        for part in _PARTS:
            for path in range(self._path_count):
                self._complete(part, path)
        self._files.sync()

    def finish(self, blobs: BlobStore) -> ShardIndex:
        """Put the token files into the blob store, and return the index of the shards."""
        return ShardIndex(
            sequence_length=self._shape.sequence_length,
            marked=self._shape.marked,
            paths=tuple(self._path_shard(path, blobs) for path in range(self._path_count)),
        )

    def summaries(self) -> tuple[PathSummary, ...]:
        """Return what the operator wants to see of each path."""
        return tuple(
            PathSummary(
                path=path,
                documents=train.documents,
                tokens=train.tokens,
                held_out_documents=validation.documents,
                sequences=self._rows("train", path),
                held_out_sequences=self._rows("validation", path),
                labels=dict(sorted(labels.items(), key=lambda entry: (-entry[1], entry[0]))),
                learned_tokens=train.learned if self._shape.marked else None,
            )
            for path, (train, validation, labels) in enumerate(
                zip(self._parts["train"], self._parts["validation"], self._labels, strict=True)
            )
        )

    def _chunks(self, corpus: TokenCorpus) -> Iterator[range]:
        first = 0
        while first < len(corpus):
            chunk = _chunk_at(corpus, first, self._chunk_documents, self._chunk_tokens)
            yield chunk
            first = chunk.stop

    def _beginnings(self, part: Part, corpus: TokenCorpus, chunk: range) -> Beginnings:
        return Beginnings(
            tuple(np.array(corpus.beginning(index, self._shape.prefix_tokens)) for index in chunk),
            tuple(corpus.label_name(index) for index in chunk),
            self._routed_to[part],
        )

    def _add_chunk(self, part: Part, corpus: TokenCorpus, chunk: range, paths: np.ndarray) -> None:
        """Append the documents of a chunk to their files."""
        pieces: dict[int, list[np.ndarray]] = {}
        for index, chosen in zip(chunk, paths.tolist(), strict=True):
            document, label = corpus.document(index), corpus.label_name(index)
            content = self._trained(document) if part == "train" else self._windows(document)
            learned = 0
            if self._shape.marked:
                learned = int(((content >= 0) & (content != self._shape.padding)).sum())
            content = content.astype(self._dtype).reshape(-1)
            for path in chosen:
                pieces.setdefault(path, []).append(content)
                self._parts[part][path].documents += 1
                self._parts[part][path].tokens += len(document)
                self._parts[part][path].learned += learned
                if part == "train" and label is not None:
                    self._labels[path][label] += len(document)
        for path, arrays in pieces.items():
            self._files.append(_name(part, path), np.concatenate(arrays).tobytes())

    def _trained(self, document: np.ndarray) -> np.ndarray:
        """Return what a training file gets of a document: of a chat the pieces of at most a row in
        which something is to be learned, each with one token of padding behind it."""
        if not self._shape.marked:
            return document
        separator = np.array([self._shape.padding], self._dtype)
        parts: list[np.ndarray] = [np.empty(0, self._dtype)]
        for start in range(0, len(document), self._shape.sequence_length):
            piece = np.array(document[start : start + self._shape.sequence_length])
            # Nothing is before it, so it is no target.
            piece[0] = min(piece[0], ~piece[0])
            if (piece >= 0).any():
                parts += [piece, separator]
        return np.concatenate(parts)

    def _windows(self, document: np.ndarray) -> np.ndarray:
        prefix, padding = self._shape.prefix_tokens, self._shape.padding
        rows = scoring_windows(document, self._shape.sequence_length, prefix, padding)
        if not self._shape.marked:
            return rows
        scored = rows[:, prefix:]
        return rows[((scored >= 0) & (scored != padding)).any(axis=1)]

    def _complete(self, part: Part, path: int) -> None:
        """Give a file whole rows."""
        name = _name(part, path)
        self._files.append(name, b"")  # It is there, also if it is empty.
        if self._shape.marked and part == "train":
            self._files.append(self._made(part, path), self._packed(path).tobytes())
            return
        rows, rest = divmod(self._files.sizes[name], self._row_bytes)
        if rest <= self._dtype.itemsize:
            # One token alone in a last row predicts nothing: a batch of that row has no loss.
            self._files.cut(name, rows * self._row_bytes)
        else:
            missing = (self._row_bytes - rest) // self._dtype.itemsize
            self._files.append(name, np.full(missing, self._shape.padding, self._dtype).tobytes())

    def _packed(self, path: int) -> np.ndarray:
        """Return the rows of a training file of chats."""
        tokens = np.fromfile(self._files.folder / _name("train", path), self._dtype)
        ends = np.flatnonzero(tokens == self._shape.padding)
        lengths = np.diff(ends, prepend=-1) - 1
        packed = pack_documents(lengths, self._shape.sequence_length)
        shape = (len(packed), self._shape.sequence_length)
        rows = np.full(shape, self._shape.padding, self._dtype)
        for row, documents in zip(rows, packed, strict=True):
            start = 0
            for index in documents:
                end, length = int(ends[index]), int(lengths[index])
                row[start : start + length] = tokens[end - length : end]
                start += length + 1
        return rows

    def _path_shard(self, path: int, blobs: BlobStore) -> PathShard:
        return PathShard(
            path=path,
            train_sha256=self._put(blobs, "train", path),
            train_sequences=self._rows("train", path),
            train_documents=self._parts["train"][path].documents,
            validation_sha256=self._put(blobs, "validation", path),
            validation_sequences=self._rows("validation", path),
        )

    def _put(self, blobs: BlobStore, part: Part, path: int) -> str:
        file = self._files.folder / self._made(part, path)
        sha256 = sha256_of_file(file)
        # All shards twice may be more than the disk holds; a finished file is never changed.
        link_or_copy(file, blobs.path(sha256))
        return sha256

    def _rows(self, part: Part, path: int) -> int:
        return self._files.sizes.get(self._made(part, path), 0) // self._row_bytes

    def _made(self, part: Part, path: int) -> str:
        """Return the name of the file that becomes a blob."""
        return _made_name(part, path, marked=self._shape.marked)


def written_rows(folder: Path, rows: RowShape, part: Part, path: int) -> np.ndarray:
    """Return what a builder wrote for a path, [N, sequence_length], as a read-only memory map."""
    file = folder / _made_name(part, path, marked=rows.marked)
    return open_tokens(file, rows.sequence_length, rows.vocabulary_size, marked=rows.marked)


def _made_name(part: Part, path: int, *, marked: bool) -> str:
    return f"packed-{path:05d}.bin" if marked and part == "train" else _name(part, path)


def _name(part: Part, path: int) -> str:
    return f"{part}-{path:05d}.bin"
