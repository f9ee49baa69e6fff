"""What a volunteer sees: a live panel on a terminal, plain lines otherwise."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dipaco.modules.command_line import shown_bytes
from dipaco.modules.errors import DipacoError
from dipaco.peer.node import Node
from dipaco.peer.publisher import PeerStatus, Publisher
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

# Plain lines for inner steps appear at most this often.
PLAIN_INNER_PERIOD_S = 15.0
_REACHED = {
    "direct": "others can call it",
    "relayed": "called through a relay",
    "outgoing": "nobody can call it",
    "unknown": "not called yet",
}


class Display:
    """Shows the events of a session. `say` is for the lines before training begins."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live: Live | None = None
        self._panel: LivePanel | None = None
        self._last_inner_s = 0.0

    def say(self, line: str) -> None:
        """Print one line above the panel."""
        self.console.print(line, markup=False, soft_wrap=True)

    def start(self, node: Node, publisher: Publisher, status: PeerStatus) -> None:
        """Begin the live panel; on a pipe or file nothing changes but the lines go on."""
        if self.console.is_terminal:
            self._panel = LivePanel(node, publisher, status)
            self._live = Live(
                self._panel, console=self.console, refresh_per_second=2, transient=True
            )
            self._live.start()

    def stop(self) -> None:
        """End the live panel."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Turn an event into a line, if it is one that a person wants to read."""
        if self._panel is not None:
            self._panel.on_event(kind, values)
        line = self._line(kind, values)
        if line:
            self.say(f"{time.strftime('%H:%M:%S')} {line}")

    def _line(self, kind: str, v: Mapping[str, Any]) -> str | None:
        if kind == "inner":
            now = time.monotonic()
            if self._live is not None or now - self._last_inner_s < PLAIN_INNER_PERIOD_S:
                return None
            self._last_inner_s = now
            return (
                f"path {v['path']} step {v['path_step']}: loss {v['loss']:.3f}, "
                f"{v['tokens_per_s']:,.0f} tokens/s"
            )
        if kind == "waiting":
            return f"waiting for {v['what']}" if self._live is None else None
        formatter = _LINES.get(kind)
        return formatter(v) if formatter else None


def _successor_line(v: Mapping[str, Any]) -> str | None:
    run = f"run '{v['name']}' ({v['run']})"
    return {
        "found": f"the operator signed a successor: {run}",
        "ready": f"the successor is ready; moving to it at the end of the round: {run}",
        "moving": f"moving to the successor: {run}",
    }.get(v["state"])


def _commit_line(v: Mapping[str, Any]) -> str:
    return (
        f"round {v['round']}: {v['module']} is now version {v['version']} ({v['digest'][:12]}), "
        f"{v['rows']} of {v['expected']} peers, {v['seconds_after_boundary']:.1f} s after the "
        "boundary"
    )


def _reachable_line(v: Mapping[str, Any]) -> str:
    closed = "other peers cannot call this one: it calls them"
    return {
        "direct": "other peers can call this one",
        "relayed": f"{closed}, or they go through a relay",
        "outgoing": f"{closed}; to help more, forward its port (--port, --announce-maddrs)",
        "unknown": "whether other peers can call this one is not known at its new addresses",
    }[v["how"]]


_LINES = {
    "reachable": _reachable_line,
    "claimed": lambda v: f"claimed path {v['path']}: {v['reason']}",
    "training": lambda v: (
        f"training path {v['path']} from its step {v['path_step']}"
        + (", with its kept optimizer state" if v["resumed_optimizer"] else "")
    ),
    "commit": _commit_line,
    "carry_on": lambda v: f"round {v['round']}: {v['module']} carries on: {v['reason']}",
    "adopt": lambda v: (
        f"took over {v['module']} version {v['version']} ({v['digest'][:12]}), "
        f"{v['tokens']:,} tokens behind it"
    ),
    "move": lambda v: f"moving from path {v['from_path']} to {v['to_path']}: {v['reason']}",
    "paused": lambda v: f"paused: {v['reason']}",
    "validation": lambda v: (
        f"round {v['round']}: held-out loss of path {v['path']} is {v['loss']:.3f} "
        f"({v['tokens']:,} tokens)"
    ),
    "kept": lambda v: f"keeps a copy of {v['module']} version {v['version']}",
    "successor": _successor_line,
    "leaving": lambda v: "leaving: states handed over, claim withdrawn",
}


class LivePanel:
    """What this peer does, what it waits for, and what its work was worth; 80 columns are enough.

    Drawn again by rich on every refresh.
    """

    def __init__(self, node: Node, publisher: Publisher, status: PeerStatus) -> None:
        self._node = node
        self._publisher = publisher
        self._status = status
        self._last_loss = float("nan")
        self._counted: Counter[str] = Counter()
        self._last_steps: dict[str, tuple[int, int]] = {}
        """By module: round and rows of the last step."""

    def on_event(self, kind: str, v: Mapping[str, Any]) -> None:
        """Take note of what the panel shows."""
        if kind == "inner":
            self._last_loss = v["loss"]
        elif kind == "commit":
            self._counted[v["module"]] += v["own_tokens"]
            self._last_steps[v["module"]] = (v["round"], v["rows"])

    def __rich__(self) -> Panel:
        node, status = self._node, self._status
        claim = status.claim
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(no_wrap=True, style="dim")
        rows.add_column(overflow="fold")
        rows.add_row("path", Text(f"{'-' if claim.path is None else claim.path}  {claim.reason}"))
        doing: str = "trains" if claim.state == "training" else claim.state
        if claim.state == "training" and not status.waiting_for:
            doing += f", {status.tokens_per_s:,.0f} tokens/s"
        rows.add_row("does", Text(f"{doing}, on {status.device}"))
        if status.waiting_for:
            rows.add_row("waits", Text(f"for {status.waiting_for}"))
        rows.add_row("round", self._round_text(node.clock.now()))
        rows.add_row("loss", f"{_loss(self._last_loss)}, held-out {_loss(status.validation_loss)}")
        rows.add_row("worth", self._worth_text())
        rows.add_row(
            "line",
            f"up {shown_bytes(status.bytes_up)}, down {shown_bytes(status.bytes_down)}, "
            f"{_REACHED[status.reachable]}",
        )
        parts: list[Any] = [rows]
        modules = self._modules_table()
        if modules is not None:
            parts += [Text(), modules]
        title = Text(f"dipaco {node.plan.name} {node.run_id}")
        return Panel(Group(*parts), title=title, title_align="left")

    def _worth_text(self) -> str:
        """Return what of this peer's work is in the chains, since it was started."""
        last = max(self._last_steps.items(), key=lambda one: one[1][0], default=None)
        if last is None:
            return "no step was taken yet"
        module, (round_index, rows) = last
        tokens = max(self._counted.values(), default=0)
        return f"{tokens:,} tokens in steps; last: {module} in round {round_index}, {rows} peers"

    def _round_text(self, now: float) -> str:
        schedule, status = self._node.schedule, self._status
        if now < schedule.start_s:
            return f"the run starts in {schedule.start_s - now:.0f} s"
        if schedule.fixed_steps:
            return f"{status.round_index}, of {schedule.fixed_steps} steps"
        levels = schedule.grid.levels_in_time_order()
        upcoming = min(
            schedule.boundary(schedule.passed(level, now) + 1, level) for level in levels
        )
        return (
            f"{schedule.round_at(now)}, boundary of {upcoming.level} in "
            f"{upcoming.time_s - now:.0f} s"
        )

    def _modules_table(self) -> Table | None:
        path = self._status.claim.path
        if path is None:
            return None
        try:
            view = self._publisher.view
        except DipacoError:
            return None
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("module", "peers", "version", "state", "last step"):
            table.add_column(column)
        for module in self._node.grid.modules_of_path(path):
            held = self._node.held.get(module)
            last = self._last_steps.get(module)
            table.add_row(
                module,
                str(len(view.group(self._node.grid, module, joining=False))),
                str(held.version) if held else "-",
                held.digest[:12] if held else "-",
                f"round {last[0]}, {last[1]} peers" if last else "-",
            )
        return table


def _loss(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
