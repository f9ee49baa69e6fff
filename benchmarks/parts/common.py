"""What the benchmarks share: options, the report, processes, and the memory of process trees.

Every figure stands beside another that was measured next to it, because machines differ and
are seldom idle; the report says how busy this one was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
# As a user starts a peer, but a step takes a while in which the processor is free; and none is
# taken before a file is there.
_STEADY_PEER = """
import os, sys, time
from dipaco.peer.peer_command import main
from dipaco.training.trainer import PathTrainer
step = PathTrainer.inner_step
def steady(trainer):
    while not os.path.exists({go!r}):
        time.sleep(0.05)
    end = time.monotonic() + {step_s}
    loss = step(trainer)
    time.sleep(max(0.0, end - time.monotonic()))
    return loss
PathTrainer.inner_step = steady
sys.exit(main(sys.argv[1:]))
"""


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    return parser


@dataclass
class Report:
    """What a benchmark found: rows for people, figures for programs."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def row(self, *cells: object) -> None:
        """Add a row; numbers are shown with three or four digits."""
        self.rows.append(tuple(shown(cell) for cell in cells))

    def as_json(self) -> dict[str, Any]:
        """Return the figures with the machine they were measured on."""
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": round(self.load_before, 2),
            "load_after": round(os.getloadavg()[0], 2),
        }
        return {"benchmark": self.name, **self.figures, "machine": machine}

    def conclude(self, broken: list[str], as_json: bool) -> int:
        """Print it all, with the targets that were missed; returns the exit code."""
        self.figures["broken"] = broken
        self.notes += broken
        self.print(as_json)
        return int(bool(broken))

    def print(self, as_json: bool) -> None:
        """Print the one or the other."""
        found = self.as_json()
        if as_json:
            print(json.dumps(found))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.name, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        # In a file nothing is cut off.
        console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
        console.print(table)
        machine = found["machine"]
        self.notes.append(
            f"{machine['cores']} cores; load {machine['load_before']} before, "
            f"{machine['load_after']} after"
        )
        for note in self.notes:
            console.print(note, highlight=False)


def shown(value: object) -> str:
    """Format a cell: integers whole, other numbers with about three digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def ratio(figure: float, beside: float) -> float:
    """Return `figure / beside`, rounded; not a number when there is nothing to divide by."""
    return round(figure / beside, 4) if beside else float("nan")


def alternate(
    beside: Callable[[], dict[str, Any]], measured: Callable[[], dict[str, Any]], times: int
) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Run `beside`, `measured`, `beside`, `measured`, ..., `beside`.

    Returns, for each run of `measured`, what stood before it, itself, and what came after it, so
    that a machine that becomes busier or idler shifts both alike.
    """
    before, found = beside(), []
    for _ in range(times):
        middle = measured()
        after = beside()
        found.append((before, middle, after))
        before = after
    return found


def paired_ratios(
    found: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]], key: str
) -> list[float]:
    """Return each middle figure divided by the mean of its two neighbours."""
    return [
        ratio(middle[key], statistics.mean((before[key], after[key])))
        for before, middle, after in found
    ]


def run_json(script: str, *arguments: str, timeout_s: float = 300.0) -> dict[str, Any]:
    """Run a script of this folder with one thread and return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=one_thread(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        # Linux shares the processor by session first, and the peers have one each.
        start_new_session=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_thread() -> dict[str, str]:
    """Return an environment in which tensor arithmetic has one thread, as in the peers."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def steady_peer(step_s: float, go: Path | None = None, before: str = "") -> tuple[str, ...]:
    """Return the program of a peer whose inner steps take at least so long, as on a GPU.

    No peer takes a step before the file `go` is there, so that the first round can be one of all.
    `before` is Python that runs first.
    """
    text = before + _STEADY_PEER.format(step_s=step_s, go=str((go or HERE).resolve()))
    return (sys.executable, "-c", text)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="dipaco-benchmark-") as name:
        yield Path(name)


@dataclass(frozen=True)
class ProcessMemory:
    """One process of a tree. Proportional sizes count a shared page as its share of the users."""

    pid: int
    parent: int
    command: str
    proportional_mib: float
    anonymous_mib: float


def process_tree(root: int) -> list[ProcessMemory]:
    """Return the process `root` and all that descend from it, parents first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(text[text.rindex(")") + 2 :].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [(root, 0)]
    while waiting:
        pid, parent = waiting.pop(0)
        try:
            rollup = smaps_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())
            command = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        found.append(ProcessMemory(pid, parent, command, rollup["Pss"], rollup["Pss_Anon"]))
        waiting += [(child, pid) for child in sorted(parents.get(pid, []))]
    return found


def smaps_rollup(text: str) -> dict[str, float]:
    """Parse /proc/PID/smaps_rollup into MiB by name."""
    found = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            found[name] = int(rest.split()[0]) / 1024
    return found
