"""The end of a stay on a path: last work is merged, as far as there is time (design 4.4).

A peer that is told to leave takes part in the outer rounds that are under way and in those that
begin and end before its time is over. What nobody else trains it commits at once: nobody has to
be waited for, and whoever takes the path over begins with it. One that moves to another path has
no such hurry, but trains nothing while it waits; so it commits what is its alone, and goes. One
whose owner needs the machine parts like one that leaves, and stays in the swarm without a path.
"""

from __future__ import annotations

from .actions import Pause, SaveAll
from .gathering import possible_peers
from .joining import Joining
from .knowledge import Knowledge
from .outer import OuterRounds
from .rounds import ClockPosition, RoundPosition

# What a round takes is known from the last one; the first is believed to take this share of the
# commit window.
FIRST_SHARE = 0.5
# Of a round: whoever has trained for less since the last boundary takes no step of its own. The
# momentum of the outer optimizer takes a whole one each time.
LEAST_SHARE = 0.1


class Parting:
    """One parting after another; `is_over` once no more can be merged."""

    def __init__(self, knowledge: Knowledge, position: RoundPosition, outer: OuterRounds) -> None:
        self._known = knowledge
        self._position = position
        self._outer = outer
        self._begin_s = 0.0
        self._limit_s = 0.0
        self._waits_for_boundaries = False
        self._done: set[str] = set()

    def begin(self, limit_s: float, *, waits_for_boundaries: bool) -> None:
        """Begin to merge what is not merged yet, for `limit_s` at most."""
        self._begin_s, self._limit_s = self._known.now_s, limit_s
        self._waits_for_boundaries = waits_for_boundaries
        self._done.clear()

    @property
    def left_s(self) -> float:
        """How long it may take still."""
        return max(0.0, self._begin_s + self._limit_s - self._known.now_s)

    def clock_went_back(self) -> None:
        """Begin the limit anew, from a time that has come."""
        self._begin_s = min(self._begin_s, self._known.now_s)

    def on_turn(self, step_s: float) -> bool:
        """Go on; returns whether it is over."""
        known, outer, position = self._known, self._outer, self._position
        if self.left_s <= 0 or not isinstance(position, ClockPosition):
            return True
        for module in known.anchors:
            level = known.grid.level_of(module)
            if level not in outer.running and level not in self._done and self._is_alone(module):
                self._done.add(level)
                if self._is_worth_a_step(module, level):
                    outer.start(position.take_early(level, known.now_s))
        for boundary in position.due(known.now_s, step_s):
            if self._is_in_time(boundary.level, boundary.time_s):
                self._done.add(boundary.level)
                outer.start(boundary)
        outer.go_on()
        if outer.running:
            return False
        levels = map(known.grid.level_of, known.anchors)
        return not any(self._is_in_time(level, position.next_s(level)) for level in levels)

    def _is_alone(self, module: str) -> bool:
        return not possible_peers(self._known, module) - {self._known.me}

    def _is_worth_a_step(self, module: str, level: str) -> bool:
        """Tell whether there is enough to commit, and nobody has done so in this round before."""
        position, now_s = self._position, self._known.now_s
        assert isinstance(position, ClockPosition)
        duration_s = self._known.plan.rounds.duration_s
        passed_s = now_s - (position.next_s(level) - duration_s)
        is_first = self._known.anchors[module].last_round < position.next_round_index(level)
        return is_first and passed_s >= LEAST_SHARE * duration_s

    def _is_in_time(self, level: str, boundary_s: float) -> bool:
        """Tell whether a round that begins at a boundary will have ended when time is over."""
        if not self._waits_for_boundaries or level in self._done:
            return False
        first_s = FIRST_SHARE * self._known.plan.rounds.window_s
        took_s = self._outer.took_s.get(level, first_s)
        return boundary_s + took_s <= self._begin_s + self._limit_s


class Pausing:
    """A peer that trains nothing for a while: it serves what it holds, and has no path."""

    def __init__(
        self,
        knowledge: Knowledge,
        joining: Joining,
        outer: OuterRounds,
    ) -> None:
        self._known = knowledge
        self._joining = joining
        self._outer = outer
        self.reason = ""
        """Why nothing is to be trained; empty when something is."""

    def begin(self) -> None:
        """Let go of the path, with all that waits for it; what is not merged by now is given up."""
        known = self._known
        known.do(SaveAll(), Pause(known.path, self.reason))
        known.path, known.anchors = None, {}
        self._joining.beginning.stop()
        self._outer.begin_path()
        self._outer.adoption.begin_path()
        self._joining.claiming.pause(self.reason)
