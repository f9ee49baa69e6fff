"""Saying hello to a peer: who it is, which protocol it speaks, and what its clock says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from dipaco.modules.errors import NetworkError, ProtocolVersionError
from dipaco.modules.plan import PROTOCOL_VERSION, protocol_remedy
from hivemind.p2p import P2P, PeerID
from hivemind.proto import runtime_pb2

from .clock import ClockSample, sample_of
from .messages import HelloReply, HelloRequest, Message, MessageError, decode, encode
from .reasons import short_reason, speaks_no_dipaco, was_reset
from .service import NAMESPACE, ExchangeService

SOFTWARE = f"dipaco/{version('dipaco')}"
ReplyT = TypeVar("ReplyT", bound=Message)

RESET_WAIT_S, LONGEST_RESET_WAIT_S = 0.05, 0.4
"""How long to wait after the first reset of a stream; twice as long after each further one, up to
the second."""
RECONNECT_AFTER_S = 4.0
"""After so many seconds of resets, or half of a call's time, the connection is made anew."""


@dataclass(frozen=True)
class Hello:
    """A peer's answer to a hello."""

    peer_id: str
    protocol: int
    software: str
    run: str | None
    """The run that it takes part in; None while it joins."""
    clock: ClockSample

    def check_protocol(self, software: str, protocol_version: int) -> None:
        """Raise `ProtocolVersionError` unless the peer speaks our version."""
        if self.protocol != protocol_version:
            raise ProtocolVersionError(
                f"peer {self.peer_id} is {self.software} with protocol {self.protocol}, this is "
                f"{software} with protocol {protocol_version}; "
                f"{protocol_remedy(self.protocol, protocol_version)}"
            )


async def ask(
    p2p: P2P, peer: str, method: str, message: Message, reply: type[ReplyT], timeout_s: float
) -> ReplyT:
    """Call one unary method of a peer's exchange service.

    Raises `NetworkError` when it does not answer or answers nonsense, and `ProtocolVersionError`
    when it is reached but knows no such service.
    """
    try:
        peer_id = PeerID.from_base58(peer)
        stub = ExchangeService.get_stub(p2p, peer_id, namespace=NAMESPACE)
        request = runtime_pb2.ExpertRequest(metadata=encode(message))

        async def disconnect() -> None:
            await p2p._client.disconnect(peer_id)

        response = await _unless_reset(getattr(stub, method), request, timeout_s, disconnect)
        return decode(reply, response.metadata)
    except MessageError as error:
        raise NetworkError(f"peer {peer} answered nonsense: {error}") from None
    except Exception as error:
        if speaks_no_dipaco(error):
            raise ProtocolVersionError(
                f"peer {peer} does not speak dipaco's protocol {PROTOCOL_VERSION}; it may be a "
                "plain hivemind node or another version of dipaco"
            ) from error
        raise NetworkError(f"peer {peer}: {short_reason(error)}") from error


async def _unless_reset(
    call: Callable[..., Awaitable[runtime_pb2.ExpertResponse]],
    request: runtime_pb2.ExpertRequest,
    timeout_s: float,
    disconnect: Callable[[], Awaitable[None]],
) -> runtime_pb2.ExpertResponse:
    """Make a call again for as long as its stream is reset, in `timeout_s` at most.

    Before it has learned a peer's protocols libp2p opens a stream in the hope of the best, and one
    who does not speak ours resets it. Once they are known the answer is that; it takes moments, and
    seconds on a busy machine. What a peer says of its protocols when they change can overtake what
    it said before, and is never said again: a new connection is, with all of them.
    """
    began_s = time.monotonic()
    until_s, wait_s = began_s + timeout_s, RESET_WAIT_S
    reconnect_s = began_s + min(RECONNECT_AFTER_S, timeout_s / 2)
    while True:
        try:
            return await call(request, timeout=until_s - time.monotonic())
        except Exception as error:
            if not was_reset(error) or time.monotonic() + wait_s > until_s:
                raise
        if time.monotonic() >= reconnect_s:
            reconnect_s = until_s
            with contextlib.suppress(Exception):
                await asyncio.wait_for(disconnect(), until_s - time.monotonic())
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_RESET_WAIT_S)


async def say_hello(
    p2p: P2P, peer: str, software: str, protocol_version: int, timeout_s: float
) -> Hello:
    """Say hello once. Raises as `ask` does; the protocol version is not checked."""
    request = HelloRequest(protocol=protocol_version, software=software[:64])
    asked_s = time.time()
    reply = await ask(p2p, peer, "rpc_hello", request, HelloReply, timeout_s)
    sample = sample_of(asked_s, reply.received_s, reply.sent_s, time.time())
    software_shown = "".join(c if c.isprintable() else "?" for c in reply.software)
    return Hello(peer, reply.protocol, software_shown, reply.run, sample)


async def clock_samples(
    p2p: P2P, peer: str, count: int, software: str, protocol_version: int, timeout_s: float
) -> tuple[ClockSample, ...]:
    """Say hello `count` times, one after the other; what was measured until a failure counts."""
    samples: list[ClockSample] = []

    async def measure() -> None:
        for _ in range(count):
            hello = await say_hello(p2p, peer, software, protocol_version, timeout_s)
            samples.append(hello.clock)

    with contextlib.suppress(NetworkError, ProtocolVersionError, asyncio.TimeoutError):
        await asyncio.wait_for(measure(), timeout_s)
    return tuple(samples)
