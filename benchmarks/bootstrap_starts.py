"""Starts of a bootstrap node beside busy processes: how long each takes, and whether one hangs.

    python benchmarks/bootstrap_starts.py [--starts N] [--busy M] [--limit-s S] [--json]

One node after the other is started on loopback, in the same folder and so with the same identity,
while other processes use the cores. A start ends when the node has printed the address that a
volunteer pastes; one that has not done so within the limit hangs, and is killed.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from parts.common import Report, build_parser, scratch_folder
from support.swarm import Member, Swarm
from support.tiny_run import make_tiny_run

PRINTED = "dipaco-peer --initial-peers /"
BUSY = "while True: pass"
LEAVE_S = 20.0
LOOK_S = 0.02


@dataclass(frozen=True)
class Start:
    """What became of one start: "served", "hung", or "failed" with the node's last line."""

    outcome: str
    seconds: float
    last_line: str = ""


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--starts", type=int, default=100, help="starts, one after the other (100)")
    parser.add_argument("--busy", type=int, default=2, help="processes beside them (2)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="after that it hangs (120)")
    chosen = parser.parse_args()
    report = Report("starts of a bootstrap node", ("", "starts", "seconds"))
    starts: list[Start] = []
    with scratch_folder() as folder, busy_processes(chosen.busy):
        run = make_tiny_run(folder / "run", inner_steps=0, duration_s=600.0)
        with Swarm(folder, run) as swarm:
            for number in range(chosen.starts):
                start = watch(swarm.start_bootstrap(name=f"start-{number}"), chosen.limit_s)
                starts.append(start)
                said = f"start {number}: {start.outcome} after {start.seconds:.1f} s"
                print(f"{said} {start.last_line}".rstrip(), file=sys.stderr, flush=True)
    served = [start.seconds for start in starts if start.outcome == "served"]
    hung = sum(start.outcome == "hung" for start in starts)
    failed = [start.last_line for start in starts if start.outcome == "failed"]
    report.row("served: median", len(served), statistics.median(served) if served else "")
    report.row("served: longest", "", max(served, default=0.0))
    report.row("hung", hung, "")
    report.row("failed", len(failed), "")
    report.notes.append(f"{chosen.busy} busy processes beside each start")
    report.notes += failed
    report.figures = {
        "starts": len(starts),
        "busy": chosen.busy,
        "limit_s": chosen.limit_s,
        "hung": hung,
        "failed": failed,
        "median_s": round(statistics.median(served), 3) if served else None,
        "longest_s": round(max(served), 3) if served else None,
        "seconds": [round(start.seconds, 3) for start in starts],
    }
    report.print(chosen.json)
    return 0


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes computing; each is ended by its id."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait(LEAVE_S)


def watch(node: Member, limit_s: float) -> Start:
    """Wait until a node has printed its address, has ended or hangs, and end it."""
    started = time.monotonic()
    outcome = "served"
    while PRINTED not in node.output.read_text():
        if not node.alive:
            outcome = "failed"
            break
        if time.monotonic() - started > limit_s:
            outcome = "hung"
            break
        time.sleep(LOOK_S)
    seconds = time.monotonic() - started
    if outcome == "served":
        node.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.popen.wait(LEAVE_S)
    if node.alive:
        node.kill()
    lines = node.output.read_text().splitlines()
    return Start(outcome, seconds, lines[-1] if outcome != "served" and lines else "")


if __name__ == "__main__":
    sys.exit(main())
