"""The status for people: what is wrong first, then the tables of paths, modules and peers.

`render` shows everything. `FittedStatus` is for `--watch`: as much as the terminal has room for,
with the problems first. Rows give way to them, and how many are not shown is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from .problems import path_name, short_peer

# What records say, for people.
REACHABLE = {"outgoing": "outgoing only"}
# A title, the names of the columns and one row.
LEAST_TABLE_LINES = 3
# These columns are narrowed where there is no room for all.
LONG_COLUMNS = ("modules", "peers", "device", "software")


@dataclass(frozen=True)
class _Rows:
    """One table before it is drawn."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    in_trouble: tuple[bool, ...]
    """Of each row, whether a problem is about it: those are shown first when not all can be."""


def render(status: dict[str, Any]) -> Group:
    """Draw the whole status."""
    tables = [_draw(rows, len(rows.rows), is_fitted=False) for rows in _tables(status)]
    return Group(_head(status), *_problem_lines(status), *_notes(status), *tables)


@dataclass(frozen=True)
class FittedStatus:
    """The status as far as the terminal has room for it."""

    status: dict[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The last line stays free: a terminal scrolls when it is written to the end.
        room = options.size.height - 1
        lines = _wrapped(console, options, [_head(self.status)])[:room]
        room -= len(lines)
        yield from lines
        tables = _tables(self.status)
        for line in self._problems(console, options, room - 1):
            room -= 1
            yield line
        notes = _wrapped(console, options, _notes(self.status))
        if len(notes) + LEAST_TABLE_LINES <= room:
            room -= len(notes)
            yield from notes
        yield from _fit_tables(tables, room)

    def _problems(self, console: Console, options: ConsoleOptions, room: int) -> Iterator[Text]:
        """Yield the lines of as many problems as there is room for, and the number of others."""
        texts = _problem_lines(self.status)
        wrapped = [_wrapped(console, options, [text]) for text in texts]
        shown = 0
        while shown < len(texts):
            used = sum(len(lines) for lines in wrapped[: shown + 1])
            if used + (shown + 1 < len(texts)) > room:
                break
            shown += 1
        for lines in wrapped[:shown]:
            yield from lines
        if shown < len(texts) and room > 0:
            more = f"and {len(texts) - shown} more problems" if shown else f"{len(texts)} problems"
            yield _line(f"{more}: make the window larger", "red")


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _wrapped(console: Console, options: ConsoleOptions, texts: Sequence[Text]) -> list[Text]:
    return [line for text in texts for line in text.wrap(console, options.max_width)]


def _head(status: dict[str, Any]) -> Text:
    run, validation = status["run"], status["validation"]
    head = Text(f"run {run['name']} ({run['id']}), round {status['round']}")
    if validation["perplexity"] is not None:
        head.append(
            f", validation perplexity {validation['perplexity']:.2f} "
            f"({validation['paths_reporting']} paths, {validation['tokens']:,} tokens)"
        )
    return head


def _problem_lines(status: dict[str, Any]) -> list[Text]:
    if status["healthy"]:
        return [Text("healthy", style="green")]
    return [Text(f"problem: {problem['text']}", style="red") for problem in status["problems"]]


def _notes(status: dict[str, Any]) -> list[Text]:
    notes = [
        Text(
            f"score request {one['request']}: have {len(one['done'])} of {one['paths']} scores, "
            f"{len(one['scoring'])} in progress"
        )
        for one in status["score_requests"]
    ]
    successor = status["successor"]
    if successor is not None:
        notes.append(Text(f"succeeded by run {successor['name']} ({successor['id']})"))
    return notes


# -- tables


def _tables(status: dict[str, Any]) -> tuple[_Rows, ...]:
    troubled = {name for problem in status["problems"] for name in problem["subjects"]}
    return (
        _Rows(
            "paths",
            ("path", "modules", "state", "peers", "last round", "tokens/s", "held-out loss"),
            tuple(_path_row(path) for path in status["paths"]),
            tuple(path_name(path["path"]) in troubled for path in status["paths"]),
        ),
        _Rows(
            "modules",
            ("module", "version", "last round", "tokens", "digest", "holders", "agree"),
            tuple(_module_row(module) for module in status["modules"]),
            tuple(module["module"] in troubled for module in status["modules"]),
        ),
        _Rows(
            "peers",
            ("peer", "path", "state", "tokens/s", "device", "software", "reachable"),
            tuple(_peer_row(peer) for peer in status["peers"]),
            tuple(peer["peer_id"] in troubled for peer in status["peers"]),
        ),
    )


def _round(last_round: int | None) -> str:
    return "-" if last_round is None or last_round < 0 else str(last_round)


def _path_row(path: dict[str, Any]) -> tuple[str, ...]:
    loss = path["validation_loss"]
    return (
        str(path["path"]),
        " ".join(path["modules"]),
        path["state"],
        " ".join(short_peer(peer) for peer in path["peers"]) or "-",
        _round(path["last_round"]),
        f"{path['tokens_per_s']:,.0f}",
        "-" if loss is None else f"{loss:.3f}",
    )


def _module_row(module: dict[str, Any]) -> tuple[str, ...]:
    return (
        module["module"],
        str(module["version"]),
        _round(module["last_round"]),
        f"{module['tokens']:,}",
        (module["digest"] or "-")[:12],
        str(len(module["holders"])),
        "yes" if module["agree"] else "NO",
    )


def _peer_row(peer: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{peer['name']} {short_peer(peer['peer_id'])}".lstrip(),
        "-" if peer["path"] is None else str(peer["path"]),
        peer["state"],
        f"{peer['tokens_per_s']:,.0f}",
        peer["device"],
        peer["software"],
        REACHABLE.get(peer["reachable"], peer["reachable"]),
    )


def _draw(rows: _Rows, shown: int, *, is_fitted: bool) -> Table:
    """Draw the rows of a table that there is room for; fitted ones take a line each."""
    hidden = len(rows.rows) - shown
    title = f"{rows.title} ({hidden} more not shown)" if hidden else rows.title
    if is_fitted:
        table = Table(title=_line(title), title_justify="left", box=None, pad_edge=False)
    else:
        table = Table(title=title, title_justify="left")
    for name in rows.columns:
        table.add_column(name, no_wrap=is_fitted and name not in LONG_COLUMNS)
    order: Sequence[int] = range(len(rows.rows))
    if hidden:
        order = sorted(sorted(order, key=lambda i: not rows.in_trouble[i])[:shown])
    for index in order:
        table.add_row(*(_line(cell) if is_fitted else cell for cell in rows.rows[index]))
    return table


def _fit_tables(tables: Sequence[_Rows], room: int) -> Iterator[Table | Text]:
    """Yield tables of at most `room` lines together, and a line that names those left out."""
    count = len(tables)
    while count and LEAST_TABLE_LINES * count + (count < len(tables)) > room:
        count -= 1
    left_out = [f"{len(rows.rows)} {rows.title}" for rows in tables[count:]]
    shares = _shares(
        [len(rows.rows) for rows in tables[:count]],
        room - bool(left_out) - (LEAST_TABLE_LINES - 1) * count,
    )
    for rows, share in zip(tables, shares, strict=False):
        yield _draw(rows, share, is_fitted=True)
    if left_out and room > 0:
        yield _line(f"not shown: {', '.join(left_out)}")


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """Share lines evenly; what one does not need goes to the others."""
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for place, index in enumerate(order):
        shares[index] = min(wanted[index], room // (len(order) - place))
        room -= shares[index]
    return shares
