"""Swarm time: what this machine's clock says, corrected by what its neighbours' clocks say.

Rounds follow the clock (design 4.1, rounds), so peers have to agree on the time; it need not be the
right one. A hello measures a neighbour's clock as NTP does (RFC 5905, section 8): with four time
stamps, from which the round trip cancels. Swarm time is the median of the uncorrected clocks of
this peer and its neighbours: peers that see the same clocks find the same time, no peer follows
another, and one wrong clock moves nothing. Neighbours are drawn at random, so a peer cannot choose
an id that gets it asked, and a clock moves by seconds only if most of the neighbours agree.

While a peer runs, somebody may set its machine's clock, by hours. Swarm time then continues by the
time since the machine started, until neighbours have been asked: they agree with the new time, or
the peer ends.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dipaco.base.errors import ClockError
from dipaco.base.patience import since_start_s
from dipaco.base.waits import BriefLock

from .known_peers import peer_of

logger = logging.getLogger("dipaco.peer.exchange.contact.clock")

MAX_CLOCK_OFFSET_S = 5.0
_REMEDY = "set this machine's clock: sudo timedatectl set-ntp true"
MAX_NEIGHBOURS = 15
# How many of them may be those whose addresses were given.
MAX_GIVEN = 3
# Neighbours tell one time when this share of them is so close to their median.
_AGREEING_SHARE = 2 / 3
_AGREEING_S = 0.5
# Without that, and in one measurement of a clock that was set before, it moves no farther.
MAX_DOUBTFUL_S = 1.0
_MAX_STEP_S = 0.5
_SAMPLES = 4
_MEASURE_TIMEOUT_S = 8.0
# Smaller corrections than this are noise of the measurement.
_LEAST_STEP_S = 0.01
# Between two looks the machine's time and the time since it started part by so much only where
# somebody has set the clock; of two readings that are further apart nothing is concluded.
_LEAST_JUMP_S = 1.0
_READ_S = 0.1
_READINGS = 5


@dataclass(frozen=True)
class ClockSample:
    """One look at a neighbour's clock."""

    offset_s: float
    """The neighbour's clock minus this machine's."""
    delay_s: float
    """Round trip without the neighbour's own time; the offset is wrong by half of it at most."""


def sample_of(asked_s: float, received_s: float, sent_s: float, answered_s: float) -> ClockSample:
    """Compute a sample from the four time stamps of a hello.

    `asked_s` and `answered_s` are of this machine's clock, the other two of the neighbour's.
    """
    offset_s = ((received_s - asked_s) + (sent_s - answered_s)) / 2
    delay_s = (answered_s - asked_s) - (sent_s - received_s)
    return ClockSample(offset_s, max(0.0, delay_s))


def agreed_offset_s(neighbours_s: Sequence[float]) -> float:
    """Return swarm time minus own time: the median of all clocks, this machine's included."""
    return statistics.median([0.0, *neighbours_s])


def _tell_one_time(neighbours_s: Sequence[float]) -> bool:
    """Tell whether nearly all of these offsets are the same."""
    middle_s = statistics.median(neighbours_s)
    close = sum(abs(offset_s - middle_s) <= _AGREEING_S for offset_s in neighbours_s)
    return close >= _AGREEING_SHARE * len(neighbours_s)


def _draw(peers: Iterable[str], count: int) -> list[str]:
    """Return so many of the peers, at random as nobody can foresee."""
    known = sorted(set(peers))
    return random.SystemRandom().sample(known, min(count, len(known)))


def check_offset(offset_s: float) -> None:
    """Raise `ClockError` when the others' clocks are `offset_s` ahead, and that is too much."""
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        where = "behind" if offset_s > 0 else "ahead of"
        raise ClockError(
            f"this machine's clock is {abs(offset_s):.1f} s {where} the other peers, at most "
            f"{MAX_CLOCK_OFFSET_S:.0f} s are allowed; {_REMEDY}"
        )


class Neighbours(Protocol):
    """What a measurement needs from the exchange."""

    def connected_peers(self) -> tuple[str, ...]:
        """Return the ids of the peers that this node is connected to."""
        ...

    def clock_samples(
        self, peers: Sequence[str], count: int, timeout_s: float
    ) -> Mapping[str, tuple[ClockSample, ...]]:
        """Say hello to each peer `count` times; peers that do not answer are left out."""
        ...


class Clock:
    """Swarm time. Thread-safe: the offset is one float, replaced as a whole."""

    def __init__(
        self,
        offset_s: float = 0.0,
        system_time: Callable[[], float] = time.time,
        steady_time: Callable[[], float] | None = None,
    ) -> None:
        """`steady_time` is one that nobody sets; without it no jump is noticed."""
        self.offset_s = offset_s
        """Swarm time minus this machine's time."""
        self._system_time = system_time
        self._steady_time = steady_time
        self._is_set = False
        self._lock = BriefLock()
        self._apart_s: float | None = None
        self._jumps = 0
        self.has_jumped = False
        """Whether this machine's clock was set and no neighbour has confirmed it yet."""

    def now(self) -> float:
        """Return swarm time as Unix seconds."""
        return self._look() + self.offset_s

    def _look(self) -> float:
        """Return this machine's time; if it has jumped, the offset makes up for it."""
        if self._steady_time is None:
            return self._system_time()
        with self._lock:
            for _ in range(_READINGS):
                steady_s = self._steady_time()
                system_s = self._system_time()
                if self._steady_time() - steady_s < _READ_S:
                    break
            else:
                return system_s
            apart_s = system_s - steady_s
            jump_s = 0.0 if self._apart_s is None else apart_s - self._apart_s
            self._apart_s = apart_s
            if abs(jump_s) >= _LEAST_JUMP_S:
                self.offset_s -= jump_s
                self._jumps += 1
                self.has_jumped = True
                logger.warning(
                    "this machine's clock was set %s by %.1f s; other peers are asked for the time",
                    *("ahead" if jump_s > 0 else "back", abs(jump_s)),
                )
            return system_s

    def measure(
        self,
        neighbours: Neighbours,
        given: Sequence[str] = (),
        is_in: Callable[[str], bool] = lambda peer: False,
    ) -> int:
        """Correct the clock by peers whose addresses were given, and by some at random of those
        that this node is connected to and that are admitted (`is_in`).

        Returns how many answered; without an answer nothing changes, nor when this machine's clock
        was set meanwhile: what was measured is of the time before. Raises `ClockError`, and
        changes nothing, when the others' clocks are more than `MAX_CLOCK_OFFSET_S` away. Called
        on joining and every few rounds; takes `_MEASURE_TIMEOUT_S` at most.
        """
        self._look()
        jumps = self._jumps
        first = _draw(given, MAX_GIVEN)
        others = {peer for peer in neighbours.connected_peers() if is_in(peer)} - set(given)
        asked = (*first, *_draw(others, MAX_NEIGHBOURS - len(first)))
        samples = neighbours.clock_samples(asked, _SAMPLES, _MEASURE_TIMEOUT_S)
        # The sample of each peer with the least delay is the least wrong.
        offsets = [min(s, key=lambda one: one.delay_s).offset_s for s in samples.values() if s]
        self._look()
        with self._lock:
            if self._jumps != jumps:
                return 0
            if offsets:
                self._correct(offsets)
        return len(offsets)

    def _correct(self, offsets: Sequence[float]) -> None:
        target_s = agreed_offset_s(offsets)
        if _tell_one_time(offsets):
            check_offset(statistics.median(offsets))
        else:
            logger.warning(
                "the clocks of %d neighbours differ by up to %.1f s: this machine's is moved by "
                "at most %.0f s; if it is wrong, %s",
                *(len(offsets), max(offsets) - min(offsets), MAX_DOUBTFUL_S, _REMEDY),
            )
            target_s = min(max(target_s, -MAX_DOUBTFUL_S), MAX_DOUBTFUL_S)
        if self._is_set and not self.has_jumped:
            least_s, most_s = self.offset_s - _MAX_STEP_S, self.offset_s + _MAX_STEP_S
            target_s = min(max(target_s, least_s), most_s)
        self._is_set, self.has_jumped = True, False
        if abs(target_s - self.offset_s) >= _LEAST_STEP_S:
            logger.debug("clock offset %+.3f s by %d neighbours", target_s, len(offsets))
            self.offset_s = target_s


def measure_clock(neighbours: Neighbours, initial_peers: Sequence[str]) -> Clock:
    """Return the clock of a node that has just joined through the addresses `initial_peers`.

    Raises `ClockError`. When nobody answers the hello, the machine's own time is used and a
    warning is logged.
    """
    clock = Clock(steady_time=since_start_s)
    ids = [peer_of(address) for address in initial_peers]
    if not clock.measure(neighbours, ids):
        logger.warning("no neighbour told the time; this machine's clock is used as it is")
    return clock
