"""Progress of what takes longer than a few seconds: how far it is, and how long it goes on.

A bar on a terminal, a line now and then elsewhere. What is quick says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_ItemT = TypeVar("_ItemT")

# Between two lines where there is no bar; the first comes after as long.
LINE_EVERY_S = 10.0


def _shown_count(count: float) -> str:
    """Return a count with its thousands separated."""
    return f"{count:,.0f}"


def _shown_time(seconds: float) -> str:
    """Return a duration for people, in its largest fitting unit."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


class StageProgress:
    """How far one thing is; `update` may be called at any rate."""

    def __init__(
        self,
        name: str,
        say: Callable[[str], None],
        bar: Progress | None = None,
        *,
        shown: Callable[[float], str] = _shown_count,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._say = say
        self._bar = bar
        self._shown = shown
        self._now = now
        self._task = bar.add_task(name, total=None, amount="", note="") if bar else None
        self._began_at = self._said_at = now()
        self._first: float | None = None

    def update(self, done: float, total: float | None, note: str = "") -> None:
        """Show that `done` of `total` (None: unknown) is done.

        The first call says what was there already: it does not count for the speed.
        """
        if self._first is None:
            self._first, self._began_at = done, self._now()
        amount = self._shown(done)
        if total is not None:
            amount += f" of {self._shown(total)}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, amount=amount, note=note)
        elif self._now() - self._said_at >= LINE_EVERY_S:
            self._said_at = self._now()
            line = f"{self._name}: {amount} {note}".rstrip()
            self._say(line if total is None else line + self.estimate(done, total))

    def estimate(self, done: float, total: float) -> str:
        """Return how long the rest takes at the speed so far, as the end of a line."""
        if self._first is None or not self._first < done < total:
            return ""
        left_s = (self._now() - self._began_at) * (total - done) / (done - self._first)
        return f", about {_shown_time(left_s)} more" if left_s >= 1 else ""


@contextmanager
def bar_or_lines(name: str, console: Console) -> Iterator[StageProgress]:
    """Show progress on a console while the body runs: a bar if it is a terminal."""

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    if not console.is_terminal:
        yield StageProgress(name, say)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield StageProgress(name, say, bar)


def each(
    items: Sequence[_ItemT],
    say: Callable[[str], None],
    what: Callable[[_ItemT], str],
    *,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[_ItemT]:
    """Yield the items one after the other; say of each what is done with it, which of how many it
    is, and how long it goes on at the speed so far."""
    stage = StageProgress("", say, now=now)
    stage.update(0, len(items))
    for number, item in enumerate(items):
        left = stage.estimate(number, len(items))
        say(f"{what(item)} ({number + 1} of {len(items)}{left})")
        yield item


def seldom(
    say: Callable[[str], None], *, now: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """Return a `say` that leaves out lines which come sooner than `LINE_EVERY_S` after the last
    one, for where nobody watches; what is quick says nothing."""
    said_at = now()

    def say_seldom(line: str) -> None:
        nonlocal said_at
        if now() - said_at >= LINE_EVERY_S:
            said_at = now()
            say(line)

    return say_seldom


def shown_bytes(count: int) -> str:
    """Return a count of bytes in decimal units, three digits."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"
