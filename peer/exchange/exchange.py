"""The exchange: tell, ask, get and put, a synchronous facade over one thread (skeleton)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dipaco.dht.chain import Head, Row, Step
from dipaco.modules.blobs import BlobStore
from dipaco.modules.plan import PROTOCOL_VERSION
from dipaco.peer.owner.uplink import Uplink

from .chain_store import ChainStore
from .clock import ClockSample
from .content import ContentSource
from .contribution_files import ContributionFiles
from .hello import Hello
from .messages import CallBackReply
from .transport import Transport
from .verify import RowCheck

CALL_TIMEOUT_S = 5.0
CALL_BACK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ServedRun:
    """What others are answered about a run, and what their answers are checked by."""

    run_id: str
    content: ContentSource
    """States and blobs by hash: `HeldStates`. Contributions are looked up beside it."""
    chains: ChainStore
    check: RowCheck
    contributions: ContributionFiles | None = None
    """None: nothing is taken from others (`put` is refused)."""
    admission: bytes | None = None
    """This peer's own; None for who only reads."""


@dataclass(frozen=True)
class Answer:
    """What a peer says of a module; checked."""

    steps: tuple[Step, ...] = ()
    rows: tuple[Row, ...] = ()
    has_more: bool = False
    held: Head | None = None


class OnTold(Protocol):
    """Hears what others tell. Called on the exchange's thread; returns at once."""

    def __call__(
        self, peer: str, module: str, rows: tuple[Row, ...], steps: tuple[Step, ...], keep: bool
    ) -> None: ...


class Exchange:
    """One node's exchange. Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        *,
        software: str = "dipaco",
        protocol_version: int = PROTOCOL_VERSION,
        uplink: Uplink | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start to answer others. Raises `NetworkError`."""

    def stop(self) -> None:
        """Stop answering, within two seconds."""

    @property
    def peer_id(self) -> str:
        """This node's id."""
        raise NotImplementedError

    @property
    def bytes_up(self) -> int:
        """Sent since the start."""
        raise NotImplementedError

    @property
    def bytes_down(self) -> int:
        """Received since the start."""
        raise NotImplementedError

    def connected_peers(self) -> tuple[str, ...]:
        """Return the ids of the peers that are connected. Raises `NetworkError`."""
        raise NotImplementedError

    def serve_run(self, run: ServedRun) -> None:
        """Answer about this run from now on, and ask others about it."""

    def listen(self, on_told: OnTold) -> None:
        """Tell of rows and steps that others tell, once they are checked."""

    def hello(self, peer: str, timeout_s: float = CALL_TIMEOUT_S) -> Hello:
        """Say hello. Raises `NetworkError`, or `ProtocolVersionError` for another version."""
        raise NotImplementedError

    def clock_samples(
        self, peers: Sequence[str], count: int, timeout_s: float
    ) -> dict[str, tuple[ClockSample, ...]]:
        raise NotImplementedError

    def call_back(
        self, peer: str, addresses: Sequence[str], timeout_s: float = CALL_BACK_TIMEOUT_S
    ) -> CallBackReply:
        raise NotImplementedError

    def tell(
        self,
        peers: Sequence[str],
        module: str,
        rows: Sequence[Row] = (),
        steps: Sequence[Step] = (),
        keep: bool = False,
    ) -> None:
        """Tell peers of rows and steps; returns at once, what does not arrive is not reported."""

    def ask(
        self, peer: str, module: str, locator: Sequence[str], timeout_s: float = CALL_TIMEOUT_S
    ) -> Answer | None:
        """Ask which steps come after some; blocks. None: the peer is silent."""
        raise NotImplementedError

    def put(self, peer: str, row: Row, data: bytes | Path, timeout_s: float = 60.0) -> bool:
        """Push the file of the own row to a mailbox; blocks. True when it has it."""
        raise NotImplementedError

    def get(
        self,
        sha256: str,
        peers: Sequence[str],
        into: BlobStore,
        *,
        greatest_bytes: int,
        timeout_s: float,
        mirrors: Sequence[str] = (),
        is_urgent: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Path:
        """Fetch content by hash; blocks. Raises `NetworkError`, `IntegrityError`, `StorageError`."""
        raise NotImplementedError

    def gather(
        self,
        rows: Sequence[Row],
        others: Mapping[str, tuple[str, ...]],
        *,
        check: Callable[[Row, Path], None],
        on_done: Callable[[Row, str, bool], None],
        timeout_s: float,
    ) -> None:
        """Get the files of rows into `contributions`; returns at once.

        :param others: by file, peers that may have it beside its owner
        :param check: raises `IntegrityError` when a file is no contribution; on a thread of its own
        :param on_done: hears, once for each row and on another thread, the reason why not (""), and
            whether the file came and was refused
        """
