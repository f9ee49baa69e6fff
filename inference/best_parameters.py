"""The best states of the paths of a source: found, checked against their claims, remembered.

What a swarm announces as the best states of a path is a claim (`dipaco.dht.announced_bests`), and
a copy on a peer's disk may never have been checked. So they are scored again on the held-out rows
that early stopping uses before their claim is believed: one pass over at most
`validation_sequences` rows for each path. Trainers leave rounds out where scoring takes long, and
those in which they end: where later states are not known to have been scored, they are scored here
on the same rows, and the better of the two are the best.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from dipaco.modules.best_parameters import BestParameters, BestParametersStore, claim_holds
from dipaco.modules.compose import load_path
from dipaco.modules.errors import DipacoError, IntegrityError
from dipaco.modules.evaluate import LossSum, sum_losses
from dipaco.modules.files import sha256_of_file
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.token_files import early_stopping_rows

logger = logging.getLogger(__name__)


class CheckedBestParameters:
    """Tells which paths have best states that can be used, and gives them.

    :param candidates: gives the best states to try of a path, one after the other
    :param held_out: gives all held-out rows of a path [N, T], or None where they are not here;
        what cannot be checked is then used unchecked
    :param unscored: gives the newest states of a path, by module, if they are later than some best
        ones and perhaps better; None if not
    :param device: where paths are run
    """

    def __init__(
        self,
        plan: RunPlan,
        store: BestParametersStore,
        candidates: Callable[[int], Iterable[BestParameters]],
        held_out: Callable[[int], np.ndarray | None],
        unscored: Callable[[BestParameters], Mapping[str, ModuleState] | None],
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._store = store
        self._candidates = candidates
        self._held_out = held_out
        self._unscored = unscored
        self._device = device
        self._model: PathModel | None = None
        self._rounds: dict[int, int | None] = {}
        self._checked: set[str] = set()
        self._grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
        self._scored: dict[int, tuple[list[str], float]] = {}
        """For each path, the digests of newest states that were scored here, and their loss."""

    def look_again(self) -> None:
        """Forget which states are the best: they are found again when next asked for. Those that
        were checked are not checked again."""
        self._rounds.clear()

    def round_of(self, path: int) -> int | None:
        """Return the round of a path's best states; None if there are none to use, or the newest
        states are better.

        They are found and checked when first asked for.
        """
        if path not in self._rounds:
            self._rounds[path] = self._find(path)
        return self._rounds[path]

    def load(self, path: int) -> BestParameters | None:
        """Return the best states of a path; None if there are none to use."""
        return self._store.load(path) if self.round_of(path) is not None else None

    def _find(self, path: int) -> int | None:
        try:
            for best in self._candidates(path):
                try:
                    self._check(best)
                except IntegrityError as error:
                    logger.warning("best states of path %d not used: %s", path, error)
                    continue
                if self._is_outdone(best):
                    return None
                file = self._store.file(path)
                if not (file.is_file() and sha256_of_file(file) == best.sha256):
                    self._store.hold(best)
                return best.round_index
        except DipacoError as error:
            logger.warning("best states of path %d not used: %s", path, error)
        return None

    def _check(self, best: BestParameters) -> None:
        """Raise IntegrityError unless the held-out loss is what the states claim."""
        if best.sha256 in self._checked:
            return
        rows = self._held_out(best.path)
        if rows is None:
            logger.debug("best states of path %d are not checked: no held-out rows", best.path)
            return
        best.load_into(model := self._scoring_model())
        found = self._loss(model, rows)
        claimed = best.held_out_loss
        if not claim_holds(claimed, found):
            raise IntegrityError(
                f"they claim a held-out loss of {claimed.loss} over {claimed.tokens} tokens, "
                f"here it is {found.loss} over {found.tokens}"
            )
        self._checked.add(best.sha256)

    def _is_outdone(self, best: BestParameters) -> bool:
        """Tell whether later states, which nobody has scored, are better than checked best ones."""
        rows = self._held_out(best.path)
        states = self._unscored(best) if rows is not None else None
        if rows is None or states is None:
            return False
        digests = [states[module].digest for module in sorted(states)]
        if self._scored.get(best.path, ([], 0.0))[0] != digests:
            load_path(model := self._scoring_model(), self._grid, best.path, states)
            loss = self._loss(model, rows).loss
            self._scored[best.path] = digests, loss if loss is not None else math.inf
        # A loss that is no number is not less.
        return self._scored[best.path][1] < best.reference.loss

    def _scoring_model(self) -> PathModel:
        if self._model is None:
            self._model = PathModel(self._plan.model).to(self._device).eval()
        return self._model

    def _loss(self, model: PathModel, rows: np.ndarray) -> LossSum:
        chosen = early_stopping_rows(rows, self._plan.rounds)
        return LossSum(*sum_losses(model, chosen, self._plan.routing.prefix_tokens))
