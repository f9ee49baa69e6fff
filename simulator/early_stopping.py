"""Early stopping in a simulation: the best parameters of every path, as peers keep them.

They are chosen after the same rounds and by the same rows as in a swarm with fixed steps, so both
keep the same ones. With a folder they are in `P00003.safetensors`. One found since the last
checkpoint is in `P00003.pending`, because a killed simulation repeats the rounds after it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco.modules.best_parameters import (
    BestParameters,
    BestParametersStore,
    BestReference,
    best_parameters_of,
    read_best_parameters,
    write_best_parameters,
)
from dipaco.modules.evaluate import LossSum, sum_losses
from dipaco.modules.files import storage_errors, sync_folder
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_files import are_shared, early_stopping_rows, reported_rows


@dataclass(frozen=True)
class BestReport:
    """The best states of a path so far."""

    round_index: int
    chosen: LossSum
    """On the held-out rows that choose."""
    validation: LossSum
    """On the rows that are reported for the current states too."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values: part of a line of `dipaco-simulate --json`."""
        return {
            "round": self.round_index,
            "chosen_loss": self.chosen.loss,
            "validation_loss": self.validation.loss,
        }


class EarlyStopping:
    """Keeps the best states of every path: in `folder`, or in memory without one.

    `sequences` is the most held-out rows reported for a path; None is all of them.
    """

    def __init__(
        self,
        run: RunFolder,
        plan: RunPlan,
        grid: Grid,
        *,
        sequences: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._run = run
        self._plan = plan
        self._grid = grid
        self._sequences = sequences
        self._folder = folder
        self._in_memory: dict[int, BestParameters] = {}
        self._reports: dict[int, BestReport] = {}
        self._earlier: dict[int, BestReference] = {}
        if folder is not None and folder.is_dir():
            for pending in folder.glob("*.pending"):
                pending.unlink(missing_ok=True)
            self._earlier = {
                held.path: held for held in BestParametersStore(folder, grid).load_from_disk()
            }

    def consider(
        self,
        path: int,
        round_index: int,
        model: PathModel,
        states: Mapping[str, ModuleState],
        validation: LossSum,
        *,
        trained: bool = True,
    ) -> BestReport | None:
        """Compare the committed states of a path after a round with its best so far.

        `model` holds these states and is free afterwards, `validation` is their loss on the
        reported rows. Without `trained` they are only reported, as before the first round.
        Returns what is the best now; None while there is none, or without early stopping.
        """
        rounds = self._plan.rounds
        if not rounds.early_stopping:
            return None
        if trained and (round_index + 1) % rounds.validation_every_rounds == 0:
            chosen = self._chosen_loss(path, model, validation)
            best = self._best_loss(path)
            if chosen.loss is not None and (
                best is None or best.loss is None or chosen.loss < best.loss
            ):
                self._keep(best_parameters_of(self._grid, path, round_index, chosen, states))
                self._reports[path] = BestReport(round_index, chosen, validation)
        if path not in self._reports and path in self._earlier:
            self._reports[path] = self._report_earlier(path, model)
        return self._reports.get(path)

    def load(self, path: int) -> BestParameters | None:
        """Return the best states of a path so far; None when there are none."""
        if self._folder is None:
            return self._in_memory.get(path)
        pending = self._pending(path)
        if pending.is_file():
            return read_best_parameters(pending, self._grid, path=path)
        return BestParametersStore(self._folder, self._grid).load(path)

    def commit(self) -> None:
        """Make what was found since the last call permanent. Called before each checkpoint."""
        if self._folder is None or not self._folder.is_dir():
            return
        with storage_errors(self._folder):
            for pending in sorted(self._folder.glob("*.pending")):
                os.replace(pending, pending.with_suffix(".safetensors"))
        sync_folder(self._folder)

    def _best_loss(self, path: int) -> LossSum | None:
        if path in self._reports:
            return self._reports[path].chosen
        return self._earlier[path].held_out_loss if path in self._earlier else None

    def _chosen_loss(self, path: int, model: PathModel, validation: LossSum) -> LossSum:
        """Return the loss on the rows that choose, which may be the reported ones."""
        rounds = self._plan.rounds
        rows = self._run.validation_tokens(self._plan, path)
        chosen = early_stopping_rows(rows, rounds)
        reported = reported_rows(rows, rounds, self._sequences)
        if are_shared(rows, rounds) and len(chosen) == len(reported):
            return validation
        return LossSum(*sum_losses(model, chosen, self._plan.routing.prefix_tokens))

    def _report_earlier(self, path: int, model: PathModel) -> BestReport:
        """Report the best states that an earlier life of the simulation kept."""
        earlier = self._earlier[path]
        best = self.load(path)
        assert best is not None
        best.load_into(model)
        rows = self._run.validation_tokens(self._plan, path)
        reported = reported_rows(rows, self._plan.rounds, self._sequences)
        prefix_tokens = self._plan.routing.prefix_tokens
        validation = LossSum(*sum_losses(model, reported, prefix_tokens))
        return BestReport(earlier.round_index, earlier.held_out_loss, validation)

    def _keep(self, best: BestParameters) -> None:
        if self._folder is None:
            self._in_memory[best.path] = best
        else:
            write_best_parameters(best, self._pending(best.path))

    def _pending(self, path: int) -> Path:
        assert self._folder is not None
        return BestParametersStore(self._folder, self._grid).file(path).with_suffix(".pending")
