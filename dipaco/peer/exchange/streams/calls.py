"""Asking a peer: open a stream, send a request, read the reply, close the stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TypeVar

from dipaco.base.errors import NetworkError, ProtocolVersionError
from dipaco.protocol.plan import PROTOCOL_VERSION

from .messages import Message, MessageError, Request, decode, framed, read_frame
from .reasons import short_reason, speaks_no_dipaco, was_reset
from .transport import Stream, Transport

# One name for all versions of the protocol: the hello in it is how they tell each other apart.
PROTOCOL_NAME = "/dipaco/exchange"
_ReplyT = TypeVar("_ReplyT", bound=Message)

_RESET_WAIT_S, _LONGEST_RESET_WAIT_S = 0.05, 0.4
"""How long to wait after the first reset of a stream; twice as long after each further one, up to
the second."""
_RECONNECT_AFTER_S = 4.0
"""After so many seconds of resets, or half of a call's time, the connection is made anew."""


class TurnedAway(NetworkError):
    """The peer is there, and hears only whom it knows to be admitted."""


async def call(
    transport: Transport, peer: str, request: Request, reply: type[_ReplyT], timeout_s: float
) -> _ReplyT:
    """Ask a peer and return its reply.

    Raises `NetworkError` when it does not answer or answers nonsense, `TurnedAway` when it answers
    only admitted peers, and `ProtocolVersionError` when it is reached but knows no such service.
    """
    stream, answer = await begin(transport, peer, request, reply, timeout_s)
    stream.close()
    return answer


async def begin(
    transport: Transport, peer: str, request: Request, reply: type[_ReplyT], timeout_s: float
) -> tuple[Stream, _ReplyT]:
    """Open a stream, send a request and read the reply; the caller closes the stream.

    Raises as `call` does.
    """
    request = request.model_copy(update={"admission": transport.admission})
    try:
        return await _unless_reset(transport, peer, request, reply, timeout_s)
    except MessageError as error:
        raise NetworkError(f"peer {peer} answered nonsense: {error}") from None
    except NetworkError:
        raise
    except Exception as error:
        if speaks_no_dipaco(error):
            raise ProtocolVersionError(
                f"peer {peer} does not speak dipaco's protocol {PROTOCOL_VERSION}; it may be a "
                "plain hivemind node or another version of dipaco"
            ) from error
        raise NetworkError(f"peer {peer}: {short_reason(error)}") from error


async def _unless_reset(
    transport: Transport, peer: str, request: Request, reply: type[_ReplyT], timeout_s: float
) -> tuple[Stream, _ReplyT]:
    """Ask again as long as the stream is reset before a reply, for at most `timeout_s`.

    Before libp2p has learned a peer's protocols it opens a stream all the same, and a peer that
    does not speak ours resets it. Once they are known, the answer is definite; that takes moments,
    or seconds on a busy machine. What a peer says when its protocols change can overtake what it
    said before, and is never repeated, but a new connection transmits all of them.
    """
    began_s = time.monotonic()
    until_s, wait_s = began_s + timeout_s, _RESET_WAIT_S
    reconnect_s = began_s + min(_RECONNECT_AFTER_S, timeout_s / 2)
    while True:
        try:
            async with asyncio.timeout(until_s - time.monotonic()):
                return await _once(transport, peer, request, reply, until_s)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if time.monotonic() + wait_s > until_s:
                raise error
        except Exception as error:
            if not was_reset(error) or time.monotonic() + wait_s > until_s:
                raise
        if time.monotonic() >= reconnect_s:
            reconnect_s = until_s
            with contextlib.suppress(Exception):
                await asyncio.wait_for(transport.disconnect(peer), until_s - time.monotonic())
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_RESET_WAIT_S)


async def _once(
    transport: Transport, peer: str, request: Request, reply: type[_ReplyT], until_s: float
) -> tuple[Stream, _ReplyT]:
    stream = await transport.open_stream(peer, PROTOCOL_NAME)
    try:
        await stream.write(framed(request), until_s - time.monotonic())
        data = await read_frame(stream, reply.max_bytes)
        if not data:
            raise TurnedAway(f"peer {peer} does not know that this peer is admitted")
        return stream, decode(reply, data)
    except BaseException:
        stream.close()
        raise
