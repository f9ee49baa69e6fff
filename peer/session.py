"""The life of a training peer: join, claim, train by the clock, average, move, leave.

The main thread owns the model and takes inner steps; outer rounds, transfers and records are
background work whose results are applied between two steps. What a peer does is decided from its
view of the swarm by the pure functions of `dipaco.dht.policy`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dipaco.dht.agreement import expected_group, possible_group
from dipaco.dht.policy import Decision, lead_rank, seniority, should_move
from dipaco.modules.errors import DipacoError, IntegrityError, NetworkError
from dipaco.modules.state import ModuleState

from .adoption import Adoptions
from .averaging.pool import AveragingPool
from .claimer import Claimer
from .events import EventLog
from .keeper import Keeper, hand_over
from .node import Node
from .outer_round import CarriedOn, Committed, CommittedElsewhere, OuterResult, OuterRound
from .path_files import PathFiles, starting_state
from .progress import ProgressReports
from .publisher import PeerStatus, Publisher
from .rounds import Boundary, RateMeter, RoundPosition
from .scoring import Scoring
from .settings import PeerSettings
from .successor import SuccessorWatch
from .trainer import PathTrainer, Snapshot

logger = logging.getLogger("dipaco.peer.session")

LEAVE_BUDGET_S = 4.0
BEGIN_LIMIT_S = 300.0
BEGIN_RETRY_S = 3.0


@dataclass
class _Job:
    """An outer round under way."""

    snapshot: Snapshot
    boundary: Boundary
    future: Future[OuterResult]


class Session:
    """One training peer in one run. `run` returns when it was stopped, has done its rounds, or
    can move to the run's successor."""

    def __init__(
        self,
        settings: PeerSettings,
        node: Node,
        pool: AveragingPool,
        trainer_factory: Callable[[], PathTrainer],
        status: PeerStatus,
        publisher: Publisher,
        keeper: Keeper,
        events: EventLog,
        stopping: threading.Event,
    ) -> None:
        self.settings = settings
        self.node = node
        self.status = status
        self.events = events
        self.stopping = stopping
        self._pool = pool
        self._publisher = publisher
        self._keeper = keeper
        self._trainer = trainer_factory()
        self._files = PathFiles(node)
        self._claimer = Claimer(
            node.grid,
            publisher,
            status,
            node.clock,
            events,
            me=node.me,
            pinned=settings.path,
        )
        self._executor = ThreadPoolExecutor(
            max_workers=len(node.grid.level_names) + 2, thread_name_prefix="outer"
        )
        self._saving: Future[None] = self._executor.submit(lambda: None)
        self._wake = threading.Event()
        self._jobs: dict[str, _Job] = {}
        self._in_vain: Counter[str] = Counter()
        self._position = RoundPosition(node.schedule)
        self._meter = RateMeter()
        self._rounds_on_path = 0
        self._rounds_done = 0
        self._last_loss = float("nan")
        self._adoptions = Adoptions(
            node, publisher, self._trainer, self._executor, self._wake, self._hold_committed, events
        )
        self._progress = ProgressReports(node, publisher, self._trainer, status, events)
        self._scoring = Scoring(node, publisher, self._trainer, events, self._wake.set)
        self._watch = SuccessorWatch(node, events, follow=not settings.stay)
        self._successor: Node | None = None
        publisher.add_annex(self._scoring)
        publisher.add_annex(self._watch)

    # -- life cycle

    def run(self) -> Node | None:
        """Train until `stopping` is set or `max_rounds` rounds have ended; then leave cleanly.

        Returns the successor's node when a round has ended and the run has one that is at hand:
        this run was left then, and the swarm was not.
        """
        try:
            decision = self._claimer.claim(self.stopping)
            if not self.stopping.is_set():
                self._begin_first_path(decision)
            while not self.stopping.is_set() and self._successor is None:
                self._turn()
        finally:
            self._leave()
        return self._successor

    @property
    def rounds_done(self) -> int:
        """Rounds that ended here."""
        return self._rounds_done

    def _begin_first_path(self, decision: Decision) -> None:
        """Begin; one that came from the run before waits for content, since others come too."""
        deadline = time.monotonic() + (BEGIN_LIMIT_S if self.node.earlier is not None else 0.0)
        while not self.stopping.is_set():
            try:
                self._begin_path(decision)
                return
            except (NetworkError, IntegrityError) as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                logger.warning("tries for %.0f s more to begin: %s", left_s, error)
                self._set_waiting(f"content of path {decision.path}")
                self.stopping.wait(BEGIN_RETRY_S)

    def _begin_path(self, decision: Decision) -> None:
        """Fetch what the path needs and start to train it."""
        node, path = self.node, decision.path
        files = self._files.fetch(path, self._set_waiting)
        states: dict[str, ModuleState] = {}
        for module in node.grid.modules_of_path(path):
            self._set_waiting(f"state of {module}")
            states[module] = starting_state(
                module, node, self._publisher, self._files, self.stopping
            )
        optimizer_state = node.states.load_optimizer(path)
        self._adoptions.clear()
        self._in_vain.clear()
        self._trainer.start_path(path, states, files.stream, optimizer_state=optimizer_state)
        self._progress.begin_path(files)
        self._adoptions.validation = files.validation
        self._files.release()
        for state in states.values():
            node.held.hold(state, save=False)
        self._rounds_on_path = 0
        self.status.state = "training"
        self._set_waiting("")
        now = node.clock.now()
        self._position.enter(now)
        self._publisher.announce()
        self.events.emit(
            "training",
            path=path,
            path_step=self._trainer.path_step,
            round=self._position.round_index,
            modules={module: state.version for module, state in states.items()},
            resumed_optimizer=optimizer_state is not None,
        )

    # -- one turn of the main loop

    def _turn(self) -> None:
        """Apply what finished, start what is due, then take one inner step or wait for one."""
        if self._publisher.failure is not None:
            raise self._publisher.failure
        self._wake.clear()
        self._finish_jobs()
        self._progress.poll()
        self._adoptions.finish(self._jobs)
        now = self.node.clock.now()
        for boundary in self._position.due(now, self._meter.step_s):
            self._start_outer_round(boundary)
        self._adoptions.catch_up(now, self._jobs)
        if self._position.round_ended(self._jobs):
            self._end_round()
            return
        scored = self._scoring.turn(
            self._position.slack_s(now, self._meter.step_s), self._meter.step_s
        )
        if self._position.may_step(now):
            self._inner_step()
        elif not scored:
            self._wait_for_boundary(now)

    def _inner_step(self) -> None:
        self._set_waiting("")
        if self._position.steps_in_round == 0:
            # Once a round, when claims have settled: replicas of a path draw different batches.
            rank = lead_rank(self._publisher.view, self.node.me, self._trainer.path or 0)
            self._trainer.replica = self._files.replica_number(rank)
        started = time.perf_counter()
        self._last_loss = self._trainer.inner_step()
        step_s = time.perf_counter() - started
        self._meter.step(step_s, self._trainer.tokens_per_step)
        self._position.stepped()
        self.status.tokens_per_s = self._meter.tokens_per_s
        self.events.emit(
            "inner",
            path=self._trainer.path,
            path_step=self._trainer.path_step,
            loss=round(self._last_loss, 6),
            tokens_per_s=round(self._meter.tokens_per_s, 1),
            seconds=round(step_s, 4),
        )

    def _wait_for_boundary(self, now: float) -> None:
        """Wait for the run to start, or, in the fixed-steps mode, for a boundary or its commit."""
        until_s, what = self._position.waiting_for(now, self._jobs)
        self._set_waiting(what)
        self._wake.wait(min(max(until_s - now, 0.01), 0.25))

    def _set_waiting(self, what: str) -> None:
        if what != self.status.waiting_for:
            self.status.waiting_for = what
            if what:
                self.events.emit("waiting", what=what)

    # -- outer rounds

    def _start_outer_round(self, boundary: Boundary) -> None:
        """Snapshot the module of the boundary's level and average it in the background."""
        level = boundary.level
        module = self._module_of_level(level)
        late_s = self.node.clock.now() - boundary.time_s
        if level in self._jobs:
            self._carried_on(module, boundary, "the round before had not ended", 0)
            return
        if late_s > self.node.plan.rounds.matchmaking_s:
            self._carried_on(module, boundary, f"came {late_s:.1f} s after the boundary", 0)
            return
        if self._trainer.unmerged_tokens(module) == 0:
            self._carried_on(module, boundary, "nothing was trained since the last commit", 0)
            return
        self._warn_when_short(boundary)
        snapshot = self._trainer.snapshot(module, boundary.round_index)
        if not snapshot.is_finite:
            logger.warning("%s is not finite any more: back to its anchor", module)
            self._trainer.discard(module)
            self._carried_on(module, boundary, "own outer gradient is not finite", 0)
            return
        try:
            averager = self._pool.for_level(level)
        except DipacoError as error:
            self._carried_on(module, boundary, str(error), 0)
            return
        outer = OuterRound(
            plan=self.node.plan,
            me=self.node.me,
            module_index=self.node.grid.modules().index(module),
            shard_sequences=self._files.shard_weights(),
            averager=averager,
            expected_group=lambda name: expected_group(self._publisher.view, self.node.grid, name),
            possible_group=lambda name: possible_group(self._publisher.view, self.node.grid, name),
            ask_others=self._adoptions.ask_others,
            rounds_in_vain=self._in_vain[module],
            stopping=self.stopping.is_set,
            seniority=lambda peer: seniority(self._publisher.view, self.node.me, peer),
            local_time=self.node.clock.to_local,
        )
        future = self._executor.submit(outer.run, snapshot, boundary)
        future.add_done_callback(lambda _: self._wake.set())
        self._jobs[level] = _Job(snapshot, boundary, future)
        self.events.emit(
            "outer_round",
            module=module,
            round=boundary.round_index,
            tokens=snapshot.tokens,
            late_s=round(self.node.clock.now() - boundary.time_s, 3),
        )

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

    def _module_of_level(self, level: str) -> str:
        return next(m for m in self._trainer.modules if self.node.grid.level_of(m) == level)

    def _finish_jobs(self) -> None:
        for level, job in list(self._jobs.items()):
            if not job.future.done():
                continue
            del self._jobs[level]
            result = self._result_of(job)
            module = job.snapshot.module
            if isinstance(result, Committed):
                self._trainer.commit(job.snapshot, result.state)
                self._adoptions.forget(module)
                self._in_vain[module] = 0
                self._hold_committed(result.state)
                self._committed_event(job, result)
            elif isinstance(result, CommittedElsewhere):
                self._carried_on(module, job.boundary, result.reason, 0)
                self._adoptions.start(module, result.digest, result.holders, job.snapshot)
                self._in_vain[module] = 0
            else:
                self._carried_on(module, job.boundary, result.reason, result.expected)
                self._adoptions.remember(job.snapshot)
                self._in_vain[module] += 1
            self._position.closed(job.boundary)

    def _result_of(self, job: _Job) -> OuterResult:
        """Return a job's result; an unforeseen failure costs the commit, never the peer."""
        try:
            return job.future.result()
        except Exception as error:
            logger.debug("outer round of %s failed", job.snapshot.module, exc_info=True)
            return CarriedOn(f"{type(error).__name__}: {error}", 0)

    def _hold_committed(self, state: ModuleState) -> None:
        """Serve a new anchor at once; write it to disk in the background when a save is due."""
        self.node.held.hold(state, save=False)
        self._publisher.announce()
        if (self._position.round_index + 1) % self.node.plan.rounds.save_every_rounds == 0:
            self._executor.submit(self.node.held.hold, state, save=True)

    def _committed_event(self, job: _Job, result: Committed) -> None:
        state = result.state
        self.status.last_commit[state.module] = (job.boundary.round_index, len(result.table))
        self.events.emit(
            "commit",
            module=state.module,
            round=job.boundary.round_index,
            version=state.version,
            digest=state.digest,
            tokens=state.tokens,
            group=[row.peer for row in result.table],
            paths=sorted({row.path for row in result.table}),
            expected=result.expected,
            attempt=result.attempt,
            seconds_after_boundary=round(self.node.clock.now() - job.boundary.time_s, 3),
            seconds=round(result.seconds, 3),
        )

    def _carried_on(self, module: str, boundary: Boundary, reason: str, expected: int) -> None:
        self._position.closed(boundary)
        self.events.emit(
            "carry_on",
            module=module,
            round=boundary.round_index,
            reason=reason,
            expected=expected,
            anchor=self._trainer.anchor(module).digest,
        )

    # -- the end of a round

    def _end_round(self) -> None:
        """Score the committed states, save, and think about moving."""
        ended = self._position.round_index
        self._rounds_done += 1
        self._rounds_on_path += 1
        self._progress.end_round(ended, self._last_loss)
        self._save_optimizer(ended)
        self.events.emit(
            "round",
            round=ended,
            path=self._trainer.path,
            path_step=self._trainer.path_step,
            loss=round(self._last_loss, 6),
            digests={m: s.digest for m, s in self._trainer.anchors().items()},
        )
        self._position.next_round(self.node.clock.now())
        if self.settings.max_rounds and self._rounds_done >= self.settings.max_rounds:
            self.stopping.set()
            return
        self._successor = self._watch.take()
        if self._successor is None:
            self._move_if_better()

    def _save_optimizer(self, round_index: int) -> None:
        """Write the AdamW state in the background; only copying it keeps the next step waiting."""
        path = self._trainer.path
        due = (round_index + 1) % self.node.plan.rounds.save_every_rounds == 0
        if not due or path is None or not self._saving.done():
            return
        state = self._trainer.optimizer_state()
        self._saving = self._executor.submit(self._write_optimizer, path, state)

    def _keep_optimizer(self) -> None:
        """Write the AdamW state now, before the peer moves or leaves."""
        if not self._saving.cancel():
            wait([self._saving])
        if self._trainer.path is not None:
            self._write_optimizer(self._trainer.path, self._trainer.optimizer_state())

    def _write_optimizer(self, path: int, state: dict[str, object]) -> None:
        try:
            self.node.states.save_optimizer(path, state)
        except DipacoError as error:
            logger.warning("AdamW state not kept: %s", error)

    def _move_if_better(self) -> None:
        if self.settings.path is not None or self._jobs:
            return
        decision = should_move(
            self._publisher.view,
            self.node.grid,
            self.node.me,
            rounds_on_path=self._rounds_on_path,
            dwell_rounds=self.node.plan.rounds.dwell_rounds,
        )
        if decision is None or decision.path == self._trainer.path:
            return
        self.events.emit(
            "move", from_path=self._trainer.path, to_path=decision.path, reason=decision.reason
        )
        self._keep_optimizer()
        self._progress.finish(LEAVE_BUDGET_S)
        try:
            taken = self._claimer.claim(self.stopping, decision)
            if not self.stopping.is_set():
                self._begin_path(taken)
        except (NetworkError, IntegrityError) as error:
            self._stay(error)

    def _stay(self, error: DipacoError) -> None:
        """Go on with the present path after a move failed: its model is untouched."""
        path = self._trainer.path
        assert path is not None
        logger.warning("stays on path %d: %s", path, error)
        self._rounds_on_path = 0
        self.status.state = "training"
        self._claimer.take_back(path)
        self._set_waiting("")
        self._position.enter(self.node.clock.now())

    # -- leaving

    def _leave(self) -> None:
        """Withdraw the claim, save, hand over, stop: within ten seconds (promise 10)."""
        deadline = time.monotonic() + LEAVE_BUDGET_S
        self.status.state = "leaving"
        self._publisher.announce()
        self._set_waiting("handing over")
        handed_over: tuple[str, ...] = ()
        try:
            self.node.held.save_all()
            if self._trainer.path is not None:
                self._keep_optimizer()
                self._progress.finish(1.0)
                if self._successor is None:
                    modules = self._trainer.modules
                    handed_over = hand_over(self.node, self._publisher, modules, deadline)
        finally:
            if self._successor is None:
                path = self._trainer.path
                self.events.emit("leaving", path=path, handed_over=sorted(handed_over))
            self._watch.stop()
            self._scoring.close()
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._progress.stop()
            self._keeper.stop()
            self._publisher.stop(withdraw=True)
