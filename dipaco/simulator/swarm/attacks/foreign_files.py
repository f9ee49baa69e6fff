"""Attack 4: a row that names a file that was checked for another."""

from __future__ import annotations

from dataclasses import replace

from dipaco.protocol.chain import Row
from dipaco.protocol.member.actions import Tell

from .insider import Insider


class ForeignFiles(Insider):
    """Its rows of one module name its newest file of another module, which those who train both
    have checked already."""

    def told(self, action: Tell) -> Tell:
        """Name another file in the own rows."""
        rows = tuple(self._changed(row) if row.peer == self.peer else row for row in action.rows)
        return replace(action, rows=rows)

    def _changed(self, row: Row) -> Row:
        known = [rows[self.peer] for rows in self.rows.values() if self.peer in rows]
        others = [r for r in known if r.module < row.module]
        found = max(others, key=lambda r: r.round_index, default=row)
        return replace(row, file=found.file)
