"""What averaging adapters is worth: one machine, DiLoCo and paths, 500 steps on a public base.

    python benchmarks/adapters_worth.py RUN... --base FOLDER --log FILE --workers 13 --seconds 700
    python benchmarks/adapters_worth.py --log FILE --table

Each RUN is a prepared run of [1, 4] paths with adapters, for another seed. Beside its manifest lie
its held-out texts, `validation.jsonl.gz` with a "domain". The base is made of the checkpoint in
FOLDER, where the run lacks it. The queue of tasks is in the order of their value; each is a process
with a thread for each peer, in bf16 if the CPU is made for that. After --seconds what is unfinished
is ended.

A line of JSON is appended each time that a task is scored, and none is made twice; a task's last
one says `finished`. `nats` and `targets` are those of each held-out document, in the order of
`domains`: of the tokens behind the routing prefix, by the path that the run's router chooses, in
bf16 as in training. Before the last steps only every third document of a domain is scored.
`sent_bytes` is what a peer sends in a round: its contributions, to all who train these modules, or
keep them where few do.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.averaged_adapters import (
    HalfAdapters,
    ProductReference,
    ThreadedReference,
    TiledReference,
    TurnsReference,
)
from parts.changed_run import ChangedRun
from parts.run_base import install_base
from worth import read_log

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.modules.compose import load_path
from dipaco.modules.contributions import CODECS
from dipaco.modules.device import autocast_for, training_format
from dipaco.modules.layout import layout_of
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_files import scoring_windows
from dipaco.simulator.simulated_peers import SimulatedPeer, SimulatorSettings
from dipaco.training.scoring import row_losses, scoring_at_once

CPU = torch.device("cpu")
PEERS = 4
STEPS = 500
SCORED_AT = (100, 250, 500, 1000, 2000)
# Before the last steps one of so many documents of a domain is scored; of so many to try it.
FEW, TRIED = 3, 12
WAYS: dict[str, type[ThreadedReference]] = {
    "apart": ThreadedReference,
    "turns": TurnsReference,
    "MiSS": TiledReference,
    "product": ProductReference,
}


@dataclass(frozen=True)
class Task:
    """One training: its name in the log, and how it differs from the run."""

    arm: str
    modules: tuple[int, ...] = (1,)
    peers: int = PEERS
    """0: nothing is trained."""
    steps: int = STEPS
    """Of each peer."""
    round_steps: int = 20
    way: str = "apart"
    changes: dict[str, Any] = field(default_factory=dict)
    run: str = ""
    threads: int = PEERS
    """Of its process: one for each peer. One machine with more steps divides each step."""

    @property
    def name(self) -> str:
        """What tells it from all others."""
        rounds = f", H {self.round_steps}" if self.peers > 1 else ""
        way = f", {self.way}" if self.way != "apart" else ""
        changes = "".join(f", {name} {_short(value)}" for name, value in self.changes.items())
        return f"{self.arm}{rounds}{way}{changes}"

    @property
    def scored_after(self) -> tuple[int, ...]:
        """Whole rounds, in steps."""
        if not self.peers:
            return (0,)
        wanted = [steps for steps in SCORED_AT if steps < self.steps]
        rounds = {self.round_steps * max(1, steps // self.round_steps) for steps in wanted}
        return (*sorted(steps for steps in rounds if steps < self.steps), self.steps)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(str(v) for v in value.values() if v is not None)
    return str(value)


def tasks(runs: Sequence[str], steps: int) -> list[Task]:
    """Return all tasks, the most valuable first."""
    exactly = {"contributions.codec": "float32"}
    nothing = [
        Task("base", peers=0, threads=1),
        Task("one machine, 4 x steps", peers=1, steps=4 * STEPS, round_steps=50, changes=exactly),
        Task("one machine", peers=1, round_steps=50, changes=exactly, threads=1),
    ]
    shared = [Task("DiLoCo"), Task("[1, 4]", (1, 4)), Task("[2, 2]", (2, 2))]
    private = [Task("[4], private", (4,), round_steps=50)]
    ordered = [replace(task, run=run) for run in runs for task in (*nothing, *shared, *private)]
    for run in runs:
        for rounds in (50, 10):
            ordered += [replace(task, run=run, round_steps=rounds) for task in shared]
    first = runs[0]
    for way in ("turns", "MiSS", "product"):
        ordered.append(replace(shared[0], run=first, round_steps=50, way=way))
    # What one machine can tell needs a quarter of the time.
    machine = replace(nothing[-1], run=first)
    of_machine: list[dict[str, Any]] = [
        *({"model.adapters": {"rank": rank}} for rank in (4, 64)),
        *({"inner.learning_rate": rate} for rate in (3e-4, 3e-3)),
        {"model.adapters": {"rank": 64}, "inner.learning_rate": 3e-4},
        {"model.adapters": {"rank": 16, "base_format": "nf4"}},
    ]
    ordered += [replace(machine, changes={**exactly, **change}) for change in of_machine]
    for codec in ("int2", "sign", "float32"):
        ordered.append(replace(shared[2], run=first, changes={"contributions.codec": codec}))
    if steps == STEPS:
        return ordered
    # To try it, rounds are short too, and tasks become the same.
    tried = [
        replace(
            task, steps=steps * task.steps // STEPS, round_steps=min(task.round_steps, steps // 2)
        )
        for task in ordered
    ]
    return list({(task.run, task.name): task for task in tried}.values())


class HeldOut:
    """The held-out rows of a run by path, each with its document."""

    def __init__(self, run: ChangedRun, folder: Path) -> None:
        self.run, self.plan = run, run.plan()
        tokenizer, prefix = run.tokenizer(self.plan), self.plan.routing.prefix_tokens
        self.domains: list[str] = []
        of_row: dict[bytes, int] = {}
        with gzip.open(folder / "validation.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                read = json.loads(line)
                tokens = tokenizer.document_tokens(read["text"])
                for row in scoring_windows(tokens, self.plan.model.sequence_length, prefix):
                    of_row[row.astype("<u4").tobytes()] = len(self.domains)
                self.domains.append(read["domain"])
        seen = dict.fromkeys(self.domains, 0)
        self._in_domain = np.zeros(len(self.domains), dtype=int)
        for number, domain in enumerate(self.domains):
            self._in_domain[number] = seen[domain]
            seen[domain] += 1
        self._rows = []
        for path in range(run.grid(self.plan).path_count):
            rows = np.asarray(run.validation_tokens(self.plan, path)).astype("<u4")
            self._rows.append((rows, np.array([of_row[row.tobytes()] for row in rows], dtype=int)))

    def scores(self, swarm: ThreadedReference, one_of: int, threads: int) -> dict[str, Any]:
        """Return nats and targets of one of so many documents, and their perplexities."""
        nats, targets = (np.zeros(len(self.domains)) for _ in range(2))
        wanted = self._in_domain % one_of == 0
        torch.set_num_threads(1)
        parts = []
        for path, (_, documents) in enumerate(self._rows):
            chosen = np.flatnonzero(wanted[documents])
            parts += [(path, part) for part in np.array_split(chosen, threads)]
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda part: self._losses(swarm, *part), parts))
        for (path, chosen), losses in zip(parts, found, strict=True):
            for total, of_rows in zip((nats, targets), losses, strict=True):
                np.add.at(total, self._rows[path][1][chosen], of_rows)
        return {
            "perplexity": perplexities(self.domains, nats, targets),
            "domains": self.domains,
            "nats": nats.round(2).tolist(),
            "targets": targets.astype(int).tolist(),
        }

    def _losses(
        self, swarm: ThreadedReference, path: int, chosen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the nats and targets of some rows of a path."""
        model = self.run.path_model(self.plan).eval()
        load_path(model, self.run.grid(self.plan), path, swarm.states)
        rows = self._rows[path][0][chosen].astype(np.int64)
        with autocast_for(CPU, training_format(CPU, exact=False)):
            prefix_tokens = self.plan.routing.prefix_tokens
            return row_losses(model, rows, prefix_tokens, scoring_at_once(CPU, 4))


def perplexities(domains: Sequence[str], nats: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the perplexity of each domain and of all tokens together."""
    found = {}
    for domain in (*dict.fromkeys(domains), "all"):
        of = np.array([domain in (each, "all") for each in domains])
        found[domain] = round(float(np.exp(nats[of].sum() / targets[of].sum())), 3)
    return found


def train(task: Task, folder: Path, log: Path, is_tried: bool) -> None:
    """Do a task, and append its lines."""
    one_path = task.modules == (1,)
    grid = {} if one_path else {"grid.modules_per_level": task.modules}
    run = ChangedRun(folder, {**grid, **task.changes}, one_path=one_path)
    paths = run.grid(run.plan()).path_count
    peers = [SimulatedPeer(n % paths, n // paths) for n in range(max(1, task.peers))]
    swarm = WAYS[task.way](
        run,
        steps_per_round=task.round_steps,
        peers=peers,
        settings=SimulatorSettings(validation_sequences=0, exact=False),
    )
    held_out = HeldOut(run, folder)
    training_s = 0.0
    for steps in task.scored_after:
        began_s = time.process_time()
        torch.set_num_threads(task.threads if task.peers == 1 else 1)
        while swarm.next_round * task.round_steps < steps:
            swarm.run_round()
        training_s += time.process_time() - began_s
        is_last = steps == task.scored_after[-1]
        line = {
            "run": task.run,
            "task": task.name,
            "arm": task.arm,
            "round_steps": task.round_steps,
            "steps": steps,
            "finished": is_last,
            "tokens": steps * task.peers * 128,
            "sent_bytes": sent_bytes(swarm) if task.peers else 0,
            **held_out.scores(swarm, TRIED if is_tried else 1 if is_last else FEW, task.threads),
            "format": str(training_format(CPU, exact=False)),
            "training_cpu_s": round(training_s, 1),
            "cpu_s": round(time.process_time(), 1),
        }
        append(log, line)
        print(f"{task.run}: {task.name}, {steps} steps: {line['perplexity']}", flush=True)


def sent_bytes(swarm: ThreadedReference) -> int:
    """Return what a peer of path 0 sends in a round."""
    plan, grid, total = swarm.plan, swarm.grid, 0
    codec = CODECS[plan.contributions.codec]
    for module in grid.modules_of_path(0):
        trainers = sum(peer.path in grid.paths_of_module(module) for peer in swarm.peers)
        holders = max(trainers, min(plan.rounds.copies, len(swarm.peers)))
        layout = layout_of(grid, module)
        told = [
            size
            for name, size in zip(layout.names, layout.sizes, strict=True)
            if not isinstance(swarm, HalfAdapters) or swarm.told(name)
        ]
        total += (holders - 1) * codec.file_bytes(sum(told))
    return total


def append(log: Path, line: dict[str, Any]) -> None:
    """Append a line as a whole, unless the log has it."""
    known = {(each["run"], each["task"], each["steps"]) for each in read_log(log)}
    if (line["run"], line["task"], line["steps"]) not in known:
        with log.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def work(chosen: argparse.Namespace) -> int:
    """Let processes do the tasks that the log lacks; return how many failed.

    The next task that begins is the first of those for whose threads there is room.
    """
    end_s = time.monotonic() + chosen.seconds
    folders = {folder.name: folder for folder in chosen.runs}
    for folder in folders.values():
        install_base(RunFolder(folder), chosen.base)
    done = {(line["run"], line["task"]) for line in read_log(chosen.log) if line["finished"]}
    queue = [task for task in selected(chosen) if (task.run, task.name) not in done]
    print(
        f"{len(queue)} tasks, {len(done)} are done; {training_format(CPU, exact=False)}", flush=True
    )
    running: dict[subprocess.Popen[bytes], Task] = {}
    failed = 0
    try:
        while (queue or running) and time.monotonic() < end_s:
            room = chosen.workers - sum(task.threads for task in running.values())
            task = next((task for task in queue if task.threads <= room), None)
            if task is not None:
                queue.remove(task)
                running[started(chosen, task)] = task
                continue
            for process in list(running):
                if process.poll() is not None:
                    task = running.pop(process)
                    if process.returncode:
                        failed += 1
                        print(f"{task.run}: {task.name} FAILED ({process.returncode})", flush=True)
            time.sleep(0.2)
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
    print(f"{len(running)} ended unfinished, {len(queue)} not begun, {failed} failed", flush=True)
    return failed


def selected(chosen: argparse.Namespace) -> list[Task]:
    """Return the tasks of the runs, or those of them whose names hold --only."""
    found = tasks([folder.name for folder in chosen.runs], chosen.steps)
    return [task for task in found if chosen.only in f"{task.run}: {task.name}"]


def started(chosen: argparse.Namespace, task: Task) -> subprocess.Popen[bytes]:
    """Start the process of a task."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [
            *(sys.executable, __file__, *map(str, chosen.runs), "--log", str(chosen.log)),
            *("--steps", str(chosen.steps), "--task", f"{task.run}: {task.name}"),
        ],
        env={**os.environ, **one, "TOKENIZERS_PARALLELISM": "false"},
    )


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each task and number of steps: the mean over runs."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["task"], line["steps"]), []).append(line)
    columns = list(lines[0]["perplexity"])
    yield f"| | steps | {' | '.join(columns)} | of each run | MB sent a round |"
    yield f"|---|---:|{'---:|' * len(columns)}---|---:|"
    for (name, steps), found in groups.items():
        means = [np.mean([line["perplexity"][column] for line in found]) for column in columns]
        cells = " | ".join(f"{mean:.2f}" for mean in means)
        each = ", ".join(f"{line['perplexity']['all']:.2f}" for line in found)
        few = "" if found[0]["finished"] else " (of a third)"
        sent = found[0]["sent_bytes"] / 1e6
        yield f"| {name} | {steps}{few} | {cells} | {each} | {sent:.2f} |"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="prepared, one a seed")
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="checkpoint of their base")
    parser.add_argument("--log", type=Path, required=True, help="where lines are appended")
    parser.add_argument("--workers", type=int, default=4, help="threads at a time (4)")
    parser.add_argument("--seconds", type=float, default=3600, help="all end after these (3600)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"in place of {STEPS}, to try it")
    parser.add_argument("--only", default="", metavar="TEXT", help="tasks with this in their name")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="only name the tasks")
    parser.add_argument("--table", action="store_true", help="only tell what the log has")
    return parser.parse_args()


def main() -> int:
    """Train, name the tasks or tell; returns the exit code."""
    chosen = options()
    try:
        if chosen.table:
            print("\n".join(table(read_log(chosen.log))))
            return 0
        if chosen.workers < PEERS:
            raise ConfigurationError(f"--workers {chosen.workers} must be at least {PEERS}")
        if not chosen.runs:
            raise ConfigurationError("give RUN, made by 'dipaco-bootstrap prepare', or --table")
        if chosen.list:
            print("\n".join(f"{task.run}: {task.name}" for task in selected(chosen)))
        elif chosen.task:
            found = tasks([folder.name for folder in chosen.runs], chosen.steps)
            (task,) = (task for task in found if f"{task.run}: {task.name}" == chosen.task)
            folder = next(folder for folder in chosen.runs if folder.name == task.run)
            train(task, folder, chosen.log, chosen.steps != STEPS)
        else:
            return 1 if work(chosen) else 0
    except DipacoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
