"""Averaging and stepping for a member, on worker threads while the inner loop goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from dipaco.dht.certificates import Certificate
from dipaco.dht.view import claimed_tokens, greatest_contribution
from dipaco.modules.errors import DipacoError, IntegrityError
from dipaco.modules.grid import Grid
from dipaco.modules.outer import (
    AveragingRule,
    Contribution,
    Usual,
    bounded_table,
    outer_step,
)
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState, StateReference

from .averaging.averager import AveragingFailed, AveragingOutcome, ExactAverager
from .exchange.steps import pack
from .member import actions as a
from .member import events as e
from .trainer import Snapshot

logger = logging.getLogger("dipaco.peer.outer_steps")

# A meeting that is waited for is told of its members this much later than the member at most.
GRACE_S = 1.0


class Pool(Protocol):
    """The averagers of a peer: the averaging pool."""

    rule: AveragingRule

    def for_level(self, level: str) -> ExactAverager:
        """Return a living averager. On the main thread."""
        ...

    def members_together(self, level: str) -> int:
        """How many members a group has as it forms, as far as this peer knows; 0: none yet."""
        ...


@dataclass(frozen=True)
class Step:
    """An outer step that was computed: the member may commit it."""

    state: ModuleState
    table: tuple[Contribution, ...]
    snapshot: Snapshot
    begin_s: float
    seconds: float


class OuterSteps:
    """Called by the session, on its thread; reports from others."""

    def __init__(
        self,
        plan: RunPlan,
        grid: Grid,
        me: str,
        pool: Pool,
        sign: Callable[[StateReference, str, tuple[Contribution, ...]], Certificate],
        local_time: Callable[[float], float],
        report: Callable[[e.Event], None],
        serve: Callable[[ModuleState, bytes | None], None],
    ) -> None:
        self._plan = plan
        self._grid = grid
        self._me = me
        self._pool = pool
        self._sign = sign
        self._local_time = local_time
        self._report = report
        self._serve = serve
        self._executor = ThreadPoolExecutor(len(grid.level_names) + 1, thread_name_prefix="outer")
        self._stopping = threading.Event()
        self._awaited: dict[str, frozenset[str] | None] = {}
        self._outcomes: dict[tuple[str, int], AveragingOutcome] = {}
        self._steps: dict[str, Step] = {}
        self._began: dict[str, tuple[float, float]] = {}

    def stop(self) -> None:
        """Begin nothing more; the averagers are stopped by whoever made them."""
        self._stopping.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def forget(self) -> None:
        """The path in training has changed: nothing that was computed is needed."""
        self._outcomes.clear()
        self._steps.clear()

    def take(self, digest: str) -> Step:
        """Hand out the step that came to a state, for committing it."""
        return self._steps.pop(digest)

    def begin(self, action: a.TakeSnapshot) -> None:
        """Note that the outer round of a module begins, whether others come to it or not."""
        self._began[action.module] = (action.boundary_s, time.monotonic())

    def average(self, action: a.Average, snapshot: Snapshot) -> e.Event | None:
        """Begin to meet and average; returns the failure if there is no averager."""
        try:
            averager = self._pool.for_level(self._grid.level_of(action.module))
        except DipacoError as error:
            # What the others make of it without this peer is not known.
            return e.AverageFailed(
                action.module,
                action.round_index,
                action.attempt,
                str(error),
                members=action.candidates,
            )
        self._awaited[action.module] = action.awaited
        self._executor.submit(self._average, action, snapshot, averager)
        return None

    def awaits(self, action: a.Await) -> None:
        """Tell the meeting under way for whom it waits."""
        self._awaited[action.module] = action.peers

    def _average(self, action: a.Average, snapshot: Snapshot, averager: ExactAverager) -> None:
        module, round_index, attempt = action.module, action.round_index, action.attempt
        try:
            outcome = self._meet(action, snapshot, averager)
        except AveragingFailed as failure:
            logger.debug("%s attempt %d: %s", module, attempt, failure)
            self._report(
                e.AverageFailed(
                    module,
                    round_index,
                    attempt,
                    str(failure),
                    tuple(failure.culprits),
                    tuple(failure.peers_seen),
                    failure.is_proven,
                )
            )
        except Exception as error:
            # An unforeseen failure costs the commit, never the peer.
            logger.debug("averaging of %s failed", module, exc_info=True)
            # What the others made of it is not known.
            self._report(
                e.AverageFailed(
                    module,
                    round_index,
                    attempt,
                    f"{type(error).__name__}: {error}",
                    members=action.candidates,
                )
            )
        else:
            self._outcomes[module, round_index] = outcome
            self._report(e.Averaged(module, round_index, attempt, outcome.table, outcome.culprits))

    def _meet(
        self, action: a.Average, snapshot: Snapshot, averager: ExactAverager
    ) -> AveragingOutcome:
        self._stopping.wait(max(0.0, self._local_time(action.begin_s) - time.time()))
        close_s, end_s = self._local_time(action.close_s), self._local_time(action.end_s)
        latest_s = self._local_time(action.latest_s)
        is_counted = self._plan.rounds.inner_steps > 0
        return averager.average(
            snapshot.outer_gradient(),
            candidates=action.candidates,
            close_s=close_s,
            end_s=max(end_s, close_s + GRACE_S),
            latest_s=latest_s,
            contribution=self._contribution(snapshot),
            module=action.module,
            round_index=action.round_index,
            attempt=action.attempt,
            anchor_digest=action.anchor,
            greatest_tokens=greatest_contribution(self._plan, action.begin_s, action.round_index),
            usual=self._pool.rule.usual(snapshot.anchor),
            awaited=(lambda: self._awaited[action.module]) if is_counted else None,
            exclude=action.excluded,
            undialable=action.undialable,
        )

    def take_step(self, action: a.TakeOuterStep, snapshot: Snapshot) -> None:
        """Begin to compute the state after an outer step."""
        outcome = None
        if not action.alone:
            outcome = self._outcomes.pop((action.module, action.round_index))
        # What rounds that were given up came to is needed by nobody.
        for place in [place for place in self._outcomes if place[0] == action.module]:
            del self._outcomes[place]
        self._executor.submit(self._step, action, snapshot, outcome)

    def _step(
        self, action: a.TakeOuterStep, snapshot: Snapshot, outcome: AveragingOutcome | None
    ) -> None:
        module = action.module
        try:
            if outcome is None:
                outcome = self._alone(snapshot)
            state = outer_step(
                snapshot.anchor,
                outcome.average,
                outcome.table,
                self._plan.outer,
                snapshot.round_index,
            )
            certificate = self._sign(state.reference, snapshot.anchor.digest, outcome.table)
        except IntegrityError as error:
            self._report(e.OuterStepFailed(module, action.round_index, str(error)))
            return
        except Exception as error:
            logger.debug("outer step of %s failed", module, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
            self._report(e.OuterStepFailed(module, action.round_index, reason))
            return
        begin_s, started = self._began[module]
        self._steps[state.digest] = Step(
            state, outcome.table, snapshot, begin_s, time.monotonic() - started
        )
        self._report(e.OuterStepped(module, state.reference, certificate))
        self._serve_step(state, outcome.average)

    def _serve_step(self, state: ModuleState, average: torch.Tensor) -> None:
        """Let those who miss the step take it; with 8 bits packing takes longer than stepping."""
        try:
            self._serve(state, pack(average, self._pool.rule.codec))
        except Exception:
            # The state itself is served in any case.
            logger.debug("the step of %s is not served", state.module, exc_info=True)

    def _contribution(self, snapshot: Snapshot) -> Contribution:
        tokens = claimed_tokens(self._plan, snapshot.tokens, snapshot.round_index)
        return Contribution(path=snapshot.path, peer=self._me, tokens=tokens)

    def _alone(self, snapshot: Snapshot) -> AveragingOutcome:
        """Be a group of one; the gradient passes through the codec like everybody's."""
        mine = self._contribution(snapshot)
        usual = Usual.of(snapshot.anchor.progress, snapshot.anchor.version)
        table = bounded_table((mine,), usual)
        average = self._pool.rule.average([snapshot.outer_gradient()], table, usual)
        return AveragingOutcome(average=average, table=table)
