"""Saying hello to a peer: who it is, which protocol it speaks, and what its clock says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from importlib.metadata import version

from dipaco.base.errors import NetworkError, ProtocolVersionError
from dipaco.peer.exchange.streams.calls import call
from dipaco.peer.exchange.streams.messages import HelloReply, HelloRequest
from dipaco.peer.exchange.streams.transport import Transport
from dipaco.protocol.plan import PROTOCOL_VERSION, protocol_remedy

from .clock import ClockSample, sample_of

SOFTWARE = f"dipaco/{version('dipaco')}"


@dataclass(frozen=True)
class Greeting:
    """What this node says of itself."""

    software: str = SOFTWARE
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Hello:
    """A peer's answer to a hello."""

    peer_id: str
    protocol: int
    software: str
    run: str | None
    """The run that it takes part in; None while it joins."""
    clock: ClockSample

    def check_protocol(self, me: Greeting) -> None:
        """Raise `ProtocolVersionError` unless the peer speaks our version."""
        if self.protocol != me.protocol:
            raise ProtocolVersionError(
                f"peer {self.peer_id} is {self.software} with protocol {self.protocol}, this is "
                f"{me.software} with protocol {me.protocol}; "
                f"{protocol_remedy(self.protocol, me.protocol)}"
            )


async def say_hello(transport: Transport, peer: str, me: Greeting, timeout_s: float) -> Hello:
    """Say hello once. Raises as `call` does; the protocol version is not checked."""
    request = HelloRequest(protocol=me.protocol, software=me.software[:64])
    asked_s = time.time()
    reply = await call(transport, peer, request, HelloReply, timeout_s)
    sample = sample_of(asked_s, reply.received_s, reply.sent_s, time.time())
    software_shown = "".join(c if c.isprintable() else "?" for c in reply.software)
    return Hello(peer, reply.protocol, software_shown, reply.run, sample)


async def clock_samples(
    transport: Transport, peer: str, count: int, me: Greeting, timeout_s: float
) -> tuple[ClockSample, ...]:
    """Say hello `count` times, one after the other; what was measured until a failure counts."""
    samples: list[ClockSample] = []

    async def measure() -> None:
        for _ in range(count):
            samples.append((await say_hello(transport, peer, me, timeout_s)).clock)

    with contextlib.suppress(NetworkError, ProtocolVersionError, asyncio.TimeoutError):
        await asyncio.wait_for(measure(), timeout_s)
    return tuple(samples)
