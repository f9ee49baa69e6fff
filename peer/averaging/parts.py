"""Buffers of the exact all-reduce: sums of a section, averages of parts, and the vector itself.

What is missing is never made up for. A part is summed when every contribution to it is there, in
canonical order, and encoded once; an output is complete or there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from dipaco.modules.outer import SECTION_ROWS, AveragingRule, Contribution
from dipaco.peer.member.gathering import takes_long
from hivemind.averaging.allreduce import AllreduceException
from hivemind.proto import runtime_pb2

from .codec import PartCodec, is_finite
from .group import BadRowError, GroupRules

# Parts that a member may send ahead of the last one that was summed.
WINDOW_PARTS = 4

T = TypeVar("T")


class AveragingFailed(AllreduceException):
    """No average, nothing changed. The message is one line that says what and who.

    `peers_seen` are all members of the group if there was one, `culprits` those of them that this
    peer itself saw fail, `notices` lines about peers that were not admitted to the group,
    `reported` a member of which another one said that it failed. With `is_proven` the culprits
    lied, as this peer has computed itself.
    """

    def __init__(
        self,
        reason: str,
        peers_seen: tuple[str, ...] = (),
        culprits: tuple[str, ...] = (),
        notices: tuple[str, ...] = (),
        reported: str = "",
        is_proven: bool = False,
    ) -> None:
        # All arguments are passed on, or the exception would not survive pickling.
        super().__init__(reason, peers_seen, culprits, notices, reported, is_proven)
        self.reason = reason
        self.peers_seen = peers_seen
        self.culprits = culprits
        self.notices = notices
        self.reported = reported
        self.is_proven = is_proven

    @property
    def blamed(self) -> str:
        """Who is named to others, or nothing."""
        return self.culprits[0] if self.culprits else self.reported

    def __str__(self) -> str:
        return self.reason


class NoGroup(AveragingFailed):
    """A reducer knows no such group, so nobody can have its average: as if none had formed."""


async def in_executor(function: Callable[..., T], *arguments: Any) -> T:
    """Have a thread do something that takes long."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


class FirstFailure:
    """Why an all-reduce has failed here, if it has; whoever waits for anything waits for this."""

    def __init__(self) -> None:
        self._failure: asyncio.Future[AveragingFailed] = asyncio.get_running_loop().create_future()

    def get(self) -> AveragingFailed | None:
        """Return the failure, if there is one."""
        return self._failure.result() if self._failure.done() else None

    def set(self, failure: AveragingFailed) -> None:
        """Fail, unless that has happened before."""
        if not self._failure.done():
            self._failure.set_result(failure)

    async def or_result(self, future: asyncio.Future[T], timeout_s: float | None = None) -> T:
        """Wait for a future and return its result, or raise the failure if that comes first.

        Raises TimeoutError when neither comes; the future goes on.
        """
        either: set[asyncio.Future[Any]] = {future, self._failure}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        if not self._failure.done():
            raise TimeoutError
        raise self._failure.result()


@dataclass(frozen=True)
class ReducedPart:
    """An averaged part: the bytes that every member gets and what they decode to."""

    encoded: runtime_pb2.Tensor
    decoded: torch.Tensor


class PartRoot:
    """Adds the sums of all sections to the parts that this peer is the root of, and encodes them.

    `sections` sums are put for each part, and each result is taken so often.
    """

    def __init__(
        self, sections: int, rule: AveragingRule, codec: PartCodec, failure: FirstFailure
    ) -> None:
        self._sections = sections
        self._rule, self._codec = rule, codec
        self._failure = failure
        self._sums: dict[int, dict[int, torch.Tensor]] = {}
        self._results: dict[int, asyncio.Future[ReducedPart]] = {}
        self._takers: dict[int, int] = {}

    async def put(self, section: int, part: int, section_sum: torch.Tensor) -> None:
        """Take a section's sum of a part; with the last one the average is made.

        Raises ValueError when that is not finite.
        """
        sums = self._sums.setdefault(part, {})
        sums[section] = section_sum
        if len(sums) == self._sections:
            ordered = [sums[number] for number in sorted(self._sums.pop(part))]
            loop = asyncio.get_running_loop()
            reduced = await loop.run_in_executor(None, self._add_and_encode, ordered)
            self._result(part).set_result(reduced)

    async def take(self, part: int) -> ReducedPart:
        """Wait for a part's average. Raises AveragingFailed."""
        reduced = await self._failure.or_result(self._result(part))
        self._takers[part] = self._takers.get(part, 0) + 1
        if self._takers[part] == self._sections:
            del self._results[part]
        return reduced

    def _result(self, part: int) -> asyncio.Future[ReducedPart]:
        if part not in self._results:
            self._results[part] = asyncio.get_running_loop().create_future()
        return self._results[part]

    def _add_and_encode(self, ordered: list[torch.Tensor]) -> ReducedPart:
        average = self._rule.add_sections(ordered)
        encoded = self._codec.encode(average)
        return ReducedPart(encoded, self._codec.decode(encoded, average.numel()))


class SectionReducer:
    """Sums the contributions of a section's members to the parts that this peer reduces for it.

    :param sizes: the elements of these parts, by number, in order
    :param members: the section's members in the order of summation, with `weights` and `paths`
    :param usual_norms: of all parts, or none
    :param finish: makes a part's average of the section's sum; raises AveragingFailed

    Every member puts every part, in order, and takes every result; a result is forgotten when all
    have taken it. Lives in one event loop, for one all-reduce.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        members: Sequence[int],
        weights: Sequence[float],
        paths: Sequence[int],
        usual_norms: Sequence[float],
        rule: AveragingRule,
        finish: Callable[[int, torch.Tensor], Awaitable[ReducedPart]],
        failure: FirstFailure,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.sizes = dict(sizes)
        self._parts = tuple(self.sizes)
        self._members, self._weights, self._paths = tuple(members), tuple(weights), tuple(paths)
        # Where there are no sections, many members send to one reducer.
        self._window = max(1, min(WINDOW_PARTS, WINDOW_PARTS * SECTION_ROWS // len(members)))
        self._usual_norms = tuple(usual_norms)
        self._rule, self._finish = rule, finish
        self._failure = failure
        self._waiting: dict[int, dict[int, tuple[torch.Tensor, float | None]]] = {}
        self._received = dict.fromkeys(self._members, 0)
        self._summed = {part: loop.create_future() for part in self._parts}
        self._results: dict[int, asyncio.Future[ReducedPart]] = {
            part: loop.create_future() for part in self._parts
        }
        self._last = tuple(self._results.values())[-1]
        self._takers = dict.fromkeys(self._parts, len(self._members))
        self._tasks: set[asyncio.Task[None]] = set()

    def received_all_from(self, member: int) -> bool:
        """Tell whether a member has put all of its parts."""
        return self._received[member] == len(self._parts)

    async def put(
        self, member: int, part: int, contribution: torch.Tensor, norm: float | None = None
    ) -> None:
        """Accept a member's next part, and wait while that member is far ahead of the others.

        `norm` is that of the contribution, if it is known. Raises ValueError for a part out of
        turn, and AveragingFailed.
        """
        number = self._received[member]
        if number == len(self._parts) or part != self._parts[number]:
            raise ValueError(f"part {part} out of turn")
        self._received[member] += 1
        waiting = self._waiting.setdefault(part, {})
        waiting[member] = contribution, norm
        if len(waiting) == len(self._members):
            task = asyncio.create_task(self._reduce(part, self._waiting.pop(part)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if number >= self._window:
            await self._failure.or_result(self._summed[self._parts[number - self._window]])

    async def take(self, part: int) -> ReducedPart:
        """Wait for a part's result; each member takes each part once. Raises AveragingFailed."""
        reduced = await self._failure.or_result(self._results[part])
        self._takers[part] -= 1
        if self._takers[part] == 0:
            del self._results[part]
        return reduced

    async def wait_until_finished(self) -> None:
        """Wait for the last part. Raises AveragingFailed."""
        await self._failure.or_result(self._last)

    async def _reduce(
        self, part: int, contributions: dict[int, tuple[torch.Tensor, float | None]]
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            ordered = [contributions[member][0] for member in self._members]
            known = [contributions[member][1] for member in self._members]
            contributions.clear()
            section_sum = await loop.run_in_executor(None, self._sum, part, ordered, known)
            self._summed[part].set_result(None)
            self._results[part].set_result(await self._finish(part, section_sum))
        except AveragingFailed as failure:
            self._failure.set(failure)
        except Exception as error:
            self._failure.set(AveragingFailed(f"part {part} could not be summed: {error}"))

    def _sum(
        self, part: int, ordered: list[torch.Tensor], known: list[float | None]
    ) -> torch.Tensor:
        usual_norm = self._usual_norms[part] if self._usual_norms else 0.0
        norms = [norm for norm in known if norm is not None]
        self._rule.clip(ordered, usual_norm, norms if len(norms) == len(ordered) else None)
        section_sum = self._rule.combine_section(ordered, self._weights, self._paths)
        if not is_finite(section_sum):
            raise ValueError("the sum is not finite")
        return section_sum


class PartedVector:
    """The vector in parts, which are sent, and overwritten by the averages that come back.

    It is the averager's scratch copy. A part's average exists only when the part was sent and
    decoded everywhere, so no second vector is needed.
    """

    def __init__(self, flat: torch.Tensor, rule: AveragingRule) -> None:
        self.parts = flat.view(-1).split(rule.part_sizes(flat.numel()))
        self._missing = set(range(len(self.parts)))
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each part."""
        return tuple(part.numel() for part in self.parts)

    @property
    def share_complete(self) -> float:
        """How many of the parts are averages, of 1."""
        return 1.0 - len(self._missing) / len(self.parts)

    def put(self, part: int, average: torch.Tensor) -> None:
        """Write an averaged part into the vector."""
        self.parts[part].copy_(average)
        self._missing.discard(part)
        if not self._missing and not self.complete.done():
            self.complete.set_result(None)


@dataclass(frozen=True)
class AveragingOutcome:
    """What every member of the group holds now: the same bits, the same table."""

    average: torch.Tensor
    """Flat fp32; the caller's own."""
    table: tuple[Contribution, ...]
    """Canonical rows of all contributions in the average."""
    matchmaking_s: float = 0.0
    reduce_s: float = 0.0
    culprits: tuple[str, ...] = ()
    """Members that accused a reducer falsely."""


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
    latest_s: float
    """When it does if its rows say that it takes long; not before `end_s`."""
    awaited: frozenset[str] | None = None
    """With fixed steps: the group is complete when these are in it."""
    exclude: frozenset[str] = frozenset()
    """Peers that are neither called nor admitted."""
    undialable: frozenset[str] = frozenset()
    """Candidates that are not called and do not lead."""
    nodes: tuple[bytes, ...] = ()
    """Hashes of the own parts, which the own row commits to; none where nothing is checked."""

    def until_s(self, needed_s: float) -> float:
        """Return when an all-reduce gives up whose slowest line needs so long for its bytes: the
        same for all members, whenever they ask."""
        is_slow = takes_long(self.close_s, self.end_s, needed_s)
        return self.latest_s if is_slow else self.end_s


def as_failure(
    error: Exception, members: tuple[str, ...], notices: tuple[str, ...]
) -> AveragingFailed:
    """Turn whatever went wrong in the averager's process into what the host is told."""
    if isinstance(error, AveragingFailed):
        return AveragingFailed(
            error.reason,
            () if isinstance(error, NoGroup) else error.peers_seen or members,
            error.culprits,
            error.notices or notices,
            error.reported,
            error.is_proven,
        )
    if isinstance(error, BadRowError):
        return AveragingFailed(f"group refused: {error}", members, (error.peer,), notices)
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return AveragingFailed(text, members, (), notices)
