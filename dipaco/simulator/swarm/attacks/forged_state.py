"""Attack 1: a step that nobody can compute, and a state of it with bytes of somebody's choice."""

from __future__ import annotations

from typing import Any

from dipaco.protocol.chain import Head, Row, Step
from dipaco.protocol.member.actions import Tell

from ..world import FORGED_LOSS, SUBTLE_LOSS
from .insider import Insider, Place


class ForgedState(Insider):
    """It proposes first with honest rows and its own, gives its file to nobody or to some, and
    serves a state of that step with bytes of its choice, much or a little worse."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        random = self.world.engine.random
        self.loss = random.choice((FORGED_LOSS, SUBTLE_LOSS))
        self.gives_to_some = random.random() < 0.5
        self._forged: set[str] = set()
        """Its steps."""
        self._told: dict[Place, int] = {}

    def told(self, action: Tell) -> Tell:
        """Keep the own rows back; what it proposes in its turn is a step of the same kind."""
        self._forged.update(step.name for step in action.steps if self.peer in step.peers)
        rows = tuple(row for row in action.rows if row.peer != self.peer)
        return Tell(action.peers, action.module, rows, action.steps, action.keep)

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """Propose with every row that was heard beyond half of the group, the own one included."""
        group = self.member.known.trainers(place[0]) | {self.peer}
        if self.peer not in rows or 2 * len(rows) <= len(group):
            return
        states = [row.state for row in rows.values()]
        if len(set(states)) == 1 and len(rows) > self._told.get(place, 0):
            self._told[place] = len(rows)
            step = Step.of(rows.values())
            self._forged.add(step.name)
            self.tell(place[0], steps=(step,))

    def seen_digest(self, head: Head) -> Head:
        """Return the state that is served of its steps."""
        return self.world.forge(head, self.loss) if head.step in self._forged else head

    def serve(self, caller: str, verb: str, content: Any) -> tuple[Any, int]:
        """Answer a call, but give the own file away to every second peer at most."""
        is_own = verb == "get" and self.world.files[content].row.peer == self.peer
        if is_own and not (self.gives_to_some and self.world.machines[caller].number % 2):
            return None, 0
        return super().serve(caller, verb, content)
