"""One all-reduce in which every member ends with the same bits, or with nothing (design 4.3, 4.4).

A butterfly, in one level or in two (`topology`): the vector is cut into parts, every member reduces
some of them, everybody sends its contribution to each part to a reducer and gets the average back.

* A contribution passes through the codec before it is summed, the reducer's own included.
* The contributions to a part are summed in the canonical order of the group's table and with the
  table's weights; weights that a sender states are ignored. In two levels a reducer has those of
  one section, and hands their sum in fp32 to the part's root, which adds the sections in order.
* The average is encoded once. Every member, the reducers included, decodes the same bytes.
* A contribution that is missing, late, malformed or not finite fails the part for everybody. A
  member that lacks any part fails, and so does everything it still owes to others. It says whom
  it blames before it goes, so that nobody takes the messenger for the cause.

So whoever ends with a result ends with the same bits as everybody who does, and with those that
`dipaco.modules.outer.AveragingRule.average` gives in one process. Known weakness, as without a
commit protocol there must be one: a reducer that dies between its last answers leaves members
with a complete result and members without. The latter learn of it from the state that the former
publish (design 4.4, the state with more contributors wins). A hostile reducer, which sends wrong
numbers or different ones to different members, is what `check` looks for afterwards (`verdicts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, AsyncIterator, TypeVar  # noqa: UP035  Hivemind's servicers know no other.

import torch
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import AveragingRule
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.proto.averaging_pb2 import AveragingData as Message
from hivemind.utils.asyncio import amap_in_executor, as_aiter

from .codec import PartCodec
from .group import AgreedGroup
from .parts import (
    AveragingFailed,
    FirstFailure,
    PartedVector,
    PartRoot,
    ReducedPart,
    SectionReducer,
    in_executor,
)
from .streams import (
    STAY_S,
    Answers,
    Counter,
    Inbox,
    counted,
    describe,
    farewell,
    reported,
    until_closed,
)
from .topology import Topology
from .verdicts import Signing, make_step_check

logger = logging.getLogger(__name__)

# A share of the silence that is borne: so long who fails goes on telling.
LINGER_SHARE = 0.25
# In two levels what is waited for may be far away: who waits for it says so often that it is there.
BEAT_S = 1.0
# Parts that are encoded ahead of the one that is sent.
ENCODED_AHEAD = 2
# Numbers of a section's sum in one message: 1 MiB.
SUM_NUMBERS = 2**18

T = TypeVar("T")


class ExactAllReduceRunner:
    """Runs one all-reduce of one flat fp32 vector with a group that has agreed on its rows.

    Created by `AveragingService` after the meeting. `run` replaces `flat` by the average, or
    raises AveragingFailed; `flat` is then undefined. A member that is silent for `silence_s` has
    failed; a reducer gets twice that.
    """

    def __init__(
        self,
        *,
        p2p: P2P,
        servicer_type: type[ServicerBase],
        prefix: str | None,
        group: AgreedGroup,
        rule: AveragingRule,
        flat: torch.Tensor,
        codec: PartCodec,
        silence_s: float,
        nodes: Sequence[bytes] = (),
        signing: Signing | None = None,
    ) -> None:
        self.peer_id = p2p.peer_id
        self._p2p, self._servicer_type, self._prefix = p2p, servicer_type, prefix
        self._group, self._codec, self._silence_s = group, codec, silence_s
        self._place = {peer: place for place, peer in enumerate(group.peers)}
        self._me = self._place[self.peer_id.to_base58()]
        self._failure = FirstFailure()
        self._vector = PartedVector(flat, rule)
        sizes = self._sizes = self._vector.sizes
        order = [self._place[row.peer] for row in group.table]
        section_rows = rule.rows_of_a_section(len(order))
        self._topology = topology = Topology.of(order, group.shares, sizes, section_rows)
        self.owed_bytes = topology.bytes_sent_by(self._me, sizes, codec.codec)
        self.needed_s = topology.seconds_needed(group.mbit_per_s, sizes, codec.codec)
        self._has_levels = len(topology.sections) > 1
        weights = dict(zip(order, rule.weights(group.table, group.usual), strict=True))
        paths = dict(zip(order, (row.path for row in group.table), strict=True))
        self._section = topology.section_of[self._me]
        self._root = PartRoot(len(topology.sections), rule, codec, self._failure)
        self._reducers = {
            section: SectionReducer(
                {part: sizes[part] for part in topology.parts_reduced_by(self._me, section)},
                topology.sections[section],
                [weights[member] for member in topology.sections[section]],
                [paths[member] for member in topology.sections[section]],
                group.usual.norms,
                rule,
                self._finisher(section),
                self._failure,
            )
            for section in topology.sections_reduced_by(self._me)
        }
        self._nodes = b"".join(nodes)
        self.step_check = make_step_check(
            group, rule, codec, topology, order, flat, self._me, silence_s, self._open, signing
        )
        members = range(len(group.peers))
        others = [member for member in members if member != self._me]
        self._owed = {root: topology.sums_between(self._me, root) for root in others}
        self._due = {reducer: topology.sums_between(reducer, self._me) for reducer in others}
        loop = asyncio.get_running_loop()
        owed = [place for places in self._owed.values() for place in places]
        self._sums: dict[tuple[int, int], asyncio.Future[torch.Tensor]] = {
            place: loop.create_future() for place in owed
        }
        self._averages: dict[tuple[int, int], asyncio.Future[ReducedPart]] = {
            place: loop.create_future() for place in owed
        }
        self._sum_codec = PartCodec(CODECS["none"])
        self._beat_s = min(BEAT_S, silence_s / 4) if self._has_levels else None
        self._started: set[tuple[int, bool]] = set()
        """Members whose stream of parts (False) or sums (True) has begun."""

    def _get_peer_stub(self, peer: PeerID) -> Any:
        return self._servicer_type.get_stub(self._p2p, peer, namespace=self._prefix)

    def fail(self, reason: str, *culprits: str, reported: str = "") -> None:
        """End the all-reduce for this peer and for all that wait for anything from it.

        Nothing changes for parts that are averaged, nor for a result that is complete.
        """
        self._failure.set(AveragingFailed(reason, self._group.peers, culprits, (), reported))

    @property
    def share_averaged(self) -> float:
        """How much of the vector has come back as averages, of 1."""
        return self._vector.share_complete

    async def check(self, limit_s: float) -> tuple[str, ...]:
        """Check the reducers after `run`, within `limit_s`; returns who accused one falsely."""
        return () if self.step_check is None else await self.step_check.run(limit_s)

    def end_check(self) -> None:
        """Let nobody wait for this peer's verdict any more."""
        if self.step_check is not None:
            self.step_check.give_up()

    async def run(self) -> None:
        """Take part until the vector is the average in all of its parts, or raise the failure."""
        topology, me = self._topology, self._me
        watch = asyncio.create_task(self._expect_all())
        tasks = []
        for member in sorted(set(topology.reducers[self._section])):
            parts = topology.parts_reduced_by(member, self._section)
            work = self._contribute_here() if member == me else self._contribute(member, parts)
            tasks.append(asyncio.create_task(self._guarded(member, work)))
        sums = [
            asyncio.create_task(self._guarded(root, self._hand_on(root, places)))
            for root, places in self._owed.items()
            if places
        ]
        tasks += sums
        try:
            await self._failure.or_result(self._vector.complete)
            # Others may still wait for averages that this peer gets from their roots.
            if sums:
                await asyncio.wait(sums)
        except AveragingFailed:
            await asyncio.wait(tasks, timeout=LINGER_SHARE * self._silence_s)
            raise
        finally:
            self.fail("the all-reduce was given up")
            for task in (watch, *tasks):
                task.cancel()
            await asyncio.gather(watch, *tasks, return_exceptions=True)

    async def _expect_all(self) -> None:
        """Fail when somebody who should send to this peer has not begun in time."""
        topology = self._topology
        expected = {
            (member, False)
            for section in self._reducers
            for member in topology.sections[section]
            if member != self._me
        }
        expected |= {(reducer, True) for reducer, places in self._due.items() if places}
        await asyncio.sleep(self._silence_s)
        missing = sorted({self._group.peers[member] for member, _ in expected - self._started})
        if missing:
            names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            self.fail(f"peer {names} sent nothing for {self._silence_s:g} s", *missing)

    async def _guarded(self, member: int, work: Awaitable[None]) -> None:
        """Do something that a member is needed for; when it goes wrong, all goes wrong."""
        name = self._group.peers[member]
        try:
            await work
        except AveragingFailed as failure:
            self._failure.set(failure)
        except Exception as error:
            logger.debug("exchange with %s failed", name, exc_info=True)
            self.fail(f"peer {name} failed as a reducer: {describe(error)}", name)

    # What this peer sends: contributions to reducers, sums to roots.

    async def _contribute_here(self) -> None:
        """Contribute to what this peer reduces for its own section."""
        reducer = self._reducers[self._section]

        async def put() -> None:
            self._begin_keeping(self._me, self._nodes)
            for part in reducer.sizes:
                encoded = await in_executor(self._codec.encode, self._vector.parts[part])
                await self._put(reducer, self._me, part, encoded)

        async def take() -> None:
            for part in reducer.sizes:
                self._vector.put(part, (await reducer.take(part)).decoded)

        await asyncio.gather(put(), take())

    async def _contribute(self, member: int, parts: Sequence[int]) -> None:
        """Send a reducer this peer's contributions, and take the averages."""

        async def contributions() -> AsyncIterator[Message]:
            own = as_aiter(*(self._vector.parts[part] for part in parts))
            encoded = amap_in_executor(self._codec.encode, own, max_prefetch=ENCODED_AHEAD)
            code, group_id = averaging_pb2.PART_FOR_AVERAGING, self._group.group_id
            if self.step_check is not None:
                hashes = runtime_pb2.Tensor(buffer=self._nodes)
                yield Message(code=code, group_id=group_id, tensor_part=hashes)
                code, group_id = averaging_pb2.NO_CODE, b""
            async for part in encoded:
                failure = self._failure.get()
                if failure is not None:
                    yield farewell(failure)
                    return
                yield Message(code=code, group_id=group_id, tensor_part=part)
                code, group_id = averaging_pb2.NO_CODE, b""

        call = self._get_peer_stub(self._peer_id(member)).rpc_aggregate_part
        async with self._exchange(member, call, contributions()) as answers:
            for part in parts:
                reduced = await self._decoded(await answers.next(), part)
                if self.step_check is not None:
                    self.step_check.note(part, reduced.encoded)
                    if part == parts[-1]:
                        signature = (await answers.next()).tensor_part.buffer
                        self.step_check.take_signature(member, signature)
                self._vector.put(part, reduced.decoded)

    async def _hand_on(self, member: int, places: Sequence[tuple[int, int]]) -> None:
        """Send a root the sums that it needs, and take the averages for the sections' members."""

        async def sums() -> AsyncIterator[Message]:
            code = averaging_pb2.PART_FOR_AVERAGING
            yield Message(code=averaging_pb2.ACCEPTED, group_id=self._group.group_id)
            for place in places:
                while not self._sums[place].done():
                    try:
                        await self._failure.or_result(self._sums[place], self._beat_s)
                    except TimeoutError:
                        yield Message(code=averaging_pb2.ACCEPTED)
                    except AveragingFailed as failure:
                        yield farewell(failure)
                        return
                for piece in self._sums.pop(place).result().split(SUM_NUMBERS):
                    yield Message(code=code, tensor_part=self._sum_codec.encode(piece))

        call = self._get_peer_stub(self._peer_id(member)).rpc_add_sums
        async with self._exchange(member, call, sums()) as answers:
            for part, section in places:
                reduced = await self._decoded(await answers.next(), part)
                self._averages[part, section].set_result(reduced)

    def _finisher(self, section: int) -> Callable[[int, torch.Tensor], Awaitable[ReducedPart]]:
        """Return how a section's sum of a part becomes its average."""

        async def finish(part: int, section_sum: torch.Tensor) -> ReducedPart:
            if self._topology.root(part) == self._me:
                await self._root.put(section, part, section_sum)
                reduced = await self._root.take(part)
                if self.step_check is not None:
                    self.step_check.note(part, reduced.encoded)
                return reduced
            self._sums[part, section].set_result(section_sum)
            return await self._failure.or_result(self._averages[part, section])

        return finish

    def _peer_id(self, member: int) -> PeerID:
        return PeerID.from_base58(self._group.peers[member])

    async def _decoded(self, message: Message, part: int) -> ReducedPart:
        encoded = message.tensor_part
        decoded = await in_executor(self._codec.decode, encoded, self._sizes[part])
        return ReducedPart(encoded, decoded)

    @contextlib.asynccontextmanager
    async def _exchange(
        self,
        member: int,
        call: Callable[[AsyncIterator[Message]], Awaitable[AsyncIterator[Message]]],
        inputs: AsyncIterator[Message],
    ) -> AsyncIterator[Answers]:
        """Call a reducer or a root."""
        sent = Counter()
        calling = asyncio.ensure_future(call(counted(inputs, sent)))
        try:
            stream = await self._failure.or_result(calling, self._silence_s)
        finally:
            calling.cancel()
        name = self._group.peers[member]
        answers = Answers(
            stream,
            sent,
            lambda message: self._report(name, message),
            self._failure,
            2 * self._silence_s,
            may_beat=self._has_levels,
        )
        try:
            yield answers
        finally:
            await answers.close()

    def _report(self, name: str, message: Message) -> AveragingFailed:
        return reported(name, message, self._group.peers, self.peer_id.to_base58())

    # What others send to this peer: contributions, as a reducer; sums, as a root.

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[Message], context: P2PContext
    ) -> AsyncIterator[Message]:
        """Take a member's contributions to the parts that this peer reduces, answer averages."""
        sender = self._place.get(context.remote_id.to_base58(), self._me)
        reducer = self._reducers.get(self._topology.section_of[sender])
        if reducer is None or not self._begins(sender, is_sums=False):
            yield Message(code=averaging_pb2.PROTOCOL_VIOLATION)
            await until_closed(stream)
            return

        async def receive(messages: Inbox) -> None:
            if self.step_check is not None:
                message = await messages.next(self._silence_s)
                self._begin_keeping(sender, message.tensor_part.buffer)
            for part in reducer.sizes:
                message = await messages.next(self._silence_s)
                await self._put(reducer, sender, part, message.tensor_part)

        async def average(part: int) -> ReducedPart:
            # Who can only send gets nothing before it has sent all: its line may be bad both ways.
            if self._group.shares[sender] == 0:
                await reducer.wait_until_finished()
            return await reducer.take(part)

        averages = [functools.partial(average, part) for part in reducer.sizes]
        if self.step_check is not None:
            averages.append(functools.partial(self._signature, reducer))
        async for message in self._serve(sender, stream, receive, averages):
            yield message

    def _begin_keeping(self, member: int, nodes: bytes) -> None:
        if self.step_check is not None:
            self.step_check.kept.begin(member, nodes)

    async def _put(
        self, reducer: SectionReducer, member: int, part: int, encoded: runtime_pb2.Tensor
    ) -> None:
        """Decode a member's contribution to a part, which others may ask to see, and take it."""
        decoded = await in_executor(self._codec.decode, encoded, self._sizes[part])
        norm, check = None, self.step_check
        if check is not None:
            norm = await in_executor(check.kept.keep, member, part, encoded.buffer, decoded)
        await reducer.put(member, part, decoded, norm)

    async def _signature(self, reducer: SectionReducer) -> ReducedPart:
        """Return this reducer's signature of all its averages, in the place of a part."""
        assert self.step_check is not None
        await reducer.wait_until_finished()
        return ReducedPart(runtime_pb2.Tensor(buffer=self.step_check.signature()), torch.empty(0))

    # Checks.

    async def _open(self, member: int, name: str, inputs: AsyncIterator[Message]) -> Any:
        return await getattr(self._get_peer_stub(self._peer_id(member)), name)(inputs)

    async def rpc_add_sums(
        self, stream: AsyncIterator[Message], context: P2PContext
    ) -> AsyncIterator[Message]:
        """Take a reducer's sums of the parts that this peer is the root of, answer averages."""
        sender = self._place.get(context.remote_id.to_base58(), self._me)
        places = self._due.get(sender, ())
        if not places or not self._begins(sender, is_sums=True):
            yield Message(code=averaging_pb2.PROTOCOL_VIOLATION)
            await until_closed(stream)
            return

        async def receive(messages: Inbox) -> None:
            for part, section in places:
                section_sum = torch.empty(self._sizes[part])
                for piece in section_sum.split(SUM_NUMBERS):
                    # It beats while it waits for its members, whom it has given less time.
                    message = await messages.next(2 * self._silence_s, may_beat=True)
                    piece.copy_(self._sum_codec.decode(message.tensor_part, piece.numel()))
                await self._root.put(section, part, section_sum)

        averages = (functools.partial(self._root.take, part) for part, _ in places)
        async for message in self._serve(sender, stream, receive, averages):
            yield message

    def _begins(self, sender: int, *, is_sums: bool) -> bool:
        """Note that a member's stream has begun; false for a stranger and a second stream."""
        if sender == self._me or (sender, is_sums) in self._started:
            return False
        self._started.add((sender, is_sums))
        return True

    async def _serve(
        self,
        sender: int,
        stream: AsyncIterator[Message],
        receive: Callable[[Inbox], Awaitable[None]],
        averages: Iterable[Callable[[], Awaitable[ReducedPart]]],
    ) -> AsyncIterator[Message]:
        """Receive what a member sends and answer averages at the same time, so that neither waits
        for the other's network."""
        received = asyncio.Event()
        receiver = asyncio.create_task(self._receive(sender, stream, receive, received))
        try:
            try:
                for take in averages:
                    average = asyncio.ensure_future(take())
                    try:
                        while not average.done():
                            await asyncio.wait({average}, timeout=self._beat_s)
                            if not average.done():
                                yield Message(code=averaging_pb2.ACCEPTED)
                    finally:
                        average.cancel()
                    encoded = average.result().encoded
                    yield Message(code=averaging_pb2.AVERAGED_PART, tensor_part=encoded)
            except AveragingFailed as failure:
                yield farewell(failure)
            # As in `until_closed`; what comes is received meanwhile.
            await asyncio.sleep(STAY_S)
        finally:
            receiver.cancel()
            # Cancelled or closed: the sender is gone. That matters only if it still owed something.
            if not received.is_set():
                self._sender_failed(sender, ConnectionError("it went away"))

    async def _receive(
        self,
        sender: int,
        stream: AsyncIterator[Message],
        receive: Callable[[Inbox], Awaitable[None]],
        received: asyncio.Event,
    ) -> None:
        """Receive what a member owes, then read to the stream's end, come what may.

        Whatever goes wrong before that is received fails the all-reduce.
        """
        name = self._group.peers[sender]
        messages = Inbox(stream, self._group.group_id, lambda message: self._report(name, message))
        try:
            await receive(messages)
            received.set()
        except StopAsyncIteration:
            self._sender_failed(sender, ConnectionError("its stream ended before its last part"))
        except Exception as error:
            self._sender_failed(sender, error)
        with contextlib.suppress(Exception):
            async for _ in stream:
                pass

    def _sender_failed(self, sender: int, error: Exception) -> None:
        if isinstance(error, AveragingFailed):
            self._failure.set(error)
            return
        name = self._group.peers[sender]
        logger.debug("contribution of %s failed", name, exc_info=error)
        self.fail(f"peer {name} failed to contribute: {describe(error)}", name)
