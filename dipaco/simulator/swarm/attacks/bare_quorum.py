"""Attack 5: the smallest step that is a step, as soon as rows are heard."""

from __future__ import annotations

from dipaco.protocol.chain import Row, Step

from .insider import Insider, Place


class BareQuorum(Insider):
    """It tells a step of its own row and of as few others as are enough, never the victim's, as
    soon as it has heard of them, every round."""

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """Propose as soon as there are enough."""
        module = place[0]
        trainers = self.member.known.trainers(module) | {self.peer}
        enough = len(trainers) // 2 + 1
        victim = self.world.watch.victims.get(module)
        chosen = [row for peer, row in rows.items() if peer not in (victim, self.peer)]
        if self.peer not in rows or len(chosen) + 1 != enough:
            return
        own = rows[self.peer]
        step_rows = [own, *[row for row in chosen if row.state == own.state]]
        self.tell(module, rows=(own,), steps=(Step.of(step_rows),))
