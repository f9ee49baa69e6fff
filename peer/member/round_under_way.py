"""What is known of an outer round from its boundary to its end, and of those that failed or that
others ended without this peer."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto

from .adoption import Adoption
from .knowledge import Knowledge
from .rounds import Boundary, RoundPosition

# Who made so many rounds fail lately is not admitted by a peer that leads, for so many rounds.
GREATEST_FAILURES, EXCLUDED_ROUNDS = 2, 4
# Who was proven to lie once is not admitted for twice as many rounds, then for four times as many,
# up to so many.
GREATEST_EXCLUDED_ROUNDS = 64
# Who was waited for in vain so often in a row is not waited for, for twice as many rounds each
# time and so many at most.
GREATEST_ABSENCES, GREATEST_UNAWAITED_ROUNDS = 2, 64
REMEMBERED = 256


class Phase(Enum):
    """What an outer round waits for."""

    COPYING = auto()
    MEETING = auto()
    PAUSING = auto()
    ASKING = auto()
    TRACING = auto()
    STEPPING = auto()


@dataclass
class RoundUnderWay:
    """An outer round under way."""

    module: str
    boundary: Boundary
    anchor: str
    """Digest of the state that it started from."""
    phase: Phase = Phase.COPYING
    attempt: int = 0
    tokens: int = 0
    expected: int = 1
    group: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    alive: frozenset[str] | None = None
    culprits: frozenset[str] = frozenset()
    failure: str = "the commit window had passed"
    members: frozenset[str] = frozenset()
    """Who was in groups of it, as far as is known: they may have committed what is copied."""
    awaited: frozenset[str] | None = None
    close_s: float = 0.0
    until_s: float = math.inf
    """When the present phase ends at the latest, where nothing else ends it, in steady time."""

    @property
    def had_members(self) -> bool:
        """Whether a group had formed, so that others may hold a state with the copy in it."""
        return bool(self.members)

    def is_far(self, latest_s: float) -> bool:
        """Tell whether its boundary comes after `latest_s`, and it has not got to its step."""
        return self.boundary.time_s > latest_s and self.phase is not Phase.STEPPING

    def come_near(self, now_s: float, longest_s: float) -> None:
        """With fixed steps, once the clock was put back: let it end after `longest_s` at most."""
        boundary, latest_s = self.boundary, now_s + longest_s
        self.boundary = replace(
            boundary,
            time_s=min(boundary.time_s, now_s),
            meet_until_s=min(boundary.meet_until_s, latest_s),
        )
        self.close_s = min(self.close_s, latest_s)

    def add_members(self, peers: Collection[str]) -> None:
        """Note who was in a group, or may have been."""
        self.members |= frozenset(peers)


class CatchingUp:
    """With fixed steps: boundaries that are open until the state is here that others committed.

    The others wait for this peer at their next boundary, and it cannot meet them before it stands
    on their state. Used by `OuterRounds`.
    """

    def __init__(self) -> None:
        self._ended: dict[str, RoundUnderWay] = {}

    @property
    def levels(self) -> str:
        """The levels that wait, for a line of text."""
        return ", ".join(sorted(self._ended))

    def add(self, ended: RoundUnderWay) -> None:
        """Keep open the boundary of a round that ended because others had committed."""
        self._ended[ended.boundary.level] = ended

    def clear(self) -> None:
        """Forget all of them: their path is left."""
        self._ended.clear()

    def go_on(self, known: Knowledge, adoption: Adoption, position: RoundPosition) -> None:
        """Close the boundaries whose states came; where another state came, meet there again."""
        for level, ended in list(self._ended.items()):
            if adoption.is_fetching(ended.module):
                continue
            del self._ended[level]
            anchor = known.anchors[ended.module]
            stays = anchor.digest == ended.anchor
            if stays or anchor.last_round >= ended.boundary.round_index:
                position.closed(ended.boundary)
            else:
                position.again(ended.boundary)


def _is_within(rounds: int, last_round: int, round_index: int) -> bool:
    """Whether a round is at most so many after an earlier one.

    One that is yet to come was noted by a clock that was ahead: it says nothing.
    """
    return 0 <= round_index - last_round <= rounds


@dataclass
class _Failures:
    failures: int = 0
    last_round: int = -1
    lies: int = 0
    last_lie: int = -1

    def is_excluded(self, round_index: int) -> bool:
        rounds = min(EXCLUDED_ROUNDS * 2**self.lies, GREATEST_EXCLUDED_ROUNDS)
        if self.lies and _is_within(rounds, self.last_lie, round_index):
            return True
        is_recent = _is_within(EXCLUDED_ROUNDS, self.last_round, round_index)
        return is_recent and self.failures >= GREATEST_FAILURES


class Culprits:
    """Who made reduces fail, over rounds: one slow or broken peer stops a module once.

    One that lied, as was proven here, is left out at once, and for longer each time: it was not
    unlucky, and each round that it comes back to may be lost.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Failures] = {}

    def blame(self, peers: Collection[str], round_index: int, *, is_proven: bool = False) -> None:
        """Note who made a reduce of a round fail, or was proven to lie in it."""
        for peer in sorted(peers):
            # At the end, so that those blamed longest ago are forgotten first.
            record = self._records[peer] = self._records.pop(peer, _Failures())
            if not _is_within(EXCLUDED_ROUNDS, record.last_round, round_index):
                record.failures = 0
            record.failures += record.last_round != round_index
            record.last_round = round_index
            if is_proven:
                record.lies += record.last_lie != round_index
                record.last_lie = round_index
        while len(self._records) > REMEMBERED:
            del self._records[next(iter(self._records))]

    def excluded(self, round_index: int, also: Collection[str]) -> tuple[str, ...]:
        """Return who is not admitted in a round: those lately blamed, and `also`."""
        found = set(also)
        found |= {peer for peer, record in self._records.items() if record.is_excluded(round_index)}
        return tuple(sorted(found))


@dataclass
class _Absence:
    times: int = 0
    last_round: int = -1


class Absentees:
    """With fixed steps: who claims to train a module and does not come to its groups, over rounds.

    A claim that nobody stands behind, or somebody whom no group admits, would hold up every round
    to its limit. Whoever comes is waited for as all are.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], _Absence] = {}

    def note(
        self, module: str, round_index: int, awaited: Collection[str], group: Collection[str]
    ) -> None:
        """Note who was in the group of a round, of those who were waited for."""
        for peer in group:
            self._records.pop((module, peer), None)
        for peer in sorted(set(awaited) - set(group)):
            record = self._records.pop((module, peer), _Absence())
            self._records[module, peer] = record
            record.times += record.last_round != round_index
            record.last_round = round_index
        while len(self._records) > REMEMBERED:
            del self._records[next(iter(self._records))]

    def unawaited(self, module: str, round_index: int) -> frozenset[str]:
        """Return who is not waited for at a module in a round."""
        return frozenset(
            peer
            for (of_module, peer), record in self._records.items()
            if of_module == module
            and record.times >= GREATEST_ABSENCES
            and _is_within(
                min(2**record.times, GREATEST_UNAWAITED_ROUNDS), record.last_round, round_index
            )
        )
