"""What the benchmarks share: options, the report, processes, and the memory of process trees."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows

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
# What an inner step is where none is computed: a matrix is changed a little, another one each time.
_NO_COMPUTING = """
import torch
from dipaco.training.inner import InnerLoop
def change(loop, tokens, path_step):
    matrices = [p for p in loop.model.parameters() if p.ndim > 1]
    with torch.no_grad():
        matrices[path_step % len(matrices)].mul_(1.0 + 0.002 * (torch.rand(()) - 0.5))
    return 5.0
InnerLoop.step = change
"""


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.add_argument("--rows", metavar="NAME", help="add what is found to results/NAME.json")
    return parser


class Report:
    """What a benchmark found, as rows, and how busy the machine was meanwhile.

    :param conditions: what else holds for the rows, such as seed and sizes
    """

    def __init__(self, name: str, **conditions: Any) -> None:
        self.name, self.conditions = name, conditions
        self.rows: list[rows.Row] = []
        self.notes: list[str] = []
        self._load_before = os.getloadavg()[0]

    def add(self, of: str, figures: Mapping[str, Any]) -> None:
        """Add a row for each figure; what is None is left out, and what is in a dict told apart."""
        for figure, value in figures.items():
            if isinstance(value, dict):
                self.add(of, {f"{figure}: {key}": inner for key, inner in value.items()})
            elif value is not None and value != []:
                told = str(value) if isinstance(value, bool) else value
                self.rows.append({"of": of, "figure": figure, "value": told})

    def as_json(self) -> dict[str, Any]:
        """Return all of it, with the machine that it was measured on."""
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load": [round(self._load_before, 2), round(os.getloadavg()[0], 2)],
        }
        told = {"notes": self.notes, "machine": machine, "rows": self.rows}
        return {"benchmark": self.name, "commit": rows.commit(), **self.conditions, **told}

    def conclude(self, chosen: argparse.Namespace, broken: list[str] | None = None) -> int:
        """Print it, and add it to the results where that was asked for; returns the exit code,
        which is 1 when something is `broken`."""
        broken = broken or []
        self.notes += [f"broken: {what}" for what in broken]
        found = self.as_json()
        load = found["machine"]["load"]
        if chosen.rows:
            rows.append(chosen.rows, self.rows, load=load, **self.conditions)
        if chosen.json:
            print(json.dumps(found))
        else:
            print(f"{self.name}\n\n{self._table()}")
            print("\n".join([*self.notes, f"{os.cpu_count()} cores, load {load[0]} to {load[1]}"]))
        return int(bool(broken))

    def _table(self) -> str:
        """Return a table that is longer than wide."""
        figures, several = ({row[key] for row in self.rows} for key in ("figure", "of"))
        if len(figures) <= len(several):
            return rows.table({"rows": self.rows})
        turned = [{**row, "of": row["figure"], "figure": row["of"]} for row in self.rows]
        return rows.table({"units": "by row", "rows": turned})


def ratio(figure: float, beside: float) -> float:
    """Return `figure / beside`, rounded; not a number when there is nothing to divide by."""
    return round(figure / beside, 4) if beside else float("nan")


def one_thread() -> dict[str, str]:
    """Return an environment in which tensor arithmetic has one thread, as in the peers."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def steady_peer(
    step_s: float, go: Path | None = None, before: str = "", *, computes: bool = True
) -> tuple[str, ...]:
    """Return the program of a peer whose inner steps take at least so long, as on a GPU.

    No peer takes a step before the file `go` is there, so that the first round can be one of all.
    `before` is Python that runs first. Unless a peer `computes`, its steps are waited for alone.
    """
    before += "" if computes else _NO_COMPUTING
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


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its descendants so far."""
    total, clock = 0.0, os.sysconf("SC_CLK_TCK")
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            times[int(entry.name)] = (int(fields[11]) + int(fields[12])) / clock
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        total += times.get(one, 0.0)
        waiting += children.get(one, [])
    return total


def smaps_rollup(text: str) -> dict[str, float]:
    """Parse /proc/PID/smaps_rollup into MiB by name."""
    found = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            found[name] = int(rest.split()[0]) / 1024
    return found
