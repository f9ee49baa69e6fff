"""The exact averager: a process that meets the other trainers of a module and averages with them.

A peer has one for each level, for as long as it lives. Modules of a level have the same size, so
the group key alone says which module and round an averager serves (`dipaco.peer.averaging.group`).
Matchmaking, the process and the network are Hivemind's; the all-reduce is
`dipaco.peer.averaging.allreduce`, in which all members end with the same bits or with nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterable, Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, AsyncIterator  # noqa: UP035  Hivemind's servicers do not know the other one.

import torch
from dipaco.dht.guarded_dht import GuardedDHT, die_with_parent, own_future_locks
from dipaco.modules.errors import NetworkError
from dipaco.modules.outer import AveragingRule, Contribution, canonical_table
from dipaco.modules.plan import PROTOCOL_VERSION
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import achain, anext, as_aiter
from hivemind.utils.timed_storage import get_dht_time

from .allreduce import LINGER_S, ExactAllReduceRunner
from .codec import PartCodec, is_finite
from .group import AgreedGroup, BadRowError, GatherRow, GroupRules, agree
from .own_process import become_quiet, interrupts_held_back
from .parts import AveragingFailed, AveragingOutcome, AveragingRequest, as_failure
from .waiting import meet_awaited

__all__ = ["AveragingFailed", "AveragingOutcome", "ExactAverager"]

logger = logging.getLogger(__name__)

# Of a peer whose upload nobody has measured.
DEFAULT_BANDWIDTH_MBIT = 100
# Seconds that the averager's process may take to say that it gave up in time.
_GRACE_S = 2.0
_GREATEST_NOTICES = 16


class ExactAverager(DecentralizedAverager):
    """Averages outer gradients of one level's modules; see the module's text.

    :param dht: this peer's DHT, already running
    :param prefix: `averager_prefix(run_id, level)`, the same on every peer
    :param size: elements of a module of this level
    :param rule: how contributions become an average, the same on every peer
    :param part_bytes: greatest part on the wire
    :param matchmaking_s: seconds in which a group forms, `RoundsConfig.matchmaking_s`
    :param paths_of_module: for each module of the level, the paths through it
    :param silence_s: a member that sends nothing for this long has failed
    :param client_mode: this peer cannot be reached: it follows and never reduces
    :param bandwidth_mbit: upload of this peer; members reduce the more, the faster they are
    :param start: start the process now; otherwise call `run_in_background`

    Create it early, before CUDA is used, on a thread that lives as long as the peer: the process
    is forked, and ends with the thread that started it. SIGINT keeps its handler in the host and
    is ignored in the averager, which ends when it is told to or when its host does.
    """

    # Hivemind would otherwise serve the handlers of whichever base class was used first. The name
    # of this class is part of the RPCs' names, hence of the protocol.
    _rpc_handlers = None
    _stub_type = None

    def __init__(
        self,
        dht: GuardedDHT,
        *,
        prefix: str,
        size: int,
        rule: AveragingRule,
        part_bytes: int,
        matchmaking_s: float,
        paths_of_module: Mapping[str, Collection[int]],
        silence_s: float = 30.0,
        client_mode: bool | None = None,
        bandwidth_mbit: int | None = None,
        start: bool = True,
        shutdown_timeout: float = 3.0,
    ) -> None:
        self._rule = rule
        self._codec = PartCodec(rule.codec)
        self._part_bytes = part_bytes
        self._matchmaking_s = matchmaking_s
        self._silence_s = silence_s
        self._paths_of_module = {name: frozenset(paths) for name, paths in paths_of_module.items()}
        self._bandwidth_mbit = max(1, int(bandwidth_mbit or DEFAULT_BANDWIDTH_MBIT))
        self._scratch = torch.zeros(size, dtype=torch.float32)
        self._call_lock = threading.Lock()
        self._stopped = False
        self._pending: MPFuture | None = None
        self._request: AveragingRequest | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._together = multiprocessing.Value("i", 0)
        super().__init__(
            (self._scratch,),
            dht,
            start=False,
            prefix=prefix,
            # Members start within moments of each other and share the closing time; a leader that
            # is a little late must still fit before it.
            min_matchmaking_time=0.5 * matchmaking_s,
            request_timeout=min(5.0, 0.4 * matchmaking_s),
            allow_state_sharing=False,
            client_mode=client_mode,
            shutdown_timeout=shutdown_timeout,
        )
        if start:
            self.run_in_background()

    # In the host process.

    def average(
        self,
        flat: torch.Tensor,
        *,
        group_bits: str,
        scheduled_time: float,
        timeout_s: float,
        contribution: Contribution,
        module: str,
        round_index: int,
        anchor_digest: str,
        greatest_tokens: int = 2**50,
        expected_peers: int | None = None,
        awaited: Callable[[], frozenset[str] | None] | None = None,
        longest_wait_s: float = 0.0,
        exclude: Collection[str] = (),
    ) -> AveragingOutcome:
        """Average `flat` with the group that forms under `group_bits` until `scheduled_time`.

        Called on any one thread at a time; blocks for `timeout_s` at most. `flat` is never changed.
        `scheduled_time` is on this machine's clock and the same instant for all members; with
        `expected_peers` the group closes as soon as so many are together.
        With `awaited` (fixed steps) members come at any time and `scheduled_time` is this peer's
        own limit: the group closes when all that it returns are there, or at the limit of who came
        first, at most `longest_wait_s` (the same for all members) after it came. It is
        asked twice a second until a group is found; None gives up. `contribution` is this peer's
        row (its `peer` is the libp2p peer id), `greatest_tokens` what no row may exceed;
        peers in `exclude` are not admitted when this peer leads.

        Raises AveragingFailed, which is ordinary life: no other peer came, or one of them failed.
        Raises NetworkError when the averager's process is gone, and ValueError for arguments that
        no run can have.
        """
        rules = self._rules(
            contribution, module, round_index, anchor_digest, greatest_tokens, exclude
        )
        self._check(flat, scheduled_time, timeout_s, expected_peers)
        now = get_dht_time()
        end_s = now + timeout_s
        request = AveragingRequest(
            rules=rules,
            group_bits=group_bits,
            scheduled_time=scheduled_time,
            deadline=min(end_s, max(scheduled_time, now) + 0.5 * self._matchmaking_s + 0.5),
            end_s=end_s,
            expected_peers=expected_peers,
        )
        if awaited is not None:
            request = replace(
                request,
                scheduled_time=now + longest_wait_s,
                # Later than what any other member declares, or Hivemind would not look for it.
                deadline=now + 2 * longest_wait_s,
                awaited=awaited() or frozenset(),
                close_s=scheduled_time,
            )
        if not self._call_lock.acquire(blocking=False):
            raise RuntimeError("an averager serves one call at a time")
        try:
            future = self._send(request, flat)
            rows, matchmaking_s, reduce_s, notices = self._wait(future, end_s + _GRACE_S, awaited)
            average = self._scratch.clone()
        except AveragingFailed as failure:
            self._log(module, round_index, failure.notices)
            level = logging.WARNING if failure.culprits else logging.DEBUG
            logger.log(level, "%s, round %d: %s", module, round_index, failure)
            raise
        finally:
            self._call_lock.release()
        self._log(module, round_index, notices)
        table = canonical_table(Contribution(*row) for row in rows)
        return AveragingOutcome(average, table, matchmaking_s, reduce_s)

    @property
    def members_together(self) -> int:
        """Members that a group with `awaited` has here, as it forms; 0 when another peer leads."""
        return self._together.value

    def run_in_background(self, await_ready: bool = True, timeout: float = 60.0) -> None:
        """Start the process, from any thread, without touching the host's SIGINT handler.

        Raises NetworkError when it is not ready within `timeout` seconds.
        """
        with interrupts_held_back():
            self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until the process serves. Raises NetworkError when it does not."""
        until = time.monotonic() + timeout
        try:
            while not self._ready.done() and self.is_alive() and time.monotonic() < until:
                concurrent.futures.wait([self._ready], 0.5)
            self._ready.result(timeout=0.5)
        except concurrent.futures.TimeoutError:
            ended = not self.is_alive()
            self.shutdown()
            if ended:
                raise NetworkError(f"the averager {self.prefix} ended while it started") from None
            raise NetworkError(
                f"the averager {self.prefix} did not start within {timeout:g} s; "
                "is this machine overloaded? Try again"
            ) from None
        except Exception as error:
            self.shutdown()
            raise NetworkError(f"the averager {self.prefix} could not start: {error}") from error

    def shutdown(self) -> None:
        """Stop the process, in little more than `shutdown_timeout` seconds. May be repeated."""
        self._stopped = True
        with contextlib.suppress(OSError, ValueError):
            self._inner_pipe.send(("_SHUTDOWN", None))
        if not self.is_alive():
            return
        with contextlib.suppress(OSError, ValueError):
            self._outer_pipe.send(("_shutdown", [self.shutdown_timeout], {}))
        self.join(self.shutdown_timeout)
        if self.is_alive():
            self.terminate()
            self.join(1.0)
        if self.is_alive():
            self.kill()
            self.join(1.0)

    def __del__(self) -> None:
        if getattr(self, "_parent_pid", None) == os.getpid() and self.is_alive():
            self.shutdown()

    def _rules(
        self,
        contribution: Contribution,
        module: str,
        round_index: int,
        anchor_digest: str,
        greatest_tokens: int,
        exclude: Collection[str],
    ) -> GroupRules:
        if module not in self._paths_of_module:
            raise ValueError(f"{module} is not a module of {self.prefix}")
        own = GatherRow(
            protocol=PROTOCOL_VERSION,
            module=module,
            round_index=round_index,
            anchor=anchor_digest,
            path=contribution.path,
            peer=contribution.peer,
            tokens=contribution.tokens,
            bandwidth_mbit=0 if self.client_mode else self._bandwidth_mbit,
        )
        rules = GroupRules(own, self._paths_of_module[module], greatest_tokens, frozenset(exclude))
        # What others would refuse is found here.
        try:
            rules.check_row(own.to_bytes(), self.peer_id.to_base58())
        except BadRowError as error:
            raise AveragingFailed(f"own contribution would be refused: {error.reason}") from None
        return rules

    def _check(
        self,
        flat: torch.Tensor,
        scheduled_time: float,
        timeout_s: float,
        expected_peers: int | None,
    ) -> None:
        if flat.shape != self._scratch.shape or flat.dtype != torch.float32 or flat.is_cuda:
            raise ValueError(
                f"{self.prefix} averages {self._scratch.numel()} fp32 numbers in memory, "
                f"not {tuple(flat.shape)} of {flat.dtype} on {flat.device}"
            )
        if timeout_s <= 0 or scheduled_time >= get_dht_time() + timeout_s:
            raise ValueError(f"the group closes after the timeout of {timeout_s:.1f} s")
        if expected_peers is not None and expected_peers < 2:
            raise ValueError("a group of one needs no averager")
        if not is_finite(flat):
            raise AveragingFailed("own outer gradient is not finite")

    def _send(self, request: AveragingRequest, flat: torch.Tensor) -> MPFuture:
        if not self.is_alive():
            raise self._death()
        if self._pending is not None and not self._pending.done():
            raise AveragingFailed("the previous averaging has not ended yet")
        # The process is idle, so nobody reads the scratch copy.
        self._scratch.copy_(flat)
        future: MPFuture = MPFuture()
        self._outer_pipe.send(("_average", [], {"request": request, "future": future}))
        self._pending = future
        return future

    def _wait(
        self,
        future: MPFuture,
        until_s: float,
        awaited: Callable[[], frozenset[str] | None] | None,
    ) -> Any:
        """Wait for the process's answer, and notice when it dies."""
        while True:
            if awaited is not None:
                self._outer_pipe.send(("_await", [awaited()], {}))
            try:
                return future.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                if not self.is_alive():
                    raise self._death() from None
                if get_dht_time() > until_s:
                    self._outer_pipe.send(("_give_up", [], {}))
                    raise AveragingFailed("the averager does not answer") from None
            except concurrent.futures.CancelledError:
                raise AveragingFailed("the averager was stopped") from None

    def _death(self) -> Exception:
        if self._stopped:
            return AveragingFailed("the averager was stopped")
        return NetworkError(f"the averager {self.prefix} died; restart the peer")

    def _log(self, module: str, round_index: int, notices: Collection[str]) -> None:
        for notice in notices:
            logger.warning("%s, round %d: %s", module, round_index, notice)

    # In the averager's process.

    def run(self) -> None:
        """Serve as long as the host lives: quietly, and on one thread for arithmetic."""
        become_quiet()
        die_with_parent()
        own_future_locks()
        torch.set_num_threads(1)
        super().run()

    async def _average(self, *, request: AveragingRequest, future: MPFuture) -> None:
        """Serve one call of `average`; its answer goes to `future`, whatever happens."""
        self._keep_current_task()
        self._request = request
        members: tuple[str, ...] = ()
        try:
            group_info, matchmaking_s = await self._find_group(request)
            members = tuple(peer_id.to_base58() for peer_id in group_info.peer_ids)
            with self._announced(group_info, members, request) as (group, announced):
                started = time.monotonic()
                await self._reduce(group, announced, request.end_s)
                reduce_s = time.monotonic() - started
            rows = tuple((row.path, row.peer, row.tokens) for row in group.table)
            answer = (rows, matchmaking_s, reduce_s, tuple(request.notices))
            future.set_result(answer)
        except asyncio.CancelledError:
            future.set_exception(AveragingFailed("the averaging was given up", members))
        except Exception as error:
            logger.debug("averaging failed", exc_info=True)
            future.set_exception(as_failure(error, members, tuple(request.notices)))
        finally:
            self._request = None

    async def _find_group(self, request: AveragingRequest) -> tuple[GroupInfo, float]:
        """Meet the others under the request's key, or raise AveragingFailed."""
        matchmaking = self._matchmaking
        matchmaking.group_key_manager.group_bits = request.group_bits
        matchmaking.target_group_size = request.expected_peers
        self._pending_groups_registered.clear()
        started = time.monotonic()
        try:
            group_info = await (
                matchmaking.look_for_group(request)
                if request.awaited is None
                else meet_awaited(matchmaking, request, self._tell_together)
            )
        except BaseException:
            self._pending_groups_registered.set()
            raise
        if group_info is None:
            self._pending_groups_registered.set()
            raise AveragingFailed("no other peer came to the group")
        return group_info, time.monotonic() - started

    @contextlib.contextmanager
    def _announced(
        self, group_info: GroupInfo, members: tuple[str, ...], request: AveragingRequest
    ) -> Iterator[tuple[AgreedGroup, asyncio.Future[ExactAllReduceRunner | None]]]:
        """Check the group's rows and let its members' parts in, for as long as this is entered."""
        announced: asyncio.Future[ExactAllReduceRunner | None] = (
            asyncio.get_running_loop().create_future()
        )
        group: AgreedGroup | None = None
        try:
            try:
                group = agree(group_info.group_id, members, group_info.gathered, request.rules)
                self._running_groups[group.group_id] = announced
            finally:
                # Members that were faster than the leader's message to this peer wait for this.
                self._pending_groups_registered.set()
            yield group, announced
        finally:
            if group is not None:
                self._running_groups.pop(group.group_id, None)
            if not announced.done():
                announced.set_result(None)

    async def _reduce(
        self,
        group: AgreedGroup,
        announced: asyncio.Future[ExactAllReduceRunner | None],
        end_s: float,
    ) -> None:
        """Replace the scratch copy by the group's average, or raise."""
        runner = ExactAllReduceRunner(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            group=group,
            rule=self._rule,
            flat=self._scratch,
            codec=self._codec,
            part_bytes=self._part_bytes,
            silence_s=self._silence_s,
        )
        announced.set_result(runner)
        try:
            await asyncio.wait_for(_exhaust(runner), max(0.0, end_s - get_dht_time()))
        except (TimeoutError, asyncio.TimeoutError):
            raise AveragingFailed("the all-reduce did not end in time", group.peers) from None

    def _tell_together(self, members: int) -> None:
        self._together.value = members

    async def _await(self, peers: frozenset[str] | None) -> None:
        """Hear for whom the group that is looked for waits; None: for nobody any more."""
        if self._request is not None:
            self._request.awaited = peers

    async def _give_up(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    def _keep_current_task(self) -> None:
        """Refer to a task that Hivemind does not: it could be collected while it runs."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Admit another peer to the group that this peer leads, unless its row is bad."""
        own = self._request
        if own is not None and request.group_key == self._matchmaking.group_key_manager.current_key:
            try:
                own.rules.check_joiner(request.gather, context.remote_id.to_base58())
            except BadRowError as error:
                notice = f"not admitted to the group: {error}"
                if notice not in own.notices and len(own.notices) < _GREATEST_NOTICES:
                    own.notices.append(notice)
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
                return
        async for message in super().rpc_join_group(request, context):
            yield message

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Take parts from a member of a group that this peer is in."""
        request = await asyncio.wait_for(anext(stream), self._silence_s)
        if request.group_id not in self._running_groups:
            # The leader's message to this peer can be slower than a member's first part.
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._pending_groups_registered.wait(), self._silence_s)
        announced = self._running_groups.get(request.group_id)
        runner = await asyncio.shield(announced) if announced is not None else None
        if runner is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            # Reading on, or the sender would lose this answer while it writes.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_exhaust(stream), LINGER_S)
            return
        async for message in runner.rpc_aggregate_part(achain(as_aiter(request), stream), context):
            yield message

    async def _declare_for_download_periodically(self) -> None:
        """Hivemind's state sharing is not used: states are exchanged by digest."""

    async def _shutdown(self, timeout: float | None) -> None:
        await self._give_up()
        if not self.client_mode:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(
                    self.remove_p2p_handlers(self._p2p, namespace=self.prefix), timeout
                )


async def _exhaust(items: AsyncIterable[Any]) -> None:
    async for _ in items:
        pass
