"""The module states that this process can serve, in memory and on disk.

Every committed anchor is served from an immutable snapshot: from the store when it was saved,
otherwise from memory. The exchange looks content up here by digest; the publisher announces what
is held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dipaco.modules.best_parameters import BestParametersStore
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import StorageError
from dipaco.modules.grid import Grid
from dipaco.modules.state import ModuleState, StateReference, state_chunks
from dipaco.modules.store import StateStore

from .steps import HeldSteps

logger = logging.getLogger("dipaco.peer.exchange.held_states")

# Who read an announcement asks for that state, and rounds can be shorter than the reading: a state
# is served for so long after it came, in so much memory, whatever has taken its place.
RECENT_S = 30.0
RECENT_BYTES = 256 * 2**20


class HeldStates:
    """Newest state of every module held here. Thread-safe; also the exchange's content source."""

    def __init__(
        self,
        grid: Grid,
        store: StateStore,
        blobs: BlobStore,
        bests: BestParametersStore | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid = grid
        self._store = store
        self._blobs = blobs
        self._bests = bests
        self._lock = threading.Lock()
        self._newest: dict[str, StateReference] = {}
        self._in_memory: dict[str, ModuleState] = {}
        self._monotonic = monotonic
        self._recent: dict[str, tuple[float, ModuleState]] = {}
        """What came lately by its digest, the oldest first."""
        self._earlier: HeldStates | None = None
        self.steps = HeldSteps()

    def use_earlier(self, earlier: HeldStates | None) -> None:
        """Serve by hash also what is held of the run that this one succeeds."""
        self._earlier = earlier

    def load_from_disk(self) -> tuple[StateReference, ...]:
        """Take up what an earlier life of this peer left on disk; bad files are skipped."""
        for module in sorted({stored.module for stored in self._store.list()}):
            if module not in self._grid.modules():
                continue
            state = self._store.load_latest(module, self._grid.layout(module))
            if state is not None:
                with self._lock:
                    self._newest[module] = state.reference
        return self.all()

    def hold(self, state: ModuleState) -> None:
        """Serve `state` from now on, from memory, in place of what is held of the module."""
        held = state.reference
        with self._lock:
            previous = self._newest.get(state.module)
            self._newest[state.module] = held
            if previous is not None and previous.digest != held.digest:
                self._in_memory.pop(previous.digest, None)
                self._in_memory[held.digest] = state
            elif previous is None:
                self._in_memory[held.digest] = state
        self._remember(state)

    def save(self, state: ModuleState) -> None:
        """Write `state` to disk; if it is still what is held, it is served from there.

        A full disk is reported and the state is kept in memory, so that training goes on.
        """
        try:
            self._store.save(state)
        except StorageError as error:
            logger.warning("state of %s kept in memory only: %s", state.module, error)
            return
        with self._lock:
            self._in_memory.pop(state.digest, None)

    def drop(self, module: str) -> None:
        """Serve a module no more, and remove its states from the disk."""
        with self._lock:
            held = self._newest.pop(module, None)
            if held is not None:
                self._in_memory.pop(held.digest, None)
        self._store.remove(module)

    def _remember(self, state: ModuleState) -> None:
        with self._lock:
            self._recent.setdefault(state.digest, (self._monotonic(), state))
            used_bytes = sum(state.byte_size for _, state in self._recent.values())
            for digest, (came_s, old) in list(self._recent.items()):
                if used_bytes <= RECENT_BYTES and self._monotonic() - came_s <= RECENT_S:
                    break
                used_bytes -= old.byte_size
                del self._recent[digest]

    def save_all(self) -> None:
        """Write what is only in memory; called on leaving."""
        with self._lock:
            waiting = list(self._in_memory.values())
        for state in waiting:
            self.save(state)

    def get(self, module: str) -> StateReference | None:
        """Return what is held of `module`."""
        with self._lock:
            return self._newest.get(module)

    def all(self) -> tuple[StateReference, ...]:
        """Return everything held, by module."""
        with self._lock:
            return tuple(self._newest[module] for module in sorted(self._newest))

    def load(self, module: str) -> ModuleState | None:
        """Return the held state of `module` itself, from memory or from disk."""
        with self._lock:
            held = self._newest.get(module)
            state = self._in_memory.get(held.digest) if held else None
        if state is not None or held is None:
            return state
        return self._store.load_latest(module, self._grid.layout(module))

    def lookup(self, sha256: str) -> Path | bytes | None:
        """Find content by its hash: a state, a best path or a blob; or an outer step by its name.
        The exchange calls this."""
        with self._lock:
            state = self._in_memory.get(sha256)
        if state is not None:
            return _content(state)
        path = self._store.find(sha256)
        if path is None and self._bests is not None:
            path = self._bests.find(sha256)
        if path is not None:
            return path
        if self._blobs.has(sha256):
            return self._blobs.path(sha256)
        with self._lock:
            recent = self._recent.get(sha256)
        if recent is not None:
            return _content(recent[1])
        step = self.steps.lookup(sha256)
        if step is not None:
            return step
        return self._earlier.lookup(sha256) if self._earlier is not None else None

    def read(self, sha256: str, offset: int, count: int) -> bytes | None:
        """Return some bytes of a content that is here; None when it is not, or shorter."""
        found = self.lookup(sha256)
        if isinstance(found, Path):
            try:
                with found.open("rb") as file:
                    file.seek(offset)
                    data = file.read(count)
            except OSError:
                return None
        else:
            data = (found or b"")[offset : offset + count]
        return data if len(data) == count else None


def _content(state: ModuleState) -> bytes:
    return b"".join(bytes(chunk) for chunk in state_chunks(state))
