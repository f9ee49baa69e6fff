"""What the parts of a peer need of each other, and no more: a test gives each a small stand-in."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from dipaco.dht.coverage import Scope
from dipaco.dht.view import SwarmView


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


class Fetcher(Protocol):
    """Gets the blobs of the run."""

    def all_blobs(self) -> tuple[str, ...]:
        """The hashes that the run consists of."""
        ...

    def has_blob(self, sha256: str) -> bool:
        """Whether a blob is on this disk."""
        ...

    def blob(self, sha256: str) -> Path:
        """Fetch a blob. Raises a `DipacoError` when nobody gives it."""
        ...
