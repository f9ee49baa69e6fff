"""Hivemind's DHT, corrected where it leaves processes behind, loses requests or waits for ever.

A peer consists of the training process, the DHT process and p2pd.
Killed with SIGKILL, Hivemind's children would live on and go on answering for the dead peer. And
a terminal sends Ctrl+C to all of them at once, so p2pd would be gone before the peer can say
goodbye. Both are corrected where the children start.

`GuardedDHT` is the only door to the DHT process. A request is written as a whole, and the task
made of it is held until it ends: Hivemind refers to the newest alone, and one that waits for p2pd
would be collected as garbage. Every call has a limit, asks again when no answer comes, and
notices that the DHT process or p2pd has ended or hangs. The DHT process ends with its p2pd, so
a caller that waits looks at one process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import inspect
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from hivemind import DHT
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.asyncio import switch_to_uvloop
from hivemind.utils.mpfuture import MPFuture, SharedBytes

from dipaco.base.errors import NetworkError
from dipaco.base.patience import LOOK_S, looks

from . import bounded_protocol
from .company import node_id_of

logger = logging.getLogger("dipaco.dht.guarded_dht")

# What another node may take to answer, as in Hivemind; and where all were silent at joining.
ANSWER_LIMIT_S, PATIENT_ANSWER_LIMIT_S = 3.0, 20.0
# How Hivemind says that nobody answered, and that who answered was not answered in turn.
_SILENCE = ("none of the initial_peers responded", "can't access this node")
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends. Elsewhere: nothing."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _detach_from_terminal() -> None:
    """Run in p2pd before it starts: out of the terminal's process group, tied to its parent."""
    os.setsid()
    die_with_parent()


# p2pd relays for anybody, past all limits of the node's owner: 4 GiB a connection, and still 128
# KiB with this flag. So this node itself answers those who ask for `_RELAYING`, and refuses. Nobody
# needs a relay: a peer that cannot be called calls its mailboxes.
_NO_RELAY = "-relayService=0"
_RELAYING = "/libp2p/circuit/relay/0.2.0/hop"


def _start_p2pd(start: Callable[..., Any], *command: str, **options: Any) -> Any:
    """Start p2pd with `start`, as Hivemind would, apart from what it leaves open."""
    return start(*command, _NO_RELAY, preexec_fn=_detach_from_terminal, **options)


async def _refuse(
    info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.close()


def own_future_locks() -> None:
    """Give a forked process its own locks for making futures. Called first in each.

    Hivemind's are shared by all processes of the peer: one that is killed while it makes a future
    would stop the others for ever.
    """
    MPFuture._initialization_lock = threading.Lock()
    SharedBytes._lock = threading.Lock()


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


def start_task(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begin a task on a loop that holds its tasks."""
    return asyncio.create_task(coroutine)


# -- the pipe into the DHT process

# Writing a request takes microseconds; a thread that holds the pipe longer died or hangs.
_PIPE_LIMIT_S = 20.0
_LENGTH_BYTES = 4


class _PipeStuck(Exception):
    """Nobody reads the pipe, or its last writer died writing."""


class _RequestWriter:
    """The sending end of a pipe into which several threads and forked processes write.

    A request longer than the kernel's 4 KiB is written in pieces, and those of two must not mix.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = multiprocessing.get_context("fork").Lock()
        os.set_blocking(pipe.fileno(), False)

    def send(self, request: Any, limit_s: float = _PIPE_LIMIT_S) -> None:
        """Write one request as a whole. Raises `_PipeStuck`, or OSError when it is closed."""
        pickled = bytes(ForkingPickler.dumps(request))
        message = memoryview(len(pickled).to_bytes(_LENGTH_BYTES, "big") + pickled)
        until = time.monotonic() + limit_s
        if not self._lock.acquire(timeout=limit_s):
            raise _PipeStuck
        try:
            while message:
                try:
                    message = message[os.write(self._pipe.fileno(), message) :]
                except BlockingIOError:
                    self._await_room(until)
        finally:
            self._lock.release()

    def _await_room(self, until: float) -> None:
        room = select.poll()
        room.register(self._pipe.fileno(), select.POLLOUT)
        if not room.poll(max(0.0, until - time.monotonic()) * 1000):
            raise _PipeStuck


def receive_request(pipe: int) -> bytes:
    """Read one request to its end: what has begun to arrive is being written already.

    Called in the DHT process. Raises EOFError when nobody can write any more.
    """
    os.set_blocking(pipe, True)  # the event loop makes it non-blocking
    return _read(pipe, int.from_bytes(_read(pipe, _LENGTH_BYTES), "big"))


def _read(pipe: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(pipe, count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


# -- the door

CALL_LIMIT_S = 30.0
# An answer that is not here by then may be lost. Whatever is asked may run twice.
ASK_AGAIN_AFTER_S = 10.0
BEAT_S = 1.0
# The DHT process hangs when its beats stop for so many looks.
SILENT_LOOKS = 40
PING_S = 5.0
PING_LIMIT_S = 10.0
SILENT_PINGS = 2
START_LIMIT_S = 75.0
REPLICA_LIMIT_S = 20.0
CLOSE_LIMIT_S = 1.0
# Keys that this node has read and still remembers.
CACHED_KEYS = 1024
_P2PD_ENDED, _P2PD_HANGS = 71, 72
_ENDINGS = {
    _P2PD_ENDED: "the DHT process has ended because p2pd did",
    _P2PD_HANGS: "the DHT process has ended because p2pd did not answer",
}


class GuardedDHT(DHT):
    """Hivemind's DHT whose processes end with the peer that started them. Safe to share."""

    _outer_pipe: Any
    _inner_pipe: Any

    def __init__(
        self,
        *arguments: Any,
        start: bool,
        await_ready: bool = True,
        given: Sequence[str] = (),
        **options: Any,
    ):
        """`given`: addresses of peers that are believed, if they are not those to join through."""
        super().__init__(*arguments, start=False, **options)
        self._given = tuple(given)
        self._outer_pipe = _RequestWriter(self._outer_pipe)
        self._beats = multiprocessing.get_context("fork").RawValue(ctypes.c_ulonglong, 0)
        self._hung = ""
        if start:
            self.run_in_background(await_ready=await_ready)

    # In the processes of the peer that ask.

    @property
    def failure(self) -> str | None:
        """What is wrong when no call can be answered any more, else None.

        Another process cannot tell, since the DHT process is no child of it.
        """
        if self._hung:
            return self._hung
        if self._parent_pid != os.getpid() or self.is_alive():
            return None
        return _ENDINGS.get(self.exitcode or 0, "the DHT process has ended")

    def call(
        self, function: Callable[..., Any], *arguments: Any, limit_s: float = CALL_LIMIT_S
    ) -> Any:
        """Return what `await function(node, *arguments)` returns in the DHT process.

        `function` can be pickled, and may run twice. Raises `NetworkError`: it failed, or there is
        no answer within `limit_s`, or, sooner, there will be none.
        """
        return self.run_coroutine(_Bound(function, arguments), limit_s=limit_s)

    def run_coroutine(
        self, coro: Any, return_future: bool = False, limit_s: float = CALL_LIMIT_S
    ) -> Any:
        """Hivemind's way in: its properties and `replicate_p2p` come through here."""
        return self._answer(partial(super().run_coroutine, coro), return_future, limit_s)

    def get_visible_maddrs(self, latest: bool = False, limit_s: float = CALL_LIMIT_S) -> Any:
        """Return the addresses of this node; `latest` asks p2pd anew."""
        return self.call(_visible_maddrs, latest, limit_s=limit_s)

    def _answer(
        self, ask: Callable[..., Any], return_future: bool, limit_s: float = CALL_LIMIT_S
    ) -> Any:
        """Ask, and unless the future itself is wanted ask until there is an answer."""
        if return_future:
            return self._ask(ask)
        ask_again_at = time.monotonic()
        beats, silent_looks = self._beats.value, 0
        asked: list[concurrent.futures.Future[Any]] = []
        for look_s in looks(limit_s):
            self.check()
            if time.monotonic() >= ask_again_at:
                asked.append(self._ask(ask))
                ask_again_at = time.monotonic() + ASK_AGAIN_AFTER_S
            concurrent.futures.wait(asked, look_s, "FIRST_COMPLETED")
            for future in asked:
                if future.done():
                    return self._result(future)
            if self._beats.value != beats:
                beats, silent_looks = self._beats.value, 0
            else:
                silent_looks += 1
            if silent_looks >= SILENT_LOOKS:
                self._hangs(f"the DHT process hung for {SILENT_LOOKS * LOOK_S:g} s")
        raise NetworkError(f"the DHT did not answer for {limit_s:g} s; check the network")

    def _ask(self, ask: Callable[..., Any]) -> concurrent.futures.Future[Any]:
        try:
            return ask(return_future=True)  # type: ignore[no-any-return]
        except _PipeStuck:
            self._hangs("the DHT process takes no requests")
        except (OSError, ValueError):
            self.check()
            raise NetworkError("the DHT process does not listen any more; start again") from None

    def _result(self, future: concurrent.futures.Future[Any]) -> Any:
        try:
            return future.result(0)
        except (Exception, concurrent.futures.CancelledError) as error:
            logger.debug("a call to the DHT failed", exc_info=True)
            reason = str(error) or type(error).__name__
            raise NetworkError(f"the DHT could not answer: {reason}") from None

    def check(self) -> None:
        """Raise `NetworkError` when there is a `failure`."""
        failure = self.failure
        if failure is not None:
            raise NetworkError(f"{failure}; start again")

    def _hangs(self, how: str) -> NoReturn:
        """End a process that answers nobody, so that everybody learns it. Raises `NetworkError`."""
        self._hung = how
        if self._parent_pid == os.getpid():
            self.kill()
        raise NetworkError(f"{how}; start again")

    async def replicate_p2p(self) -> P2P:
        """Connect the running loop to this node's p2pd.

        Not cached as Hivemind's, which stays bound to the loop that asked first. Raises
        `NetworkError`.
        """
        hold_tasks(asyncio.get_running_loop())
        daemon = self.call(_daemon_address)
        try:
            return await asyncio.wait_for(P2P.replicate(daemon), REPLICA_LIMIT_S)
        except Exception as error:
            reason = str(error) or "it is silent"
            raise NetworkError(f"p2pd does not answer: {reason}") from error

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the process serves. Raises what kept it from that, and TimeoutError."""
        until = time.monotonic() + (timeout or START_LIMIT_S)
        alive = True
        while not self._ready.done():
            if not alive:
                raise NetworkError("the DHT process ended while it started")
            if time.monotonic() > until:
                raise TimeoutError(f"it did not start within {timeout or START_LIMIT_S:g} s")
            # Looked at before the wait: what a process said last may arrive after its end.
            alive = self.is_alive()
            concurrent.futures.wait([self._ready], LOOK_S)
        self._ready.result(0)

    def shutdown(self) -> None:
        """End the process and p2pd, in little more than `shutdown_timeout` seconds."""
        if not self.is_alive():
            return
        with contextlib.suppress(_PipeStuck, OSError, ValueError):
            self._outer_pipe.send(("_shutdown", [], {}), limit_s=0.5)
        self.join(self.shutdown_timeout)
        for end in (self.terminate, self.kill):
            if self.is_alive():
                end()
                self.join(1.0)

    # In the DHT process.

    def run(self) -> None:
        """Serve until told to stop, or until p2pd is gone."""
        die_with_parent()
        own_future_locks()
        given = self._given or self.initial_peers or ()
        bounded_protocol.install(str(address).rpartition("/p2p/")[2] for address in given)
        asyncio.subprocess.create_subprocess_exec = partial(
            _start_p2pd, asyncio.subprocess.create_subprocess_exec
        )
        loop = switch_to_uvloop()
        hold_tasks(loop)
        sys.exit(loop.run_until_complete(self._serve()))

    async def _serve(self) -> int:
        """Make the node, answer requests, and return the exit code."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        start_task(self._beat())
        try:
            self._node = await self._make_node()
        except Exception as error:
            logger.debug("the DHT node did not start", exc_info=True)
            self._ready.set_exception(error)
            return 0
        self._stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._inner_pipe.fileno(), self._take)
        start_task(self._watch_p2pd())
        start_task(self._ping_p2pd())
        self._ready.set_result(None)
        code = await self._stopped
        with contextlib.suppress(Exception):
            # Also removes the sockets, which a p2pd that has ended leaves behind.
            await asyncio.wait_for(self._node.p2p.shutdown(), CLOSE_LIMIT_S)
        return code

    async def _make_node(self) -> DHTNode:
        """Join; where nobody has answered in the usual time, once more with more patience.

        A peer on a busy machine, or behind a line that is full, answers after some seconds.
        """
        began_s = time.monotonic()
        try:
            return await self._join(ANSWER_LIMIT_S)
        except Exception as error:
            was_silent = time.monotonic() - began_s >= ANSWER_LIMIT_S
            if not was_silent or not any(text in str(error) for text in _SILENCE):
                raise
            logger.debug("nobody answered within %g s; once more", ANSWER_LIMIT_S)
        return await self._join(PATIENT_ANSWER_LIMIT_S)

    async def _join(self, answer_limit_s: float) -> DHTNode:
        """Start p2pd, and make a node whose id follows from the peer id."""
        of_node = inspect.signature(DHTNode.create).parameters
        of_p2p = {name: value for name, value in self.kwargs.items() if name not in of_node}
        if self.kwargs.get("client_mode"):
            of_p2p.setdefault("dht_mode", "client")
        # Noise alone: the TLS of p2pd is that of go1.20, with faults that a stranger can reach.
        p2p = await P2P.create(initial_peers=self.initial_peers, tls=False, **of_p2p)
        try:
            await p2p.add_binary_stream_handler(_RELAYING, _refuse)
            node = await DHTNode.create(
                p2p=p2p,
                node_id=node_id_of(p2p.peer_id),
                initial_peers=self.initial_peers,
                num_workers=self.num_workers,
                record_validator=self._record_validator,
                cache_size=CACHED_KEYS,
                wait_timeout=answer_limit_s,
                **{name: self.kwargs[name] for name in self.kwargs.keys() - of_p2p.keys()},
            )
        except BaseException as error:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(p2p.shutdown(), CLOSE_LIMIT_S)
            if isinstance(error, Exception) and DHTProtocol.refusal is not None:
                # Nobody else answered, so this says more than that they were silent.
                raise DHTProtocol.refusal from error
            raise
        if DHTProtocol.refusal is not None:
            logger.warning("one of the given addresses is passed over: %s", DHTProtocol.refusal)
        node._should_shutdown_p2p = True
        node.protocol.wait_timeout = ANSWER_LIMIT_S
        return node

    def _take(self) -> None:
        """Begin to answer a request that has arrived; one that cannot be read is dropped."""
        if not self._inner_pipe.poll():
            return
        try:
            request = receive_request(self._inner_pipe.fileno())
        except (EOFError, OSError):
            self._stop(0)
            return
        try:
            method, arguments, options = ForkingPickler.loads(request)
            start_task(getattr(self, method)(*arguments, **options))
        except Exception:
            logger.warning("a request to the DHT process could not be read", exc_info=True)

    def _stop(self, code: int) -> None:
        if not self._stopped.done():
            self._stopped.set_result(code)

    async def _shutdown(self) -> None:
        try:
            await self._node.shutdown()
        finally:
            self._stop(0)

    async def _beat(self) -> None:
        """Show that the loop turns."""
        while True:
            self._beats.value += 1
            await asyncio.sleep(BEAT_S)

    async def _watch_p2pd(self) -> None:
        await self._node.p2p._child.wait()
        # A p2pd that was told to stop ends before its node has.
        if self._node.is_alive:
            self._stop(_P2PD_ENDED)

    async def _ping_p2pd(self) -> None:
        """Stop when p2pd lives but answers nothing."""
        silent = 0
        while silent < SILENT_PINGS:
            await asyncio.sleep(PING_S)
            try:
                await asyncio.wait_for(self._node.p2p._client.identify(), PING_LIMIT_S)
                silent = 0
            except TimeoutError:
                silent += 1
            except Exception as error:
                logger.debug("p2pd did not say who it is: %r", error)
        self._stop(_P2PD_HANGS)


class _Bound:
    """A function with its arguments, which can be sent to the DHT process."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments

    async def __call__(self, dht: Any, node: Any) -> Any:
        return await self._function(node, *self._arguments)


async def _daemon_address(node: Any) -> Any:
    return node.p2p.daemon_listen_maddr


async def _visible_maddrs(node: Any, latest: bool) -> Any:
    return await node.get_visible_maddrs(latest=latest)
