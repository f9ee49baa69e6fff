"""The one door to a node's DHT process, which is started again whenever it ends or hangs.

A peer consists of the training process, the DHT process, p2pd, and the keeper that forks the DHT
process. On a busy machine p2pd is silent for minutes, or the kernel kills it for its memory: no
reason to stop training. While there is no DHT process every call fails at once, with a
`NetworkError`, as calls fail when the network is away. The new one has the same identity and port,
is told again what the last one was (`keep`), and those who stand on it are told (`on_restart`). It
begins alone, for nobody may answer at that moment; who is known is called then. Only when none has
started for an hour is there a `failure`, which ends the peer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID

from dipaco.base.errors import NetworkError
from dipaco.base.patience import LOOK_S, looks
from dipaco.base.waits import BriefLock, may_wait_for

from .addresses import with_ports_of
from .channel import Channel
from .dht_process import Beginning, NodeOptions, hold_tasks, serve_node
from .process_keeper import ProcessKeeper

logger = logging.getLogger("dipaco.dht.guarded_dht")

_CALL_LIMIT_S = 30.0
_START_LIMIT_S = 75.0
# The DHT process hangs when nothing is heard of it for so many looks.
SILENT_LOOKS = 40
# For so long, and so often, it is tried to start one again. Attempts are counted too, for a machine
# that slept has not tried.
RESTART_LIMIT_S, LEAST_ATTEMPTS = 3600.0, 10
# The wait after the first attempt that failed; twice as long after each further one.
RESTART_WAIT_S, LONGEST_RESTART_WAIT_S = 1.0, 60.0
_REPLICA_LIMIT_S = 20.0
SHUTDOWN_LIMIT_S = 3.0
_ANY_PORT_HERE = "/ip4/127.0.0.1/tcp/0"


class GuardedDHT:
    """A node of the DHT. Thread-safe.

    A thread of its own starts the DHT process, watches it, and starts it again.
    """

    def __init__(
        self,
        initial_peers: Sequence[str] = (),
        *,
        given: Sequence[str] = (),
        host_maddrs: Sequence[str] = (_ANY_PORT_HERE,),
        record_validators: Sequence[RecordValidatorBase] = (),
        **others: Any,
    ) -> None:
        """
        :param given: addresses of peers that are believed, if not those to join through
        :param others: options of Hivemind's `P2P.create` and `DHTNode.create`
        """
        given = tuple(given or initial_peers)
        self._options = NodeOptions(given, tuple(record_validators), others)
        self._beginning = Beginning(tuple(initial_peers), tuple(host_maddrs))
        self._channel: Channel | None = None
        self.pid = 0
        """Of the DHT process."""
        self.starts = 0
        """How often it was started."""
        self.failure: str | None = None
        """Why there will be no DHT process any more, else None."""
        self._why = "the DHT process was not started"
        self._lock = BriefLock()
        self._kept: dict[str, tuple[Any, ...]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._own, name="dht", daemon=True)
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()

    # -- for those who ask

    def start(self, limit_s: float = _START_LIMIT_S) -> None:
        """Start the process and wait until it serves.

        Raises `RuntimeError` with what kept it from that, `NetworkError` when it has ended
        meanwhile, and `TimeoutError`.
        """
        self._start_limit_s = limit_s
        self._thread.start()
        # The thread itself has a bound.
        self._started.result()

    def call(
        self, function: Callable[..., Any], *arguments: Any, limit_s: float = _CALL_LIMIT_S
    ) -> Any:
        """Return what `await function(node, *arguments)` returns in the DHT process.

        `function` can be pickled. Raises `NetworkError`: it failed, or there is no answer within
        `limit_s`, or, sooner, there will be none.
        """
        may_wait_for("the DHT process")
        channel = self._present_channel()
        asked = channel.ask(function, arguments)
        for look_s in looks(limit_s):
            if concurrent.futures.wait([asked], look_s).done:
                try:
                    return asked.result()
                except NetworkError:
                    self._raise_ended(channel.end)
                except RuntimeError as error:
                    raise NetworkError(f"the DHT could not answer: {error}") from None
        raise NetworkError(f"the DHT did not answer for {limit_s:g} s; check the network")

    def keep(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function`, now and in every DHT process that is started from here on.

        Of one `name` the last call counts. Raises `NetworkError`; it is kept all the same.
        """
        with self._lock:
            self._kept[name] = (function, *arguments)
        self.call(function, *arguments)

    def on_restart(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the process was started again, before it counts as started: where
        it raises an exception, it is started once more. On a thread that nothing else waits for."""
        with self._lock:
            self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Call a listener no more."""
        with self._lock, contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    def check(self) -> None:
        """Raise `NetworkError` when no call can be answered now."""
        self._present_channel()

    def _present_channel(self) -> Channel:
        channel = self._channel
        if channel is None or channel.end:
            self._raise_ended(channel.end if channel is not None else self._why)
        return channel

    def _raise_ended(self, why: str) -> NoReturn:
        if self.failure is not None:
            raise NetworkError(f"{self.failure}; start again")
        raise NetworkError(why if self._closing.is_set() else f"{why}; it is being started again")

    @property
    def peer_id(self) -> PeerID:
        """This node's id. Raises `NetworkError`."""
        return self.call(_peer_id)

    def get_visible_maddrs(self, limit_s: float = _CALL_LIMIT_S) -> Any:
        """Return the addresses of this node, asking p2pd anew. Raises `NetworkError`."""
        found = self.call(_visible_maddrs, limit_s=limit_s)
        # Where p2pd listens now it listens after a restart: others know it there.
        listening = with_ports_of(map(str, found), self._beginning.host_maddrs)
        self._beginning = replace(self._beginning, host_maddrs=listening)
        return found

    async def replicate_p2p(self) -> P2P:
        """Connect the running loop to this node's p2pd. Raises `NetworkError`."""
        hold_tasks(asyncio.get_running_loop())
        asking = self._present_channel().ask(_daemon_address, ())
        try:
            daemon = await asyncio.wait_for(asyncio.wrap_future(asking), _CALL_LIMIT_S)
            return await asyncio.wait_for(P2P.replicate(daemon), _REPLICA_LIMIT_S)
        except Exception as error:
            reason = str(error) or "it is silent"
            raise NetworkError(f"p2pd does not answer: {reason}") from error

    def shutdown(self) -> None:
        """End the process and p2pd, in little more than `SHUTDOWN_LIMIT_S`."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * SHUTDOWN_LIMIT_S)

    # -- on the thread that owns the process

    def _own(self) -> None:
        """Have a DHT process until it is closed, or none can be had."""
        self._keeper: ProcessKeeper | None = None
        try:
            try:
                self._begin(self._start_limit_s)
            except BaseException as error:
                self._started.set_exception(error)
                return
            self._started.set_result(None)
            while why := self._watch():
                if not self._begin_again(why):
                    return
        finally:
            self._end()

    def _begin(self, limit_s: float) -> None:
        """Start a process and wait until it serves. Raises as `start` does."""
        channel = self._new_channel()
        channel.send(self._beginning)
        for look_s in looks(limit_s):
            if concurrent.futures.wait([channel.ready], look_s).done:
                channel.ready.result()
                break
            if self._closing.is_set():
                raise NetworkError("it was told to end while it started")
        else:
            channel.close("the DHT process did not start")
            raise TimeoutError(f"it did not start within {limit_s:g} s")
        self._channel = channel
        self.starts += 1

    def _new_channel(self) -> Channel:
        if self._keeper is None:
            self._keeper = ProcessKeeper(partial(serve_node, self._options))
        try:
            self.pid, connected = self._keeper.start()
        except OSError as error:
            self._keeper.close()
            self._keeper = None
            raise NetworkError(f"the DHT process cannot be forked: {error}") from error
        return Channel(connected)

    def _watch(self) -> str:
        """Wait until the process ends or hangs, and return how; "" when it shall end."""
        channel = self._channel
        assert channel is not None
        heard, silent_looks = channel.heard, 0
        while not self._closing.wait(LOOK_S):
            if channel.end:
                return channel.end
            silent_looks = 0 if channel.heard != heard else silent_looks + 1
            heard = channel.heard
            if silent_looks >= SILENT_LOOKS:
                channel.close(f"the DHT process hung for {SILENT_LOOKS * LOOK_S:g} s")
        return ""

    def _begin_again(self, why: str) -> bool:
        """Start another process, as often as it takes; False when there is none."""
        logger.warning("%s; it is started again, and training goes on", why)
        # Nobody may answer at this moment: it begins alone, and who is known is called then.
        self._beginning = replace(self._beginning, initial_peers=())
        since_s, attempts, wait_s = time.monotonic(), 0, RESTART_WAIT_S
        while True:
            try:
                self._why = why
                self._drop()
                self._begin(_START_LIMIT_S)
                self._restore()
            except Exception as error:
                reason = str(error) or type(error).__name__
                logger.info("the DHT process was not started again: %s", reason)
                logger.debug("an attempt failed", exc_info=True)
            else:
                logger.warning("the DHT process was started again")
                return True
            attempts += 1
            is_late = time.monotonic() - since_s >= RESTART_LIMIT_S
            if is_late and attempts >= LEAST_ATTEMPTS:
                self.failure = f"{why}, and none could be started for an hour: {reason}"
                return False
            if self._closing.wait(wait_s):
                return False
            wait_s = min(2 * wait_s, LONGEST_RESTART_WAIT_S)

    def _drop(self) -> None:
        """Let go of a process that has ended; one that ends has a moment to do it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.finish(SHUTDOWN_LIMIT_S)
            channel.close(self._why)

    def _restore(self) -> None:
        """Tell the new process what the last one was, and then those who stand on it."""
        with self._lock:
            kept, listeners = list(self._kept.values()), list(self._listeners)
        for function, *arguments in kept:
            self.call(function, *arguments)
        for listener in listeners:
            listener()

    def _end(self) -> None:
        self._why = "the DHT process was ended"
        self._drop()
        if self._keeper is not None:
            self._keeper.close()


async def _peer_id(node: Any) -> PeerID:
    return node.peer_id


async def _daemon_address(node: Any) -> Any:
    return node.p2p.daemon_listen_maddr


async def _visible_maddrs(node: Any) -> Any:
    return await node.get_visible_maddrs(latest=True)
