"""An insider: one admitted peer that trains like anybody, and attacks the others meanwhile.

By itself it attacks nobody: the swarm that attacks are compared with has it, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dipaco.protocol.chain import Head, Row, Step
from dipaco.protocol.member.actions import Action, Publish, Tell
from dipaco.protocol.member.events import Answered, Event, Told

from ..machine import Machine
from ..network import Link
from ..world import FILE_BYTES, Content

# A row belongs here: of which module and round, and on which step.
Place = tuple[str, int, str]


class Insider(Machine):
    """An admitted peer. It hears at once what is told; its inner steps keep it from nothing."""

    is_honest = False

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.rows: dict[Place, dict[str, Row]] = {}
        """All that it knows, by peer."""

    # -- what it learns

    def deliver(self, event: Event) -> None:
        """Hear of an event, before its member does."""
        if isinstance(event, Told | Answered) and self.is_alive:
            for step in event.steps:
                self.on_step(step)
            self._note(event.rows)
        super().deliver(event)

    def act(self, action: Action) -> None:
        """Carry out what its member wants."""
        if isinstance(action, Tell):
            own = [row for row in action.rows if row.peer == self.peer]
            self._note(own)
            action = self.told(action)
            if not (action.rows or action.steps):
                return
        super().act(action)
        if isinstance(action, Publish):
            self.on_boundary(action)

    def _note(self, rows: Iterable[Row]) -> None:
        for row in rows:
            place = row.module, row.round_index, row.parent
            known = self.rows.setdefault(place, {})
            if row.peer not in known:
                known[row.peer] = row
                self._choose_victim(row.module, known)
                self.on_rows(place, known)

    def _choose_victim(self, module: str, rows: dict[str, Row]) -> None:
        """The first honest peer that contributes beside this one is the victim, for good."""
        machines = self.world.machines
        honest = sorted(p for p in rows if p in machines and machines[p].is_honest)
        if honest and self.peer in rows:
            self.world.watch.victims.setdefault(module, honest[0])

    # -- what an attack does

    def told(self, action: Tell) -> Tell:
        """Return what is told in place of what its member wants to tell."""
        return action

    def on_boundary(self, action: Publish) -> None:
        """A boundary of its own has come."""

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """A row was heard of, or is its own; `rows` are all of its place."""

    def on_step(self, step: Step) -> None:
        """A step was heard of."""

    # -- what it can do

    @property
    def others(self) -> tuple[str, ...]:
        """All other peers that run."""
        machines = self.world.machines.values()
        return tuple(m.peer for m in machines if m is not self and m.is_alive)

    def tell(
        self,
        module: str,
        *,
        rows: tuple[Row, ...] = (),
        steps: tuple[Step, ...] = (),
        peers: tuple[str, ...] | None = None,
    ) -> None:
        """Tell everybody, or some."""
        told = Tell(self.others if peers is None else peers, module, rows, steps)
        self.world.say(self.peer, "lies", told)
        self.carrying.do(told)

    def path_of(self, module: str) -> int:
        """Return a path through a module: its own, if that is one."""
        paths = self.world.grid.paths_of_module(module)
        return self.path if self.path in paths else next(iter(paths))

    def make_row(
        self,
        place: Place,
        state: str,
        *,
        peer: str = "",
        content: Content = "good",
    ) -> Row:
        """Make a contribution of nothing, its own or of another identity of its owner."""
        module, round_index, parent = place
        blank = Row(
            module, round_index, parent, state, self.path_of(module), peer or self.peer, 1, "",
            FILE_BYTES,
        )  # fmt: skip
        row = self.world.make_file(blank, 0, 0, content)
        self.store.files.add(row.file)
        return row

    def head_of(self, module: str) -> Head | None:
        """Return the state of a module that it holds."""
        return self.store.held.get(module)

    def add_identities(self, names: Iterable[str]) -> None:
        """Let further identities answer calls, each as this one does."""
        for name in names:
            self.world.network.join(name, Link(), self.serve)


def names(prefix: str, count: int) -> tuple[str, ...]:
    """Return the names of further identities."""
    return tuple(f"{prefix}{number}" for number in range(count))
