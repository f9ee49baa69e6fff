"""What the parts of a peer need of each other, and no more: a test gives each a small stand-in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from dipaco.dht.chain import Row, Step
from dipaco.dht.coverage import Scope
from dipaco.dht.view import SwarmView

from .exchange.exchange import Answer
from .member.events import Event

Report = Callable[[Event], None]
"""Lets an event happen to the member soon. From any thread."""


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


class OtherPeers(Protocol):
    """Short messages to other peers: the exchange."""

    def tell(
        self,
        peers: Sequence[str],
        module: str,
        rows: Sequence[Row] = (),
        steps: Sequence[Step] = (),
        keep: bool = False,
    ) -> None:
        """Tell peers of rows and steps; returns at once."""
        ...

    def ask(self, peer: str, module: str, locator: Sequence[str]) -> Answer | None:
        """Ask which steps come after some; blocks. None: the peer is silent."""
        ...

    def put(self, peer: str, row: Row, data: bytes | Path) -> bool:
        """Push the file of the own row to a mailbox; blocks. True when it has it."""
        ...


class Chains(Protocol):
    """What is told to those who ask: the chain store."""

    def add_verified(self, steps: Sequence[Step]) -> None:
        """Take in steps whose rows were checked."""
        ...

    def note_rows(self, rows: Sequence[Row]) -> None:
        """Take in checked rows."""
        ...


class Files(Protocol):
    """Where contributions lie: the contribution files."""

    def find(self, sha256: str) -> Path | None:
        """A file by its hash."""
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
