"""What a volunteer sees: a live panel on a terminal, plain lines otherwise."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dipaco.base.errors import DipacoError, printable
from dipaco.base.progress import shown_bytes
from dipaco.peer.keeping.credit import own_tokens
from dipaco.peer.node.node import Node
from dipaco.peer.owner.pauses import BY_COMMAND
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.peer_settings import default_cache_folder
from dipaco.peer.presence.own_status import PeerStatus
from dipaco.peer.presence.refresher import Refresher
from dipaco.protocol.identity import KEY_FILE

# Plain lines for inner steps appear at most this often.
_PLAIN_INNER_PERIOD_S = 15.0
# A wait is shown when it has lasted this long; most are over by then.
_LONG_WAIT_S = 5.0
# Old steps of chains are on the disk: tokens are counted at most this often, and for at most one
# part in so many of the time.
_COUNT_PERIOD_S, _COUNT_PAUSE = 10.0, 100.0
_END_WAITS = {"inner", "training", "paused", "leaving"}
_REACHED = {
    "direct": "they can call this machine",
    "outgoing": "they cannot call this machine: it calls them",
    "unknown": "whether they can call this machine is not known yet",
}


class Given:
    """What this peer has given, over all phases of the run. A listener of events."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.came = time.strftime("%H:%M")
        self.tokens = 0
        self.loss = math.nan
        self.count: Callable[[], int] = lambda: 0
        """Returns how many tokens of this peer are in the chains. Raises `DipacoError`."""
        self._monotonic = monotonic
        self._in_model, self._again_s = 0, -math.inf

    def on_event(self, kind: str, v: Mapping[str, Any]) -> None:
        """Count the tokens of an inner step."""
        if kind == "inner":
            self.tokens += v["tokens"]
            self.loss = v["loss"]

    def __str__(self) -> str:
        began_s = self._monotonic()
        if began_s >= self._again_s:
            with contextlib.suppress(DipacoError):
                self._in_model = self.count()
            took_s = self._monotonic() - began_s
            self._again_s = began_s + max(_COUNT_PERIOD_S, _COUNT_PAUSE * took_s)
        return (
            f"{self.tokens:,} tokens since {self.came}; {self._in_model:,} of yours are in the "
            "model"
        )


class Display:
    """Shows the events of a session. `say` is for the lines before training begins."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        debug: bool = False,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        """With `debug` it shows every wait and module, and what is done for others."""
        self.console, self._debug = console or Console(highlight=False), debug
        self._new_timer = timer
        self._timer: threading.Timer | None = None
        self._waiting = ""
        self._moved: tuple[int, str] | None = None
        self._live: Live | None = None
        self._given = Given()
        self._last_inner_s = 0.0

    def say(self, *lines: str) -> None:
        """Print lines above the panel, with none of another thread between them."""
        self.console.print("\n".join(map(printable, lines)), markup=False, soft_wrap=True)

    def start(self, node: Node, refresher: Refresher, status: PeerStatus) -> None:
        """Begin the live panel; on a pipe or file nothing changes but the lines go on."""
        if self.console.is_terminal:
            self._given.count = lambda: own_tokens(node)
            uplink, folder = node.exchange.uplink, node.cache_folder
            panel = LivePanel(node, refresher, status, self._given, uplink, folder)
            self._live = Live(panel, console=self.console, refresh_per_second=2, transient=True)
            self._live.start()

    def stop(self) -> None:
        """End the live panel."""
        self._end_wait()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Turn an event into a line, if it is one that a person wants to read."""
        self._given.on_event(kind, values)
        if kind in _END_WAITS:
            self._end_wait()
        line = self._line(kind, values)
        if line:
            self.say(f"{time.strftime('%H:%M:%S')} {line}")

    def _line(self, kind: str, v: Mapping[str, Any]) -> str | None:
        if kind == "inner":
            now = time.monotonic()
            if self._live is not None or now - self._last_inner_s < _PLAIN_INNER_PERIOD_S:
                return None
            self._last_inner_s = now
            return (
                f"path {v['path']} step {v['path_step']}: loss {v['loss']:.3f}, "
                f"{v['tokens_per_s']:,.0f} tokens/s"
            )
        if kind == "waiting":
            return self._waiting_line(v["what"]) if self._live is None else None
        if kind == "move":
            self._moved = v["to_path"], v["reason"]
        if not self._debug and self._is_noise(kind, v):
            return None
        if kind == "leaving":
            return f"left: you trained {self._given.tokens:,} tokens; the same command continues"
        formatter = _LINES.get(kind)
        return formatter(v) if formatter else None

    def _is_noise(self, kind: str, v: Mapping[str, Any]) -> bool:
        """Tell whether the owner knows it already, or need not know it."""
        if kind == "outer_step":
            # A module that is private to a path has no other trainers, and the path's loss is
            # shown.
            return str(v["module"]).startswith("P")
        if kind == "claimed":
            return (v["path"], v["reason"]) == self._moved
        return kind == "kept"

    def _waiting_line(self, what: str) -> str | None:
        """Return the line with `debug`; without it, a long wait is shown later."""
        self._waiting = what
        if self._debug:
            return f"waiting for {what}"
        if self._timer is None:
            self._timer = self._new_timer(_LONG_WAIT_S, self._tell_wait)
            self._timer.daemon = True
            self._timer.start()
        return None

    def _tell_wait(self) -> None:
        self._timer = None
        self.say(f"{time.strftime('%H:%M:%S')} waiting for {self._waiting}")

    def _end_wait(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def _successor_line(v: Mapping[str, Any]) -> str | None:
    run = f"run '{v['name']}' ({v['run']})"
    return {
        "found": f"the operator signed a successor: {run}",
        "ready": f"the successor is ready; moving to it at the end of the round: {run}",
        "moving": f"moving to the successor: {run}",
    }.get(v["state"])


def _outer_step_line(v: Mapping[str, Any]) -> str:
    rows, awaited = v["rows"], v["expected"]
    # It may also contain work of peers that were not awaited.
    work = f"{rows} of {_peers(awaited)}" if rows < awaited else _peers(rows)
    return (
        f"round {v['round']}: {v['module']} is now version {v['version']}, with the work of {work}"
    )


def _reachable_line(v: Mapping[str, Any]) -> str:
    return {
        "direct": f"other peers can call this one. A friend joins through it with: {v['line']}",
        "outgoing": "other peers cannot call this one: it calls them; to help more, forward its "
        "port (--port, --announce-maddrs)",
        "unknown": "whether other peers can call this one is not known at its new addresses",
    }[v["how"]]


_LINES = {
    "reachable": _reachable_line,
    "claimed": lambda v: f"claimed path {v['path']}: {v['reason']}",
    "training": lambda v: (
        f"training path {v['path']} from its step {v['path_step']}"
        + (", with the optimizer state that it kept" if v["resumed_optimizer"] else "")
    ),
    "own_texts": lambda v: (
        f"trains path {v['path']} on {v['documents']:,} of your documents (their text stays here; "
        "others see what the model learns from them)"
    ),
    "own_texts_validation": lambda v: (
        f"round {v['round']}: held-out loss on your own texts is {v['loss']:.3f} "
        f"({v['tokens']:,} tokens)"
    ),
    "outer_step": _outer_step_line,
    "carry_on": lambda v: f"round {v['round']}: {v['module']} carries on: {v['reason']}",
    "adopt": lambda v: (
        f"took over {v['module']} version {v['version']}, trained on {v['tokens']:,} tokens"
    ),
    "move": lambda v: f"moving from path {v['from_path']} to {v['to_path']}: {v['reason']}",
    "paused": lambda v: f"paused: {v['reason']}",
    "validation": lambda v: (
        f"round {v['round']}: held-out loss of path {v['path']} is {v['loss']:.3f} "
        f"({v['tokens']:,} tokens)"
    ),
    "kept": lambda v: f"keeps a copy of {v['module']} version {v['version']}",
    "successor": _successor_line,
    "twin": lambda v: (
        f"another machine has this peer's identity, at {v['addresses'][0]}: both do one peer's "
        f"work. Stop one of them and delete its {KEY_FILE}"
    ),
}


class LivePanel:
    """What this peer does, who else is here, what its owner has given, and how to pause and stop;
    80 columns are enough.

    Drawn again by rich on every refresh.
    """

    def __init__(
        self,
        run: Node,
        swarm: Refresher,
        status: PeerStatus,
        given: Given,
        uplink: Uplink,
        cache_folder: Path,
    ) -> None:
        self._run, self._swarm, self._status, self._given = run, swarm, status, given
        self._uplink, self._cache_folder = uplink, cache_folder

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._status
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(no_wrap=True, style="dim")
        rows.add_column(overflow="fold")
        if self._run.plan.about.text:
            rows.add_row("for", Text(printable(self._run.plan.about.text)))
        rows.add_row("now", Text(self._now_text()))
        if status.waiting_for:
            rows.add_row("waits", Text(printable(f"for {status.waiting_for}")))
        rows.add_row("others", self._others_text())
        rows.add_row("given", str(self._given))
        loss = _loss(self._given.loss)
        if not math.isnan(status.validation_loss):
            loss += f"; {_loss(status.validation_loss)} on texts that it does not train on"
        rows.add_row("loss", loss)
        rows.add_row("round", self._round_text(self._run.clock.now()))
        line = self._uplink
        moved = f"sent {shown_bytes(line.sent_bytes)}, received {shown_bytes(line.received_bytes)}"
        rows.add_row("line", moved)
        rows.add_row("keys", Text(self._keys_text()))
        title = Text(f"dipaco: run {self._run.plan.name}")
        # A terminal echoes Ctrl+C as two characters: in a full line they would begin another one,
        # and rich would leave a line of the panel behind.
        yield Panel(rows, title=title, title_align="left", width=options.max_width - 2)

    def _now_text(self) -> str:
        status, claim = self._status, self._status.claim
        if claim.state == "paused":
            return f"paused: {claim.reason}"
        if claim.path is None:
            return claim.state
        which = f"path {claim.path} (the run has {self._run.grid.path_count})"
        if claim.state != "training":
            return f"{claim.state} {which}"
        speed = "" if status.waiting_for else f", {status.tokens_per_s:,.0f} tokens/s"
        return f"trains {which}{speed}, on {status.device}"

    def _others_text(self) -> str:
        try:
            view = self._swarm.view
        except DipacoError:
            return "not seen yet"
        others = {*view.present, *view.from_elsewhere} - {self._run.me}
        if not others:
            return "nobody else is here at the moment"
        whole = len(view.paths(self._run.grid)) == self._run.grid.path_count
        count = f"{'' if whole else 'at least '}{len(others)} other"
        return (
            f"{count}{'s are' if len(others) > 1 else ' is'} here; "
            + _REACHED[self._status.reachable]
        )

    def _round_text(self, now: float) -> str:
        schedule, status = self._run.schedule, self._status
        if now < schedule.start_s:
            return f"the run starts in {schedule.start_s - now:.0f} s"
        if schedule.fixed_steps:
            return f"{status.round_index}, of {schedule.fixed_steps} steps"
        levels = schedule.grid.levels_in_time_order()
        upcoming = min(schedule.boundary(schedule.passed(lv, now) + 1, lv).time_s for lv in levels)
        return f"{schedule.round_at(now)}; the peers combine their work in {upcoming - now:.0f} s"

    def _keys_text(self) -> str:
        folder = self._cache_folder
        where = "" if folder == default_cache_folder() else f" --cache-dir {folder}"
        claim = self._status.claim
        if claim.state == "paused" and claim.reason == BY_COMMAND:
            return f"to continue: dipaco-peer resume{where}; to stop: Ctrl+C"
        stop = "to stop: Ctrl+C, nothing is lost"
        return stop if claim.state == "paused" else f"{stop}; to pause: dipaco-peer pause{where}"


def _loss(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _peers(count: int) -> str:
    return f"{count} peer" + "s" * (count != 1)
