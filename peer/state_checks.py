"""By which held-out rows a foreign state is judged (design 4.4).

Those of the path in training, if it has a part in what is compared. A module that others have
trained fits the documents of their paths, and those of a path that hardly anybody has trained worse
than its genesis state does, by many nats: who begins such a path would refuse every honest state.
It looks at the rows of the path that has trained the module most instead. Which path that is, the
anchor says; only one without any training believes the state itself.
"""

from __future__ import annotations

import logging

import torch
from dipaco.modules.errors import DipacoError
from dipaco.modules.state import ModuleState

from .path_files import PathFiles
from .trainer import Comparison, PathTrainer

logger = logging.getLogger("dipaco.peer.state_checks")

LOSS_CHECK_SEQUENCES = 8
# A path has a part in a module that has so large a part of the tokens of the one that has most.
LEAST_PART = 0.25
# Rows of another path are waited for so long, and those of so many are remembered.
FETCH_LIMIT_S = 20.0
MOST_PATHS = 4


class StateChecks:
    """Compares states by rows that say something of them."""

    def __init__(self, files: PathFiles, trainer: PathTrainer) -> None:
        self._files = files
        self._trainer = trainer
        self._rows: dict[int, torch.Tensor] = {}

    def prepare(self, state: ModuleState) -> None:
        """Fetch the rows that a state will be judged by; on the thread that has fetched it."""
        path = self._judging_path(state)
        if path is None or path == self._trainer.path or path in self._rows:
            return
        try:
            rows = self._files.held_out_rows(path, FETCH_LIMIT_S)
        except DipacoError as error:
            logger.info("%s is judged by this path's documents only: %s", state.module, error)
            return
        while len(self._rows) >= MOST_PATHS:
            del self._rows[next(iter(self._rows))]
        self._rows[path] = rows[:LOSS_CHECK_SEQUENCES]

    def compare(self, module: str, state: ModuleState, own_rows: torch.Tensor) -> Comparison:
        """Score a state of a module in place of the anchor; `own_rows` [N, T] are of the path in
        training."""
        path = self._judging_path(state)
        rows = own_rows if path is None else self._rows.get(path, own_rows)
        rows = rows[:LOSS_CHECK_SEQUENCES]
        return self._trainer.compare(module, state, rows) if len(rows) else Comparison()

    def _judging_path(self, state: ModuleState) -> int | None:
        """Return the path whose rows say something; None for the one in training."""
        own = self._trainer.path
        try:
            anchor = self._trainer.anchor(state.module)
        except KeyError:
            return None
        tokens = {p: entry.tokens for p, entry in (anchor.progress or state.progress).items()}
        most = max(tokens, key=lambda path: (tokens[path], -path), default=None)
        if own is None or most is None or tokens.get(own, 0) >= LEAST_PART * tokens[most]:
            return None
        return most
