"""Attack 2: nodes next to a module's keys that swallow stores and name only each other."""

from __future__ import annotations

from typing import Any

from .insider import Insider

# Of a run: when the lie begins, and whom it does not concern: who has just begun to look.
FIRST_ROUND = 3


class LyingDirectory(Insider):
    """From the fourth round on half of the peers, or all, read nothing of each other any more: only
    what this peer and they themselves have written."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._is_of_all = self.world.engine.random.random() < 0.5
        begin_s = self.world.plan.start_s + FIRST_ROUND * self.world.plan.rounds.duration_s
        self.world.engine.at(begin_s, self._hide)

    def _hide(self) -> None:
        machines = [m for m in self.world.machines.values() if m.is_honest and m.is_alive]
        hidden = machines if self._is_of_all else machines[::2]
        self.world.say(self.peer, "lies", f"hides the others from {[m.peer for m in hidden]}")
        self.world.directory.shows = {m.peer: {m.peer, self.peer} for m in hidden}
