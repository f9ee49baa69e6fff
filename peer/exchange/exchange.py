"""The exchange: serving content and fetching it, greeting and asking other peers.

A synchronous facade over one thread with its own event loop, so that others are served while this
process trains. Started by every joined process (`node.py`) before the run is known; it serves a
run once `set_source` was called. Every call is bounded in time and raises a `DipacoError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import NetworkError
from dipaco.modules.plan import PROTOCOL_VERSION
from dipaco.modules.state import StateReference
from dipaco.peer.owner.uplink import Uplink
from hivemind.p2p import P2P, PeerID

from .clock import ClockSample
from .hello import SOFTWARE, Hello, ask, clock_samples, say_hello
from .loop_thread import LoopThread
from .messages import (
    CallBackReply,
    CallBackRequest,
    CertificatesReply,
    CertificatesRequest,
    FetchReply,
    FetchRequest,
    HeldContent,
    HoldingsReply,
    HoldingsRequest,
    OfferReply,
    OfferRequest,
    read_message,
    write_message,
)
from .reasons import short_reason
from .service import (
    FETCH_HANDLE,
    MAX_UPLOADS,
    MAX_UPLOADS_PER_PEER,
    ChainSource,
    ExchangeService,
    OfferHandler,
    RunContent,
)
from .transfer import (
    ContentAbsent,
    ContentStream,
    MirrorSource,
    OffsetBeyondEnd,
    Source,
    SourceBusy,
    download,
    spread,
)

logger = logging.getLogger("dipaco.peer.exchange.exchange")

CALL_TIMEOUT_S = 5.0
# Longer than the other peer tries to call this one.
CALL_BACK_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 10.0
DETACH_TIMEOUT_S = 0.4
MAX_DOWNLOADS = 4
# Of copies that others offer; these wait for each other, and nothing else waits for them.
MAX_COPY_DOWNLOADS = 2
# A call's own limit is inside; this much later the loop itself must be stuck.
GRACE_S = 10.0
# Checking the hash of a large download begins before its time is up and may end after it.
COMMIT_GRACE_S = 300.0


class Exchange:
    """One node's exchange. Thread-safe."""

    def __init__(
        self,
        dht: GuardedDHT,
        *,
        software: str = SOFTWARE,
        protocol_version: int = PROTOCOL_VERSION,
        max_uploads: int = MAX_UPLOADS,
        max_uploads_per_peer: int = MAX_UPLOADS_PER_PEER,
        uplink: Uplink | None = None,
    ) -> None:
        self._dht = dht
        self._software = software
        self._protocol_version = protocol_version
        self._thread = LoopThread("exchange", dht.check)
        self._service = ExchangeService(
            software=software,
            protocol_version=protocol_version,
            max_uploads=max_uploads,
            max_uploads_per_peer=max_uploads_per_peer,
            uplink=uplink,
        )
        self._p2p: P2P | None = None
        self._download_slots = asyncio.Semaphore(MAX_DOWNLOADS)
        self._copy_slots = asyncio.Semaphore(MAX_COPY_DOWNLOADS)
        self._copies = 0
        self._bytes_down = 0

    def start(self) -> None:
        """Start to answer others. Raises `NetworkError` when DHT process or p2pd don't answer."""
        self._thread.start()
        try:
            self._thread.call(self._attach(), START_TIMEOUT_S)
        except BaseException:
            self._thread.stop()
            raise

    async def _attach(self) -> None:
        self._p2p = await self._dht.replicate_p2p()
        try:
            await self._service.attach(self._p2p)
        except Exception as error:
            reason = str(error) or "it is silent"
            raise NetworkError(f"p2pd does not answer: {reason}") from error

    def stop(self) -> None:
        """Stop answering, within two seconds; calls under way end with a `NetworkError`."""
        if not self._thread.running:
            return
        with contextlib.suppress(NetworkError):
            self._thread.call(self._detach(), 2 * DETACH_TIMEOUT_S)
        self._thread.stop()

    async def _detach(self) -> None:
        p2p, self._p2p = self._p2p, None
        if p2p is not None:
            await self._service.detach(p2p, DETACH_TIMEOUT_S)
            await p2p.shutdown()

    def _connection(self) -> P2P:
        if self._p2p is None:
            raise NetworkError("the exchange is not running")
        return self._p2p

    @property
    def peer_id(self) -> str:
        """This node's id."""
        peer_id: PeerID = self._connection().peer_id
        return str(peer_id.to_base58())

    @property
    def bytes_up(self) -> int:
        """Content sent since the start."""
        return self._service.bytes_up

    @property
    def bytes_down(self) -> int:
        """Content received since the start."""
        return self._bytes_down

    def set_source(self, held: RunContent, run_id: str, chains: ChainSource | None = None) -> None:
        """Serve what `held` finds of the run `run_id`, and ask others about this run.

        `chains` knows the certificates of its states.
        """
        self._service.set_source(held, run_id, chains)

    def set_offer_handler(self, handler: OfferHandler) -> None:
        """Call `handler(offer)` on the exchange's thread for every state offered.

        It returns at once whether the state is wanted, and has it fetched on another thread.
        """
        self._service.offer_handler = handler

    def connected_peers(self) -> tuple[str, ...]:
        """Return the ids of the peers that the libp2p daemon is connected to."""

        async def peers() -> tuple[str, ...]:
            try:
                found = await asyncio.wait_for(self._connection().list_peers(), CALL_TIMEOUT_S)
            except Exception as error:
                raise NetworkError("p2pd does not answer") from error
            return tuple(sorted(info.peer_id.to_base58() for info in found))

        return self._thread.call(peers(), CALL_TIMEOUT_S + GRACE_S)

    def hello(self, peer: str, timeout_s: float = CALL_TIMEOUT_S) -> Hello:
        """Say hello. Raises `NetworkError`, or `ProtocolVersionError` for another version."""

        async def greet() -> Hello:
            return await say_hello(
                self._connection(), peer, self._software, self._protocol_version, timeout_s
            )

        hello = self._thread.call(greet(), timeout_s + GRACE_S)
        hello.check_protocol(self._software, self._protocol_version)
        return hello

    def clock_samples(
        self, peers: Sequence[str], count: int, timeout_s: float
    ) -> dict[str, tuple[ClockSample, ...]]:
        """Look at the clocks of all `peers` at once; those that do not answer are left out."""

        async def measure() -> list[tuple[ClockSample, ...]]:
            p2p, version = self._connection(), self._protocol_version
            return await asyncio.gather(
                *(clock_samples(p2p, p, count, self._software, version, timeout_s) for p in others)
            )

        others = [peer for peer in peers if peer != self.peer_id]
        taken = self._thread.call(measure(), timeout_s + GRACE_S)
        return {peer: samples for peer, samples in zip(others, taken, strict=True) if samples}

    def holdings(
        self, peer: str, module: str, timeout_s: float = CALL_TIMEOUT_S
    ) -> StateReference | None:
        """Ask what a peer holds of a module of this run now. Raises `NetworkError`.

        A reply about another module is refused like a malformed one.
        """

        async def look() -> HoldingsReply:
            request = HoldingsRequest(run=self._run_id(), module=module)
            p2p = self._connection()
            return await ask(p2p, peer, "rpc_holdings", request, HoldingsReply, timeout_s)

        held = self._thread.call(look(), timeout_s + GRACE_S).held
        if held is None:
            return None
        if held.module != module:
            raise NetworkError(f"peer {peer} answered nonsense: {held.module} instead of {module}")
        return held.reference

    def certificates(
        self,
        peer: str,
        module: str,
        digest: str,
        count: int,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Sequence[bytes]:
        """Ask for the certificates of a state and of those before it, the newest first.

        At most `count` of them come; they are not checked. Raises `NetworkError`.
        """

        async def look() -> CertificatesReply:
            request = CertificatesRequest(
                run=self._run_id(), module=module, digest=digest, count=count
            )
            p2p = self._connection()
            return await ask(p2p, peer, "rpc_certificates", request, CertificatesReply, timeout_s)

        return self._thread.call(look(), timeout_s + GRACE_S).certificates

    def offer(self, peer: str, held: StateReference, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Ask a peer to fetch a state from here; True when it will.

        The state has to be in the source. That the peer has it, its `holdings` tell.
        Raises `NetworkError`.
        """

        async def propose() -> OfferReply:
            request = OfferRequest(run=self._run_id(), held=HeldContent.of(held))
            p2p = self._connection()
            return await ask(p2p, peer, "rpc_offer", request, OfferReply, timeout_s)

        return self._thread.call(propose(), timeout_s + GRACE_S).accepted

    def call_back(
        self, peer: str, addresses: Sequence[str], timeout_s: float = CALL_BACK_TIMEOUT_S
    ) -> CallBackReply:
        """Ask a peer to call this one at some addresses. Raises a `DipacoError`."""

        async def request() -> CallBackReply:
            question = CallBackRequest(addresses=tuple(addresses))
            p2p = self._connection()
            return await ask(p2p, peer, "rpc_call_back", question, CallBackReply, timeout_s)

        return self._thread.call(request(), timeout_s + GRACE_S)

    def sample(
        self, peer: str, sha256: str, offset: int, count: int, timeout_s: float = CALL_TIMEOUT_S
    ) -> bytes | None:
        """Fetch `count` bytes of a content from a peer, which shows that the peer has them.

        None when it is busy, or sends fewer. Raises `NetworkError` when it does not hold the
        content or does not answer.
        """

        async def take() -> bytes:
            stream = await self.open_stream(peer, sha256, offset)
            try:
                data, wanted = bytearray(), min(count, stream.total_bytes - offset)
                while len(data) < wanted and (more := await stream.read(wanted - len(data))):
                    data += more
                return bytes(data)
            finally:
                stream.close()

        async def bounded() -> bytes | None:
            try:
                data = await asyncio.wait_for(take(), timeout_s)
            except SourceBusy:
                return None
            except Exception as error:
                what = f"peer {peer} does not give {sha256[:12]}"
                raise NetworkError(f"{what}: {short_reason(error)}") from None
            self._count_down(len(data))
            return data if len(data) == count else None

        return self._thread.call(bounded(), timeout_s + GRACE_S)

    def fetch(
        self,
        sha256: str,
        holders: Sequence[str],
        destination: BlobStore,
        *,
        max_bytes: int,
        timeout_s: float,
        mirrors: Sequence[str] = (),
        is_copy: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Path:
        """Fetch content by hash from peers, then from mirrors; see `transfer.download`.

        What is only to be kept for others (`is_copy`) has download slots of its own, and is given
        up when it comes slowly while other copies wait. Blocks for `timeout_s` at most (and for
        checking the hash at the end). Raises `NetworkError`, `IntegrityError`, `StorageError`.
        """
        if destination.has(sha256):
            return destination.path(sha256)
        sources: list[Source] = [
            _PeerSource(self, peer) for peer in spread(sha256, holders, self.peer_id)
        ]
        sources += [MirrorSource(address) for address in mirrors]

        async def run() -> Path:
            self._copies += is_copy
            try:
                return await download(
                    sha256,
                    sources,
                    destination,
                    max_bytes=max_bytes,
                    timeout_s=timeout_s,
                    on_bytes=self._count_down,
                    slots=self._copy_slots if is_copy else self._download_slots,
                    on_progress=on_progress,
                    others_wait=lambda: is_copy and self._copies > MAX_COPY_DOWNLOADS,
                )
            finally:
                self._copies -= is_copy

        return self._thread.call(run(), timeout_s + COMMIT_GRACE_S)

    def _count_down(self, count: int) -> None:
        self._bytes_down += count

    def _run_id(self) -> str:
        run_id = self._service.run_id
        assert run_id is not None, "set_source comes first"
        return run_id

    async def open_stream(self, peer: str, sha256: str, offset: int) -> ContentStream:
        """Begin to fetch from a peer; for `_PeerSource`, on the exchange's loop."""
        p2p = self._connection()
        _, reader, writer = await p2p.call_binary_stream_handler(
            PeerID.from_base58(peer), FETCH_HANDLE
        )
        try:
            write_message(writer, FetchRequest(sha256=sha256, offset=offset))
            await writer.drain()
            reply = await read_message(reader, FetchReply, REPLY_TIMEOUT_S)
            if reply.status == "absent":
                raise ContentAbsent
            if reply.status == "busy":
                raise SourceBusy(reply.retry_after_s)
            if reply.status == "beyond":
                raise OffsetBeyondEnd
        except BaseException:
            writer.close()
            raise
        return _PeerStream(reader, writer, reply.total_bytes)


class _PeerSource:
    """A peer as a source of a download."""

    def __init__(self, exchange: Exchange, peer: str) -> None:
        self._exchange = exchange
        self._peer = peer
        self.name = f"peer {peer}"

    async def open(self, sha256: str, offset: int) -> ContentStream:
        """Ask the peer for the content from `offset` on."""
        return await self._exchange.open_stream(self._peer, sha256, offset)


class _PeerStream:
    """Content on its way from a peer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, total_bytes: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.total_bytes = total_bytes

    async def read(self, count: int) -> bytes:
        """Return up to `count` bytes."""
        return await self._reader.read(count)

    def close(self) -> None:
        """Close the stream; the peer's upload ends with it."""
        self._writer.close()
