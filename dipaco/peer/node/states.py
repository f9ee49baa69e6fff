"""The module states of this process: what it serves, and what waits for the member's word.

A state that was computed or fetched waits here until the member adopts it, keeps it, or wants it no
more. Of a state that is held there is one object, also for the trainer, and once it was saved its
memory is its file, mapped. The one before it is on the disk too. Which step a state on the disk is
of is in the log of its chain.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import DipacoError, IntegrityError, StorageError
from dipaco.modules.device import return_freed_memory
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState, read_state, state_chunks
from dipaco.modules.store import StateStore
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.files.content import Parts
from dipaco.protocol.chain import Head, Step
from dipaco.protocol.grid import Grid

logger = logging.getLogger("dipaco.peer.node.states")

# A peer that read an announcement asks for that state, and rounds can be shorter than that: a
# state is served for so long after another has taken its place, if it is small. Of larger ones the
# disk has the last two.
RECENT_S = 30.0
RECENT_BYTES = 2**25
# Of one module, that wait for the member's word.
MAX_WAITING = 4


def head_of(state: ModuleState, step: str, weight: int, round_index: int) -> Head:
    """Return what names a state that stands on a step. Hashes it, the first time."""
    return Head(
        state.module, step, state.version, weight, round_index, state.digest, state.byte_size
    )


class _Waiting(NamedTuple):
    state: ModuleState
    before: ModuleState | None
    """What it was computed from; None of one that was fetched."""


class States:
    """States of all modules. Thread-safe; also the exchange's source of states and blobs."""

    def __init__(
        self,
        grid: Grid,
        store: StateStore,
        blobs: BlobStore,
        chains: ChainStore,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid, self._store, self._blobs, self._chains = grid, store, blobs, chains
        self._monotonic = monotonic
        self._lock = threading.RLock()
        self._held: dict[str, Head] = {}
        self._state_of: dict[str, ModuleState] = {}
        """What is held, by module."""
        self._in_memory: dict[str, ModuleState] = {}
        """What is held and not saved yet, by digest."""
        self._waiting: dict[str, dict[str, _Waiting]] = {}
        """By module and step, the latest last."""
        self._computed_from: dict[str, ModuleState] = {}
        """By digest of a state that is not saved yet: the state before it."""
        self._recent: dict[str, tuple[float, ModuleState]] = {}
        self.earlier: States | None = None
        """What is held of the run that this one succeeds, also served by hash."""

    def load_from_disk(self) -> tuple[Head, ...]:
        """Take up what an earlier life left; what no chain here leads to is left alone."""
        for module in self._grid.modules():
            for digest in self._store.digests(module):
                head = self._chains.head_of(module, digest)
                state = None if head is None else self._read(module, digest)
                if head is not None and state is not None:
                    with self._lock:
                        self._held[module], self._state_of[module] = head, state
                    self._chains.serve(module, head.step, head=head)
                    break
        return self.all()

    # -- what waits

    def put(self, step: str, state: ModuleState, before: ModuleState | None = None) -> None:
        """Keep a state that was fetched, or computed from the one `before` it, until the member
        says what becomes of it."""
        with self._lock:
            waiting = self._waiting.setdefault(state.module, {})
            waiting.pop(step, None)
            waiting[step] = _Waiting(state, before)
            for old in list(waiting)[:-MAX_WAITING]:
                del waiting[old]

    def forget(self, module: str, step: str) -> None:
        """Let go of a state that waits."""
        with self._lock:
            self._waiting.get(module, {}).pop(step, None)

    def forget_all(self) -> None:
        """Let go of all that wait: the path has changed."""
        with self._lock:
            self._waiting.clear()

    def waiting(self, module: str, step: str) -> ModuleState | None:
        """Return a state that waits."""
        with self._lock:
            found = self._waiting.get(module, {}).get(step)
            return found.state if found is not None else None

    def newest(self, module: str) -> ModuleState | None:
        """Return the state of a module that came last: one that waits, or else what is held."""
        with self._lock:
            waiting = next(reversed(self._waiting.get(module, {}).values()), None)
            held = self._held.get(module)
        if waiting is not None:
            return waiting.state
        return None if held is None else self.find(module, held.step)

    # -- what is held

    def hold(self, head: Head) -> ModuleState:
        """Hold a state that waits, or lies on the disk, from now on. Raises KeyError."""
        with self._lock:
            waiting = self._waiting.get(head.module, {}).pop(head.step, None)
            state = waiting.state if waiting else self.find(head.module, head.step)
            if state is None or state.digest != head.digest:
                raise KeyError(head.step)
            before = self._state_of.get(head.module)
            if before is not None and before.digest != head.digest:
                self._in_memory.pop(before.digest, None)
                self._computed_from.pop(before.digest, None)
                self._remember(before)
            self._held[head.module], self._state_of[head.module] = head, state
            if waiting is not None:
                self._in_memory[head.digest] = state
                if waiting.before is not None and waiting.before.version:
                    self._computed_from[head.digest] = waiting.before
        return state

    def save(self, state: ModuleState) -> None:
        """Write a held state to disk, to be served from there, and to lie there for its holders.

        The state before it lies beside it. A full disk is reported and the state is kept in memory,
        so that training goes on.
        """
        with self._lock:
            before = self._computed_from.pop(state.digest, None)
        try:
            if before is not None:
                self._store.save(before)
            self._store.save(state)
        except StorageError as error:
            logger.warning("state of %s kept in memory only: %s", state.module, error)
            return
        saved = self._read(state.module, state.digest)
        if saved is None:
            return
        state.rest_on(saved)
        return_freed_memory()  # What the round took; the next one may find its pieces too small.
        with self._lock:
            self._in_memory.pop(state.digest, None)

    def lay_down(self, state: ModuleState) -> None:
        """Let a held state that is not saved take no memory, if the disk has room for it."""
        try:
            self._store.lay_down(state)
        except DipacoError as error:
            logger.info("state of %s stays in memory: %s", state.module, error)
        return_freed_memory()

    def save_all(self) -> None:
        """Write what is only in memory; called on leaving."""
        with self._lock:
            unsaved = list(self._in_memory.values())
        for state in unsaved:
            self.save(state)

    def drop(self, module: str) -> None:
        """Serve a module no more, and remove its states from the disk."""
        with self._lock:
            held = self._held.pop(module, None)
            self._state_of.pop(module, None)
            if held is not None:
                self._in_memory.pop(held.digest, None)
                self._computed_from.pop(held.digest, None)
        self._store.remove(module)
        self.serve(module, self._chains.served(module)[0])

    def serve(self, module: str, step: str, steps: Sequence[Step] = ()) -> None:
        """Tell of the chain to a step, and of the state that is held.

        `steps`, oldest first, are those of it that were not served before. Raises KeyError when
        they stand on nothing that was.
        """
        head = self.get(module)
        if self._chains.served(module) == (step, head):
            return
        try:
            self._chains.serve(module, step, steps, head)
        except StorageError as error:
            logger.warning("the chain of %s is not on disk: %s", module, error)

    def get(self, module: str) -> Head | None:
        """Return what is held of a module."""
        with self._lock:
            return self._held.get(module)

    def all(self) -> tuple[Head, ...]:
        """Return everything held, by module."""
        with self._lock:
            return tuple(self._held[module] for module in sorted(self._held))

    def find(self, module: str, step: str) -> ModuleState | None:
        """Return the state after a step if it is anywhere here: it waits, is held, or was saved."""
        with self._lock:
            state, held = self.waiting(module, step), self._held.get(module)
            if state is not None:
                return state
            if held is not None and held.step == step:
                return self._state_of[module]
        for digest in self._store.digests(module):
            head = self._chains.head_of(module, digest)
            if head is not None and head.step == step:
                return self._read(module, digest)
        return None

    def _read(self, module: str, digest: str) -> ModuleState | None:
        """Return a state that lies in its file on the disk."""
        file = self._store.find(digest)
        if file is None:
            return None
        try:
            return read_state(file, layout_of(self._grid, module), digest, module=module)
        except DipacoError as error:
            logger.warning("state of %s on disk is not used: %s", module, error)
            if isinstance(error, IntegrityError):
                self._store.set_aside(file, digest)
            return None

    # -- the exchange's source

    def _remember(self, state: ModuleState) -> None:
        self._recent.pop(state.digest, None)
        self._recent[state.digest] = (self._monotonic(), state)
        used_bytes = sum(state.byte_size for _, state in self._recent.values())
        for digest, (until_s, old) in list(self._recent.items()):
            if used_bytes <= RECENT_BYTES and self._monotonic() - until_s <= RECENT_S:
                break
            used_bytes -= old.byte_size
            del self._recent[digest]

    def lookup(self, sha256: str) -> Path | Parts | None:
        """Find a state or a blob by its hash. The exchange calls this."""
        with self._lock:
            state = self._in_memory.get(sha256)
        if state is None:
            path = self._store.find(sha256)
            if path is not None:
                return path
            if self._blobs.has(sha256):
                return self._blobs.path(sha256)
            with self._lock:
                recent = self._recent.get(sha256)
            state = recent[1] if recent is not None else None
        if state is not None:
            return tuple(state_chunks(state))
        return self.earlier.lookup(sha256) if self.earlier is not None else None
