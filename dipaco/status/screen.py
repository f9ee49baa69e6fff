"""The status for people: first what is wrong, then the tables of paths, modules and peers.

`render` shows everything at once; `watch` shows what the terminal has room for, again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dipaco.base.errors import DipacoError
from dipaco.base.output import is_unread

from .problems import path_name, short_peer

# What records say, for people.
_WORDS = {
    "unserved": "nobody",
    "direct": "yes",
    "outgoing": "no",
    "unknown": "not known yet",
}
# A table's title, its column names, the rules around these, and the line that counts what is left.
_LINES_AROUND_ROWS = 6
# Losses on own texts that are shown.
_OWN_LOSSES = 8


@dataclass(frozen=True)
class Rows:
    """One table before it is drawn."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    in_trouble: tuple[bool, ...]
    """Whether a problem is about each of the rows."""


def render(status: dict[str, Any], height: int | None = None) -> Group:
    """Draw the status. With a `height`, the lines that the tables may take, rows that do not fit
    are left out and counted: those that no problem is about go first."""
    tables = _tables_of(status)
    if height is not None:
        max_rows = max(1, height // len(tables) - _LINES_AROUND_ROWS)
        return Group(*_above_tables(status), *(_draw(rows, max_rows) for rows in tables))
    return Group(*_above_tables(status), *map(_draw, tables))


def _above_tables(status: dict[str, Any]) -> list[Text]:
    return [*problem_lines(status), _head_of(status), *notes_of(status)]


def watch(
    status: dict[str, Any], read: Callable[[], dict[str, Any]], period_s: float, console: Console
) -> None:
    """Show a status, and what `read` gives every `period_s` seconds, while somebody reads it.

    On a terminal each takes the place of the one before. A status that cannot be read is reported.
    """
    error = Text()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while not is_unread():
            if console.is_terminal:
                above = console.render_lines(Group(error, *_above_tables(status)))
                shown = render(status, console.height - len(above))
                live.update(Group(error, shown) if error else shown, refresh=True)
            else:
                console.print(error if error else render(status))
            time.sleep(period_s)
            try:
                status, error = read(), Text()
            except DipacoError as failed:
                error = Text(f"cannot read the swarm, tries again: {failed}", style="red")


def _head_of(status: dict[str, Any]) -> Text:
    """Return the line that says which run it is, and how far."""
    run, validation = status["run"], status["validation"]
    head = Text(f"run {run['name']} ({run['id']}), round {status['round']}")
    if validation["loss"] is not None:
        head.append(
            f", held-out loss {validation['loss']:.3f} (perplexity {validation['perplexity']:.2f}) "
            f"of {validation['paths_reporting']} of {validation['paths']} paths"
        )
    return head


def problem_lines(status: dict[str, Any]) -> list[Text]:
    """Return a sentence that says how the run is, and a line for each problem, the worst first."""
    successor = status["successor"]
    if status["finished"]:
        line = f"finished, continued as run {successor['name']}: --run {successor['id']}"
        return [Text(line, style="green")]
    first = Text(status["sentence"], style="green" if status["healthy"] else "red")
    found = [Text(f"problem: {problem['text']}", style="red") for problem in status["problems"]]
    return [first, *found]


def notes_of(status: dict[str, Any]) -> list[Text]:
    """Return lines on what is neither a problem nor in a table."""
    notes = [Text(status["run"]["about"])] if status["run"]["about"] else []
    successor = status["successor"]
    if successor is not None and not status["finished"]:
        notes.append(Text(f"continued as run {successor['name']} ({successor['id']})"))
    admission = status["admission"]
    if admission["kind"] == "invitation":
        used = [f"{i['id']} ({i['peers']} of {i['places']})" for i in admission["invitations"]]
        by = f", here by {', '.join(used)}" if used else ""
        notes.append(Text(f"by invitation{by}; {admission['revoked']} revoked"))
    own = [peer for peer in status["peers"] if peer["own_texts_loss"] is not None]
    if own:
        losses = [f"{p['own_texts_loss']:.1f} ({_peer_name(p)})" for p in own[:_OWN_LOSSES]]
        more = f" and {len(own) - _OWN_LOSSES} more" if len(own) > _OWN_LOSSES else ""
        said = f"held-out loss on own texts, as their owners say: {', '.join(losses)}{more}"
        notes.append(Text(said))
    return notes


# -- tables


def _tables_of(status: dict[str, Any]) -> tuple[Rows, ...]:
    """Return the tables of paths, modules and peers."""
    troubled = {name for problem in status["problems"] for name in problem["subjects"]}
    return (
        Rows(
            "paths",
            ("path", "modules", "state", "peers", "last round", "tokens/s", "held-out loss"),
            tuple(_path_row(path) for path in status["paths"]),
            tuple(path_name(path["path"]) in troubled for path in status["paths"]),
        ),
        Rows(
            "modules",
            ("module", "version", "last round", "rows", "digest", "holders", "same everywhere"),
            tuple(_module_row(module, status["finished"]) for module in status["modules"]),
            tuple(module["module"] in troubled for module in status["modules"]),
        ),
        Rows(
            "peers",
            ("peer", "path", "state", "tokens/s", "device", "software", "can be called"),
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
        _WORDS.get(path["state"], path["state"]),
        " ".join(short_peer(peer) for peer in path["peers"]) or "-",
        _round(path["last_round"]),
        f"{path['tokens_per_s']:,.0f}",
        "-" if loss is None else f"{loss:.3f}",
    )


def _module_row(module: dict[str, Any], is_finished: bool) -> tuple[str, ...]:
    return (
        module["module"],
        str(module["version"]) if module["holders"] or not is_finished else "-",
        _round(module["last_round"]),
        f"{module['weight']:,}",
        (module["digest"] or "-")[:12],
        str(len(module["holders"])),
        "yes" if module["agree"] else "NO",
    )


def _peer_row(peer: dict[str, Any]) -> tuple[str, ...]:
    return (
        _peer_name(peer),
        "-" if peer["path"] is None else str(peer["path"]),
        peer["state"],
        f"{peer['tokens_per_s']:,.0f}",
        peer["device"],
        peer["software"],
        _WORDS.get(peer["reachable"], peer["reachable"]),
    )


def _peer_name(peer: dict[str, Any]) -> str:
    return f"{peer['name']} {short_peer(peer['peer_id'])}".lstrip()


def _draw(rows: Rows, max_rows: int | None = None) -> Table:
    """Draw a table; where `max_rows` are drawn, those in trouble come first."""
    table = Table(title=rows.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    left_out = 0 if max_rows is None else max(0, len(rows.rows) - max_rows)
    if left_out:
        table.caption, table.caption_justify = f"and {left_out:,} more", "left"
    for name in rows.columns:
        # Nothing is cut off where the terminal is narrow.
        table.add_column(name, overflow="fold")
    order = list(zip(rows.rows, rows.in_trouble, strict=True))
    if max_rows is not None:
        order.sort(key=lambda row: not row[1])
    for cells, in_trouble in order[:max_rows]:
        table.add_row(*cells, style="red" if in_trouble else None)
    return table
