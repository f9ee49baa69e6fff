"""Making the shards: every document goes to the token file of its path."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dipaco.base.blobs import BlobStore
from dipaco.base.files import append, atomic_write, canonical_json, storage_errors
from dipaco.protocol.config import PAD_TOKEN
from dipaco.protocol.plan import PathShard, ShardIndex
from dipaco.routing.tokens.token_corpus import Mapped, TokenCorpus
from dipaco.routing.tokens.token_files import (
    pack_documents,
    scoring_windows,
    token_dtype,
    window_stride,
)

logger = logging.getLogger(__name__)

Part = Literal["train", "validation"]
_PARTS: tuple[Part, Part] = ("train", "validation")
# Documents routed together, and the tokens at which a chunk ends earlier: both bound memory. An
# interrupted preparation goes on at the last chunk.
CHUNK_DOCUMENTS = 1024
CHUNK_TOKENS = 2_000_000
# Of a path, in the table of `dipaco-bootstrap prepare`.
_SHOWN_LABELS = 2


@dataclass(frozen=True)
class PathSummary:
    """What the table of `dipaco-bootstrap prepare` shows of a shard. Tokens are without padding."""

    path: int
    train_documents: int
    train_tokens: int
    validation_documents: int
    labels: tuple[tuple[str, float], ...]  # the largest labels first, by their share of the tokens
    label_tokens: Mapping[str, int] = field(default_factory=dict)
    learned_tokens: int | None = None
    """Of chats, the tokens that are to be learned; the others are only read."""


@dataclass
class _PathPart:
    """How much of one path's file is finished."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    learned: int = 0
    rows: int = 0
    """Of packed chats; 0 before they are packed."""


@dataclass(frozen=True)
class Beginnings:
    """What routing sees of a chunk of documents: their first tokens and their labels."""

    tokens: tuple[np.ndarray, ...]
    labels: tuple[str | None, ...]
    paths: int
    """How many of its best paths each document is to have."""


def chunk_at(corpus: TokenCorpus, first: int, max_documents: int, max_tokens: int) -> range:
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
    marked: bool = False
    """Whether documents are chats: they share rows only as a whole (`pack_documents`), and rows
    without a token to be learned are left out."""


class ShardBuilder:
    """Routes a corpus and writes one token file per path and part.

    A path's training documents follow each other and are cut into rows, the last row padded; each
    document is in the shards of its `train_paths` best paths (section 2.4.4). A path's validation
    file holds the `scoring_windows` of the held-out documents whose best path it is, in the order
    of the corpus. The work is done in chunks of documents; a builder that was killed goes on after
    its last finished chunk and the files come out the same.

    `inputs` is a hash of everything that the shards depend on.
    """

    def __init__(
        self,
        folder: Path,
        rows: RowShape,
        path_count: int,
        inputs: str,
        *,
        train_paths: int = 1,
        chunk_documents: int = CHUNK_DOCUMENTS,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self._folder = folder
        self._shape = rows
        self._path_count = path_count
        self._dtype = token_dtype(rows.vocabulary_size, marked=rows.marked)
        self._row_bytes = rows.sequence_length * self._dtype.itemsize
        self._inputs = inputs
        self._routed_to: dict[Part, int] = {"train": train_paths, "validation": 1}
        self._chunk_documents = chunk_documents
        self._chunk_tokens = chunk_tokens
        self._progress_path = folder / "progress.json"
        window_stride(rows.sequence_length, rows.prefix_tokens)
        folder.mkdir(parents=True, exist_ok=True)
        self._start()

    def build(
        self,
        train: TokenCorpus,
        validation: TokenCorpus,
        route: Callable[[Beginnings], np.ndarray],
        *,
        mapped: Mapped = map,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Write what is not done yet; `progress` gets (documents done, in all).

        `route` finds the best paths of a chunk, int64 [N, paths], and `mapped` has it done.
        """
        total = len(train) + len(validation)
        for part, corpus in zip(_PARTS, (train, validation), strict=True):
            chunks = list(self._chunks(part, corpus))
            beginnings = (self._beginnings(part, corpus, chunk) for chunk in chunks)
            for chunk, paths in zip(chunks, mapped(route, beginnings), strict=True):
                self._add_chunk(part, corpus, chunk, paths)
                if progress:
                    progress(sum(self._done.values()), total)
        self._finish_train_files()

    def finish(self, blobs: BlobStore) -> ShardIndex:
        """Move the token files into the blob store and return the index of the shards.

        May be called again after an interruption: files that were moved are remembered.
        """
        digests = self._moved()
        for part in _PARTS:
            for path in range(self._path_count):
                file = self._made(part, path)
                if file.exists():
                    digests[file.name] = blobs.add_file(file)
        atomic_write(self._folder / "digests.json", canonical_json(digests))
        for part in _PARTS:
            for path in range(self._path_count):
                self._file(part, path).unlink(missing_ok=True)
                self._made(part, path).unlink(missing_ok=True)
        return ShardIndex(
            sequence_length=self._shape.sequence_length,
            marked=self._shape.marked,
            paths=tuple(self._path_shard(path, digests) for path in range(self._path_count)),
        )

    def summaries(self) -> tuple[PathSummary, ...]:
        """Return what the operator wants to see of each path."""
        return tuple(
            PathSummary(
                path=path,
                train_documents=self._parts["train"][path].documents,
                train_tokens=self._parts["train"][path].tokens,
                validation_documents=self._parts["validation"][path].documents,
                labels=self._label_shares(path),
                label_tokens=dict(self._labels[path]),
                learned_tokens=self._parts["train"][path].learned if self._shape.marked else None,
            )
            for path in range(self._path_count)
        )

    def _chunks(self, part: Part, corpus: TokenCorpus) -> Iterator[range]:
        """Yield the chunks of documents that are not done yet."""
        first = self._done[part]
        while first < len(corpus):
            chunk = chunk_at(corpus, first, self._chunk_documents, self._chunk_tokens)
            yield chunk
            first = chunk.stop

    def _beginnings(self, part: Part, corpus: TokenCorpus, chunk: range) -> Beginnings:
        return Beginnings(
            tuple(np.array(corpus.beginning(index, self._shape.prefix_tokens)) for index in chunk),
            tuple(corpus.label_name(index) for index in chunk),
            self._routed_to[part],
        )

    def _add_chunk(self, part: Part, corpus: TokenCorpus, chunk: range, paths: np.ndarray) -> None:
        """Append the documents of a chunk to their files, then count the chunk as done."""
        pieces: dict[int, list[np.ndarray]] = {}
        for index, chosen in zip(chunk, paths.tolist(), strict=True):
            document, label = corpus.document(index), corpus.label_name(index)
            content = self._trained(document) if part == "train" else self._windows(document)
            learned = 0
            if self._shape.marked:
                learned = int(((content >= 0) & (content != PAD_TOKEN)).sum())
            content = content.astype(self._dtype).reshape(-1)
            for path in chosen:
                pieces.setdefault(path, []).append(content)
                self._parts[part][path].documents += 1
                self._parts[part][path].tokens += len(document)
                self._parts[part][path].learned += learned
                if part == "train" and label is not None:
                    self._labels[path][label] += len(document)
        for path, arrays in pieces.items():
            content = np.concatenate(arrays)
            append(self._file(part, path), content.tobytes())  # before it is counted
            self._parts[part][path].bytes += content.nbytes
        self._done[part] = chunk.stop
        self._save()

    def _trained(self, document: np.ndarray) -> np.ndarray:
        """Return what a training file gets of a document: of a chat the pieces of at most a row in
        which something is to be learned, each with one token of padding behind it."""
        if not self._shape.marked:
            return document
        separator = np.array([PAD_TOKEN], self._dtype)
        parts: list[np.ndarray] = [np.empty(0, self._dtype)]
        for start in range(0, len(document), self._shape.sequence_length):
            piece = np.array(document[start : start + self._shape.sequence_length])
            # Nothing is before it, so it is no target.
            piece[0] = min(piece[0], ~piece[0])
            if (piece >= 0).any():
                parts += [piece, separator]
        return np.concatenate(parts)

    def _windows(self, document: np.ndarray) -> np.ndarray:
        rows = scoring_windows(document, self._shape.sequence_length, self._shape.prefix_tokens)
        if not self._shape.marked:
            return rows
        scored = rows[:, self._shape.prefix_tokens :]
        return rows[((scored >= 0) & (scored != PAD_TOKEN)).any(axis=1)]

    def _finish_train_files(self) -> None:
        """Give every training file whole rows; doing it twice changes nothing."""
        if self._moved():
            return
        if self._shape.marked:
            for path in range(self._path_count):
                self._pack(path)
            self._save()
            return
        row_tokens = self._shape.sequence_length
        for path, done in enumerate(self._parts["train"]):
            tokens = done.bytes // self._dtype.itemsize
            missing = max(0, self._sequences("train", path) * row_tokens - tokens)
            padding = np.full(missing, PAD_TOKEN, self._dtype)
            with storage_errors(self._folder), open(self._file("train", path), "ab") as file:
                file.truncate(min(done.bytes, self._sequences("train", path) * self._row_bytes))
                file.write(padding.tobytes())

    def _pack(self, path: int) -> None:
        """Write the rows of a training file of chats."""
        file, done = self._file("train", path), self._parts["train"][path]
        tokens = np.fromfile(file, self._dtype, done.bytes // self._dtype.itemsize)
        ends = np.flatnonzero(tokens == PAD_TOKEN)
        lengths = np.diff(ends, prepend=-1) - 1
        packed = pack_documents(lengths, self._shape.sequence_length)
        rows = np.full((len(packed), self._shape.sequence_length), PAD_TOKEN, self._dtype)
        for row, documents in zip(rows, packed, strict=True):
            start = 0
            for index in documents:
                end, length = int(ends[index]), int(lengths[index])
                row[start : start + length] = tokens[end - length : end]
                start += length + 1
        atomic_write(self._made("train", path), rows.tobytes())
        done.rows = len(rows)

    def _path_shard(self, path: int, digests: dict[str, str]) -> PathShard:
        return PathShard(
            path=path,
            train_sha256=digests[self._made("train", path).name],
            train_sequences=self._sequences("train", path),
            train_documents=self._parts["train"][path].documents,
            validation_sha256=digests[self._made("validation", path).name],
            validation_sequences=self._sequences("validation", path),
        )

    def _sequences(self, part: Part, path: int) -> int:
        """Return the rows of a file. One token alone in a last row predicts nothing and is left
        out: a batch of that row would have no loss."""
        if self._shape.marked and part == "train":
            return self._parts[part][path].rows
        rows, rest = divmod(self._parts[part][path].bytes, self._row_bytes)
        return rows + (rest > self._dtype.itemsize)

    def _label_shares(self, path: int) -> tuple[tuple[str, float], ...]:
        tokens = max(1, self._parts["train"][path].tokens)
        largest = sorted(self._labels[path].items(), key=lambda entry: (-entry[1], entry[0]))
        return tuple((name, count / tokens) for name, count in largest[:_SHOWN_LABELS])

    def _file(self, part: Part, path: int) -> Path:
        return self._folder / f"{part}-{path:05d}.bin"

    def _made(self, part: Part, path: int) -> Path:
        """Return the file that becomes a blob."""
        if self._shape.marked and part == "train":
            return self._folder / f"packed-{path:05d}.bin"
        return self._file(part, path)

    def _files(self) -> Iterator[tuple[Path, int]]:
        for part in _PARTS:
            for path in range(self._path_count):
                yield self._file(part, path), self._parts[part][path].bytes

    def _start(self) -> None:
        """Continue from the progress that was saved for the same inputs, or begin again."""
        self._reset()
        if self._progress_path.exists():
            values = json.loads(self._progress_path.read_bytes())
            if values.get("inputs") == self._inputs:
                self._restore(values)
        if self._moved():
            return
        if any(size and (not f.exists() or f.stat().st_size < size) for f, size in self._files()):
            logger.warning("token files are shorter than noted; routing starts again")
            self._reset()
        for file, size in self._files():
            with open(file, "ab") as handle:
                handle.truncate(size)
        self._save()

    def _reset(self) -> None:
        self._done: dict[Part, int] = dict.fromkeys(_PARTS, 0)
        self._parts: dict[Part, list[_PathPart]] = {
            part: [_PathPart() for _ in range(self._path_count)] for part in _PARTS
        }
        self._labels: list[Counter[str]] = [Counter() for _ in range(self._path_count)]

    def _restore(self, values: dict[str, Any]) -> None:
        self._done |= values["done"]
        for part in values["parts"]:
            self._parts[part] = [_PathPart(*counts) for counts in values["parts"][part]]
        self._labels = [Counter(counts) for counts in values["labels"]]

    def _save(self) -> None:
        values = {
            "inputs": self._inputs,
            "done": self._done,
            "parts": {part: [self._counts(done) for done in self._parts[part]] for part in _PARTS},
            "labels": [dict(counts) for counts in self._labels],
        }
        atomic_write(self._progress_path, canonical_json(values))

    def _counts(self, done: _PathPart) -> list[int]:
        more = [done.learned, done.rows] if self._shape.marked else []
        return [done.bytes, done.documents, done.tokens, *more]

    def _moved(self) -> dict[str, str]:
        """Return the digests of files already in the blob store, if they are of these inputs."""
        path = self._folder / "digests.json"
        if not path.exists() or not sum(self._done.values()):
            path.unlink(missing_ok=True)
            return {}
        digests: dict[str, str] = json.loads(path.read_bytes())
        return digests
