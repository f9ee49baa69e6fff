"""One all-reduce in which every member ends with the same bits, or with nothing (design 4.3, 4.4).

Hivemind's butterfly: the vector is cut into parts, every member reduces some of them, everybody
sends its contribution to each part to that part's reducer and gets the average back. What differs:

* A contribution passes through the codec before it is summed, the reducer's own included.
* The contributions to a part are summed in the canonical order of the group's table and with the
  table's weights; weights that a sender states are ignored.
* The average is encoded once. Every member, the reducer included, decodes the same bytes.
* A contribution that is missing, late, malformed or not finite fails the part for everybody. A
  member that lacks any part fails, and so does everything it still owes to others.

So whoever ends with a result ends with the same bits as everybody who does, and with those that
`dipaco.modules.outer.AveragingRule.average` gives in one process. Known weakness, as without a
commit protocol there must be one: a reducer that dies between its last answers leaves members
with a complete result and members without. The latter learn of it from the state that the former
publish (design 4.4, the heavier state wins). A hostile reducer can send different numbers to
different members, which ends the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import AsyncIterator  # noqa: UP035  Hivemind's servicers do not know the other one.

import torch
from dipaco.modules.outer import AveragingRule, Contribution
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import anext

from .codec import PartCodec
from .group import AgreedGroup
from .parts import AveragingFailed, ExactPartContainer, ExactPartReducer

logger = logging.getLogger(__name__)

PEER_ID_BYTES = 64
# Seconds that a reducer goes on reading after its last answer.
LINGER_S = 3.0


class ExactAllReduceRunner(AllReduceRunner):
    """Runs one all-reduce of one flat fp32 vector with a group that has agreed on its rows.

    Created by `ExactAverager` in its own process, after matchmaking. `async for` over it yields
    `flat` itself once it holds the average, or raises AveragingFailed; `flat` is then undefined.
    A member that is silent for `silence_s` has failed; a reducer gets twice that.
    """

    # Hivemind would otherwise serve the handlers of whichever base class was used first.
    _rpc_handlers = None
    _stub_type = None

    tensor_part_container: ExactPartContainer
    tensor_part_reducer: ExactPartReducer

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
        part_bytes: int,
        silence_s: float,
    ) -> None:
        peer_ids = tuple(PeerID.from_base58(peer) for peer in group.peers)
        super().__init__(
            p2p=p2p,
            servicer_type=servicer_type,
            prefix=prefix,
            group_id=group.group_id,
            tensors=(flat,),
            ordered_peer_ids=peer_ids,
            peer_fractions=group.shares,
            sender_timeout=silence_s,
            reducer_timeout=2 * silence_s,
            compression=codec.compression,
            part_size_bytes=codec.whole_part_bytes(part_bytes),
        )
        # The stock reducer warns when it goes without having been used.
        self.tensor_part_reducer.finished.set()
        own_index = peer_ids.index(self.peer_id)
        self._codec = codec
        self._members = group.peers
        self.tensor_part_container = ExactPartContainer(flat, group.shares, codec, part_bytes)
        self.parts_for_local_averaging = self.tensor_part_container.get_raw_input_parts(own_index)
        self.tensor_part_reducer = ExactPartReducer(
            self.tensor_part_container.part_sizes(own_index),
            _summation_order(group.table, group.peers),
            rule.weights(group.table),
            rule,
            codec,
        )

    def fail(self, reason: str, *culprits: str) -> AveragingFailed:
        """End the all-reduce for this peer and for all that wait for parts it reduces.

        Returns the failure. Nothing changes for parts that were summed, nor for a result that is
        complete.
        """
        failure = AveragingFailed(reason, self._members, culprits)
        self.tensor_part_container.fail(failure)
        self.tensor_part_reducer.fail(failure)
        return failure

    def finalize(
        self, *, cancel: bool = False, exception: BaseException | None = None
    ) -> set[asyncio.Task]:
        """End, and leave no exception that nobody asks for."""
        super().finalize(cancel=cancel, exception=exception)
        if not self._future.cancelled():
            self._future.exception()
        return set()

    # What this peer sends, as a member.

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        """Send a reducer its parts and take the averages back; called by Hivemind's `run`."""
        index = self.ordered_peer_ids.index(peer_id)
        name = peer_id.to_base58()
        try:
            if peer_id == self.peer_id:
                await asyncio.gather(self._put_own_parts(index), self._take_own_parts(index))
            else:
                await self._exchange_with(peer_id, index)
        except AveragingFailed as failure:
            self.fail(failure.reason, *failure.culprits)
        except Exception as error:
            logger.debug("exchange of parts with %s failed", name, exc_info=True)
            self.fail(f"peer {name} failed as a reducer: {_describe(error)}", name)

    async def _put_own_parts(self, own_index: int) -> None:
        loop = asyncio.get_running_loop()
        for part_index, part in enumerate(self.parts_for_local_averaging):
            seen_by_others = await loop.run_in_executor(None, self._codec.round_trip, part)
            await self.tensor_part_reducer.put(own_index, part_index, seen_by_others)

    async def _take_own_parts(self, own_index: int) -> None:
        for part_index in range(self.tensor_part_reducer.num_parts):
            reduced = await self.tensor_part_reducer.take(part_index)
            self.tensor_part_container.register_processed_part(
                own_index, part_index, reduced.decoded
            )

    async def _exchange_with(self, peer_id: PeerID, peer_index: int) -> None:
        loop = asyncio.get_running_loop()
        sent = _Counter()
        inputs = _counted(self._generate_input_for_peer(peer_index), sent)
        stub = self._get_peer_stub(peer_id)
        stream = await asyncio.wait_for(stub.rpc_aggregate_part(inputs), self.sender_timeout)
        try:
            for part_index, size in enumerate(self.tensor_part_container.part_sizes(peer_index)):
                message = await self._next_answer(stream.__aiter__(), sent)
                if message.code != averaging_pb2.AVERAGED_PART:
                    raise self._refusal(peer_id, message)
                part = await loop.run_in_executor(
                    None, self._codec.decode, message.tensor_part, size
                )
                self.tensor_part_container.register_processed_part(peer_index, part_index, part)
        finally:
            with contextlib.suppress(Exception):
                await stream.aclose()

    async def _next_answer(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sent: _Counter
    ) -> averaging_pb2.AveragingData:
        """Wait for a reducer's next message: as long as there is progress in either direction.

        A reducer cannot answer what it has not got, so a slow upload is no fault of the reducer.
        """
        task = asyncio.ensure_future(anext(stream))
        try:
            while True:
                before = sent.value
                await asyncio.wait({task}, timeout=self.reducer_timeout)
                if task.done():
                    return task.result()
                if sent.value == before:
                    raise TimeoutError
        except StopAsyncIteration:
            raise ConnectionError("it ended before its last part") from None
        finally:
            task.cancel()

    def _refusal(self, peer_id: PeerID, message: averaging_pb2.AveragingData) -> AveragingFailed:
        """Turn a reducer's error message into a failure; whom it blames is unproven."""
        name = peer_id.to_base58()
        blamed = ""
        if 0 < len(message.peer_id) <= PEER_ID_BYTES:
            blamed = PeerID(message.peer_id).to_base58()
        if message.code == averaging_pb2.INTERNAL_ERROR and blamed in self._members:
            return AveragingFailed(f"peer {name} reports that peer {blamed} failed")
        code = averaging_pb2.MessageCode.Name(message.code)
        return AveragingFailed(f"peer {name} answered {code} instead of a part", (), (name,))

    # What others send to this peer, as a reducer.

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Take a member's contribution to every part that this peer reduces, answer averages.

        Receives and answers at the same time, so that neither waits for the other's network.
        """
        sender = context.remote_id
        if sender not in self.sender_peer_ids or sender in self.active_senders:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        sender_index = self.sender_peer_ids.index(sender)
        self.active_senders.add(sender)
        if len(self.active_senders) == len(self.sender_peer_ids):
            self.all_senders_started.set()
        reducer = self.tensor_part_reducer
        receiver = asyncio.create_task(self._receive_parts(sender, sender_index, stream, context))
        try:
            try:
                if self.should_delay_results(sender):
                    await reducer.finished.wait()
                for part_index in range(reducer.num_parts):
                    reduced = await reducer.take(part_index)
                    yield averaging_pb2.AveragingData(
                        code=averaging_pb2.AVERAGED_PART, tensor_part=reduced.encoded
                    )
            except AveragingFailed as failure:
                yield averaging_pb2.AveragingData(
                    code=averaging_pb2.INTERNAL_ERROR, peer_id=_blame(failure)
                )
            # A stream that is closed while the sender writes loses answers that it has not read.
            await asyncio.wait({receiver}, timeout=LINGER_S)
        finally:
            receiver.cancel()
            # Cancelled or closed: the sender is gone. That matters only if it still owed parts.
            if not reducer.received_all_from(sender_index):
                self._sender_failed(sender, ConnectionError("it went away"))

    async def _receive_parts(
        self,
        sender: PeerID,
        sender_index: int,
        stream: AsyncIterator[averaging_pb2.AveragingData],
        context: P2PContext,
    ) -> None:
        """Put a sender's parts into the reducer, then read to the stream's end, come what may.

        Whatever goes wrong before the last part fails the all-reduce.
        """
        loop = asyncio.get_running_loop()
        reducer = self.tensor_part_reducer
        try:
            for part_index, size in enumerate(reducer.part_sizes):
                message = await asyncio.wait_for(anext(stream), self.sender_timeout)
                if part_index == 0:
                    self._check_first(message, context)
                part = await loop.run_in_executor(
                    None, self._codec.decode, message.tensor_part, size
                )
                await reducer.put(sender_index, part_index, part)
        except StopAsyncIteration:
            self._sender_failed(sender, ConnectionError("its stream ended before its last part"))
        except Exception as error:
            self._sender_failed(sender, error)
        with contextlib.suppress(Exception):
            async for _ in stream:
                pass

    def _check_first(self, message: averaging_pb2.AveragingData, context: P2PContext) -> None:
        rejection = self._check_reasons_to_reject(message, context)
        if rejection is not None:
            raise ValueError(averaging_pb2.MessageCode.Name(rejection.code))
        if message.code != averaging_pb2.PART_FOR_AVERAGING:
            raise ValueError("its first message is not a part")

    def _sender_failed(self, sender: PeerID, error: Exception) -> AveragingFailed:
        if isinstance(error, AveragingFailed):
            return self.fail(error.reason, *error.culprits)
        name = sender.to_base58()
        logger.debug("contribution of %s failed", name, exc_info=error)
        return self.fail(f"peer {name} failed to contribute: {_describe(error)}", name)

    async def _ban_sender(self, peer_id: PeerID) -> None:
        """Called by Hivemind for a sender that never started."""
        name = peer_id.to_base58()
        self.banned_senders.add(peer_id)
        self.fail(f"peer {name} sent nothing for {self.sender_timeout:g} s", name)


class _Counter:
    value = 0


async def _counted(
    messages: AsyncIterator[averaging_pb2.AveragingData], counter: _Counter
) -> AsyncIterator[averaging_pb2.AveragingData]:
    """Count what is drawn from `messages`."""
    async for message in messages:
        yield message
        counter.value += 1
    counter.value += 1


def _summation_order(table: tuple[Contribution, ...], peers: tuple[str, ...]) -> tuple[int, ...]:
    """Return the members' indices in the order of the table."""
    return tuple(peers.index(row.peer) for row in table)


def _blame(failure: AveragingFailed) -> bytes:
    """Return the peer id that an error message names, or nothing."""
    return PeerID.from_base58(failure.culprits[0]).to_bytes() if failure.culprits else b""


def _describe(error: Exception) -> str:
    """Return one short line; some exceptions have no text."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return "it was silent for too long"
    return f"{error}".splitlines()[0][:200] if f"{error}" else type(error).__name__
