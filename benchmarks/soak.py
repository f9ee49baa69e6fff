"""Hours of a small swarm with a little churn: does anything grow?

    python benchmarks/soak.py --hours 2 [--out DIR] [--json]

A bootstrap node and six `dipaco-peer` processes on loopback train a tiny run; an inner step takes
--step-s, most of which the processor waits. Every --churn-s seconds one of the last two peers is
killed, leaves, or comes back, in turn; the other four and the node stay. Once a minute these five
are looked at: proportional memory of all their processes, processes, threads, open files, sockets,
temporary files, bytes and files on disk.

The slope of each is that of the least-squares line through the samples behind the first quarter,
an hour, summed over the five. Beside it stand first and last of them. Exit code 1 when a peer
ended by itself, a process was left over, or memory grew by more than 2% an hour.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from parts.common import Report, build_parser, process_tree, scratch_folder, steady_peer
from support.faults import processes_of
from support.swarm import ENVIRONMENT, Event, Member, Swarm
from support.tiny_run import make_tiny_run

STAYING, COMING = 4, 2
START_S = 240.0
LEAVE_S = 60.0
WARM_UP = 0.25
"""Part of the samples that slopes leave out: imports, caches and buffers fill in it."""
GREATEST_GROWTH = 0.02
FIGURES = ("memory_mib", "anonymous_mib", "processes", "threads", "files", "sockets", "temporary",
           "disk_mib", "disk_files")  # fmt: skip


def main() -> int:
    """Run the soak; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--round-s", type=float, default=20.0, help="seconds of a round (20)")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds of a step (0.5)")
    parser.add_argument("--churn-s", type=float, default=240.0, help="between two faults (240)")
    parser.add_argument("--sample-s", type=float, default=60.0, help="between two looks (60)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs and samples here")
    chosen = parser.parse_args()
    with scratch_folder() as scratch:
        folder = chosen.out or scratch
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder, chosen.round_s, chosen.step_s)
        with soak.swarm:
            soak.live(3600 * chosen.hours, chosen.churn_s, chosen.sample_s)
        report = soak.report()
    report.print(chosen.json)
    is_broken = report.figures["ended_by_itself"] or report.figures["left_over_processes"]
    growth = report.figures["slopes_per_hour"]["memory_mib"]
    return int(bool(is_broken) or growth > GREATEST_GROWTH * soak.samples[0]["memory_mib"])


class Soak:
    """The swarm, and what was seen of those that stay."""

    def __init__(self, folder: Path, round_s: float, step_s: float) -> None:
        # Before any member starts: what they leave in the folder for temporary files is counted.
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        ENVIRONMENT["TMPDIR"] = str(self.temporary.resolve())
        self.folder = folder
        self.program = steady_peer(step_s)
        self.run = make_tiny_run(
            folder / "run", private_blocks=(3,), block_count=4, inner_steps=0, duration_s=round_s,
            start_s=time.time(), documents_per_path=400,
            rounds={"matchmaking_s": 2.0, "validation_sequences": 8},
        )  # fmt: skip
        self.swarm = Swarm(folder, self.run)
        self.staying: list[Member] = []
        self.coming: list[Member] = []
        self.samples: list[dict[str, float]] = []
        self.faults = 0
        self.ended: list[str] = []

    def live(self, seconds: float, churn_s: float, sample_s: float) -> None:
        """Start everybody, and look and disturb by the clock."""
        bootstrap = self.swarm.start_bootstrap()
        entry = bootstrap.address(START_S)
        peers = [
            self.swarm.start_peer(entry, program=self.program) for _ in range(STAYING + COMING)
        ]
        self.swarm.wait(peers, "commit", timeout_s=START_S)
        self.staying, self.coming = [bootstrap, *peers[:STAYING]], peers[STAYING:]
        began = time.monotonic()
        next_fault_s, next_sample_s = churn_s, 0.0
        while (passed_s := time.monotonic() - began) < seconds:
            if passed_s >= next_sample_s:
                self.look(passed_s)
                next_sample_s += sample_s
            if passed_s >= next_fault_s:
                self.disturb(entry)
                next_fault_s += churn_s
            self.ended = [member.name for member in self.staying if not member.alive]
            if self.ended:
                return
            time.sleep(1.0)

    def disturb(self, entry: str) -> None:
        """In turn: one is killed and comes back with its disk; one leaves and a new one comes."""
        slot, step = (self.faults // 2) % COMING, self.faults % 2
        peer = self.coming[slot]
        if step == 0 and slot == 0:
            peer.kill()
        elif step == 0:
            peer.interrupt()
        else:
            peer.popen.wait(LEAVE_S)
            name = peer.name if slot == 0 else None
            self.coming[slot] = self.swarm.start_peer(entry, name=name, program=self.program)
        self.faults += 1

    def look(self, passed_s: float) -> None:
        """Take a sample of all that stay together."""
        found = [processes for m in self.staying for processes in process_tree(m.popen.pid)]
        pids = [process.pid for process in found]
        targets = [target for pid in pids for target in open_files(pid)]
        caches = [path for member in self.staying for path in files_below(self.cache_of(member))]
        sample = {
            "hours": passed_s / 3600,
            "memory_mib": sum(process.proportional_mib for process in found),
            "anonymous_mib": sum(process.anonymous_mib for process in found),
            "processes": len(found),
            "threads": sum(thread_count(pid) for pid in pids),
            "files": len(targets),
            "sockets": sum(target.startswith("socket:") for target in targets),
            "temporary": len(files_below(self.temporary)),
            "disk_mib": sum(size_of(path) for path in caches) / 2**20,
            "disk_files": len(caches),
        }
        self.samples.append({name: round(value, 4) for name, value in sample.items()})
        with (self.folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(self.samples[-1]) + "\n")

    def cache_of(self, member: Member) -> Path:
        """Where a member writes; the bootstrap node serves the run's folder."""
        return self.run.path if member is self.staying[0] else self.folder / f"{member.name}-cache"

    def report(self) -> Report:
        """Return slopes, ends and commits."""
        report = Report("what grows in a swarm", ("of five processes", "first", "last", "per hour"))
        behind = self.samples[int(WARM_UP * len(self.samples)) :]
        slopes = {name: slope(behind, name) for name in FIGURES}
        for name in FIGURES:
            report.row(name, behind[0][name], behind[-1][name], slopes[name])
        commits: list[Event] = [event for m in self.staying[1:] for event in m.of("commit")]
        left = {m.name: processes_of(m) for m in self.swarm.members if not m.alive}
        report.figures = {
            "hours": self.samples[-1]["hours"],
            "faults": self.faults,
            "commits": len(commits),
            "rounds": max((event["round"] for event in commits), default=0),
            "slopes_per_hour": slopes,
            "first": behind[0],
            "last": behind[-1],
            "ended_by_itself": self.ended,
            "left_over_processes": sum(len(pids) for pids in left.values()),
        }
        report.notes.append(f"{self.faults} faults, {len(commits)} commits by those that stayed")
        return report


def slope(samples: Sequence[dict[str, float]], name: str) -> float:
    """Return the slope of the least-squares line, an hour."""
    hours = np.array([sample["hours"] for sample in samples])
    values = np.array([sample[name] for sample in samples])
    if len(hours) < 2:
        return float("nan")
    return round(float(np.polyfit(hours, values, 1)[0]), 4)


def open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process lead to; nothing for one that has ended."""
    found = []
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []
    for descriptor in descriptors:
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except OSError:
            continue
    return found


def thread_count(pid: int) -> int:
    """Return how many threads a process has."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def size_of(path: Path) -> int:
    """Return the size of a file that may be gone by now."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
