"""The files of one path: base model, shard, held-out split, genesis states, AdamW states."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipaco.base.errors import CorpusError, DipacoError, IntegrityError
from dipaco.modules.state import ModuleState
from dipaco.peer.background import Background
from dipaco.peer.node.node import Node
from dipaco.routing.batches import BatchStream
from dipaco.routing.own_texts import OwnTexts
from dipaco.routing.tokens.token_files import check_tokens, even_sample
from dipaco.training.optimizer_states import SAVE_EVERY_S, load_optimizer, write_optimizer
from dipaco.training.trainer import PathTrainer

logger = logging.getLogger("dipaco.peer.keeping.path_files")


@dataclass(frozen=True)
class PathData:
    """A path's batches and its held-out rows."""

    path: int
    stream: BatchStream
    validation: torch.Tensor
    """Rows of the published loss, [sequences, length]."""
    own_held_out: torch.Tensor
    """The same of the owner's texts; empty without them."""


_NO_ROWS = torch.empty((0, 0), dtype=torch.int64)


class PathFiles:
    """Fetches what is missing, checks it by hash, and opens it."""

    def __init__(
        self, node: Node, own_texts: OwnTexts | None = None, *, with_shards: bool = True
    ) -> None:
        """Of `own_texts` the paths have rows too; without shards they have no others."""
        self._node = node
        self.own_texts = own_texts
        self._with_shards = with_shards
        # All modules are asked for at the same time, and their first parameters are as large as a
        # path: these are read once for all of them, and forgotten when the last one has its state.
        self._first_lock = threading.Lock()
        self._first: dict[str, torch.Tensor] | None = None
        """The parameters that every path begins with."""
        self._counting = threading.Lock()
        self._asking = 0
        """How many threads are asking for the genesis state of a module."""
        self._fetched_lock = threading.Lock()
        self._wanted: int | None = None
        """The path that is about to begin."""
        self._fetched: PathData | None = None
        """The data of a path, once it is here."""
        self._taken: PathData | None = None
        """The data of the path in training."""

    @property
    def path(self) -> int | None:
        """The path that is about to begin, if its files are here."""
        with self._fetched_lock:
            return None if self._fetched is None else self._fetched.path

    @property
    def validation(self) -> torch.Tensor:
        """Held-out rows of the path in training, or of the one that is about to begin."""
        with self._fetched_lock:
            data = self._taken or self._fetched
        return _NO_ROWS if data is None else data.validation

    @property
    def own_held_out(self) -> torch.Tensor:
        """Held-out rows of the owner's texts for the path in training."""
        with self._fetched_lock:
            return _NO_ROWS if self._taken is None else self._taken.own_held_out

    def held_out_of(self, path: int) -> torch.Tensor:
        """Held-out rows of a path that is in training or about to begin; none of another."""
        with self._fetched_lock:
            found = [d for d in (self._fetched, self._taken) if d is not None and d.path == path]
        return found[0].validation if found else _NO_ROWS

    def want(self, path: int) -> bool:
        """Note which path is about to begin; returns whether it is another one than before.

        What is fetched for a path that was given up meanwhile, and may come late, is not kept.
        """
        with self._fetched_lock:
            is_other, self._wanted = self._wanted != path, path
            if is_other:
                self._fetched = None
            return is_other

    def fetch(self, path: int) -> None:
        """Fetch and open the files of `path`, to be taken. Blocks; raises a `DipacoError`."""
        data = self._open(path)
        with self._fetched_lock:
            if self._wanted == path:
                self._fetched = data

    def take(self, path: int) -> PathData:
        """Hand out what was fetched for `path`, which begins."""
        with self._fetched_lock:
            data, self._fetched = self._fetched, None
        taken = data if data is not None and data.path == path else self._open(path)
        with self._fetched_lock:
            self._taken = taken
        return taken

    def _open(self, path: int) -> PathData:
        node, plan = self._node, self._node.plan
        shard = node.load_shard_index().paths[path]
        if shard.train_sequences == 0:
            raise CorpusError(
                f"path {path} has an empty shard, so it cannot be trained; the operator should "
                "prepare the run again with balanced = true in [router]"
            )
        node.fetcher.blob(plan.blobs.base, "the base model")
        own = self.own_texts
        stream: BatchStream | None = None
        if own is None or self._with_shards:
            tokens = self._tokens(
                shard.train_sha256,
                f"the shard of path {path}",
                lambda: node.run_folder.train_tokens(plan, path),
            )
            stream = BatchStream(
                tokens, seed=plan.seed, path=path, batch_sequences=plan.inner.batch_sequences
            )
        if own is not None:
            stream = own.stream(path, stream)
        assert stream is not None
        rows = self._tokens(
            shard.validation_sha256,
            f"the held-out split of path {path}",
            lambda: node.run_folder.validation_tokens(plan, path),
        )
        reported = even_sample(rows, plan.rounds.validation_sequences)
        validation = torch.from_numpy(np.asarray(reported, dtype=np.int64))
        return PathData(path, stream, validation, own.held_out(path) if own else _NO_ROWS)

    def _tokens(self, sha256: str, what: str, opened: Callable[[], np.ndarray]) -> np.ndarray:
        """Fetch a token file if need be, and return what is `opened` of it."""
        node = self._node

        def checked() -> np.ndarray:
            # A file that the disk has damaged would be trained on, and nobody would notice.
            if not node.run_folder.blobs.verify(sha256):
                raise IntegrityError(f"{what} does not have its hash")
            tokens = opened()
            check_tokens(tokens, node.plan.model.vocabulary_size, what)
            return tokens

        node.fetcher.blob(sha256, what)
        return node.fetcher.sound(sha256, what, checked)

    def genesis_state(self, module: str) -> ModuleState:
        """Return the state a module starts from: of the successor's index, or of the base.

        Raises `NetworkError` when nobody has it, `IntegrityError` when the operator's index names
        something that cannot be this module's first state.
        """
        node, plan = self._node, self._node.plan
        if plan.blobs.genesis is None:
            node.fetcher.blob(plan.blobs.base, "the base model")
            with self._first_parameters() as first:
                return node.run_folder.genesis_state(plan, module, first)
        what = f"the genesis state of {module}"
        node.fetcher.blob(plan.blobs.genesis, "the genesis index")
        digests = node.fetcher.sound(
            plan.blobs.genesis, "the genesis index", lambda: node.run_folder.genesis_index(plan)
        )
        assert digests is not None
        node.fetcher.blob(digests[module], what)
        return node.fetcher.sound(
            digests[module], what, lambda: node.run_folder.genesis_state(plan, module)
        )

    @contextlib.contextmanager
    def _first_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield what every path begins with, to one after the other."""
        node, plan = self._node, self._node.plan
        with self._counting:
            self._asking += 1
        try:
            with self._first_lock:
                if self._first is None:
                    self._first = node.fetcher.sound(
                        plan.blobs.base,
                        "the base model",
                        lambda: node.run_folder.first_parameters(plan),
                    )
                yield self._first
        finally:
            with self._counting:
                self._asking -= 1
                if not self._asking:
                    self._first = None

    def release(self) -> None:
        """Forget what was fetched and not taken; called when training begins or goes on."""
        with self._fetched_lock:
            self._wanted = self._fetched = None

    def forget(self) -> None:
        """Forget the path in training too: nothing is trained any more."""
        self.release()
        with self._fetched_lock:
            self._taken = None


class OptimizerFiles:
    """The AdamW states of a peer's trainer, written while training continues.

    They are written after the first round of a path, then every half an hour, and when the peer
    moves, pauses or leaves.
    """

    def __init__(
        self,
        folder: Path,
        trainer: PathTrainer,
        saver: Executor,
        background: Background,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._trainer = folder, trainer
        self._clock_s, self._saved_s = clock_s, -math.inf
        self._saver, self._background = saver, background
        self._saving: Future[None] = saver.submit(lambda: None)

    def load(self, path: int) -> dict[str, Any] | None:
        """Return the state of a path that begins, if one is here."""
        self._saved_s = -math.inf
        return load_optimizer(self._folder, path)

    def save(self) -> None:
        """Write the present state, unless that was done lately; a background thread waits for the
        disk.
        """
        if not self._saving.done() or self._clock_s() - self._saved_s < SAVE_EVERY_S:
            return
        self._saved_s = self._clock_s()
        self._saving = self._saver.submit(self._finish, self._write())
        self._background.watch("saving", self._saving)

    def keep(self) -> None:
        """Write the present state now, because the peer moves, pauses or leaves."""
        if not self._saving.cancel():
            wait([self._saving])
        self._finish(self._write())

    def _write(self) -> Callable[[], None]:
        """Write the present state; the function returned makes it safe on the disk."""
        path, trainer = self._trainer.path, self._trainer
        if path is not None:
            try:
                return write_optimizer(self._folder, path, trainer.optimizer_state())
            except DipacoError as error:
                logger.warning("AdamW state not kept: %s", error)
        return lambda: None

    def _finish(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except DipacoError as error:
            logger.warning("optimizer state not kept: %s", error)
