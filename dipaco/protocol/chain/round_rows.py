"""The rows of the last rounds of a module, and which of their files are here.

Of a peer, a round and a parent the first row counts, so a peer that signs several gains nothing.
Rows are told apart by their names and not by their files: a row that names another's file changes
nothing for the other. What is kept is bounded, and who contributed lately has room before others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from .steps import Row, Step

# Rounds that are remembered; peers with a row on top of a step; rows of a peer, in all and in a
# round: a peer can have a row on top of each of a few heads while the chains of a split are
# compared.
_REMEMBERED_ROUNDS, REMEMBERED_PEERS, ROWS_OF_A_PEER = 3, 512, 4
# Rounds whose files are remembered, even for a step whose rows nobody told before.
_REMEMBERED_FILES_ROUNDS = 64


class RoundRows:
    """Rows by round and parent. Names of rows whose files are checked, and of those refused."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], dict[str, Row]] = {}
        self._fetched: dict[int, dict[str, set[str]]] = {}
        """Rows whose files were fetched, by round and peer: a file costs its bytes."""
        self.here: set[str] = set()
        """Rows whose files are here, and contributions to the module."""
        self.refused: set[str] = set()
        """Rows whose files are no contributions."""
        self._asked_s: dict[str, float] = {}
        self._round_of: dict[str, int] = {}
        """The round of each row in the three fields above."""

    def note(self, row: Row, has_room_first: Callable[[str], bool]) -> bool:
        """Take in a row; returns whether it counts. `has_room_first` tells which peers have room
        before others."""
        key, peer = (row.round_index, row.parent), row.peer
        own = [key for key, others in self._rows.items() if peer in others]
        if key in own:
            return False
        others, displaced = self._rows.get(key, {}), None
        if len(others) >= REMEMBERED_PEERS:
            displaced = next((p for p in reversed(others) if not has_room_first(p)), None)
            if displaced is None or not has_room_first(peer):
                return False
        if not self.spend_fetch(row):
            return False
        if displaced is not None:
            self._forget(key, displaced)
        if len(own) >= ROWS_OF_A_PEER:
            self._forget(min(own), peer)
        self._rows.setdefault(key, {})[peer] = row
        return True

    def spend_fetch(self, row: Row) -> bool:
        """Count the fetch of a row's file before its step is taken; returns whether it may be
        fetched: of a peer and a round a few may, whatever it signs."""
        names = self._fetched.setdefault(row.round_index, {}).setdefault(row.peer, set())
        if len(names) < ROWS_OF_A_PEER:
            names.add(row.name)
        if len(self._fetched) > _REMEMBERED_FILES_ROUNDS:
            del self._fetched[min(self._fetched)]
        return row.name in names

    def forget_before(self, round_index: int) -> None:
        """Forget the rows of rounds long gone."""
        for old in [old for old in self._fetched if old <= round_index - _REMEMBERED_ROUNDS]:
            del self._fetched[old]
        for key in [key for key in self._rows if key[0] <= round_index - _REMEMBERED_ROUNDS]:
            for peer in list(self._rows[key]):
                self._forget(key, peer)
        oldest = round_index - _REMEMBERED_FILES_ROUNDS
        for name in [name for name, found in self._round_of.items() if found <= oldest]:
            self._forget_file(name)

    def _forget(self, key: tuple[int, str], peer: str) -> None:
        name = self._rows[key].pop(peer).name
        if not self._rows[key]:
            del self._rows[key]
        self._forget_file(name)

    def _forget_file(self, name: str) -> None:
        self._round_of.pop(name, None)
        self.here.discard(name)
        self.refused.discard(name)
        self._asked_s.pop(name, None)

    def on_top_of(self, round_index: int, parent: str) -> Mapping[str, Row]:
        """Return the rows of a round that stand on a step, by peer."""
        return self._rows.get((round_index, parent), {})

    def standing(self, round_index: int, parent: str, state: str) -> dict[str, Row]:
        """Return the rows on top of a step that name a state and whose files are not refused.

        `state` is empty where this peer has none: then those of the state that most rows name.
        """
        rows = self.on_top_of(round_index, parent)
        found = {peer: row for peer, row in rows.items() if row.name not in self.refused}
        if not state:
            named = [row.state for row in found.values()]
            state = min(named, key=lambda digest: (-named.count(digest), digest), default="")
        return {peer: row for peer, row in found.items() if row.state == state}

    def of_round(self, round_index: int) -> dict[str, Row]:
        """Return a row of each peer that has one in a round, whatever it stands on."""
        keys = [key for key in self._rows if key[0] == round_index]
        return {peer: row for key in keys for peer, row in self._rows[key].items()}

    def all(self) -> tuple[Row, ...]:
        """Return all rows, the latest rounds last."""
        return tuple(row for key in sorted(self._rows) for row in self._rows[key].values())

    def newest(self, count: int) -> tuple[Row, ...]:
        """Return at most so many rows, the latest rounds last."""
        return self.all()[-count:]

    def rounds_on_top_of(self, parent: str) -> list[int]:
        """Return the rounds of which there are rows that stand on a step, the earliest first."""
        return sorted(round_index for round_index, of in self._rows if of == parent)

    def peers_here(self) -> set[str]:
        """Return the peers whose files of the last rounds came, in time or not, so slow peers get
        in again."""
        here = self.here
        return {p for rows in self._rows.values() for p, row in rows.items() if row.name in here}

    def to_gather(self, rows: Iterable[Row], now_s: float, again_s: float) -> tuple[Row, ...]:
        """Return the rows whose files are not here and were not asked for just now, and note that
        they are."""
        here, refused, last = self.here, self.refused, now_s - again_s
        missing = [row for row in rows if row.name not in here and row.name not in refused]
        missing = [row for row in missing if self._asked_s.get(row.name, -math.inf) < last]
        self._asked_s.update((row.name, now_s) for row in missing)
        self._round_of.update((row.name, row.round_index) for row in missing)
        return tuple(missing)

    def came(self, row: Row) -> None:
        """The file of a row is here, and is a contribution."""
        self.here.add(row.name)
        self._round_of[row.name] = row.round_index

    def missing(self, step: Step | None) -> tuple[Row, ...]:
        """Return the rows of a step whose files are not here."""
        return tuple(row for row in step.rows if row.name not in self.here) if step else ()

    def is_refused(self, step: Step | None) -> bool:
        """Tell whether a file in a step is no contribution."""
        if step is None or not self.refused:
            return False
        return any(row.name in self.refused for row in step.rows)

    def gather_failed(self, row: Row, *, is_refused: bool) -> None:
        """Nobody gave a file, or the disk lost it, and it may be asked for again; or it is no
        contribution."""
        self._asked_s.pop(row.name, None)
        self.here.discard(row.name)
        if is_refused:
            self.refused.add(row.name)
            self._round_of[row.name] = row.round_index
