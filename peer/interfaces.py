"""What the parts of a peer need of each other, and no more: a test gives each a small stand-in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from dipaco.dht.coverage import Scope
from dipaco.dht.view import SwarmView
from dipaco.modules.state import ModuleState, StateReference


class Swarm(Protocol):
    """The swarm as this peer sees it, and its way to say that something changed: the publisher."""

    @property
    def view(self) -> SwarmView:
        """The newest view. Raises `NetworkError` before the first."""
        ...

    @property
    def period_s(self) -> float:
        """Seconds between two refreshes."""
        ...

    def watch(self, scope: Scope) -> None:
        """Read this part of the swarm from the next time on."""
        ...

    def refresh(self, further: Collection[int] = ()) -> SwarmView:
        """Publish and read, and return a view that is newer than this call.

        It covers the buckets `further` too.
        """
        ...

    def announce(self) -> None:
        """Publish soon."""
        ...

    def announce_blobs(self) -> None:
        """Publish the blobs held here soon."""
        ...


class StateFetcher(Protocol):
    """Gets states from other peers: the fetcher."""

    def state(
        self, wanted: StateReference, holders: Sequence[str], *, is_copy: bool = False
    ) -> ModuleState:
        """Fetch and check a state, for own use or as a copy for others.

        Raises a `DipacoError` when no holder gives it.
        """
        ...


class Fetcher(StateFetcher, Protocol):
    """Gets the blobs of the run too."""

    def all_blobs(self) -> tuple[str, ...]:
        """The hashes that the run consists of."""
        ...

    def has_blob(self, sha256: str) -> bool:
        """Whether a blob is on this disk."""
        ...

    def blob(self, sha256: str) -> Path:
        """Fetch a blob. Raises a `DipacoError` when nobody gives it."""
        ...


class StateHolder(Protocol):
    """Serves states to others: the held states."""

    def get(self, module: str) -> StateReference | None:
        """What is held of a module."""
        ...

    def load(self, module: str) -> ModuleState | None:
        """The held state itself, from memory or disk."""
        ...

    def hold(self, state: ModuleState) -> None:
        """Serve a state from now on, from memory."""
        ...

    def save(self, state: ModuleState) -> None:
        """Write a state to disk, and serve it from there."""
        ...

    def save_all(self) -> None:
        """Write what is only in memory."""
        ...

    def drop(self, module: str) -> None:
        """Serve a module no more, and remove its states from the disk."""
        ...

    def read(self, sha256: str, offset: int, count: int) -> bytes | None:
        """Some bytes of a state that is served."""
        ...
