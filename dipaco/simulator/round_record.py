"""Keeps the rounds of a simulation: in a file, a line each, and in a chart."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import atomic_write

from .round_report import RoundReport


class RoundRecord:
    """Writes rounds to `log` as they come, and draws them into `plot` at the end.

    :param goes_on: whether the rounds that `log` has already come before

    Raises ConfigurationError if the library that draws is missing, before anything is trained.
    """

    def __init__(self, log: Path | None, plot: Path | None, *, goes_on: bool = False) -> None:
        self._log, self._plot = log, plot
        self._rows: list[dict[str, Any]] = []
        if plot is not None:
            _drawing()
        if log is not None and goes_on and log.exists():
            self._rows = list(_whole_rows(log.read_bytes()))
            atomic_write(log, [json.dumps(row).encode() + b"\n" for row in self._rows])
        elif log is not None:
            log.write_text("")

    def add(self, report: RoundReport) -> None:
        """Take a round."""
        self._rows.append(report.as_dict())
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(self._rows[-1]) + "\n")

    def draw(self) -> None:
        """Draw the rounds so far, if that was asked for and there are any."""
        if self._plot is None or not self._rows:
            return
        figure, (left, right) = _drawing().subplots(1, 2, figsize=(10, 4))
        rounds = [row["round"] for row in self._rows]
        for path in sorted({entry["path"] for row in self._rows for entry in row["paths"]}):
            losses = [
                next((e["train_loss"] for e in row["paths"] if e["path"] == path), None)
                for row in self._rows
            ]
            left.plot(rounds, [loss or math.nan for loss in losses], color="0.75", linewidth=0.8)
        left.plot(rounds, [row["train_loss"] for row in self._rows], marker=".")
        left.set(xlabel="round", ylabel="training loss (grey: each path)")
        scored = [(row["round"], row["perplexity"]) for row in self._rows if row["perplexity"]]
        if scored:
            right.plot(*zip(*scored, strict=True), marker=".")
        right.set(xlabel="round", ylabel="held-out perplexity of the anchors")
        figure.tight_layout()
        figure.savefig(self._plot)


def _whole_rows(log: bytes) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a log. A power cut or a kill may have left a part of one."""
    for line in log.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _drawing() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError(
            "--plot needs matplotlib; install it with: pip install 'dipaco[plot]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
