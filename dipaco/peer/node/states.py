"""The module states of this process: those it serves, and those that wait for a decision.

A state that was computed or fetched waits here until the member adopts it, keeps it, or no longer
wants it. There is one object of a state that is held, also for the trainer; once it was saved, its
memory is its mapped file. The state before it is on the disk too, and the index says to which step
each of them belongs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import DipacoError, IntegrityError, StorageError
from dipaco.base.waits import BriefLock
from dipaco.modules.device import return_freed_memory
from dipaco.modules.layout import layout_of
from dipaco.modules.saved_states import StateStore
from dipaco.modules.state import ModuleState, state_chunks
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.files.content import Parts
from dipaco.protocol.chain.steps import Head, Step
from dipaco.protocol.grid import Grid

logger = logging.getLogger("dipaco.peer.node.states")

# States of one module that may wait for the member's decision, and for the disk.
_MAX_WAITING, _MAX_UNSAVED = 4, 2


def head_of(state: ModuleState, step: str, weight: int, round_index: int) -> Head:
    """Return what names a state that stands on a step. Hashes it, the first time."""
    return Head(
        state.module, step, state.version, weight, round_index, state.digest, state.byte_size
    )


class Named(NamedTuple):
    """A state, and after which step it is."""

    head: Head
    state: ModuleState


class _Waiting(NamedTuple):
    state: ModuleState
    before: Named | None
    """The state that it was computed from; None for one that was fetched."""


class _Unsaved(NamedTuple):
    held: Named
    before: Named | None


class States:
    """States of all modules. Thread-safe; also the exchange's source of states and blobs."""

    def __init__(self, grid: Grid, store: StateStore, blobs: BlobStore, chains: ChainStore) -> None:
        self._grid, self._store, self._blobs, self._chains = grid, store, blobs, chains
        self._lock = BriefLock()
        self._held: dict[str, Named] = {}
        """By module."""
        self._unsaved: dict[str, tuple[_Unsaved, ...]] = {}
        """The states that are held in memory alone, and those held just before, by module, the
        latest last."""
        self._waiting: dict[str, dict[str, _Waiting]] = {}
        """By module and step, the latest last."""
        self.earlier: States | None = None
        """What is held of the run that this one succeeds, also served by hash."""

    def load_from_disk(self) -> tuple[Head, ...]:
        """Take up what an earlier life left; what no chain here leads to is left alone."""
        for module in self._grid.modules():
            for head in self._store.heads(module):
                state = self._read(module, head.digest)
                if state is None:
                    continue
                try:
                    self._chains.serve(module, head.step, head=head)
                except KeyError:
                    continue
                with self._lock:
                    self._held[module] = Named(head, state)
                break
        return self.all()

    # -- what waits

    def put(self, step: str, state: ModuleState, before: Named | None = None) -> None:
        """Keep a state that was fetched, or computed from the one `before` it, until the member
        decides.
        """
        with self._lock:
            waiting = self._waiting.setdefault(state.module, {})
            waiting.pop(step, None)
            waiting[step] = _Waiting(state, before)
            for old in list(waiting)[:-_MAX_WAITING]:
                del waiting[old]

    def forget(self, module: str, step: str) -> None:
        """Let go of a state that waits."""
        with self._lock:
            self._waiting.get(module, {}).pop(step, None)

    def forget_all(self) -> None:
        """Let go of all states that wait, because the path has changed."""
        with self._lock:
            self._waiting.clear()

    def waiting(self, module: str, step: str) -> ModuleState | None:
        """Return a state that waits."""
        with self._lock:
            found = self._waiting.get(module, {}).get(step)
            return found.state if found is not None else None

    # -- what is held

    def hold(self, head: Head) -> ModuleState:
        """Hold a state that waits, or lies on the disk, from now on. Raises KeyError."""
        with self._lock:
            waiting = self._waiting.get(head.module, {}).pop(head.step, None)
        state = waiting.state if waiting else self.find(head.module, head.step)
        if state is None or state.digest != head.digest:
            raise KeyError(head.step)
        with self._lock:
            self._held[head.module] = held = Named(head, state)
            if waiting is not None:
                replaced = [u._replace(before=None) for u in self._unsaved.get(head.module, ())]
                newest = _Unsaved(held, waiting.before)
                self._unsaved[head.module] = (*replaced, newest)[-_MAX_UNSAVED:]
        return state

    def save(self, state: ModuleState) -> None:
        """Write a state that is, or was, held to disk, so that it is served from there.

        The state before it is kept beside it. A full disk is reported and the state is kept in
        memory, so that training continues.
        """
        unsaved = self._in_memory(state.digest)
        if unsaved is None:
            return
        try:
            if unsaved.before is not None and unsaved.before.head.version:
                self._store.save(unsaved.before.state, unsaved.before.head)
            self._store.save(state, unsaved.held.head)
        except StorageError as error:
            logger.warning("state of %s kept in memory only: %s", state.module, error)
            with self._lock:
                # No state that was held before is kept for a disk that does not take it.
                self._unsaved[state.module] = self._unsaved.get(state.module, ())[-1:]
            return
        saved = self._read(state.module, state.digest)
        if saved is None:
            return
        state.rest_on(saved)
        return_freed_memory()  # What the round took; the next one may find its pieces too small.
        with self._lock:
            # What was held before it need not be saved any more.
            entries = self._unsaved.get(state.module, ())
            later = next((n for n, e in enumerate(entries, 1) if e.held is unsaved.held), 0)
            self._unsaved[state.module] = entries[later:]

    def _in_memory(self, digest: str) -> _Unsaved | None:
        with self._lock:
            of_all = [entry for entries in self._unsaved.values() for entry in entries]
        return next((entry for entry in of_all if entry.held.head.digest == digest), None)

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
            unsaved = [entry.held.state for of in self._unsaved.values() for entry in of]
        for state in unsaved:
            self.save(state)

    def drop(self, module: str) -> None:
        """Serve a module no more. `remove_dropped` frees the disk."""
        with self._lock:
            self._held.pop(module, None)
            self._unsaved.pop(module, None)
        self._chains.hold(module, None)

    def remove_dropped(self, module: str) -> None:
        """Remove the states of a module from the disk, unless one has been held again since."""
        if self.get(module) is None:
            self._store.remove(module)

    def serve(self, module: str, step: str, steps: Sequence[Step] = ()) -> None:
        """Serve the chain to a step, and the state that is held.

        `steps`, oldest first, are those of it that were not served before. Raises KeyError when
        they do not stand on steps that were.
        """
        try:
            self._chains.serve(module, step, steps, self.get(module))
        except StorageError as error:
            logger.warning("the chain of %s is not on disk: %s", module, error)

    def get(self, module: str) -> Head | None:
        """Return what is held of a module."""
        with self._lock:
            held = self._held.get(module)
            return held.head if held is not None else None

    def all(self) -> tuple[Head, ...]:
        """Return everything held, by module."""
        with self._lock:
            return tuple(self._held[module].head for module in sorted(self._held))

    def find(self, module: str, step: str) -> ModuleState | None:
        """Return the state after a step if it is anywhere here: it waits, is held, or was saved."""
        with self._lock:
            state = self.waiting(module, step)
            in_memory = [entry.held for entry in self._unsaved.get(module, ())]
            in_memory += [self._held[module]] if module in self._held else []
        if state is not None:
            return state
        for head, held in in_memory:
            if head.step == step:
                return held
        digest = self._store.digest_after(module, step)
        return None if digest is None else self._read(module, digest)

    def _read(self, module: str, digest: str) -> ModuleState | None:
        """Return a state that lies in its file on the disk."""
        try:
            return self._store.load(module, layout_of(self._grid, module), digest)
        except DipacoError as error:
            logger.warning("state of %s on disk is not used: %s", module, error)
            if isinstance(error, IntegrityError):
                self._store.kept.remove(digest)
            return None

    # -- the exchange's source

    def lookup(self, sha256: str) -> Path | Parts | None:
        """Find a state or a blob by its hash. The exchange calls this."""
        path = self._store.find(sha256)
        if path is not None:
            return path
        if self._blobs.has(sha256):
            return self._blobs.path(sha256)
        unsaved = self._in_memory(sha256)
        held = self._held.values() if unsaved is None else (unsaved.held,)
        for head, state in tuple(held):
            if head.digest == sha256:
                return tuple(state_chunks(state))
        return self.earlier.lookup(sha256) if self.earlier is not None else None
