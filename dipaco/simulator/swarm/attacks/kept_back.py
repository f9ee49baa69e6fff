"""Attack 11: a finished step with one row more, told to half of the peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dipaco.protocol.chain import Row, Step
from dipaco.protocol.member.actions import Tell
from dipaco.protocol.member.proposing import LATE_GRACES

from .insider import Insider, Place

# So long before the last moment: most of those who are told still hear of it in time, and cannot
# tell the others in time.
CLOSE_S = 5.0


class KeptBack(Insider):
    """It keeps its row back until others have made the step of the round, and tells half of the
    peers a step with that row more just before the next boundary."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._own: dict[Place, Row] = {}
        self._heaviest: dict[Place, Step] = {}

    def told(self, action: Tell) -> Tell:
        """Keep the own rows back, and tell no step that has them."""
        for row in action.rows:
            if row.peer == self.peer:
                place = row.module, row.round_index, row.parent
                if place not in self._own:
                    self._own[place] = row
                    self.later(self._delay_s(row), self._tell_half, place)
        rows = tuple(row for row in action.rows if row.peer != self.peer)
        steps = tuple(step for step in action.steps if self.peer not in step.peers)
        return replace(action, rows=rows, steps=steps)

    def _boundary_s(self, row: Row) -> float:
        schedule = self.world.schedule
        if schedule.fixed_steps:
            return self.believed_s
        return schedule.boundary(row.round_index, self.world.grid.level_of(row.module)).time_s

    def _delay_s(self, row: Row) -> float:
        """Return in how many seconds the step is told: just before the next boundary."""
        passed_s = self.believed_s - self._boundary_s(row)
        return self.world.plan.rounds.duration_s - passed_s - CLOSE_S

    def on_step(self, step: Step) -> None:
        """Remember the heaviest step of a place that others have made."""
        place = step.module, step.round_index, step.parent
        known = self._heaviest.get(place)
        if self.peer not in step.peers and (known is None or len(known.rows) < len(step.rows)):
            self._heaviest[place] = step

    def _tell_half(self, place: Place) -> None:
        step, own = self._heaviest.get(place), self._own[place]
        if step is None:
            rows = [row for row in self.rows[place].values() if row.state == own.state]
            made = Step.of(rows)
        else:
            made = Step.of((*step.rows, own))
        self.tell(place[0], steps=(made,), peers=self.others[::2])


class KeptBackPerfectly(KeptBack):
    """The same at the last moment at which another step of the round is taken."""

    def _delay_s(self, row: Row) -> float:
        rounds = self.world.plan.rounds
        last_s = rounds.gather_limit_s + LATE_GRACES * rounds.grace_limit_s
        if self.world.schedule.fixed_steps:
            last_s += rounds.duration_s / 2
        return max(0.1, self._boundary_s(row) + last_s - self.believed_s - CLOSE_S)
