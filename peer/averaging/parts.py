"""Buffers of the exact all-reduce: parts that are summed, and parts that come back.

Both replace Hivemind's buffers and differ from them in one rule: what is missing is never made up
for. A part is summed when every member's contribution to it is there, in canonical order, and
encoded once; an output is complete or there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import torch
from dipaco.modules.outer import AveragingRule, Contribution
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.partition import TensorPartContainer
from hivemind.proto import runtime_pb2

from .codec import PartCodec
from .group import BadRowError, GroupRules

# Parts that a member may send ahead of the last one that was summed.
WINDOW_PARTS = 4


class AveragingFailed(AllreduceException):
    """No average, nothing changed. The message is one line that says what and who.

    `peers_seen` are all members of the group if there was one, `culprits` those of them that this
    peer itself saw fail, `notices` lines about peers that were not admitted to the group.
    """

    def __init__(
        self,
        reason: str,
        peers_seen: tuple[str, ...] = (),
        culprits: tuple[str, ...] = (),
        notices: tuple[str, ...] = (),
    ) -> None:
        # All arguments are passed on, or the exception would not survive pickling.
        super().__init__(reason, peers_seen, culprits, notices)
        self.reason = reason
        self.peers_seen = peers_seen
        self.culprits = culprits
        self.notices = notices

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class ReducedPart:
    """An averaged part: the bytes that every member gets and what they decode to."""

    encoded: runtime_pb2.Tensor
    decoded: torch.Tensor


class ExactPartReducer:
    """Sums the parts that this peer reduces. Lives in one event loop, for one all-reduce.

    `part_sizes` are the parts' elements, `order` the indices of senders in the order of summation,
    and `weights` belong to `order`. Parts are combined by `rule`. Every sender puts every part, in
    order, and takes every result; a result is forgotten when all have taken it.
    """

    def __init__(
        self,
        part_sizes: Sequence[int],
        order: Sequence[int],
        weights: Sequence[float],
        rule: AveragingRule,
        codec: PartCodec,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.part_sizes = tuple(part_sizes)
        self.num_parts = len(self.part_sizes)
        self.finished = asyncio.Event()
        self._order, self._weights = tuple(order), tuple(weights)
        self._rule, self._codec = rule, codec
        self._waiting: dict[int, dict[int, torch.Tensor]] = {}
        self._received = [0] * len(self._order)
        # A failure is a result like any other, so that nobody has to retrieve an exception.
        self._results: dict[int, asyncio.Future[ReducedPart | AveragingFailed]] = {
            index: loop.create_future() for index in range(self.num_parts)
        }
        self._takers = [len(self._order)] * self.num_parts
        self._reduced = 0
        self._failure: AveragingFailed | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        if self.num_parts == 0:
            self.finished.set()

    @property
    def complete(self) -> bool:
        """Tell whether every part was summed."""
        return self._reduced == self.num_parts

    def received_all_from(self, sender_index: int) -> bool:
        """Tell whether a sender has put all of its parts."""
        return self._received[sender_index] == self.num_parts

    async def put(self, sender_index: int, part_index: int, part: torch.Tensor) -> None:
        """Accept a sender's next part, and wait while that sender is far ahead of the others.

        Raises ValueError for a part out of turn, and the failure once the all-reduce failed.
        """
        self._raise_failure()
        if part_index != self._received[sender_index] or part_index >= self.num_parts:
            raise ValueError(f"part {part_index} out of turn, of {self.num_parts} parts")
        self._received[sender_index] += 1
        waiting = self._waiting.setdefault(part_index, {})
        waiting[sender_index] = part
        if len(waiting) == len(self._order):
            task = asyncio.create_task(self._reduce(part_index, self._waiting.pop(part_index)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        behind = self._results.get(part_index - WINDOW_PARTS)
        if behind is not None:
            await asyncio.wait({behind})
            self._raise_failure()

    async def take(self, part_index: int) -> ReducedPart:
        """Wait for a part's result; each sender takes each part once.

        Raises AveragingFailed when a contribution to the part is missing or wrong.
        """
        result = self._results[part_index]
        await asyncio.wait({result})
        self._takers[part_index] -= 1
        if self._takers[part_index] == 0:
            del self._results[part_index]
        reduced = result.result()
        if isinstance(reduced, AveragingFailed):
            raise reduced
        return reduced

    def fail(self, failure: AveragingFailed) -> None:
        """Fail every part that is not summed yet, for everybody. Nothing when all are."""
        if self.complete or self._failure is not None:
            return
        self._failure = failure
        for result in self._results.values():
            if not result.done():
                result.set_result(failure)
        self._waiting.clear()
        self.finished.set()

    def finalize(self) -> None:
        """Called by Hivemind's runner at the end, whatever the end is."""
        self.fail(AveragingFailed("the all-reduce was given up"))

    async def _reduce(self, part_index: int, parts: dict[int, torch.Tensor]) -> None:
        loop = asyncio.get_running_loop()
        try:
            ordered = [parts[sender_index] for sender_index in self._order]
            parts.clear()
            reduced = await loop.run_in_executor(None, self._sum_and_encode, ordered)
        except Exception as error:
            self.fail(AveragingFailed(f"part {part_index} could not be summed: {error}"))
            return
        if self._failure is None:
            self._reduced += 1
            self._results[part_index].set_result(reduced)
            if self.complete:
                self.finished.set()

    def _sum_and_encode(self, ordered: list[torch.Tensor]) -> ReducedPart:
        average = self._rule.combine(ordered, self._weights)
        encoded = self._codec.encode(average)
        return ReducedPart(encoded, self._codec.decode(encoded, average.numel()))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class ExactPartContainer(TensorPartContainer):
    """Cuts the vector into parts, and takes the averages back in place, all of them or none.

    The vector is the averager's scratch copy. A part is overwritten by its average, which exists
    only when the part was sent and decoded everywhere, so no second vector is needed.
    """

    def __init__(
        self, flat: torch.Tensor, shares: Sequence[int], codec: PartCodec, part_bytes: int
    ) -> None:
        super().__init__(
            (flat,),
            shares,
            compression=codec.compression,
            part_size_bytes=codec.whole_part_bytes(part_bytes),
            return_deltas=False,
            prefetch=2,
        )
        self._views = tuple(tuple(part for part, _ in parts) for parts in self._input_parts_by_peer)
        self._missing_parts = sum(self.num_parts_by_peer)
        self._end: asyncio.Future[AveragingFailed | None] = (
            asyncio.get_running_loop().create_future()
        )

    def part_sizes(self, peer_index: int) -> tuple[int, ...]:
        """Return the elements of each part that a member reduces."""
        return tuple(view.numel() for view in self._views[peer_index])

    def register_processed_part(self, peer_index: int, part_index: int, part: torch.Tensor) -> None:
        """Write an averaged part into the vector. Parts of one reducer come in order."""
        if self._end.done():
            return
        if part_index != self._outputs_registered_by_peer[peer_index]:
            raise ValueError(f"part {part_index} of reducer {peer_index} out of turn")
        self._views[peer_index][part_index].copy_(part)
        self._outputs_registered_by_peer[peer_index] += 1
        self._missing_parts -= 1
        if self._missing_parts == 0:
            self._end.set_result(None)

    def fail(self, failure: AveragingFailed) -> None:
        """End without a result. Nothing when the result is complete."""
        if not self._end.done():
            self._end.set_result(failure)

    def register_failed_reducer(self, peer_index: int) -> None:
        """Hivemind would put local values in the place of what is missing; here it is the end."""
        self.fail(AveragingFailed(f"reducer {peer_index} failed"))

    async def iterate_output_tensors(self) -> AsyncIterator[torch.Tensor]:
        """Yield the vector once it is the average in all of its parts, or raise the failure."""
        failure = await asyncio.shield(self._end)
        if failure is not None:
            raise failure
        yield self.local_tensors[0]

    def finalize(self) -> None:
        """Called by Hivemind's runner at the end, whatever the end is."""
        super().finalize()
        if hasattr(self, "_end") and not self._end.get_loop().is_closed():
            self.fail(AveragingFailed("the all-reduce was given up"))


@dataclass(frozen=True)
class AveragingOutcome:
    """What every member of the group holds now: the same bits, the same table."""

    average: torch.Tensor
    """Flat fp32; the caller's own."""
    table: tuple[Contribution, ...]
    """Canonical rows of all contributions in the average."""
    matchmaking_s: float = 0.0
    reduce_s: float = 0.0


@dataclass(frozen=True)
class AveragingRequest:
    """One call of `average`, as the averager's process gets it. Times are Unix seconds."""

    rules: GroupRules
    key: str
    """Names the meeting, the same on all members."""
    candidates: tuple[str, ...]
    """Who may come, in leading order."""
    window_s: float
    """Seconds in which a group is to form."""
    start_s: float | None
    """When all come; None when they come at any time."""
    close_s: float
    give_up_s: float
    """When the meeting gives up, whoever leads."""
    end_s: float
    """When the all-reduce gives up."""
    awaited: frozenset[str] | None = None
    """With fixed steps: the group is complete when these are in it."""
    exclude: frozenset[str] = frozenset()
    """Peers that are neither called nor admitted."""


def as_failure(
    error: Exception, members: tuple[str, ...], notices: tuple[str, ...]
) -> AveragingFailed:
    """Turn whatever went wrong in the averager's process into what the host is told."""
    if isinstance(error, AveragingFailed):
        return AveragingFailed(
            error.reason, error.peers_seen or members, error.culprits, error.notices or notices
        )
    if isinstance(error, BadRowError):
        return AveragingFailed(f"group refused: {error}", members, (error.peer,), notices)
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return AveragingFailed(text, members, (), notices)
