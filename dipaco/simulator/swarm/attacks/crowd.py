"""Attack 8: as many rows on one round and head as are remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dipaco.protocol.member.actions import Action, Adopt, StartPath

from .insider import Insider, names

ROWS, AT_ONCE = 512, 128


class Crowd(Insider):
    """As soon as there is a head, 512 rows of its owner's identities stand on it, of the next
    round, before any honest row does."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._peers = names("x", ROWS)
        self.add_identities(self._peers)
        self._crowded: set[str] = set()

    def act(self, action: Action) -> None:
        """Crowd every new head."""
        super().act(action)
        if isinstance(action, Adopt):
            self._crowd(action.head.module)
        elif isinstance(action, StartPath):
            for head in action.heads:
                self._crowd(head.module)

    def _crowd(self, module: str) -> None:
        head = self.store.held[module]
        if head.step in self._crowded:
            return
        self._crowded.add(head.step)
        place = module, self._next_round(module), head.step
        first = self.make_row(place, head.digest, peer=self._peers[0], content="garbage")
        rows = [replace(first, peer=peer) for peer in self._peers]
        for begin in range(0, ROWS, AT_ONCE):
            self.tell(module, rows=tuple(rows[begin : begin + AT_ONCE]))

    def _next_round(self, module: str) -> int:
        schedule, head = self.world.schedule, self.store.held[module]
        if schedule.fixed_steps:
            return head.round_index + 1
        level = self.world.grid.level_of(module)
        return max(head.round_index, schedule.passed(level, self.believed_s)) + 1
