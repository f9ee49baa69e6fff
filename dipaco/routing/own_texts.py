"""Texts that stay at home (design 4.14, texts): a volunteer's documents as rows of each path.

    FOLDER/          for its owner alone (mode 700; files 600)
        tokens/      all documents as tokens, until they are routed
        rows/        the rows of each path, and the held-out ones, as `dipaco.routing.shards` writes
        made.json    what the rows were made of, and how many there are; written last
        places.json  how far each path's rows were read

They are read, tokenised and routed by the parts that `prepare` uses. Nothing in this folder is a
blob, so nobody can ask for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.base.files import atomic_write, canonical_json, note, storage_errors
from dipaco.protocol.config import Config
from dipaco.protocol.plan import RunPlan
from dipaco.routing.batches import BatchStream
from dipaco.routing.documents.corpus import (
    CorpusConfig,
    Document,
    corpus_documents,
    corpus_files,
    holds_chats,
)
from dipaco.routing.documents.quoting import nothing_quoted
from dipaco.routing.routers.document_routing import DocumentRouter
from dipaco.routing.shards import (
    Beginnings,
    PathSummary,
    RowShape,
    ShardBuilder,
    written_rows,
)
from dipaco.routing.tokens.chat_tokens import ChatEncoder
from dipaco.routing.tokens.token_corpus import (
    EncodedDocument,
    TokenCorpus,
    TokenCorpusWriter,
    encoded,
    write_token_corpora,
)
from dipaco.routing.tokens.token_files import even_sample

# Of the documents. A hash of each decides, so the same ones are held out after a return.
HELD_OUT_FRACTION = 0.1
# Documents that are tokenised or routed between two looks at whether to go on.
_DOCUMENTS_AT_ONCE = 64


class _Made(Config):
    """What lies in the folder."""

    key: str
    """A hash of what the rows were made of: which files, whose tokenizer and router."""
    paths: tuple[PathSummary, ...]
    left_out: int
    """Chats in which nothing is to be learned."""


@dataclass
class _Place:
    """How far the rows of a path were read."""

    batches: int = 0
    due: float = 0.0
    """Which part of the next batch of own texts has become due."""


class OwnTexts:
    """The rows of an owner's documents by path. One thread reads batches and keeps places."""

    def __init__(self, plan: RunPlan, folder: Path, shape: RowShape, made: _Made) -> None:
        self._plan, self._folder, self._shape = plan, folder, shape
        self.documents = {s.path: s.documents for s in made.paths if s.sequences}
        """Training documents by path, of the paths that have some."""
        self.sequences = {s.path: s.sequences for s in made.paths if s.sequences}
        """How much these are: documents differ in length."""
        self.held_out_documents = sum(summary.held_out_documents for summary in made.paths)
        self.left_out_chats = made.left_out
        self._places = _read_places(folder / "places.json")

    def held_out(self, path: int) -> torch.Tensor:
        """Return held-out rows of a path, int64 [sequences, length]: as many as are scored of a
        shard, or fewer."""
        rows = written_rows(self._folder / "rows", self._shape, "validation", path)
        scored = even_sample(rows, self._plan.rounds.validation_sequences)
        return torch.from_numpy(np.asarray(scored, dtype=np.int64))

    def stream(self, path: int, shard: BatchStream | None) -> BatchStream:
        """Return the batches of a path, beside those of its shard if that is given. They go on
        where they ended."""
        place = self._places.setdefault(path, _Place())
        rows = written_rows(self._folder / "rows", self._shape, "train", path)
        return _OwnBatches(rows, shard, place, self._plan, path)

    def keep_places(self) -> None:
        """Write how far the texts were read. On a full disk they are read again."""
        places = {str(path): asdict(place) for path, place in self._places.items()}
        file = self._folder / "places.json"
        with contextlib.suppress(OSError):
            note(file, json.dumps(places))
            file.chmod(0o600)


class _OwnBatches(BatchStream):
    """Batches of own texts and of a shard by turns, so that each row is read equally often.

    Replicas of a path share the shard as ever: its batches are those of their places, and the ones
    in whose turn own texts are read are left out until the next epoch.
    """

    def __init__(
        self, rows: np.ndarray, shard: BatchStream | None, place: _Place, plan: RunPlan, path: int
    ) -> None:
        size = plan.inner.batch_sequences
        super().__init__(rows, seed=plan.seed, path=path, batch_sequences=size)
        self._shard, self._place = shard, place
        self._share = len(rows) / (len(rows) + (0 if shard is None else shard.sequences))

    @property
    def batches_per_epoch(self) -> int:
        return super().batches_per_epoch if self._shard is None else self._shard.batches_per_epoch

    def batch(self, place: int) -> torch.Tensor:
        """Return the next batch; `place` is that in the shard."""
        own = self._place
        own.due += self._share
        if self._shard is not None and own.due < 1.0:
            return self._shard.batch(place)
        own.due = max(0.0, own.due - 1.0)
        own.batches += 1
        return super().batch(own.batches - 1)


def open_own_texts(
    plan: RunPlan,
    corpus: CorpusConfig,
    folder: Path,
    router: Callable[[], DocumentRouter],
    *,
    progress: Callable[[str, int], None] = lambda what, done: None,
) -> OwnTexts:
    """Return an owner's documents as rows, made now unless they lie in the folder.

    `router` loads what a run routes with, if that is needed. `progress` hears how many documents
    are done, and may raise to end this. Raises CorpusError, which quotes no text, and
    ConfigurationError for chats in a run without a chat template.
    """
    with nothing_quoted():
        shape = RowShape(
            sequence_length=plan.model.sequence_length,
            prefix_tokens=plan.routing.prefix_tokens,
            vocabulary_size=plan.model.vocabulary_size,
            padding=plan.model.padding_token,
            marked=holds_chats(corpus),
        )
        said = [_files_of(corpus), _settings_of(plan), corpus.model_dump(mode="json")]
        key = hashlib.sha256(canonical_json(said)).hexdigest()
        made = _read_made(folder / "made.json")
        if made is None or made.key != key:
            _make_private(folder)
            paths, left_out = _build(folder, shape, corpus, plan, router(), progress)
            made = _Made(key=key, paths=paths, left_out=left_out)
            _finish(folder, made)
    return OwnTexts(plan, folder, shape, made)


def _files_of(corpus: CorpusConfig) -> list[list[str | int]]:
    """Return what changes when the files do: to read all of them at each start takes long."""
    found = [(path, path.stat()) for path in corpus_files(corpus, "train")]
    return [[str(path), status.st_size, status.st_mtime_ns] for path, status in found]


def _settings_of(plan: RunPlan) -> list[str | int]:
    blobs, routing = plan.blobs, plan.routing
    shape = [plan.model.sequence_length, plan.grid.path_count]
    return [blobs.tokenizer, blobs.router, blobs.base, *shape, *routing.model_dump().values()]


def _make_private(folder: Path) -> None:
    """Make the folder anew, readable by its owner alone."""
    with storage_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        for one in (folder.parent, folder):
            one.mkdir(0o700, parents=True, exist_ok=True)
            one.chmod(0o700)


def _finish(folder: Path, made: _Made) -> None:
    with storage_errors(folder):
        shutil.rmtree(folder / "tokens")
        for file in folder.rglob("*"):
            file.chmod(0o700 if file.is_dir() else 0o600)
    atomic_write(folder / "made.json", made.model_dump_json().encode(), mode=0o600)


def _build(
    folder: Path,
    shape: RowShape,
    corpus: CorpusConfig,
    plan: RunPlan,
    router: DocumentRouter,
    progress: Callable[[str, int], None],
) -> tuple[tuple[PathSummary, ...], int]:
    """Tokenise and route all documents; returns what there is of each path, and how many chats were
    left out."""
    if shape.marked and router.tokenizer.chat_template is None:
        raise ConfigurationError("these are chats, and this run has no chat template; give texts")
    prefix_tokens = shape.prefix_tokens if shape.marked else None
    size, tokens = shape.vocabulary_size, folder / "tokens"
    train, validation = (
        TokenCorpusWriter(tokens / part, size, chat_prefix_tokens=prefix_tokens)
        for part in ("train", "validation")
    )
    with (
        contextlib.closing(ChatEncoder(router.tokenizer, shape.prefix_tokens))
        if shape.marked
        else contextlib.nullcontext()
    ) as chats:
        encode = functools.partial(_encoded, router, chats)
        for documents, _ in write_token_corpora(
            corpus_documents(corpus), encode, train, validation, chunk_documents=_DOCUMENTS_AT_ONCE
        ):
            progress("documents read", documents)

    def route(beginnings: Beginnings) -> np.ndarray:
        return router.nearest_paths(beginnings.tokens, beginnings.paths, beginnings.labels)

    rows = ShardBuilder(
        folder / "rows",
        shape,
        plan.grid.path_count,
        train_paths=plan.routing.train_paths,
        chunk_documents=_DOCUMENTS_AT_ONCE,
    )
    both = TokenCorpus(tokens / "train", size), TokenCorpus(tokens / "validation", size)
    rows.build(
        *both,
        route,
        progress=lambda done, total: progress("documents routed", done),
    )
    paths = rows.summaries()
    if not any(summary.sequences for summary in paths):
        raise CorpusError("none of these documents can be trained on; a tenth is held out")
    # Why is not said: a template's complaint may quote the chat.
    return paths, sum(out.chats for corpus in both for out in corpus.left_out.values())


def _encoded(
    router: DocumentRouter, chats: ChatEncoder | None, chunk: Sequence[tuple[Document, bool]]
) -> list[EncodedDocument]:
    return encoded(chunk, router.tokenizer, torch.get_num_threads(), chats)


def _read_made(file: Path) -> _Made | None:
    """Return what was made, None if that was interrupted or cannot be read."""
    try:
        return _Made.model_validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def _read_places(file: Path) -> dict[int, _Place]:
    """Return how far each path was read; from the beginning, if that cannot be read."""
    try:
        said = json.loads(file.read_bytes())
        return {
            int(path): _Place(int(place["batches"]), float(place["due"]))
            for path, place in said.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
