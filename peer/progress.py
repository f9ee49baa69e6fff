"""What a trainer tells of its path at the end of a round: how far it is, and how good.

It scores the committed states on held-out rows and publishes a progress entry. From that, others
decide which path has waited longest (design 4.5), and find the path's best states.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch
from dipaco.dht.records import ProgressEntry
from dipaco.modules.best_parameters import BestReference
from dipaco.modules.evaluate import LossSum

from .early_stopping import EarlyStopping
from .node import Node
from .path_files import PathData
from .publisher import PeerStatus, Publisher
from .reporting.events import EventLog
from .trainer import PathTrainer

logger = logging.getLogger("dipaco.peer.progress")

# What a diverged inner loop reports instead of a number that no record can hold.
MAX_LOSS = 1e6
# Of a peer's time, where rounds follow the clock.
SCORING_SHARE = 0.1


class ScoringBudget:
    """How much of a peer's time goes into scoring: a slow one leaves rounds out.

    It would be late for every boundary otherwise, score again, and never commit. The first scoring
    is always due; each puts the next one off until it was `share` of the time since it began.
    """

    def __init__(self, share: float, clock_s: Callable[[], float]) -> None:
        self._share, self._clock_s = share, clock_s
        self._next_s = -math.inf

    def is_due(self) -> bool:
        """Tell whether there is time for it again."""
        return self._clock_s() >= self._next_s

    def spend(self, score: Callable[[], LossSum]) -> LossSum:
        """Score, and note how long that takes."""
        began_s = self._clock_s()
        found = score()
        self._next_s = began_s + (self._clock_s() - began_s) / self._share
        return found


class ProgressReports:
    """Validates and reports the path being trained. Called by the session, on its thread."""

    def __init__(
        self,
        node: Node,
        publisher: Publisher,
        trainer: PathTrainer,
        status: PeerStatus,
        events: EventLog,
    ) -> None:
        self._node = node
        self._publisher = publisher
        self._trainer = trainer
        self._status = status
        self._events = events
        self._files: PathData | None = None
        # With fixed steps the others wait, and what is chosen must not depend on the machine.
        share = math.inf if node.schedule.fixed_steps else SCORING_SHARE
        self._budget = ScoringBudget(share, time.monotonic)
        self._early_stopping = (
            EarlyStopping(node, publisher, trainer, events)
            if node.plan.rounds.early_stopping
            else None
        )

    def begin_path(self, files: PathData) -> None:
        """Take the held-out rows of the path that begins."""
        self._files = files
        self._status.validation_loss = math.nan
        if self._early_stopping is not None:
            self._early_stopping.begin_path(files.early_stopping)

    def poll(self) -> None:
        """Report best states that have just been written. Called between inner steps."""
        if self._early_stopping is not None:
            self._report_best(self._early_stopping.poll())

    def finish(self, timeout_s: float) -> None:
        """Wait for best states that are being written: the peer moves or leaves."""
        if self._early_stopping is not None:
            self._report_best(self._early_stopping.finish(timeout_s))

    def stop(self) -> None:
        """End the background work: the peer has left."""
        if self._early_stopping is not None:
            self._early_stopping.stop()

    def end_round(self, round_index: int, train_loss: float) -> None:
        """Validate the committed states if it is time; publish how far the path is."""
        validation = LossSum()
        every = self._node.plan.rounds.validation_every_rounds
        if (round_index + 1) % every == 0 and self._budget.is_due():
            validation = self._budget.spend(lambda: self._validate(round_index))
        self._publish(round_index, validation, train_loss)

    def _validate(self, round_index: int) -> LossSum:
        """Return the loss of the committed states; compare them with the best so far."""
        assert self._files is not None
        reported, choosing = self._files.validation, self._files.early_stopping
        validation = self._held_out_loss(reported)
        if validation.loss is not None:
            self._status.validation_loss = validation.loss
            self._events.emit(
                "validation",
                path=self._trainer.path,
                round=round_index,
                loss=round(validation.loss, 6),
                tokens=validation.tokens,
            )
        if self._early_stopping is not None:
            chosen_by = validation if choosing is reported else self._held_out_loss(choosing)
            self._early_stopping.consider(round_index, chosen_by)
        return validation

    def _held_out_loss(self, rows: torch.Tensor) -> LossSum:
        found = self._trainer.loss_of_anchors(rows, self._node.plan.routing.prefix_tokens)
        if found.tokens and not math.isfinite(found.nll):
            logger.warning("the held-out loss is not finite, so it is not published")
            return LossSum()
        return found

    def _publish(self, round_index: int, validation: LossSum, train_loss: float) -> None:
        path = self._trainer.path
        assert path is not None
        counted = [s.progress.get(path) for s in self._trainer.anchors().values()]
        plain = math.isfinite(train_loss) and abs(train_loss) < MAX_LOSS
        self._status.progress[path] = ProgressEntry(
            path=path,
            last_round=round_index,
            tokens=max((progress.tokens for progress in counted if progress), default=0),
            validation_nll=validation.nll,
            validation_tokens=validation.tokens,
            train_loss=train_loss if plain else MAX_LOSS,
        )
        self._report_best(self._early_stopping.best if self._early_stopping else None)
        self._publisher.announce()

    def _report_best(self, held: BestReference | None) -> None:
        """Name the best states in the entry of their path; they are served from this moment."""
        entry = self._status.progress.get(held.path) if held is not None else None
        if held is None or entry is None:
            return
        self._status.progress[held.path] = entry.naming(held)
        self._publisher.announce()
