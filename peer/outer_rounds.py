"""The outer rounds of the path in training: started at their boundaries, applied when they end.

An outer round averages on a worker thread while the inner loop goes on; what it returns is applied
here, on the session's thread, between two inner steps. A level has one round under way at most.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from dipaco.dht.agreement import (
    awaited_group,
    expected_group,
    is_overtaken,
    possible_group,
)
from dipaco.dht.policy import seniority
from dipaco.modules.errors import DipacoError
from dipaco.modules.state import ModuleState

from .adoption import Adoptions
from .averaging.pool import AveragingPool
from .events import EventLog
from .member.rounds import Boundary, RoundPosition
from .node import Node
from .outer_round import CarriedOn, Committed, CommittedElsewhere, OuterResult, OuterRound
from .publisher import PeerStatus, Publisher
from .trainer import PathTrainer, Snapshot

logger = logging.getLogger("dipaco.peer.outer_rounds")


@dataclass(frozen=True)
class _Running:
    """An outer round under way."""

    snapshot: Snapshot
    boundary: Boundary
    future: Future[OuterResult]


class OuterRounds:
    """Called by the session, on its thread, in every turn."""

    def __init__(
        self,
        node: Node,
        pool: AveragingPool,
        publisher: Publisher,
        trainer: PathTrainer,
        adoptions: Adoptions,
        position: RoundPosition,
        status: PeerStatus,
        events: EventLog,
        *,
        executor: Executor,
        hold: Callable[[ModuleState], None],
        stopping: threading.Event,
        wake: threading.Event,
    ) -> None:
        self._node = node
        self._pool = pool
        self._publisher = publisher
        self._trainer = trainer
        self._adoptions = adoptions
        self._position = position
        self._status = status
        self._events = events
        self._executor = executor
        self._hold = hold
        self._stopping = stopping
        self._wake = wake
        self._running: dict[str, _Running] = {}
        self._in_vain: Counter[str] = Counter()
        # With fixed steps: boundaries that wait for a state that others committed.
        self._catching_up: dict[str, _Running] = {}

    @property
    def running(self) -> Collection[str]:
        """Levels that have an outer round under way."""
        return self._running.keys()

    def begin_path(self) -> None:
        """Forget the last path: failed rounds of its modules don't count for this one's."""
        self._in_vain.clear()
        self._catching_up.clear()

    def start_due(self, now_s: float, step_s: float) -> None:
        """Start the rounds whose boundaries have come; an inner step takes `step_s`."""
        self._caught_up()
        for boundary in self._position.due(now_s, step_s):
            self._start(boundary)

    def finish(self) -> None:
        """Apply what has ended."""
        for level, running in list(self._running.items()):
            if running.future.done():
                del self._running[level]
                self._apply(running, _result_of(running))

    def _start(self, boundary: Boundary) -> None:
        """Snapshot the module of the boundary's level and average it in the background."""
        level = boundary.level
        module = self._module_of_level(level)
        late_s = self._node.clock.now() - boundary.time_s
        if level in self._running:
            self._carry_on(module, boundary, "the round before had not ended")
            return
        if late_s > self._node.plan.rounds.matchmaking_s:
            self._carry_on(module, boundary, f"came {late_s:.1f} s after the boundary")
            return
        if self._is_counted and self._trainer.anchor(module).last_round >= boundary.round_index:
            self._carry_on(module, boundary, "the others had taken this step")
            return
        if self._trainer.unmerged_tokens(module) == 0:
            self._carry_on(module, boundary, "nothing was trained since the last commit")
            return
        self._warn_when_short(boundary)
        snapshot = self._trainer.snapshot(module, boundary.round_index)
        if not snapshot.is_finite:
            logger.warning("%s has become non-finite: back to its anchor", module)
            self._trainer.discard(module)
            self._carry_on(module, boundary, "own outer gradient is not finite")
            return
        try:
            outer = self._outer_round(module, level)
        except DipacoError as error:
            self._carry_on(module, boundary, str(error))
            return
        future = self._executor.submit(outer.run, snapshot, boundary)
        future.add_done_callback(lambda _: self._wake.set())
        self._running[level] = _Running(snapshot, boundary, future)
        self._events.emit(
            "outer_round",
            module=module,
            round=boundary.round_index,
            tokens=snapshot.tokens,
            late_s=round(self._node.clock.now() - boundary.time_s, 3),
        )

    def _outer_round(self, module: str, level: str) -> OuterRound:
        """Hand a worker thread all that it needs. Raises `NetworkError` without an averager."""
        node, publisher = self._node, self._publisher
        return OuterRound(
            plan=node.plan,
            me=node.me,
            module_index=node.grid.modules().index(module),
            rule=self._pool.rule,
            averager=self._pool.for_level(level),
            expected_group=lambda name: expected_group(publisher.view, node.grid, name),
            possible_group=lambda name: possible_group(publisher.view, node.grid, name),
            ask_others=self._adoptions.ask_others,
            rounds_in_vain=self._in_vain[module],
            stopping=self._stopping.is_set,
            seniority=lambda peer: seniority(publisher.view, node.me, peer),
            local_time=node.clock.to_local,
            awaited_group=lambda name: awaited_group(
                publisher.view, node.grid, name, self._position.round_index
            ),
            is_overtaken=lambda anchor: is_overtaken(
                publisher.view, node.grid, anchor.module, anchor.tokens, node.me
            ),
        )

    @property
    def _is_counted(self) -> bool:
        return self._node.schedule.fixed_steps > 0

    def waiting_for(self) -> tuple[str, float]:
        """With fixed steps: what the next inner step waits for, and until when at most."""
        if not self._running:
            return f"the state that others committed of {', '.join(sorted(self._catching_up))}", 0.0
        texts, until_s = [], 0.0
        view, grid = self._publisher.view, self._node.grid
        for level, running in sorted(self._running.items()):
            module, round_index = running.snapshot.module, running.boundary.round_index
            expected = len(awaited_group(view, grid, module, round_index) | {self._node.me})
            together = self._pool.members_together(level)
            have = f"have {together} of" if together else "another peer gathers"
            texts.append(f"{level}: {have} {expected} peers")
            until_s = max(until_s, running.boundary.meet_until_s)
        return f"the outer step of {', '.join(texts)}", until_s

    def _module_of_level(self, level: str) -> str:
        return next(m for m in self._trainer.modules if self._node.grid.level_of(m) == level)

    def _warn_when_short(self, boundary: Boundary) -> None:
        missing = self._position.missing_steps(boundary.level)
        if missing > 0:
            logger.warning(
                "round %d: %d inner steps were not done before the boundary of %s; give the run "
                "a longer duration_s or fewer inner_steps",
                boundary.round_index,
                missing,
                boundary.level,
            )

    def _apply(self, running: _Running, result: OuterResult) -> None:
        """Commit, or carry on and remember the work: a state that turns up may contain it."""
        boundary, snapshot = running.boundary, running.snapshot
        module = snapshot.module
        if isinstance(result, Committed):
            self._trainer.commit(snapshot, result.state)
            parent = snapshot.anchor.digest
            self._node.certifier.committed(result.state.reference, parent, result.table)
            self._adoptions.forget(module)
            self._in_vain[module] = 0
            self._hold(result.state)
            self._committed_event(boundary, result)
        elif isinstance(result, CommittedElsewhere):
            self._in_vain[module] = 0
            self._adoptions.start(result.state, result.holders, snapshot)
            if self._is_counted and self._adoptions.is_fetching(module):
                self._catching_up[boundary.level] = running
                self._carried_on_event(module, boundary, result.reason)
                return
            self._carry_on(module, boundary, result.reason)
        else:
            self._carry_on(module, boundary, result.reason, result.expected)
            self._adoptions.remember(snapshot)
            self._in_vain[module] += 1
        self._position.closed(boundary)

    def _carry_on(
        self, module: str, boundary: Boundary, reason: str, expected_peers: int = 0
    ) -> None:
        self._position.closed(boundary)
        self._carried_on_event(module, boundary, reason, expected_peers)

    def _caught_up(self) -> None:
        """Close the boundaries whose steps came from others; have the others come again.

        Others that went on without this peer wait for it at their next boundary, and it cannot
        meet them before it stands on their state.
        """
        for level, ended in list(self._catching_up.items()):
            snapshot, boundary = ended.snapshot, ended.boundary
            if self._adoptions.is_fetching(snapshot.module):
                continue
            del self._catching_up[level]
            anchor = self._trainer.anchor(snapshot.module)
            stays = anchor.digest == snapshot.anchor.digest
            if stays or anchor.last_round >= boundary.round_index:
                self._position.closed(boundary)
            else:
                self._position.again(boundary)

    def _carried_on_event(
        self, module: str, boundary: Boundary, reason: str, expected_peers: int = 0
    ) -> None:
        self._events.emit(
            "carry_on",
            module=module,
            round=boundary.round_index,
            reason=reason,
            expected=expected_peers,
            anchor=self._trainer.anchor(module).digest,
        )

    def _committed_event(self, boundary: Boundary, result: Committed) -> None:
        state = result.state
        self._status.last_commit[state.module] = (boundary.round_index, len(result.table))
        self._events.emit(
            "commit",
            module=state.module,
            round=boundary.round_index,
            version=state.version,
            digest=state.digest,
            tokens=state.tokens,
            group=[row.peer for row in result.table],
            paths=sorted({row.path for row in result.table}),
            expected=result.expected,
            attempt=result.attempt,
            seconds_after_boundary=round(self._node.clock.now() - boundary.time_s, 3),
            seconds=round(result.seconds, 3),
        )


def _result_of(running: _Running) -> OuterResult:
    """Return how a round ended; an unforeseen failure costs the commit, never the peer."""
    try:
        return running.future.result()
    except Exception as error:
        logger.debug("outer round of %s failed", running.snapshot.module, exc_info=True)
        return CarriedOn(f"{type(error).__name__}: {error}", 0)
