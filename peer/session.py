"""The life of a training peer: join, claim, train by the clock, end a round, move, leave.

The main thread owns the model and takes inner steps; outer rounds (`outer_rounds`), transfers and
records are background work whose results are applied between two steps. What a peer does is
decided from its view of the swarm by the pure functions of `dipaco.dht.policy`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from dipaco.dht.agreement import round_of_others, trained_paths
from dipaco.dht.policy import Decision, lead_rank, should_move
from dipaco.dht.view import present_round
from dipaco.modules.errors import DipacoError, IntegrityError, NetworkError
from dipaco.modules.state import ModuleState

from .adoption import Adoptions
from .averaging.pool import AveragingPool
from .background import Background
from .claimer import Claimer
from .events import EventLog
from .keeper import Keeper, hand_over
from .member.rounds import round_position
from .node import Node
from .outer_rounds import OuterRounds
from .path_files import PathFiles, starting_state
from .progress import ProgressReports
from .publisher import PeerStatus, Publisher
from .scoring import Scoring
from .settings import PeerSettings
from .successor import SuccessorWatch
from .trainer import PathTrainer, RateMeter

logger = logging.getLogger("dipaco.peer.session")

LEAVE_BUDGET_S = 4.0
BEGIN_LIMIT_S = 300.0
BEGIN_RETRY_S = 3.0
# A wait for other peers that ends sooner is not worth a line.
SHORT_WAIT_S = 1.0


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
        background: Background,
        events: EventLog,
        stopping: threading.Event,
    ) -> None:
        self.settings = settings
        self.node = node
        self.status = status
        self.events = events
        self.stopping = stopping
        self._publisher = publisher
        self._keeper = keeper
        self._background = background
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
        background.on_failure(self._wake.set)
        self._position = round_position(node.schedule)
        self._meter = RateMeter()
        self._waiting_for = ""
        self._waits_since_s = 0.0
        self._rounds_on_path = 0
        self._rounds_done = 0
        self._last_loss = float("nan")
        self._adoptions = Adoptions(
            node.plan,
            node.grid,
            publisher,
            node.fetcher,
            self._trainer,
            events,
            me=node.me,
            ask=node.exchange.holdings,
            round_now=lambda: present_round(node.plan, publisher.view),
            executor=self._executor,
            wake=self._wake,
            hold=self._hold_anchor,
        )
        self._outer_rounds = OuterRounds(
            node,
            pool,
            publisher,
            self._trainer,
            self._adoptions,
            self._position,
            status,
            events,
            executor=self._executor,
            hold=self._hold_anchor,
            stopping=stopping,
            wake=self._wake,
        )
        self._progress = ProgressReports(node, publisher, self._trainer, status, events)
        self._scoring = Scoring(node, publisher, self._trainer, events, self._wake.set)
        self._watch = SuccessorWatch(node, events, background, follow=not settings.stay)
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
        self._outer_rounds.begin_path()
        self._trainer.start_path(path, states, files.stream, optimizer_state=optimizer_state)
        self._progress.begin_path(files)
        self._adoptions.validation = files.validation
        self._files.release()
        for state in states.values():
            node.held.hold(state, save=False)
        self._rounds_on_path = 0
        self._set_waiting("")
        self._enter_round()
        self._claimer.say("training")
        self.events.emit(
            "training",
            path=path,
            path_step=self._trainer.path_step,
            round=self._position.round_index,
            modules={module: state.version for module, state in states.items()},
            resumed_optimizer=optimizer_state is not None,
        )

    def _enter_round(self) -> None:
        """Take part from now on; with fixed steps also a peer that moves never goes back."""
        round_index = max(self._position.round_index, self._present_round())
        self._position.enter(self.node.clock.now(), round_index)
        self.status.round_index = self._position.round_index

    def _present_round(self) -> int:
        """Return the counted round after the newest in the anchors, or a later one of others."""
        assert self._trainer.path is not None
        newest = max(anchor.last_round for anchor in self._trainer.anchors().values())
        view, grid, path = self._publisher.view, self.node.grid, self._trainer.path
        return max(newest + 1, round_of_others(view, grid, path, self.node.me))

    # -- one turn of the main loop

    def _turn(self) -> None:
        """Apply what finished, start what is due, then take one inner step or wait for one.

        The model changes here only, between two inner steps, so it needs no lock. What ended is
        applied before a boundary takes its snapshot: a level's next round starts from the new
        anchor. An adoption waits while its level averages, or the anchor would change under it.
        """
        self._background.check()
        self._wake.clear()
        self._outer_rounds.finish()
        self._progress.poll()
        self._adoptions.finish(self._outer_rounds.running)
        now = self.node.clock.now()
        if now < self._position.opens_s and self._is_every_path_trained():
            self._position.open(now)
        self._outer_rounds.start_due(now, self._meter.step_s)
        self._adoptions.catch_up(now, self._outer_rounds.running)
        if self._position.round_ended(self._outer_rounds.running):
            self._end_round()
            return
        scored = self._scoring.turn(
            self._position.slack_s(now, self._meter.step_s), self._meter.step_s
        )
        if self._position.may_step(now):
            self._inner_step()
        elif not scored:
            self._wait_to_step(now)

    def _inner_step(self) -> None:
        self._set_waiting("")
        self._waits_since_s = 0.0
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

    def _is_every_path_trained(self) -> bool:
        return len(trained_paths(self._publisher.view)) == self.node.grid.path_count

    def _wait_to_step(self, now: float) -> None:
        """Wait for the run to start, or, with fixed steps, for other peers."""
        grid, view = self.node.grid, self._publisher.view
        start_s = self.node.schedule.start_s
        if now < start_s:
            self._set_waiting("the run to start")
            self._wake.wait(min(start_s - now, 0.25))
            return
        self._publisher.look_often()
        self._waits_since_s = self._waits_since_s or now
        if now - self._waits_since_s < SHORT_WAIT_S:
            self._wake.wait(SHORT_WAIT_S)
            return
        if now < self._position.opens_s:
            trained = len(trained_paths(view))
            what = f"a trainer for every path: have {trained} of {grid.path_count}"
            until_s = self._position.opens_s
        else:
            what, until_s = self._outer_rounds.waiting_for()
        self._set_waiting(what, max(0.0, until_s - now))
        self._wake.wait(0.25)

    def _set_waiting(self, what: str, limit_s: float = 0.0) -> None:
        limit = f", at most {limit_s:.0f} s more" if limit_s else ""
        if what != self._waiting_for:
            self._waiting_for = what
            if what:
                self.events.emit("waiting", what=what + limit)
        self.status.waiting_for = what + limit

    def _hold_anchor(self, state: ModuleState) -> None:
        """Serve a new anchor at once; write it to disk in the background when a save is due."""
        self.node.held.hold(state, save=False)
        self._publisher.announce()
        if self._is_save_due(self._position.round_index):
            saving = self._executor.submit(self.node.held.hold, state, save=True)
            self._background.watch("saving", saving)

    def _is_save_due(self, round_index: int) -> bool:
        return (round_index + 1) % self.node.plan.rounds.save_every_rounds == 0

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
        self._position.next_round(self.node.clock.now(), self._present_round())
        if self.node.schedule.fixed_steps:
            # Who waits for this peer in the round that has ended need not.
            self.status.round_index = self._position.round_index
            self._publisher.announce()
        if self.settings.max_rounds and self._rounds_done >= self.settings.max_rounds:
            self.stopping.set()
            return
        self._successor = self._watch.take()
        if self._successor is None:
            self._move_if_better()

    def _save_optimizer(self, round_index: int) -> None:
        """Write the AdamW state in the background; only copying it keeps the next step waiting."""
        path = self._trainer.path
        if not self._is_save_due(round_index) or path is None or not self._saving.done():
            return
        state = self._trainer.optimizer_state()
        self._saving = self._executor.submit(self._write_optimizer, path, state)
        self._background.watch("saving", self._saving)

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
        if self.settings.path is not None or self._outer_rounds.running:
            return
        try:
            # Counted rounds may be shorter than the time between two refreshes, and a view of many
            # rounds ago says of a path that it waits when another peer has taken it since.
            counted = self.node.schedule.fixed_steps > 0
            view = self._publisher.refresh() if counted else self._publisher.view
        except NetworkError as error:
            logger.warning("thinks about moving another time: %s", error)
            return
        decision = should_move(
            view,
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
        self._claimer.take_back(path)
        self._set_waiting("")
        self._enter_round()

    # -- leaving

    def _leave(self) -> None:
        """Withdraw the claim, save, hand over, stop: within ten seconds (promise 10)."""
        deadline = time.monotonic() + LEAVE_BUDGET_S
        self._claimer.say("leaving")
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
