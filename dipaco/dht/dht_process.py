"""What runs in the DHT process: p2pd, Hivemind's node, and the answers to the peer's requests.

Hivemind is corrected here where it leaves processes behind or loses requests. Killed with SIGKILL,
a peer's p2pd would live on and go on answering for it. A terminal sends Ctrl+C to all processes at
once, so p2pd would be gone before the peer can say goodbye. And a task that waits for p2pd would be
collected as garbage. The process ends with its p2pd, so who waits for it looks at one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.validation import CompositeValidator, RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.asyncio import switch_to_uvloop

from . import bounded_protocol
from .channel import BEAT, LAST, READY, framed, read_message
from .company import node_id_of
from .process_keeper import die_with_parent

logger = logging.getLogger("dipaco.dht.dht_process")

# What another node may take to answer, as in Hivemind; and where all were silent at joining.
ANSWER_LIMIT_S, _PATIENT_ANSWER_LIMIT_S = 3.0, 20.0
# How Hivemind says that nobody answered, and that who answered was not answered in turn.
_SILENCE = ("none of the initial_peers responded", "can't access this node")
_BEAT_S = 1.0
PING_S = 5.0
PING_LIMIT_S = 10.0
_SILENT_PINGS = 2
_CLOSE_LIMIT_S = 1.0
# Keys that this node has read and still remembers.
_CACHED_KEYS = 1024
_P2PD_ENDED = "the DHT process has ended because p2pd did"
_P2PD_HANGS = "the DHT process has ended because p2pd did not answer"

# p2pd relays for anybody, past all limits of the node's owner: 4 GiB a connection, and still 128
# KiB with this flag. So this node itself answers those who ask for `_RELAYING`, and refuses. Nobody
# needs a relay: a peer that cannot be called calls its mailboxes.
_NO_RELAY = "-relayService=0"
_RELAYING = "/libp2p/circuit/relay/0.2.0/hop"


@dataclass(frozen=True)
class NodeOptions:
    """How a node is made, in every process of it."""

    given: tuple[str, ...] = ()
    """Addresses of peers that are believed."""
    record_validators: Sequence[RecordValidatorBase] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    """Options of Hivemind's `P2P.create` and `DHTNode.create`."""


@dataclass(frozen=True)
class Beginning:
    """How a node begins this time."""

    initial_peers: tuple[str, ...]
    """The addresses that it joins through. Without any it is alone until it calls somebody."""
    host_maddrs: tuple[str, ...]
    """The addresses at which it listens."""


def hold_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Refer to every task that `loop` makes from here on, until it ends. May be repeated.

    asyncio does not, nor does Hivemind: a task that waits for a stream's next bytes is referred to
    by that stream alone, and asyncio refers to the stream weakly.
    """
    if loop.get_task_factory() is not None:
        return
    held: set[asyncio.Task[Any]] = set()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        held.add(task)
        task.add_done_callback(held.discard)
        return task

    loop.set_task_factory(make)


def serve_node(options: NodeOptions, connected: socket.socket) -> int:
    """Be the DHT process at one end of a connection, until told to stop or p2pd is gone."""
    bounded_protocol.install(address.rpartition("/p2p/")[2] for address in options.given)
    asyncio.subprocess.create_subprocess_exec = partial(
        _start_p2pd, asyncio.subprocess.create_subprocess_exec
    )
    loop = switch_to_uvloop()
    hold_tasks(loop)
    loop.run_until_complete(_ServedNode(options).serve(connected))
    return 0


def _start_p2pd(start: Callable[..., Any], *command: str, **options: Any) -> Any:
    """Start p2pd with `start`, as Hivemind would, apart from what it leaves open."""
    return start(*command, _NO_RELAY, preexec_fn=_detach_from_terminal, **options)


def _detach_from_terminal() -> None:
    """Run in p2pd before it starts: out of the terminal's process group, tied to its parent."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()


async def _refuse(
    info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.close()


class _ServedNode:
    """The node, and the connection over which it is asked."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._stopped: asyncio.Future[str] = asyncio.get_event_loop().create_future()

    async def serve(self, connected: socket.socket) -> None:
        """Make the node and answer requests, to the end."""
        reader, self._writer = await asyncio.open_unix_connection(sock=connected)
        beginning = await read_message(reader)
        bounded_protocol.begin(self._beat())
        try:
            self._node = await self._make_node(beginning)
        except Exception as error:
            logger.debug("the DHT node did not start", exc_info=True)
            self._send(READY, False, str(error) or type(error).__name__)
            await self._close()
            return
        self._send(READY, True, None)
        bounded_protocol.begin(self._answer_all(reader))
        bounded_protocol.begin(self._watch_p2pd())
        bounded_protocol.begin(self._ping_p2pd())
        why = await self._stopped
        if why:
            self._send(LAST, True, why)
        with contextlib.suppress(Exception):
            # Also removes the sockets, which a p2pd that has ended leaves behind.
            await asyncio.wait_for(self._node.p2p.shutdown(), _CLOSE_LIMIT_S)
        await self._close()

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), _CLOSE_LIMIT_S)

    def _send(self, number: int, is_answer: bool, value: Any) -> None:
        self._writer.write(framed((number, is_answer, value)))

    async def _make_node(self, beginning: Beginning) -> DHTNode:
        """Join; where nobody has answered in the usual time, once more with more patience.

        A peer on a busy machine, or behind a line that is full, answers after some seconds.
        """
        began_s = time.monotonic()
        try:
            return await self._join(beginning, ANSWER_LIMIT_S)
        except Exception as error:
            was_silent = time.monotonic() - began_s >= ANSWER_LIMIT_S
            if not was_silent or not any(text in str(error) for text in _SILENCE):
                raise
            logger.debug("nobody answered within %g s; once more", ANSWER_LIMIT_S)
        return await self._join(beginning, _PATIENT_ANSWER_LIMIT_S)

    async def _join(self, beginning: Beginning, answer_limit_s: float) -> DHTNode:
        """Start p2pd, and make a node whose id follows from the peer id."""
        others, initial_peers = self._options.others, list(beginning.initial_peers) or None
        of_node = inspect.signature(DHTNode.create).parameters
        of_p2p = {name: value for name, value in others.items() if name not in of_node}
        if others.get("client_mode"):
            of_p2p.setdefault("dht_mode", "client")
        # Noise alone: the TLS of p2pd is that of go1.20, with faults that a stranger can reach.
        p2p = await P2P.create(
            initial_peers=initial_peers,
            host_maddrs=list(beginning.host_maddrs) or None,
            tls=False,
            **of_p2p,
        )
        try:
            await p2p.add_binary_stream_handler(_RELAYING, _refuse)
            node = await DHTNode.create(
                p2p=p2p,
                node_id=node_id_of(p2p.peer_id),
                initial_peers=initial_peers,
                record_validator=CompositeValidator(self._options.record_validators),
                cache_size=_CACHED_KEYS,
                wait_timeout=answer_limit_s,
                **{name: others[name] for name in others.keys() - of_p2p.keys()},
            )
        except BaseException as error:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(p2p.shutdown(), _CLOSE_LIMIT_S)
            if isinstance(error, Exception) and DHTProtocol.refusal is not None:
                # Nobody else answered, so this says more than that they were silent.
                raise DHTProtocol.refusal from error
            raise
        if DHTProtocol.refusal is not None:
            logger.warning("one of the given addresses is passed over: %s", DHTProtocol.refusal)
        node._should_shutdown_p2p = True
        node.protocol.wait_timeout = ANSWER_LIMIT_S
        return node

    async def _answer_all(self, reader: asyncio.StreamReader) -> None:
        """Begin to answer each request that arrives; one that cannot be read is dropped."""
        while True:
            try:
                number, function, arguments = await read_message(reader)
            except (asyncio.IncompleteReadError, OSError):
                self._stop("")
                return
            except Exception:
                logger.warning("a request to the DHT process could not be read", exc_info=True)
                continue
            bounded_protocol.begin(self._answer(number, function, arguments))

    async def _answer(
        self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        try:
            self._send(number, True, await function(self._node, *arguments))
        except Exception as error:
            logger.debug("a request to the DHT process failed", exc_info=True)
            self._send(number, False, str(error) or type(error).__name__)

    def _stop(self, why: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result(why)

    async def _beat(self) -> None:
        """Show that the loop turns."""
        while not self._writer.is_closing():
            self._send(BEAT, True, None)
            await asyncio.sleep(_BEAT_S)

    async def _watch_p2pd(self) -> None:
        await self._node.p2p._child.wait()
        # A p2pd that was told to stop ends after that.
        self._stop(_P2PD_ENDED)

    async def _ping_p2pd(self) -> None:
        """Stop when p2pd lives but answers nothing."""
        silent = 0
        while silent < _SILENT_PINGS:
            await asyncio.sleep(PING_S)
            try:
                await asyncio.wait_for(self._node.p2p._client.identify(), PING_LIMIT_S)
                silent = 0
            except TimeoutError:
                silent += 1
            except Exception as error:
                logger.debug("p2pd did not say who it is: %r", error)
        self._stop(_P2PD_HANGS)
