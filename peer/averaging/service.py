"""What an averager's process does: meet the other trainers of a module, and average with them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, AsyncIterator  # noqa: UP035  Hivemind's servicers do not know the other one.

import torch
from dipaco.dht.admission import Admission
from dipaco.modules.outer import AveragingRule
from dipaco.peer.member.calls import Met
from dipaco.peer.member.gathering import takes_long
from dipaco.peer.member.meeting import Meeting
from hivemind.p2p import P2PContext, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import achain, anext, as_aiter

from .allreduce import ExactAllReduceRunner
from .bounded_p2p import BoundedP2P
from .codec import PartCodec
from .group import AgreedGroup, BadRowError, agree
from .meeting_room import MeetingRoom
from .parts import AveragingFailed, AveragingRequest, as_failure
from .streams import until_closed
from .verdicts import Signing

logger = logging.getLogger(__name__)


def agree_with_leader(met: Met, request: AveragingRequest, notices: tuple[str, ...]) -> AgreedGroup:
    """Check the list that a meeting ended with, and return the group.

    Raises AveragingFailed with the members, who may meet again, but for two culprits: whoever has a
    row that nobody takes, and the leader, who would have refused it at the door.
    """
    group = met.group
    try:
        return agree(request.key.encode(), group.peers, group.rows, request.rules)
    except BadRowError as error:
        members = tuple(peer for peer in group.peers if peer in request.candidates)
        culprits = tuple(dict.fromkeys((met.leader, error.peer)))
        raise AveragingFailed(f"group refused: {error}", members, culprits, notices) from None


async def run_in_time(
    runner: ExactAllReduceRunner, request: AveragingRequest, owe: Callable[[int, float], None]
) -> float:
    """Run an all-reduce, and return until when its reducers may be checked.

    What the rows say of lines may be too much, or nothing yet. So a reduce goes on with the window
    where the rest comes in time at the rate of what has come, which is much the same for all; and
    where it took most of its attempt, so do its checks. Raises AveragingFailed.
    """
    began_s, end_s = time.time(), request.until_s(runner.needed_s)

    def owe_until(time_s: float) -> float:
        left = runner.owed_bytes * (1.0 - runner.share_averaged)
        limit_s = max(0.0, time_s - time.time())
        owe(max(1, round(left)), limit_s)
        return limit_s

    running = asyncio.ensure_future(runner.run())
    try:
        while True:
            await asyncio.wait({running}, timeout=owe_until(end_s))
            took_s = time.time() - began_s
            if running.done():
                await running
                if takes_long(began_s, end_s, took_s):
                    end_s = request.latest_s
                owe_until(end_s)
                return end_s
            left_s, share = request.latest_s - time.time(), runner.share_averaged
            if end_s >= request.latest_s or took_s * (1.0 - share) > left_s * share:
                raise AveragingFailed("the all-reduce did not end in time")
            end_s = request.latest_s
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class AveragingService(ServicerBase):
    """Serves one averager's calls and its part in others' all-reduces. Lives in one event loop.

    :param flat: the scratch copy, shared with the host, which is averaged in place
    :param signing: signs what this peer averages; None checks nothing
    :param tell: hears how many members are together while a group forms
    :param owe: hears how many bytes this peer sends in the reduce that begins, and in how many
        seconds at most; 0 when it has ended
    """

    # Hivemind would otherwise serve the handlers of whichever servicer was used first. The name of
    # this class is part of the RPC's name, hence of the protocol.
    _rpc_handlers = None
    _stub_type = None

    def __init__(
        self,
        p2p: BoundedP2P,
        prefix: str,
        flat: torch.Tensor,
        *,
        rule: AveragingRule,
        codec: PartCodec,
        silence_s: float,
        tell: Callable[[int], None],
        owe: Callable[[int, float], None],
        signing: Signing | None = None,
    ) -> None:
        self._signing = signing
        self._p2p, self._prefix, self._flat = p2p, prefix, flat
        self._rule, self._codec = rule, codec
        self._silence_s = silence_s
        self._tell, self._owe = tell, owe
        self._room = MeetingRoom(p2p, f"{prefix}::meet/1")
        self._running: dict[bytes, asyncio.Future[ExactAllReduceRunner | None]] = {}
        # Set when no group forms here, so that what is not among the running never will be.
        self._settled = asyncio.Event()
        self._settled.set()
        self._task: asyncio.Task[Any] | None = None

    async def open(self) -> None:
        """Let others in."""
        await self.add_p2p_handlers(self._p2p, namespace=self._prefix)
        await self._room.open()

    async def close(self) -> None:
        """End what is under way and let nobody in any more."""
        self.give_up()
        await self._room.close()
        await self.remove_p2p_handlers(self._p2p, namespace=self._prefix)

    def expect(self, peers: frozenset[str] | None) -> None:
        """The group that forms waits for these; None: for nobody any more."""
        self._room.expect(peers)

    def give_up(self) -> None:
        """Break off the averaging under way."""
        if self._task is not None:
            self._task.cancel()

    def begin(self, request: AveragingRequest, future: MPFuture) -> None:
        """Average in the background; the answer goes to `future`, whatever happens."""
        self._task = asyncio.create_task(self._average(request, future))

    async def _average(self, request: AveragingRequest, future: MPFuture) -> None:
        notices: tuple[str, ...] = ()
        members: tuple[str, ...] = ()
        self._p2p.expected = self._room.expected = frozenset(request.candidates)
        try:
            started = time.monotonic()
            group, notices = await self._meet(request)
            members = group.peers
            self._p2p.expected = frozenset((*request.candidates, *members))
            met = time.monotonic()
            with self._announced(group) as announced:
                culprits = await self._reduce(group, announced, request)
            rows = tuple((row.path, row.peer, row.tokens) for row in group.table)
            future.set_result((rows, met - started, time.monotonic() - met, notices, culprits))
        except asyncio.CancelledError:
            future.set_exception(AveragingFailed("the averaging was given up", members))
        except Exception as error:
            logger.debug("averaging failed", exc_info=True)
            future.set_exception(as_failure(error, members, notices))

    async def _meet(self, request: AveragingRequest) -> tuple[AgreedGroup, tuple[str, ...]]:
        """Return the group that the others and this peer are in, its rows checked."""
        rules = request.rules
        came: dict[str, Admission] = {}
        if rules.gate is not None:
            rules.gate.check(rules.own.peer, rules.own.admission)
            rules.check_place(rules.own.peer, came)

        def why_not(peer: str, row: bytes) -> str | None:
            try:
                rules.check_row(row, peer)
                rules.check_place(peer, came)
            except BadRowError as error:
                return error.reason
            return None

        def make(now_s: float, first_number: int) -> Meeting:
            return Meeting(
                rules.own.peer,
                request.candidates,
                rules.own.to_bytes(),
                why_not,
                now_s=now_s,
                window_s=request.window_s,
                start_s=request.start_s,
                close_s=request.close_s,
                give_up_s=request.give_up_s,
                awaited=request.awaited,
                excluded=request.exclude,
                undialable=request.undialable,
                first_number=first_number,
            )

        self._settled.clear()
        try:
            met, notices = await self._room.meet(request.key, make, self._tell)
            agreed = agree_with_leader(met, request, notices)
            self._running[agreed.group_id] = asyncio.get_running_loop().create_future()
            return agreed, notices
        finally:
            # Members that were faster than the leader's message to this peer wait for this.
            self._settled.set()

    @contextlib.contextmanager
    def _announced(
        self, group: AgreedGroup
    ) -> Iterator[asyncio.Future[ExactAllReduceRunner | None]]:
        """Let the members' parts in, for as long as this is entered."""
        announced = self._running[group.group_id]
        try:
            yield announced
        finally:
            del self._running[group.group_id]
            if not announced.done():
                announced.set_result(None)

    async def _reduce(
        self,
        group: AgreedGroup,
        announced: asyncio.Future[ExactAllReduceRunner | None],
        request: AveragingRequest,
    ) -> tuple[str, ...]:
        """Replace the scratch copy by the group's average, or raise.

        Returns who accused a reducer falsely.
        """
        runner = ExactAllReduceRunner(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self._prefix,
            group=group,
            rule=self._rule,
            flat=self._flat,
            codec=self._codec,
            silence_s=self._silence_s,
            nodes=request.nodes,
            signing=self._signing,
        )
        announced.set_result(runner)
        try:
            until_s = await run_in_time(runner, request, self._owe)
            return await runner.check(max(0.0, until_s - time.time()))
        finally:
            self._owe(0, 0.0)
            runner.end_check()

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Take contributions to parts from a member of a group that this peer is in."""
        async for message in self._pass_on(
            lambda runner: runner.rpc_aggregate_part, stream, context
        ):
            yield message

    async def rpc_add_sums(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Take sums of parts from a member of a group that this peer is in."""
        async for message in self._pass_on(lambda runner: runner.rpc_add_sums, stream, context):
            yield message

    async def rpc_show_pieces(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Show a member of a group that this peer is in what it sent and others did."""
        async for message in self._pass_on(
            lambda runner: runner.step_check.rpc_show_pieces if runner.step_check else None,
            stream,
            context,
        ):
            yield message

    async def rpc_compare(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Exchange verdicts with a member of a group that this peer is in."""
        async for message in self._pass_on(
            lambda runner: runner.step_check.rpc_compare if runner.step_check else None,
            stream,
            context,
        ):
            yield message

    async def _pass_on(
        self,
        handler_of: Callable[[ExactAllReduceRunner], Callable[..., AsyncIterator[Any]] | None],
        stream: AsyncIterator[averaging_pb2.AveragingData],
        context: P2PContext,
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Let the all-reduce that the first message names answer the call."""
        request = await asyncio.wait_for(anext(stream), self._silence_s)
        if request.group_id not in self._running:
            # The leader's message to this peer can be slower than a member's first part.
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._settled.wait(), self._silence_s)
        announced = self._running.get(request.group_id)
        runner = await asyncio.shield(announced) if announced is not None else None
        handler = None if runner is None else handler_of(runner)
        if handler is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            await until_closed(stream)
            return
        async for message in handler(achain(as_aiter(request), stream), context):
            yield message
