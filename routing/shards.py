"""Making the shards: every document goes to the token file of its path."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from dipaco.modules.blobs import BlobStore
from dipaco.modules.config import PAD_TOKEN
from dipaco.modules.files import atomic_write, canonical_json, storage_errors
from dipaco.modules.plan import PathShard, ShardIndex

from .document_routing import DocumentRouter
from .token_corpus import TokenCorpus
from .token_files import is_held_back, scoring_windows, token_dtype, window_stride

logger = logging.getLogger(__name__)

Part = Literal["train", "validation", "held_back"]
_PARTS: tuple[Part, ...] = ("train", "validation", "held_back")
_CORPORA: tuple[Part, Part] = ("train", "validation")
CHUNK_DOCUMENTS = 1024
CHUNK_TOKENS = 2_000_000


@dataclass(frozen=True)
class PathSummary:
    """What the table of `dipaco-bootstrap prepare` shows of a shard. Tokens are without padding."""

    path: int
    train_documents: int
    train_tokens: int
    validation_documents: int
    held_back_documents: int
    labels: tuple[tuple[str, float], ...]  # the largest labels first, by their share of the tokens
    label_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _PathPart:
    """How much of one path's file is finished."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0


def chunks_of(corpus: TokenCorpus) -> Iterator[range]:
    """Yield the chunks of documents in which a corpus is routed."""
    first = 0
    while first < len(corpus):
        chunk = chunk_at(corpus, first, CHUNK_DOCUMENTS, CHUNK_TOKENS)
        yield chunk
        first = chunk.stop


def chunk_at(corpus: TokenCorpus, first: int, most_documents: int, most_tokens: int) -> range:
    """Return the documents of the chunk at `first`, bounded in number and in tokens, because a
    few long documents would fill the memory."""
    stop = min(first + most_documents, len(corpus))
    start_token = int(corpus.ends[first - 1]) if first else 0
    ends = np.asarray(corpus.ends[first:stop], dtype=np.int64)
    fitting = int(np.searchsorted(ends, start_token + most_tokens, side="right"))
    return range(first, first + max(1, fitting))


class ShardBuilder:
    """Routes a corpus and writes one token file per path and part.

    A path's training documents follow each other and are cut into rows of `sequence_length`
    tokens, the last row padded; each document is in the shards of its `train_paths` best paths
    (section 2.4.4). A path's validation file holds the `scoring_windows` of the held-out documents
    whose best path it is, in the order of the corpus.

    A `held_back_fraction` of the training documents is in no shard (`is_held_back`): an empty row
    and the windows of those whose best path it is follow in the path's validation file, and choose
    its best parameters (section 2.7). The work is done in chunks of documents; a
    builder that was killed goes on after its last finished chunk and the files come out the same.

    `inputs` is a hash of everything that the shards depend on. `routes` gives the best paths of a
    chunk of a part where others have found them. Called by `bootstrap.prepare`.
    """

    def __init__(
        self,
        folder: Path,
        router: DocumentRouter,
        path_count: int,
        sequence_length: int,
        vocabulary_size: int,
        inputs: str,
        *,
        train_paths: int = 1,
        held_back_fraction: float = 0.0,
        chunk_documents: int = CHUNK_DOCUMENTS,
        chunk_tokens: int = CHUNK_TOKENS,
        routes: Callable[[str, range], np.ndarray] | None = None,
    ) -> None:
        self._folder = folder
        self._router = router
        self._path_count = path_count
        self._sequence_length = sequence_length
        self._dtype = token_dtype(vocabulary_size)
        self._row_bytes = sequence_length * self._dtype.itemsize
        self._inputs = inputs
        self._routed_to: dict[Part, int] = {"train": train_paths, "validation": 1, "held_back": 1}
        self._held_back_fraction = held_back_fraction
        self._chunk_documents = chunk_documents
        self._chunk_tokens = chunk_tokens
        self._routes = routes
        self._progress_path = folder / "progress.json"
        window_stride(sequence_length, router.prefix_tokens)
        folder.mkdir(parents=True, exist_ok=True)
        self._start()

    def build(
        self,
        train: TokenCorpus,
        validation: TokenCorpus,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Route and write what is not done yet; `progress` gets (documents done, in all)."""
        total = len(train) + len(validation)
        for part, corpus in zip(_CORPORA, (train, validation), strict=True):
            while self._done[part] < len(corpus):
                self._add_chunk(part, corpus)
                if progress:
                    progress(sum(self._done.values()), total)
        self._pad_train_files()

    def finish(self, blobs: BlobStore) -> ShardIndex:
        """Move the token files into the blob store and return the index of the shards.

        May be called again after an interruption: files that were moved are remembered.
        """
        digests = self._moved()
        for part in _CORPORA:
            for path in range(self._path_count):
                file = self._file(part, path)
                if file.exists():
                    if part == "validation":
                        self._add_held_back(path)
                    digests[file.name] = blobs.add_file(file)
        atomic_write(self._folder / "digests.json", canonical_json(digests))
        for part in _PARTS:
            for path in range(self._path_count):
                self._file(part, path).unlink(missing_ok=True)
        return ShardIndex(
            sequence_length=self._sequence_length,
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
                held_back_documents=self._parts["held_back"][path].documents,
                labels=self._label_shares(path),
                label_tokens=dict(self._labels[path]),
            )
            for path in range(self._path_count)
        )

    def _add_chunk(self, part: Part, corpus: TokenCorpus) -> None:
        """Route one chunk, append its documents to their files, then count the chunk as done."""
        indices = chunk_at(corpus, self._done[part], self._chunk_documents, self._chunk_tokens)
        documents = [corpus.document(index) for index in indices]
        labels = [corpus.label_name(index) for index in indices]
        if self._routes is not None:
            paths = self._routes(part, indices)
        else:
            paths = self._router.nearest_paths(documents, self._routed_to[part], labels)
        pieces: dict[tuple[Part, int], list[np.ndarray]] = {}
        for document, label, chosen in zip(documents, labels, paths.tolist(), strict=True):
            into = part
            if part == "train" and is_held_back(document, self._held_back_fraction):
                into = "held_back"
            content = document if into == "train" else self._windows(document)
            content = content.astype(self._dtype).reshape(-1)
            for path in chosen[: self._routed_to[into]]:
                pieces.setdefault((into, path), []).append(content)
                self._parts[into][path].documents += 1
                self._parts[into][path].tokens += len(document)
                if into == "train" and label is not None:
                    self._labels[path][label] += len(document)
        for (into, path), arrays in pieces.items():
            content = np.concatenate(arrays)
            with storage_errors(self._folder), open(self._file(into, path), "ab") as file:
                file.write(content.tobytes())
            self._parts[into][path].bytes += content.nbytes
        self._done[part] = indices.stop
        self._save()

    def _windows(self, document: np.ndarray) -> np.ndarray:
        return scoring_windows(document, self._sequence_length, self._router.prefix_tokens)

    def _add_held_back(self, path: int) -> None:
        """Put an empty row and the held-back documents behind the held-out ones of a path; doing
        it twice changes nothing."""
        if not self._held_back_fraction:
            return
        empty = np.full(self._sequence_length, PAD_TOKEN, self._dtype)
        with (
            storage_errors(self._folder),
            open(self._file("validation", path), "ab") as file,
            open(self._file("held_back", path), "rb") as held_back,
        ):
            file.truncate(self._parts["validation"][path].bytes)
            file.write(empty.tobytes())
            shutil.copyfileobj(held_back, file)

    def _pad_train_files(self) -> None:
        """Fill up the last row of every training file; doing it twice changes nothing."""
        if self._moved():
            return
        row_tokens = self._sequence_length
        for path, done in enumerate(self._parts["train"]):
            tokens = done.bytes // self._dtype.itemsize
            missing = max(0, self._sequences("train", path) * row_tokens - tokens)
            padding = np.full(missing, PAD_TOKEN, self._dtype)
            with storage_errors(self._folder), open(self._file("train", path), "ab") as file:
                file.truncate(min(done.bytes, self._sequences("train", path) * self._row_bytes))
                file.write(padding.tobytes())

    def _path_shard(self, path: int, digests: dict[str, str]) -> PathShard:
        return PathShard(
            path=path,
            train_sha256=digests[self._file("train", path).name],
            train_sequences=self._sequences("train", path),
            train_documents=self._parts["train"][path].documents,
            validation_sha256=digests[self._file("validation", path).name],
            validation_sequences=self._sequences("validation", path)
            + (1 + self._sequences("held_back", path) if self._held_back_fraction else 0),
        )

    def _sequences(self, part: Part, path: int) -> int:
        """Return the rows of a file. One token alone in a last row predicts nothing and is left
        out: a batch of that row would have no loss."""
        rows, rest = divmod(self._parts[part][path].bytes, self._row_bytes)
        return rows + (rest > self._dtype.itemsize)

    def _label_shares(self, path: int, shown: int = 2) -> tuple[tuple[str, float], ...]:
        tokens = max(1, self._parts["train"][path].tokens)
        largest = sorted(self._labels[path].items(), key=lambda entry: (-entry[1], entry[0]))
        return tuple((name, count / tokens) for name, count in largest[:shown])

    def _file(self, part: Part, path: int) -> Path:
        return self._folder / f"{part}-{path:05d}.bin"

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
        self._done: dict[Part, int] = dict.fromkeys(_CORPORA, 0)
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
            "parts": {
                part: [[p.bytes, p.documents, p.tokens] for p in self._parts[part]]
                for part in _PARTS
            },
            "labels": [dict(counts) for counts in self._labels],
        }
        atomic_write(self._progress_path, canonical_json(values))

    def _moved(self) -> dict[str, str]:
        """Return the digests of files already in the blob store, if they are of these inputs."""
        path = self._folder / "digests.json"
        if not path.exists() or not sum(self._done.values()):
            path.unlink(missing_ok=True)
            return {}
        digests: dict[str, str] = json.loads(path.read_bytes())
        return digests
