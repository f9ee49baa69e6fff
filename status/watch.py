"""`dipaco-status --watch`: the status on the whole terminal, read again and again, with tables that
scroll.

What is wrong stands on top, whatever the tables show. Only when there is not room for all of it
does it scroll too, and how much there is is said.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from dipaco.base.errors import DipacoError

from .screen import Rows, head_of, notes_of, problem_lines, tables_of

TABLES = ("paths", "modules", "peers")


class StatusApp(App[None]):
    """Shows a status, and what `read` gives every `period_s` seconds."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n + 1), f"table('{name}')", name) for n, name in enumerate(TABLES)),
        Binding("tab", "app.focus_next", "problems/table"),
        Binding("r", "look", "read again"),
        Binding("q,ctrl+c", "quit", "quit", priority=True),
    ]
    # The problems leave room for the tabs, the names of the columns, a row and the keys.
    CSS = """
    #head { height: auto; }
    #problems { height: auto; max-height: 100%; scrollbar-size-vertical: 1; }
    #lines { height: auto; }
    #tables { height: 1fr; min-height: 5; }
    DataTable { height: 1fr; }
    """

    def __init__(
        self, status: dict[str, Any], read: Callable[[], dict[str, Any]], period_s: float
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self._status = status
        self._read = read
        self._period_s = period_s
        self._reader: threading.Thread | None = None

    def compose(self) -> ComposeResult:
        """Lay out what is shown."""
        yield Static(id="head")
        with VerticalScroll(id="problems"):
            yield Static(id="lines")
        with TabbedContent(id="tables"):
            for name in TABLES:
                with TabPane(name, id=f"tab-{name}"):
                    yield DataTable(id=name, cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Fill the tables, and look again from time to time."""
        for rows in tables_of(self._status):
            self._table(rows.title).add_columns(*rows.columns)
        self.show(self._status)
        self.action_table(TABLES[0])
        self.set_interval(self._period_s, self.action_look)

    def on_resize(self) -> None:
        """Leave the tables their least room, and the problems the rest."""
        self.query_one("#problems").styles.max_height = max(3, self.size.height - 8)

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)

    def show(self, status: dict[str, Any]) -> None:
        """Show another status; what was scrolled to stays in sight."""
        self._status = status
        count = len(status["problems"])
        head = head_of(status)
        head.append(f", {count} problem{'s' * (count != 1)}" if count else "", style="red")
        self.query_one("#head", Static).update(head)
        lines = [*problem_lines(status), *notes_of(status)]
        self.query_one("#lines", Static).update(Text("\n").join(lines))
        for rows in tables_of(status):
            self._fill(self._table(rows.title), rows)
            self.query_one(TabbedContent).get_tab(
                f"tab-{rows.title}"
            ).label = f"{rows.title} ({len(rows.rows)})"

    @staticmethod
    def _fill(table: DataTable[Text], rows: Rows) -> None:
        cursor, offset = table.cursor_coordinate, table.scroll_offset
        table.clear()
        # Rows that a problem is about come first: nobody has to scroll for them.
        order = sorted(zip(rows.rows, rows.in_trouble, strict=True), key=lambda row: not row[1])
        for cells, in_trouble in order:
            table.add_row(*(Text(cell, style="red" if in_trouble else "") for cell in cells))
        table.move_cursor(row=cursor.row, column=cursor.column, scroll=False)
        table.scroll_to(offset.x, offset.y, animate=False)

    def action_table(self, name: str) -> None:
        """Show one of the tables, and let the keys scroll it."""
        self.query_one(TabbedContent).active = f"tab-{name}"
        self._table(name).focus()

    def action_look(self) -> None:
        """Read the swarm on a thread of its own: that can take seconds.

        Not on one of asyncio's, for which a program that ends would wait.
        """
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._look, daemon=True)
            self._reader.start()

    def _look(self) -> None:
        show: Callable[[], None]
        try:
            show = partial(self.show, self._read())
        except DipacoError as error:
            show = partial(self._say, f"cannot read the swarm, tries again: {error}")
        # When it has ended meanwhile there is nobody to show it to.
        with contextlib.suppress(RuntimeError):
            self.call_later(show)

    def _say(self, line: str) -> None:
        head = head_of(self._status)
        self.query_one("#head", Static).update(head.append(f"\n{line}", style="red"))
