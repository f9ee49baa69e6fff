"""What a trainer reports about its path at the end of a round: how far it is, and how good.

It scores the anchors on held-out rows and publishes a progress entry. From that, others
decide which path has waited longest (design 4.6, moves).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from dipaco.peer.keeping.path_files import PathFiles
from dipaco.protocol.records import MAX_NLL, ProgressEntry
from dipaco.training.interruption import PassInterrupted
from dipaco.training.scoring import LossSum
from dipaco.training.trainer import PathTrainer

from .running_node import RunningNode

logger = logging.getLogger("dipaco.peer.shell.progress_reports")

# What a diverged inner loop reports instead of a number that no record can hold.
MAX_LOSS = 1e6
# Digits behind the point of the loss on own texts that others are told: whoever has the model could
# try guesses at a held-out text until its loss is the one that was told.
_TOLD_DIGITS = 1
# The share of a peer's time for scoring, where rounds follow the clock.
_SCORING_SHARE = 0.1


class ScoringBudget:
    """How much of a peer's time goes into scoring: a slow one leaves rounds out.

    It would be late for every boundary otherwise, score again, and take no step. The first scoring
    is always due; each puts the next one off until it was `share` of the time since it began.
    """

    def __init__(self, share: float, clock_s: Callable[[], float]) -> None:
        self._share, self._clock_s = share, clock_s
        self._next_s = -math.inf

    def is_due(self) -> bool:
        """Tell whether there is time for it again."""
        return self._clock_s() >= self._next_s

    def spend(self, score: Callable[[], LossSum]) -> LossSum:
        """Score, and note how long it takes."""
        began_s = self._clock_s()
        found = score()
        self._next_s = began_s + (self._clock_s() - began_s) / self._share
        return found


class ProgressReports:
    """Scores and reports the path in training. Only the session's thread calls it."""

    def __init__(self, running: RunningNode, trainer: PathTrainer, files: PathFiles) -> None:
        self._running, self._node = running, running.node
        self._trainer, self._files = trainer, files
        # With fixed steps the others wait, and what is told must not depend on the machine.
        share = math.inf if self._node.schedule.fixed_steps else _SCORING_SHARE
        self._budget = ScoringBudget(share, time.monotonic)

    def end_round(self, round_index: int, train_loss: float) -> None:
        """Validate the anchors if it is time; publish how far the path is."""
        path, trainer = self._trainer.path, self._trainer
        assert path is not None
        validation = LossSum()
        every = self._node.plan.rounds.validation_every_rounds
        if (round_index + 1) % every == 0 and self._budget.is_due():
            with suppress(PassInterrupted):
                validation = self._budget.spend(lambda: self._score(path, round_index))
        if validation.tokens and not math.isfinite(validation.nll):
            logger.warning("the held-out loss is not finite, so it is not published")
            validation = LossSum()
        if validation.loss is not None:
            self._running.status.validation_loss = validation.loss
            self._running.events.emit(
                "validation",
                path=path,
                round=round_index,
                loss=round(validation.loss, 6),
                tokens=validation.tokens,
            )
        own = self._running.status.progress
        known = own.get(path)
        if not validation.tokens and known is not None:
            # The peer's last score continues to stand for the path.
            validation = LossSum(known.validation_nll, known.validation_tokens)
        counted = [state.progress.get(path) for state in trainer.anchors().values()]
        plain = math.isfinite(train_loss) and abs(train_loss) < MAX_LOSS
        own[path] = ProgressEntry(
            path=path,
            last_round=round_index,
            tokens=max((progress.tokens for progress in counted if progress), default=0),
            validation_nll=min(validation.nll, MAX_NLL),
            validation_tokens=validation.tokens,
            shard_sequences=self._node.load_shard_index().paths[path].train_sequences,
            train_loss=train_loss if plain else MAX_LOSS,
        )
        self._running.refresher.announce()

    def _score(self, path: int, round_index: int) -> LossSum:
        """Score the anchors on held-out rows; apart from these, and told apart, on those of the
        owner's texts."""
        anchors, own = self._trainer.anchors(), self._files.own_held_out
        if len(own):
            found = self._trainer.loss_of(path, anchors, own)
            if found.loss is not None and abs(found.loss) < MAX_LOSS:
                self._running.status.own_texts_loss = round(found.loss, _TOLD_DIGITS)
                self._running.events.emit(
                    "own_texts_validation",
                    path=path,
                    round=round_index,
                    loss=round(found.loss, 6),
                    tokens=found.tokens,
                )
        return self._trainer.loss_of(path, anchors, self._files.validation)
