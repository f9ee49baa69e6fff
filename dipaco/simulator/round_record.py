"""Keeps the rounds of a simulation in a file, a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dipaco.base.files import atomic_write

from .round_report import RoundReport


class RoundRecord:
    """Writes rounds to `log` as they come.

    :param goes_on: whether the rounds that `log` has already come before
    """

    def __init__(self, log: Path, *, goes_on: bool = False) -> None:
        self._log = log
        lines = _whole_lines(log.read_bytes()) if goes_on and log.exists() else ()
        atomic_write(log, lines)

    def add(self, report: RoundReport) -> None:
        """Take a round."""
        with self._log.open("a") as file:
            file.write(json.dumps(report.as_dict()) + "\n")


def _whole_lines(log: bytes) -> Iterator[bytes]:
    """Yield the whole lines of a log. A power cut or a kill may have left a part of one."""
    for line in log.splitlines():
        try:
            json.loads(line)
        except ValueError:
            return
        yield line + b"\n"
