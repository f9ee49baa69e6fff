"""The files of `dipaco-status --replay`: which they are, and the events in them.

Whoever replays a swarm has what is left of it: logs that end in the middle of a line, logs of
several runs, and other files among them. What no peer writes is counted and named, and nothing in a
file makes this take more memory than a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco.modules.config import parse_config
from dipaco.modules.errors import ConfigurationError, StorageError
from dipaco.modules.plan import RunPlan

SUFFIXES = (".jsonl", ".json", ".log", ".ndjson")
MOST_LINE_BYTES = 2**20
# What a line may make of itself when it is not what a peer writes.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ConfigurationError)
HOMELESS = "no event before it says which run it is of"

_TOLD_EVERY_BYTES = 2**20

Event = Mapping[str, Any]
Runs = dict[str, tuple[RunPlan, str]]
"""The plan and the operator of each run, by its id."""


@dataclass
class Unread:
    """Lines of a file that no peer writes."""

    file: Path
    count: int = 0
    first_line: int = 0
    reason: str = ""

    def add(self, line: int, error: Exception) -> None:
        """Count a line; the first one is named."""
        if not self.count:
            said = str(error).splitlines()
            self.first_line = line
            self.reason = said[0][:120] if said else type(error).__name__
        self.count += 1

    def __str__(self) -> str:
        lines = "line is" if self.count == 1 else "lines are"
        return (
            f"{self.file}: {self.count} {lines} not understood, the first is line "
            f"{self.first_line}: {self.reason}"
        )


class Reading:
    """How far one reading of all files is; `update` gets bytes, done and in all."""

    def __init__(self, files: Sequence[Path], update: Callable[[float, float], None]) -> None:
        self._update = update
        self._total = sum(size_of(file) for file in files)
        self._done = self._told = 0
        update(0, self._total)

    def add(self, count: int) -> None:
        """Note that so many bytes more were read."""
        self._done += count
        if self._done - self._told >= _TOLD_EVERY_BYTES:
            self._told = self._done
            # A log may have grown since.
            self._update(min(self._done, self._total), self._total)


def size_of(file: Path) -> int:
    """Return the bytes of a file. Raises StorageError."""
    try:
        return file.stat().st_size
    except OSError as error:
        raise StorageError(f"--replay {file}: {error.strerror}") from None


def log_files(places: Sequence[Path]) -> list[Path]:
    """Return the logs among files and folders. Raises StorageError when there is none."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            found += sorted(f for f in place.rglob("*") if f.is_file() and f.suffix in SUFFIXES)
        elif place.is_file():
            found.append(place)
        else:
            raise StorageError(f"--replay {place}: there is no such file or folder")
    if not found:
        raise StorageError(
            f"--replay {places[0]}: no event log in it; they are what --log-json of dipaco-peer "
            f"writes, and end with {', '.join(SUFFIXES)}"
        )
    return found


def events_of_file(
    file: Path, unread: Unread | None, runs: Runs, reading: Reading
) -> Iterator[tuple[str, int, Event]]:
    """Yield the run, the line's number and the event, of every event that is of a run.

    Adds the runs that it meets to `runs`. Raises StorageError.
    """
    run_id = ""
    for number, line in enumerate(_lines(file, reading), start=1):
        try:
            event = _parse(line)
            if event["event"] == "run":
                plan = parse_config(RunPlan, event["plan"], "the plan")
                run_id = plan.run_id
                runs.setdefault(run_id, (plan, str(event["operator"])))
            elif not run_id:
                raise ValueError(HOMELESS)
        except MALFORMED as error:
            if unread is not None:
                unread.add(number, error)
            continue
        yield run_id, number, event


def _lines(file: Path, reading: Reading) -> Iterable[bytes]:
    """Yield the lines of a file; of one that is too long as much as shows that."""
    try:
        with file.open("rb") as opened:
            while line := opened.readline(MOST_LINE_BYTES):
                reading.add(len(line))
                rest = line
                while len(rest) == MOST_LINE_BYTES and not rest.endswith(b"\n"):
                    rest = opened.readline(MOST_LINE_BYTES)
                    reading.add(len(rest))
                yield line
    except OSError as error:
        raise StorageError(f"--replay {file}: {error.strerror}") from None


def _parse(line: bytes) -> Event:
    if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
        raise ValueError(f"it is longer than {MOST_LINE_BYTES:,} bytes")
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("it is not an event")
    time_s = event.get("time_s")
    if not isinstance(time_s, int | float) or not 0 <= time_s < 1e11:
        raise ValueError("it has no time_s")
    return event
