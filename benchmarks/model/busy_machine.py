"""Training beside programs that keep the processor busy: what it is worth to wait asleep.

    python benchmarks/model/busy_machine.py RUN_DIR --busy 2 --threads 2

The threads that compute one step wait for each other hundreds of times. As OpenMP comes they turn
in circles meanwhile, also when the one that is waited for has no processor. Every command lets them
sleep soon (`dipaco.modules.command_line.quiet_threads`). Measured is `bare_loop.py`, in a process
of its own each time and as nice as a peer (10): waiting both ways, and with one thread, with
nothing else to do and beside --busy processes that count; the ways take turns, --rounds times. The
figures are mean steps a second, the ratios those of means. Exit code 1 when one measurement takes
more than --limit-s.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dipaco.modules.command_line import SPIN_COUNT, SPIN_VARIABLE
from parts.common import Report, build_parser

BENCHMARKS = Path(__file__).resolve().parent.parent


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a prepared run folder")
    parser.add_argument("--busy", type=int, default=2, help="processes beside it (2)")
    parser.add_argument("--threads", type=int, default=2, help="that train (2)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (8)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind (3)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one of them (600)")
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
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    for name in ("OMP_WAIT_POLICY", SPIN_VARIABLE):
        environment.pop(name, None)
    if turns:
        environment[SPIN_VARIABLE] = turns
    loop = [sys.executable, str(BENCHMARKS / "bare_loop.py"), str(chosen.run)]
    lengths = ["--threads", str(threads), "--seconds", str(chosen.seconds)]
    found = subprocess.run(
        ["nice", "-n", "10", *loop, *lengths],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        timeout=chosen.limit_s,
    )
    return 1.0 / float(json.loads(found.stdout)["step_s"])


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
        means = dict.fromkeys(ways, 0.0)
        with ExitStack() as others:
            for _ in range(busy):
                others.enter_context(counting())
            for _ in range(chosen.rounds):
                for way, settings in ways.items():
                    means[way] += steps_per_s(chosen, *settings) / chosen.rounds
        ratio = means["sleeping"] / means["turning"]
        report.row(f"beside {busy} busy processes", *means.values(), ratio)
        report.figures[f"beside_{busy}"] = {**means, "sleeping_to_turning": ratio}
    report.print(chosen.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.TimeoutExpired as error:
        sys.exit(f"one measurement took more than {error.timeout:g} s; try --limit-s or --busy 1")
