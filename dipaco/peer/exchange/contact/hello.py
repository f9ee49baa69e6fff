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
class Hello:
    """A peer's answer to a hello."""

    run: str | None
    """The run that it takes part in; None while it joins."""
    clock: ClockSample


async def say_hello(
    transport: Transport, peer: str, timeout_s: float, *, any_version: bool = False
) -> Hello:
    """Say hello once. Raises as `call` does, also for a peer of another version, whose clock may
    be asked for all the same (`any_version`)."""
    request = HelloRequest(protocol=PROTOCOL_VERSION, software=SOFTWARE[:64])
    asked_s = time.time()
    reply = await call(transport, peer, request, HelloReply, timeout_s)
    if reply.protocol != PROTOCOL_VERSION and not any_version:
        software_shown = "".join(c if c.isprintable() else "?" for c in reply.software)
        raise ProtocolVersionError(
            f"peer {peer} is {software_shown} with protocol {reply.protocol}, this is {SOFTWARE} "
            f"with protocol {PROTOCOL_VERSION}; {protocol_remedy(reply.protocol)}"
        )
    return Hello(reply.run, sample_of(asked_s, reply.received_s, reply.sent_s, time.time()))


async def clock_samples(
    transport: Transport, peer: str, count: int, timeout_s: float
) -> tuple[ClockSample, ...]:
    """Say hello `count` times, one after the other; what was measured until a failure counts."""
    samples: list[ClockSample] = []

    async def measure() -> None:
        for _ in range(count):
            hello = await say_hello(transport, peer, timeout_s, any_version=True)
            samples.append(hello.clock)

    with contextlib.suppress(NetworkError, ProtocolVersionError, asyncio.TimeoutError):
        await asyncio.wait_for(measure(), timeout_s)
    return tuple(samples)
