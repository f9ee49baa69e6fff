"""Training beside programs that keep the processor busy: what waiting without turning is worth.

    python benchmarks/busy_machine.py RUN_DIR --busy 2 --threads 2

The threads that compute one step wait for each other hundreds of times. As OpenMP comes they turn
in circles meanwhile, also when the one that is waited for has no processor. Every command lets them
sleep (`dipaco.modules.command_line.quiet_threads`). Measured is `bare_loop.py`, in a process of its
own each time: waiting both ways, and with one thread, with nothing else to do and beside --busy
processes that count; the ways take turns, --rounds times. The figures are steps a second, the
ratios those of sums.
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

from dipaco.modules.command_line import QUIET_THREADS
from parts.common import Report, build_parser

TURNING = dict.fromkeys(QUIET_THREADS, "")


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


def steps_per_s(chosen: argparse.Namespace, threads: int, waiting: dict[str, str]) -> float:
    environment = {**os.environ, **waiting, "OMP_NUM_THREADS": str(threads)}
    environment = {name: value for name, value in environment.items() if value}
    command = [sys.executable, str(Path(__file__).parent / "bare_loop.py"), str(chosen.run)]
    command += ["--threads", str(threads), "--seconds", str(chosen.seconds)]
    found = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    return 1.0 / float(json.loads(found)["step_s"])


def main() -> int:
    chosen = options()
    columns = ("steps a second", "sleeping", "turning", "one thread", "sleeping to turning")
    report = Report("training beside busy programs", columns)
    ways = {
        "sleeping": (chosen.threads, QUIET_THREADS),
        "turning": (chosen.threads, TURNING),
        "one_thread": (1, QUIET_THREADS),
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
