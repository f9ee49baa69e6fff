"""Early stopping in a peer: the best states of the path in training (DiPaCo section 2.7).

The peer that has trained a path longest, its lead, keeps the path's states with the least held-out
loss, announces them, and serves them; replicas of the path hold the same states and leave this to
the lead. A peer that takes over a path looks for the best so far on its disk and in the progress
records, and goes on from it once it has scored those parameters and confirmed the claimed loss: a
claim alone would let anybody stop a path by inventing a loss.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from dipaco.dht.repetition import RecentFailures
from dipaco.modules.best_parameters import (
    BestParameters,
    BestReference,
    best_parameters_of,
    claim_holds,
)
from dipaco.modules.errors import DipacoError, IntegrityError
from dipaco.modules.evaluate import LossSum

from .node import Node
from .publisher import Publisher
from .reporting.events import EventLog
from .trainer import PathTrainer

logger = logging.getLogger("dipaco.peer.early_stopping")

# Best states that could not be fetched are not asked for again for so long.
RETRY_AFTER_S = 60.0
# Rounds of a path in which states are not kept because better ones may be on their way. Claiming
# what one does not serve costs a path no more than these.
PATIENCE_ROUNDS = 2
# Claims that proved false are remembered, so that each costs one transfer.
MAX_REMEMBERED = 256


class EarlyStopping:
    """Keeps the best states of the path in training. Called on the session's thread.

    A path's parameters are read, fetched and written in the background; `poll` collects what is
    finished.
    """

    def __init__(
        self, node: Node, publisher: Publisher, trainer: PathTrainer, events: EventLog
    ) -> None:
        self._node = node
        self._publisher = publisher
        self._trainer = trainer
        self._events = events
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="best-path")
        self._rows = torch.empty(0, 0, dtype=torch.int64)
        self._best: BestReference | None = None
        self._found: tuple[BestReference, Future[BestParameters]] | None = None
        self._writing: Future[BestReference] | None = None
        self._has_looked = False
        self._patience = PATIENCE_ROUNDS
        self._refused: dict[str, None] = {}
        self._failed = RecentFailures[str](RETRY_AFTER_S)

    def begin_path(self, rows: torch.Tensor) -> None:
        """Take the rows [sequences, length] that choose the best states of the path that begins,
        and look for the best so far."""
        self._best, self._found = None, None
        self._has_looked, self._patience = False, PATIENCE_ROUNDS
        self._rows = rows
        if len(rows):
            self._look()

    @property
    def best(self) -> BestReference | None:
        """The best states of the path, checked, on this disk and served."""
        return self._best

    def consider(self, round_index: int, held_out_loss: LossSum) -> None:
        """Compare the loss of the committed states after a round with the best so far."""
        self._check_found(round_index)
        loss = held_out_loss.loss
        if loss is None or self._writing is not None or not self._is_lead():
            return
        is_better = self._best is None or loss < self._best.loss
        if not (self._has_looked and is_better):
            self._look()
        if self._found is not None and self._found[0].loss <= loss and self._patience > 0:
            # What is on its way claims to be better, and keepers let go of it for what is named.
            self._patience -= 1
        elif is_better:
            path = self._trainer.path
            assert path is not None
            states = self._trainer.anchors()
            self._write(
                best_parameters_of(self._node.grid, path, round_index, held_out_loss, states)
            )

    def poll(self) -> BestReference | None:
        """Return the best states that have been written since the last call, if there are any."""
        if self._writing is None or not self._writing.done():
            return None
        writing, self._writing = self._writing, None
        try:
            held = writing.result()
        except DipacoError as error:
            logger.warning("the best states are not kept: %s", error)
            return None
        if held.path == self._trainer.path:
            self._best = held
        self._events.emit(
            "best_path",
            path=held.path,
            round=held.round_index,
            loss=round(held.loss, 6),
            sha256=held.sha256,
        )
        return held

    def finish(self, timeout_s: float) -> BestReference | None:
        """Wait for what is being written and return it: the peer moves or leaves."""
        if self._writing is not None:
            wait([self._writing], timeout_s)
        return self.poll()

    def stop(self) -> None:
        """End the background work; a transfer under way is left."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _is_lead(self) -> bool:
        assert self._trainer.path is not None
        return self._publisher.view.lead(self._trainer.path) in (None, self._node.me)

    def _look(self) -> None:
        """Begin to fetch the best states that others or an earlier life of this peer found."""
        path = self._trainer.path
        assert path is not None
        if self._found is not None or self._writing is not None or not self._is_lead():
            return
        self._has_looked = True
        candidates = list(self._publisher.view.bests.get(path, ()))
        on_disk = self._node.bests.get(path)
        if on_disk is not None:
            candidates.append(on_disk)
        for claimed in sorted(candidates, key=lambda claimed: claimed.rank):
            if self._best is not None and claimed.loss >= self._best.loss:
                return
            if claimed.sha256 not in self._refused and claimed.sha256 not in self._failed:
                self._found = claimed, self._executor.submit(self._fetch, path, claimed.sha256)
                return

    def _fetch(self, path: int, sha256: str) -> BestParameters:
        """Read or fetch best states; in the background."""
        on_disk = self._node.bests.get(path)
        if on_disk is not None and on_disk.sha256 == sha256:
            best = self._node.bests.load(path)
            if best is not None and best.sha256 == sha256:
                return best
        return self._node.fetcher.best_path(path, sha256)

    def _check_found(self, round_index: int) -> None:
        """Check what was fetched, and go on from it if its claim holds."""
        if self._found is None or not self._found[1].done():
            return
        (claimed, future), self._found = self._found, None
        try:
            best = future.result()
            self._check(best, round_index)
        except IntegrityError as error:
            logger.warning("best states %s refused: %s", claimed.sha256[:12], error)
            self._refused[claimed.sha256] = None
            while len(self._refused) > MAX_REMEMBERED:
                del self._refused[next(iter(self._refused))]
            return
        except DipacoError as error:
            logger.info("best states %s could not be fetched: %s", claimed.sha256[:12], error)
            self._failed.add(claimed.sha256)
            return
        if self._best is None or best.reference.loss < self._best.loss:
            self._write(best)

    def _check(self, best: BestParameters, round_index: int) -> None:
        if best.round_index > round_index:
            raise IntegrityError(f"they claim round {best.round_index}, which is yet to come")
        prefix_tokens = self._node.plan.routing.prefix_tokens
        claimed = best.held_out_loss
        found = self._trainer.loss_of_best(best, self._rows, prefix_tokens)
        if not claim_holds(claimed, found):
            here = "none" if found.loss is None else f"{found.loss:.4f}"
            raise IntegrityError(
                f"they claim a held-out loss of {best.reference.loss:.4f} over {claimed.tokens} "
                f"tokens; here it is {here} over {found.tokens}"
            )

    def _write(self, best: BestParameters) -> None:
        held = self._node.bests.get(best.path)
        if held is not None and held.sha256 == best.sha256:
            self._writing = self._executor.submit(lambda: held)
        else:
            self._writing = self._executor.submit(self._node.bests.hold, best)
