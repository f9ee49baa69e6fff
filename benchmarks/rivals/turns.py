"""Two programs take turns: each waits in a process of its own while the other works."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from parts.common import HERE, Report

Figures = dict[str, Any]
Pair = tuple[Figures, Figures]
TURN_LIMIT_S = 300.0
TESTS = HERE.parent / "tests"


class Worker:
    """A program of this folder that does a turn when it is told to. Ends with the `with` block.

    :param program: its module, such as `rivals.adapters`
    :param packages: folders of packages that it sees before those of this environment
    :param prefix: what runs a command elsewhere, such as in a network namespace
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        packages: Sequence[Path] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = " ".join((program, *arguments))
        self._popen = subprocess.Popen(
            [*prefix, sys.executable, "-m", program, *arguments],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONPATH": os.pathsep.join([*map(str, packages), str(HERE), str(TESTS)]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def turn(self, command: str = "") -> Figures:
        """Let it work, and return what it says of that."""
        self.tell(command)
        return self.answer()

    def tell(self, command: str) -> None:
        """Let it begin a turn."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{command}\n")
        self._popen.stdin.flush()

    def answer(self) -> Figures:
        """Wait for the end of its turn. Raises RuntimeError if it ends in place of that."""
        assert self._popen.stdout is not None
        if not select.select([self._popen.stdout], [], [], TURN_LIMIT_S)[0]:
            raise RuntimeError(f"{self.name} did no turn within {TURN_LIMIT_S:.0f} s")
        line = self._popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._popen.wait()}; see above")
        found: Figures = json.loads(line)
        return found


class Turns:
    """The side of the worker: what it is told, a line a turn, and where it answers."""

    def __init__(self) -> None:
        # Libraries print to the standard output, which is for answers.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def next(self) -> str:
        """Wait for the next turn and return what was said; ends the process when none comes."""
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        return line.strip()

    def answer(self, figures: Mapping[str, Any]) -> None:
        """Say what the turn was."""
        print(json.dumps(figures), file=self._answers, flush=True)


def take_turns(turn: Callable[[str], Mapping[str, Any]]) -> None:
    """Be the worker: call `turn` for each line that comes, and answer with what it returns."""
    turns = Turns()
    while True:
        turns.answer(turn(turns.next()))


class Stopwatch:
    """Measures what this process does from here on."""

    def __init__(self) -> None:
        self._began_s, self._cpu_began_s = time.perf_counter(), time.process_time()

    def figures(self, done: str, count: float) -> Figures:
        """Return how much of it was `done` a second, by the clock and by the processor."""
        return {
            f"{done}_per_s": count / (time.perf_counter() - self._began_s),
            f"{done}_per_cpu_s": count / (time.process_time() - self._cpu_began_s),
            "peak_mib": peak_mib(),
        }


def peak_mib() -> float:
    """Return the most main memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def side_by_side(ours: Worker, theirs: Worker, turns: int, *, unseen: int = 1) -> list[Pair]:
    """Let both do so many turns, close together; who is first changes each time.

    The first `unseen` turns of each, in which memory is first touched, are not told.
    """
    found: list[Pair] = []
    with ExitStack() as stack:
        stack.enter_context(ours)
        stack.enter_context(theirs)
        for number in range(-unseen, turns):
            if number % 2:
                after = theirs.turn()
                pair = ours.turn(), after
            else:
                pair = ours.turn(), theirs.turn()
            if number >= 0:
                found.append(pair)
    return found


def ratios(pairs: Sequence[Pair], key: str) -> list[float]:
    """Return ours divided by theirs, turn by turn."""
    return [ours[key] / theirs[key] for ours, theirs in pairs]


def told(values: Sequence[float]) -> str:
    """Return the median with the quarters, as a cell of a table."""
    if len(values) < 2:
        return _short(values[0])
    lower, middle, upper = map(_short, statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle} ({lower} to {upper})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def add_speed(
    report: Report, title: str, pairs: Sequence[Pair], done: str, *, by_processor: bool = True
) -> None:
    """Add rows of what is done in a second, by the clock and by the processor."""
    units = {"per_s": "second", "per_cpu_s": "processor second"}
    for key in units if by_processor else ("per_s",):
        name = f"{done}_{key}"
        ours, theirs = (told([pair[side][name] for pair in pairs]) for side in (0, 1))
        report.row(title, f"{done} a {units[key]}", told(ratios(pairs, name)), ours, theirs)


def add_memory(report: Report, title: str, pairs: Sequence[Pair]) -> None:
    """Add a row of the most main memory until the last turn."""
    last = pairs[-1:]
    sizes = [round(pair["peak_mib"]) for pair in pairs[-1]]
    report.row(title, "peak memory, MiB", told(ratios(last, "peak_mib")), *sizes)
