"""What a node answers to others: hello, what it holds, offers, and content by its hash.

One service per process; a peer and a bootstrap node run the same. Small requests are unary calls
of a Hivemind servicer. Content goes over a raw libp2p stream of our own framing (`messages.py`):
Hivemind's protobuf streams accept a message of any length, so that a hostile peer could fill the
memory of whoever reads one, and they copy every byte several times.

Failure modes: an upload to a peer that stops reading is broken off; requests beyond the slots are
answered "busy" with a time to come back; a malformed request is refused with one log line a
minute and peer.
"""

# No postponed annotations here: Hivemind reads the types of the rpc_* methods at run time.

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from dipaco.dht.certificate_check import encode_certificate
from dipaco.dht.certificates import Certificate
from dipaco.dht.repetition import Complaints
from dipaco.modules.state import StateReference
from dipaco.peer.owner.uplink import StreamMeter, Uplink
from hivemind.p2p import P2P, P2PContext, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto import runtime_pb2

from .content import ContentShelf, ContentSource, OpenContent
from .messages import (
    MAX_CERTIFICATES_BYTES,
    CallBackRequest,
    CertificatesReply,
    CertificatesRequest,
    FetchReply,
    FetchRequest,
    HeldContent,
    HelloReply,
    HelloRequest,
    HoldingsReply,
    HoldingsRequest,
    Message,
    MessageError,
    OfferReply,
    OfferRequest,
    decode,
    encode,
    read_message,
    write_message,
)
from .reachability import CallingBack
from .upload_slots import Upload, UploadSlots

logger = logging.getLogger("dipaco.peer.exchange.service")

# These names and that of the class are the names of the service on the wire.
NAMESPACE = "dipaco"
FETCH_HANDLE = "dipaco::fetch/1"

CHUNK_BYTES = 2**19
# Read from disk at once, on another thread; a multiple of a chunk.
READ_BYTES = 2**22
REQUEST_TIMEOUT_S = 10.0
CHUNK_TIMEOUT_S = 30.0
MAX_UPLOADS = 8
MAX_UPLOADS_PER_PEER = 2
# Streams with a fetch, those that are told "busy" among them.
MAX_STREAMS = 256
MAX_STREAMS_PER_PEER = 16
RETRY_AFTER_S = 1.0
COMPLAINT_PERIOD_S = 60.0
MAX_COMPLAINTS = 100
HANDLER_TIMEOUT_S = 10.0

MessageT = TypeVar("MessageT", bound=Message)
OfferHandler = Callable[[str, StateReference], bool]


class RunContent(ContentSource, Protocol):
    """What a process holds of a run: `HeldStates`."""

    def get(self, module: str) -> StateReference | None:
        """Return the newest state held of a module. Quick, from any thread."""
        ...


class ChainSource(Protocol):
    """What a process knows of where states come from: the certifier."""

    def chain(self, module: str, digest: str) -> Sequence[Certificate]:
        """Return the certificates of a state and of those before it. Quick, from any thread."""
        ...


def refuse_offer(peer: str, offered: StateReference) -> bool:
    """Refuse: the offer handler of a process that keeps nothing for others."""
    return False


class ExchangeService(ServicerBase):
    """Answers other peers. Lives on the exchange's event loop."""

    # ServicerBase caches these on the class and would let a subclass inherit stale ones.
    _rpc_handlers = None
    _stub_type = None

    def __init__(
        self,
        *,
        software: str,
        protocol_version: int,
        max_uploads: int = MAX_UPLOADS,
        max_uploads_per_peer: int = MAX_UPLOADS_PER_PEER,
        uplink: Uplink | None = None,
        system_time: Callable[[], float] = time.time,
    ) -> None:
        self.software = software
        self.protocol_version = protocol_version
        self.run_id: str | None = None
        self.held: RunContent | None = None
        self.chains: ChainSource | None = None
        self.offer_handler: OfferHandler = refuse_offer
        self.bytes_up = 0
        self._uplink = uplink or Uplink()
        self._slots = UploadSlots(max_uploads, max_uploads_per_peer)
        self._system_time = system_time
        self._shelf = ContentShelf()
        self._calling_back = CallingBack()
        self._p2p: P2P | None = None
        self._streams: Counter[str] = Counter()
        self._complaints = Complaints(COMPLAINT_PERIOD_S, MAX_COMPLAINTS)

    def set_source(self, held: RunContent, run_id: str, chains: ChainSource | None = None) -> None:
        """Serve a run's content from now on."""
        self._shelf.source = held
        self.held, self.run_id, self.chains = held, run_id, chains

    async def attach(self, p2p: P2P) -> None:
        """Register with the node's libp2p daemon."""
        self._p2p = p2p
        adding = self.add_p2p_handlers(p2p, namespace=NAMESPACE)
        await asyncio.wait_for(adding, HANDLER_TIMEOUT_S)
        adding = p2p.add_binary_stream_handler(FETCH_HANDLE, self._serve_fetch)
        await asyncio.wait_for(adding, HANDLER_TIMEOUT_S)

    async def detach(self, p2p: P2P, timeout_s: float) -> None:
        """Take the service back, if the daemon still answers."""
        removing = asyncio.gather(
            self.remove_p2p_handlers(p2p, namespace=NAMESPACE),
            p2p.remove_binary_stream_handler(FETCH_HANDLE),
            return_exceptions=True,
        )
        with contextlib.suppress(Exception):
            await asyncio.wait_for(removing, timeout_s)

    async def rpc_hello(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Tell the time and who this is; the same in every version of the protocol."""
        received_s = self._system_time()
        self._parse(HelloRequest, request, context)
        return _response(
            HelloReply(
                protocol=self.protocol_version,
                software=self.software[:64],
                received_s=received_s,
                sent_s=self._system_time(),
                run=self.run_id,
            )
        )

    async def rpc_holdings(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Tell what is held of a module at this moment, fresher than the DHT can."""
        asked = self._parse(HoldingsRequest, request, context)
        held = None
        if self.held is not None and asked.run == self.run_id:
            held = self.held.get(asked.module)
        return _response(HoldingsReply(held=HeldContent.of(held) if held is not None else None))

    async def rpc_certificates(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Tell who made a state out of which, and the same of those before it."""
        asked = self._parse(CertificatesRequest, request, context)
        chain: Sequence[Certificate] = ()
        if self.chains is not None and asked.run == self.run_id:
            chain = self.chains.chain(asked.module, asked.digest)[: asked.count]
        return _response(CertificatesReply(certificates=_as_fits(chain)))

    async def rpc_offer(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Take note of a state that the caller asks us to fetch from it."""
        offer = self._parse(OfferRequest, request, context)
        accepted = False
        if self.run_id is not None and offer.run == self.run_id:
            try:
                peer = context.remote_id.to_base58()
                accepted = bool(self.offer_handler(peer, offer.held.reference))
            except Exception as error:
                self._complain(context.remote_id.to_base58(), "an offer", error)
        return _response(OfferReply(accepted=accepted))

    async def rpc_call_back(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Try to open a new connection to the caller, where it says that it can be called."""
        asked = self._parse(CallBackRequest, request, context)
        seen: list[str] = []
        if self._p2p is not None:
            found = await asyncio.wait_for(self._p2p.list_peers(), HANDLER_TIMEOUT_S)
            caller = (info for info in found if info.peer_id == context.remote_id)
            seen = [str(address) for info in caller for address in info.addrs]
        peer = context.remote_id.to_base58()
        return _response(await self._calling_back.answer(peer, asked.addresses, seen))

    def _parse(
        self, message: type[MessageT], request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> MessageT:
        try:
            return decode(message, request.metadata)
        except MessageError as error:
            self._complain(context.remote_id.to_base58(), f"a {message.__name__}", error)
            raise

    def _complain(self, peer: str, what: str, error: Exception) -> None:
        """Log a refusal, once a minute for each peer."""
        logger.log(self._complaints.level(peer), "refused %s from %s: %s", what, peer, error)

    async def _serve_fetch(
        self, stream: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one fetch: a request, a reply, and the bytes."""
        peer = stream.peer_id.to_base58()
        if self._streams[peer] >= MAX_STREAMS_PER_PEER or self._streams.total() >= MAX_STREAMS:
            writer.transport.abort()
            return
        self._streams[peer] += 1
        try:
            request = await read_message(reader, FetchRequest, REQUEST_TIMEOUT_S)
            await self._answer_fetch(peer, request, writer)
            # Who asked closes the stream: when this end does, p2pd may lose the last of the answer.
            await asyncio.wait_for(reader.read(1), CHUNK_TIMEOUT_S)
            writer.close()
        except MessageError as error:
            self._complain(peer, "a FetchRequest", error)
            writer.close()
        except (TimeoutError, OSError, EOFError, RuntimeError) as error:
            logger.debug("upload to %s ended: %r", peer, error)
            writer.transport.abort()
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            self._streams -= Counter([peer])

    async def _answer_fetch(
        self, peer: str, request: FetchRequest, writer: asyncio.StreamWriter
    ) -> None:
        upload = None
        if self._uplink.serves:
            upload = self._slots.take(peer, writer.transport.abort)
        if upload is None:
            await _reply(writer, FetchReply(status="busy", retry_after_s=RETRY_AFTER_S))
            return
        try:
            async with self._shelf.open(request.sha256) as content:
                if content is None:
                    await _reply(writer, FetchReply(status="absent"))
                elif request.offset > content.size_bytes:
                    beyond = FetchReply(status="beyond", total_bytes=content.size_bytes)
                    await _reply(writer, beyond)
                else:
                    await _reply(writer, FetchReply(status="ok", total_bytes=content.size_bytes))
                    await self._send(content, request.offset, writer, upload)
        finally:
            self._slots.give_back(upload)

    async def _send(
        self, content: OpenContent, offset: int, writer: asyncio.StreamWriter, upload: Upload
    ) -> None:
        meter = StreamMeter(self._uplink, is_reduce=False)
        while offset < content.size_bytes:
            data = await content.read(offset, min(READ_BYTES, content.size_bytes - offset))
            if not data:
                raise EOFError("the file was cut off while it was served")
            view = memoryview(data)
            start = 0
            while start < len(view):
                # What is known of the line changes while it is used.
                step = min(CHUNK_BYTES, self._uplink.piece_bytes or CHUNK_BYTES)
                chunk = view[start : start + step]
                start += step
                await self._uplink.content(len(chunk))
                began_s = time.monotonic()
                writer.write(chunk)
                await asyncio.wait_for(writer.drain(), CHUNK_TIMEOUT_S)
                meter.wrote(len(chunk), began_s, time.monotonic())
                self.bytes_up += len(chunk)
                self._slots.sent(upload, len(chunk))
            offset += len(view)


def _as_fits(certificates: Sequence[Certificate]) -> list[bytes]:
    """Return the bytes of as many certificates as fit in one reply, the first always."""
    encoded: list[bytes] = []
    left_bytes = MAX_CERTIFICATES_BYTES // 2
    for certificate in certificates:
        data = encode_certificate(certificate)
        left_bytes -= len(data)
        if encoded and left_bytes < 0:
            break
        encoded.append(data)
    return encoded


def _response(message: Message) -> runtime_pb2.ExpertResponse:
    return runtime_pb2.ExpertResponse(metadata=encode(message))


async def _reply(writer: asyncio.StreamWriter, message: FetchReply) -> None:
    write_message(writer, message)
    await asyncio.wait_for(writer.drain(), CHUNK_TIMEOUT_S)
