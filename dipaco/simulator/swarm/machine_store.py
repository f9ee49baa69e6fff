"""What one machine has: chains, rows, files and states, and what a restart finds of them.

A state is only a name here, and the world's book has every step. So this says no more than which
names are where, in memory and on the disk.
"""

from __future__ import annotations

from collections.abc import Iterable

from dipaco.protocol.chain.steps import Head, Row, Step

from .world import World

_STEPS_IN_ANSWER, _ROWS_IN_ANSWER = 32, 128
_KEPT_ROUNDS, _STATES_ON_DISK = 3, 2


class Store:
    """What one machine has, as long as its disk lasts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._was_served: set[str] = set()
        """Steps that the member has handed over, in any life."""
        self.shards: set[int] = set()
        self.disk: dict[str, list[Head]] = {}
        """States of each module, the newest last."""
        self.files: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Forget what is only in memory, and serve what is on the disk."""
        self.held = {module: kept[-1] for module, kept in self.disk.items()}
        """The state of each module that is served."""
        self.served = {module: head.step for module, head in self.held.items()}
        """The step of each module to which the chain is served."""
        self.at_hand: dict[str, Head] = {}
        """By step: states that were computed or fetched, and are not adopted or kept yet."""
        self.computed_from: dict[str, Head] = {}
        """By step: the state before one that was computed."""
        self._rows: dict[str, dict[str, Row]] = {}

    # -- chains and rows

    def serve(self, module: str, step: str, steps: Iterable[Step]) -> bool:
        """Serve the chain to a step from now on; returns whether all of it was handed over."""
        known = self._was_served
        known.add(self._world.book.genesis(module))
        for new in steps:
            if new.parent in known:
                known.add(new.name)
        if step in known:
            self.served[module] = step
        return step in known

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Take rows in; those of the last rounds are kept."""
        for row in rows:
            known = self._rows.setdefault(row.module, {})
            known[row.file] = row
            if len(known) > _ROWS_IN_ANSWER or row.round_index > _KEPT_ROUNDS:
                oldest = max(r.round_index for r in known.values()) - _KEPT_ROUNDS
                kept = {file: r for file, r in known.items() if r.round_index > oldest}
                self._rows[row.module] = dict(list(kept.items())[-_ROWS_IN_ANSWER:])

    def answer(
        self, module: str, locator: tuple[str, ...]
    ) -> tuple[tuple[Step, ...], tuple[Row, ...], bool, Head | None]:
        """Return steps behind a locator, rows, whether there are more steps, and what is held."""
        book = self._world.book
        name = self.served.get(module, book.genesis(module))
        steps, has_more = book.after(locator, name, _STEPS_IN_ANSWER)
        return steps, tuple(self._rows.get(module, {}).values()), has_more, self.held.get(module)

    # -- files

    def prune(self, module: str, round_index: int) -> None:
        """Remove the files of rounds of a module three or more before this one."""
        made = self._world.files
        self.files = {
            file
            for file in self.files
            if file not in made
            or made[file].row.module != module
            or made[file].row.round_index > round_index - _KEPT_ROUNDS
        }

    # -- states

    def find(self, module: str, step: str) -> Head | None:
        """Return a state that is in memory or on the disk."""
        if step in self.at_hand:
            return self.at_hand[step]
        return self.served_state(module, step)

    def served_state(self, module: str, step: str) -> Head | None:
        """Return a state that others may have: it is held, or lies on the disk."""
        held = self.held.get(module)
        if held is not None and held.step == step:
            return held
        return next((head for head in self.disk.get(module, ()) if head.step == step), None)

    def hold(self, head: Head, *, save: bool) -> None:
        """Serve a state in place of the module's last one, which goes to the disk."""
        module = head.module
        before = self.held.get(module)
        if before is not None and before.step != head.step:
            self.save(before)
        self.held[module], self.served[module] = head, head.step
        self.at_hand.pop(head.step, None)
        computed_from = self.computed_from.pop(head.step, None)
        if save:
            if computed_from is not None and computed_from.version:
                self.save(computed_from)
            self.save(head)

    def save(self, head: Head) -> None:
        """Write a state to the disk; the oldest makes room."""
        kept = [one for one in self.disk.get(head.module, ()) if one.step != head.step]
        self.disk[head.module] = [*kept, head][-_STATES_ON_DISK:]

    def drop(self, module: str) -> None:
        """Stop serving a module, and remove its states from the disk."""
        self.held.pop(module, None)
        self.disk.pop(module, None)
