"""Training beside programs that keep the processor busy: what it is worth to wait asleep.

    python benchmarks/busy_machine.py RUN_DIR --busy 2 --threads 2

The threads that compute one step wait for each other hundreds of times. As OpenMP comes they turn
in circles meanwhile, also when the one that is waited for has no processor. Every command lets them
sleep soon (`dipaco.modules.command_line.quiet_threads`). Measured is `bare_loop.py`, in a process
of its own each time and as nice as a peer (10): waiting both ways, and with one thread, with
nothing else to do and beside --busy processes that count; the ways take turns, --rounds times. The
figures are steps a second, the ratios those of sums.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dipaco.modules.command_line import SPIN_COUNT, SPIN_VARIABLE
from parts.common import Report, build_parser


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a prepared run folder")
    parser.add_argument("--busy", type=int, default=2, help="processes beside it (2)")
    parser.add_argument("--threads", type=int, default=2, help="that train (2)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (8)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind (3)")
    return parser.parse_args()


@contextmanager
def counting() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def steps_per_s(chosen: argparse.Namespace, threads: int, turns: str) -> float:
    """Train in a process of its own; threads that wait turn so often, or as they come."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)} | (
        {SPIN_VARIABLE: turns} if turns else {}
    )
    command = [
        "nice",
        "-n",
        "10",
        sys.executable,
        str(Path(__file__).parent / "bare_loop.py"),
        str(chosen.run),
    ]
    command += ["--threads", str(threads), "--seconds", str(chosen.seconds)]
    found = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    return 1.0 / float(json.loads(found)["step_s"])


def main() -> int:
    chosen = options()
    columns = ("steps a second", "sleeping", "turning", "one thread", "sleeping to turning")
    report = Report("training beside busy programs", columns)
    ways = {
        "sleeping": (chosen.threads, SPIN_COUNT),
        "turning": (chosen.threads, ""),
        "one_thread": (1, SPIN_COUNT),
    }
    for busy in dict.fromkeys((0, chosen.busy)):
        sums = dict.fromkeys(ways, 0.0)
        with ExitStack() as others:
            for _ in range(busy):
                others.enter_context(counting())
            for _ in range(chosen.rounds):
                for way, settings in ways.items():
                    sums[way] += steps_per_s(chosen, *settings) / chosen.rounds
        ratio = sums["sleeping"] / sums["turning"]
        report.row(f"beside {busy} busy processes", *sums.values(), ratio)
        report.figures[f"beside_{busy}"] = {**sums, "sleeping_to_turning": ratio}
    report.print(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
