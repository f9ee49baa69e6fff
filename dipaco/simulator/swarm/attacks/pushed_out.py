"""Attack 6: rows that name others' files, and more rows that push these out again."""

from __future__ import annotations

from dataclasses import replace

from dipaco.protocol.chain import Row
from dipaco.protocol.member.actions import Tell

from .insider import Insider, Place

# So many rows push all others of a peer out; so often in a round, from its beginning on.
PUSHING = 10
PUSHES, PUSH_S = 12, 1.5


class PushedOut(Insider):
    """It tells rows of its own that name the files of honest rows, then many more, so that members
    forget the first ones, and with them the files if they are told apart by these."""

    def told(self, action: Tell) -> Tell:
        """Tell the own row late: so nobody has all rows early."""
        own = tuple(row for row in action.rows if row.peer == self.peer)
        if own:
            delay_s = 0.9 * self.world.plan.rounds.gather_limit_s
            self.later(delay_s, self._tell_late, action.module, own)
        rows = tuple(row for row in action.rows if row.peer != self.peer)
        return replace(action, rows=rows)

    def _tell_late(self, module: str, own: tuple[Row, ...]) -> None:
        self.tell(module, rows=own)

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """Begin with the second row of a round."""
        if len(rows) == 2 and self.peer in rows:
            for number in range(PUSHES):
                self.later(number * PUSH_S, self._push, place, number)

    def _push(self, place: Place, push: int) -> None:
        module, round_index, _ = place
        honest = [row for row in self.rows[place].values() if row.peer != self.peer]
        naming = [
            self._row_on(row, round_index - 1, f"{push}{number}")
            for number, row in enumerate(honest)
            if round_index
        ]
        pushing = [self._row_on(honest[0], round_index, f"{push}x{n}") for n in range(PUSHING)]
        self.tell(module, rows=(*naming, *pushing))

    def _row_on(self, honest: Row, round_index: int, salt: str) -> Row:
        """Return an own row that names the file of an honest one, on an invented step."""
        parent = salt.encode().hex().ljust(64, "0")
        return replace(honest, peer=self.peer, round_index=round_index, parent=parent)
