"""Runs of worth.py one after another, in several processes, for so many seconds.

    python benchmarks/worth_queue.py QUEUE --logs FOLDER --workers 5 --seconds 560

Each line of QUEUE has the arguments of worth.py for a run, without --log; `#` begins a comment.
Lines are begun in their order, each by the first of the processes that is free, with one thread.
A file of FOLDER for each process, such as 3.jsonl, has the lines of JSON of its runs. After
--seconds all processes are ended, and what they had not scored is lost; a line of a log is whole or
not there. Given again, the command makes only what no log of FOLDER has.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

# Before NumPy and PyTorch are imported, here and in the processes.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import worth

from dipaco.base.errors import ConfigurationError, DipacoError


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("queue", type=Path, metavar="QUEUE", help="a file of worth.py's arguments")
    parser.add_argument("--logs", type=Path, required=True, metavar="FOLDER", help="one a process")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    parser.add_argument("--seconds", type=float, default=600.0, help="until all are ended (600)")
    return parser.parse_args()


def read_queue(file: Path) -> list[list[str]]:
    """Return the arguments of each run of a queue.

    Raises ConfigurationError for a line that names a log.
    """
    runs = [shlex.split(line, comments=True) for line in file.read_text().splitlines()]
    for number, run in enumerate(runs, 1):
        if "--log" in run:
            raise ConfigurationError(f"{file}, line {number}: leave --log out")
    return [run for run in runs if run]


def work(
    runs: Sequence[Sequence[str]], begun: Synchronized[int], log: Path, known: list[worth.Figures]
) -> None:
    """Make runs until all are begun; one that fails is told, and the next begun."""
    torch.set_num_threads(1)
    while True:
        with begun.get_lock():
            number = begun.value
            begun.value += 1
        if number >= len(runs):
            return
        try:
            worth.measure(worth.options([*runs[number], "--log", str(log)]), known)
        except (DipacoError, SystemExit) as error:
            print(f"{shlex.join(runs[number])}: {error}", file=sys.stderr, flush=True)
        except Exception:
            print(f"{shlex.join(runs[number])}:", file=sys.stderr)
            traceback.print_exc()


def read_logs(folder: Path) -> list[worth.Figures]:
    """Return the figures of all logs of a folder."""
    return [line for log in sorted(folder.glob("*.jsonl")) for line in worth.read_log(log)]


def drop_half_a_line(log: Path) -> None:
    """Cut off what a process was writing when it was ended."""
    if log.exists():
        content = log.read_bytes()
        os.truncate(log, content.rfind(b"\n") + 1)


def main() -> int:
    """Run the queue; returns the exit code, 1 for a wrong queue or when time was up."""
    chosen = options()
    try:
        runs = read_queue(chosen.queue)
    except DipacoError as error:
        print(error, file=sys.stderr)
        return 1
    chosen.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + chosen.seconds
    logs = [chosen.logs / f"{number}.jsonl" for number in range(chosen.workers)]
    known = read_logs(chosen.logs)
    # A fork would inherit PyTorch's threads.
    context = multiprocessing.get_context("spawn")
    begun = context.Value("i", 0)
    workers = [context.Process(target=work, args=(runs, begun, log, known)) for log in logs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
    is_late = any(worker.is_alive() for worker in workers)
    for worker in workers:
        worker.kill()
        worker.join()
    for log in logs:
        drop_half_a_line(log)
    scored = len(read_logs(chosen.logs)) - len(known)
    not_begun = max(0, len(runs) - begun.value)
    print(json.dumps({"scored": scored, "not_begun": not_begun, "time_was_up": is_late}))
    return 1 if is_late else 0


if __name__ == "__main__":
    sys.exit(main())
