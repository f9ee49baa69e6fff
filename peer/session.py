"""A training peer's shell: it does what its member decides (`dipaco.peer.member`), and reports.

The main thread owns the model. It takes inner steps, and applies between two of them what errands
(`errands`), averagers (`outer_steps`) and the publisher have brought. Nothing is decided here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dipaco.modules.errors import IntegrityError, NetworkError
from dipaco.modules.state import ModuleState, StateReference

from .background import Background
from .errands import Errands
from .guests import tell_member
from .member import actions as a
from .member import events as e
from .member.knowledge import MemberSettings
from .member.member import MERGE_BUDGET_S
from .member.recording import RecordFile, start_member
from .node import Node
from .outer_steps import OuterSteps, Pool
from .owner.pauses import Pauses
from .path_files import OptimizerFiles, PathData, PathFiles
from .progress import ProgressReports
from .publisher import PeerStatus, Publisher
from .reporting.events import EventLog
from .scoring.answering import Scoring
from .settings import PeerSettings
from .shell import Shell
from .state_checks import PathStates, StateChecks
from .successor import SuccessorWatch
from .trainer import Comparison, PathTrainer, RateMeter, Snapshot

logger = logging.getLogger("dipaco.peer.session")

LONGEST_WAIT_S = 0.25


class Session:
    """One training peer in one run. `run` returns when it was stopped, has done its rounds, or
    can move to the run's successor."""

    def __init__(
        self,
        settings: PeerSettings,
        node: Node,
        pool: Pool,
        trainer_factory: Callable[[], PathTrainer],
        status: PeerStatus,
        publisher: Publisher,
        background: Background,
        events: EventLog,
        stopping: threading.Event,
        pauses: Pauses | None = None,
    ) -> None:
        self.settings = settings
        self.node = node
        self.status = status
        self.events = events
        self.stopping = stopping
        self._pauses = pauses
        self._pool = pool
        self._publisher = publisher
        self._certifier = certifier = node.certifier
        self._background = background
        self._trainer = trainer_factory()
        self._meter = RateMeter()
        self._files = PathFiles(node)
        path_states = PathStates(node.me, publisher, node.exchange, node.fetcher, node.held)
        self._state_checks = StateChecks(self._files, path_states, self._trainer)
        self._path_data: PathData | None = None
        self._snapshots: dict[tuple[str, int], Snapshot] = {}
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
        self._optimizer = OptimizerFiles(node.states, self._trainer, self._saver, background)
        self._waiting_for = ""
        self._last_loss = float("nan")
        self._resumed = False
        member_settings = MemberSettings(
            node.me,
            pinned=settings.path,
            max_rounds=settings.max_rounds,
            follows=not settings.stay,
        )
        known = (member_settings, node.plan, node.held.all(), certifier.all())
        self._record = None
        if settings.record is not None:
            self._record = RecordFile(_record_path(settings.record, node), *known)
        self._shell = shell = Shell(
            start_member(*known), node.clock.now, self._carry_out, self._record
        )
        self._errands = Errands(
            publisher,
            node.fetcher,
            node.exchange,
            certifier,
            node.held,
            status,
            events,
            shell.report,
            genesis=self._files.genesis_state,
            fail=background.fail,
            before_adopting=self._state_checks.prepare,
        )
        self._outer_steps = OuterSteps(
            node.plan,
            node.grid,
            node.me,
            pool,
            certifier.sign,
            node.clock.to_local,
            shell.report,
            node.held.steps.hold,
        )
        self._progress = ProgressReports(node, publisher, self._trainer, status, events)
        self._scoring = Scoring(node, publisher, self._trainer, events, shell.wake)
        self._watch = SuccessorWatch(node, events, background, follow=not settings.stay)
        self._left: a.Left | None = None
        self._successor: Node | None = None
        self._listen()

    def _listen(self) -> None:
        shell = self._shell
        tell_member(self.node.gate, shell.report)
        self._background.on_failure(shell.wake)
        self._publisher.add_annex(self._scoring)
        self._publisher.add_annex(self._watch)
        self._publisher.on_view(self._errands.see)
        self._certifier.listen(
            lambda certificate: shell.report(e.ChainFetched(certificate.reference, (certificate,)))
        )
        self.node.exchange.set_offer_handler(self._note_offer)

    def _note_offer(self, peer: str, offered: StateReference) -> bool:
        if self.status.claim.state == "leaving" or not self.node.is_in(peer):
            return False
        self._shell.report(e.Offered(peer, offered))
        return True

    # -- life cycle

    def run(self) -> Node | None:
        """Train until `stopping` is set or `max_rounds` rounds have ended; then leave cleanly.

        Returns the successor's node when a round has ended and the run has one that is at hand:
        this run was left then, and the swarm was not. Raises what ended a background thread, and
        `NetworkError` when a path could not be begun.
        """
        is_told = is_ready_told = False
        try:
            while self._left is None:
                self._background.check()
                if self.stopping.is_set() and not is_told:
                    is_told = True
                    self._shell.happen(e.LeaveWanted("stopped"))
                ready = self._watch.ready_run
                if ready is not None and not is_ready_told:
                    is_ready_told = True
                    self._shell.happen(e.SuccessorReady(ready))
                self._turn()
        except Exception:
            self._save_all()
            raise
        finally:
            self._close()
        if self._left.error:
            raise NetworkError(self._left.error)
        return self._successor

    @property
    def rounds_done(self) -> int:
        """Rounds that ended here."""
        return self._shell.member.rounds_done

    def _turn(self) -> None:
        self._look_for_pauses()
        self._progress.poll()
        together = {}
        if self.node.schedule.fixed_steps:
            together = {n: self._pool.members_together(n) for n in self.node.grid.level_names}
        instruction = self._shell.turn(e.Turn(self._meter.step_s, together))
        if isinstance(instruction, a.Left):
            self._leave(instruction)
        elif isinstance(instruction, a.TakeStep):
            self._scoring.turn(instruction.slack_s, self._meter.step_s)
            self._take_step(instruction)
        else:
            self._wait(instruction)

    def _look_for_pauses(self) -> None:
        """Tell the member when its owner wants something else than before."""
        if self._pauses is not None:
            if (reason := self._pauses.change()) is not None:
                self._shell.happen(e.PauseWanted(reason) if reason else e.ResumeWanted())
            claim = self.status.claim
            self._pauses.tell(claim.state, claim.path, claim.reason)

    def _take_step(self, instruction: a.TakeStep) -> None:
        self._set_waiting("")
        if instruction.rank is not None:
            self._trainer.replica = self._files.replica_number(instruction.rank)
        started = time.perf_counter()
        self._last_loss = self._trainer.inner_step()
        step_s = time.perf_counter() - started
        self._meter.step(step_s, self._trainer.tokens_per_step)
        self.status.tokens_per_s = self._meter.tokens_per_s
        self.events.emit(
            "inner",
            path=self._trainer.path,
            path_step=self._trainer.path_step,
            loss=round(self._last_loss, 6),
            tokens_per_s=round(self._meter.tokens_per_s, 1),
            seconds=round(step_s, 4),
            tokens=self._trainer.tokens_per_step,
        )
        self._shell.happen(e.Stepped(self._trainer.tokens_per_step))

    def _wait(self, instruction: a.Wait) -> None:
        if self._trainer.path is not None and self._scoring.turn(
            instruction.slack_s, self._meter.step_s
        ):
            return
        if instruction.what:
            self._set_waiting(instruction.what, instruction.limit_s)
            if self.node.schedule.fixed_steps:
                self._publisher.look_often()
        self._shell.wait(LONGEST_WAIT_S)

    def _set_waiting(self, what: str, limit_s: float = 0.0) -> None:
        limit = f", at most {limit_s:.0f} s more" if limit_s else ""
        if what != self._waiting_for:
            self._waiting_for = what
            if what:
                self.events.emit("waiting", what=what + limit)
        self.status.waiting_for = what + limit

    # -- what the member wants done

    def _carry_out(self, action: a.Action) -> e.Event | None:
        """Do an action, or have it done; returns what came of it if that is known at once."""
        if self._errands.carry_out(action):
            return None
        match action:
            case a.FetchPath():
                self._fetch_path(action)
            case a.StartPath():
                self._start_path(action)
            case a.Begun():
                self._begun(action)
            case a.TakeSnapshot():
                return self._take_snapshot(action)
            case a.ForgetSnapshot():
                self._snapshots.pop((action.module, action.round_index), None)
                if not action.keeps_part:
                    self._trainer.undo_cut(action.module, action.round_index)
            case a.JoinParts():
                self._trainer.join_parts(action.module, action.older, action.newer)
            case a.DropPart():
                self._trainer.drop_part(action.module, action.part)
            case a.Average():
                return self._average(action)
            case a.Await():
                self._outer_steps.awaits(action)
            case a.TakeOuterStep():
                snapshot = self._snapshots[action.module, action.round_index]
                self._outer_steps.take_step(action, snapshot)
            case a.Commit():
                self._commit(action)
            case a.CarryOn():
                self._carry_on(action)
            case a.Discard():
                self._trainer.discard(action.module)
            case a.CheckState():
                return self._check(action)
            case a.Adopt():
                self._adopt(action)
            case a.EndRound():
                self._end_round(action)
            case a.Move():
                self._move(action)
            case a.Pause():
                self._pause(action)
            case a.Stay():
                self._errands.forget("begin")
                self._files.release()
                logger.warning("stays on path %d: %s", action.path, action.reason)
            case _:
                raise AssertionError(f"nobody carries out {action}")
        return None

    # -- a path

    def _fetch_path(self, action: a.FetchPath) -> None:
        claim = self.status.claim
        if self._files.want(action.path):
            self._errands.forget("begin")
            if claim.path == action.path:
                self.events.emit("claimed", path=claim.path, reason=claim.reason)

        def fetch() -> None:
            try:
                self._files.fetch(action.path)
            except (NetworkError, IntegrityError) as error:
                self._shell.report(e.PathFailed(action.path, str(error)))
                return
            self._shell.report(e.PathReady(action.path))

        # An empty shard or a full disk does not get better with time: it ends the peer.
        self._background.watch("files", self._errands.run(fetch))

    def _start_path(self, action: a.StartPath) -> None:
        self._path_data = data = self._files.take(action.path)
        states = {state.module: self._errands.take(state, "begin") for state in action.states}
        self._errands.forget("begin", "adopt")
        optimizer_state = self.node.states.load_optimizer(action.path)
        self._snapshots.clear()
        self._outer_steps.forget()
        self._trainer.start_path(action.path, states, data.stream, optimizer_state=optimizer_state)
        self._resumed = optimizer_state is not None
        self._progress.begin_path(data)
        self._files.release()
        for state in states.values():
            self.node.held.hold(state)

    def _begun(self, action: a.Begun) -> None:
        self._set_waiting("")
        self.status.round_index = action.round_index
        self.events.emit(
            "training",
            path=action.path,
            path_step=self._trainer.path_step,
            round=action.round_index,
            modules={m: state.version for m, state in self._trainer.anchors().items()},
            resumed_optimizer=self._resumed,
        )

    def _move(self, action: a.Move) -> None:
        self.events.emit(
            "move", from_path=action.from_path, to_path=action.to_path, reason=action.reason
        )
        self._optimizer.keep()
        self._progress.finish(MERGE_BUDGET_S)

    def _pause(self, action: a.Pause) -> None:
        """Keep what a return needs, and give device and memory back."""
        if action.path is not None:
            self._optimizer.keep()
            self._progress.finish(1.0)
            self._scoring.pause()
        self._errands.forget("begin", "adopt")
        self._outer_steps.forget()
        self._snapshots.clear()
        self._path_data = None
        self._files.release()
        self._trainer.release()
        self._meter = RateMeter()
        self.status.tokens_per_s = 0.0
        self.events.emit("paused", path=action.path, reason=action.reason)

    # -- outer rounds

    def _take_snapshot(self, action: a.TakeSnapshot) -> e.SnapshotTaken:
        snapshot = self._trainer.snapshot(action.module, action.round_index)
        self._snapshots[action.module, action.round_index] = snapshot
        self._outer_steps.begin(action)
        if snapshot.tokens and snapshot.is_finite:
            self.events.emit(
                "outer_round",
                module=action.module,
                round=action.round_index,
                tokens=snapshot.tokens,
                late_s=round(self.node.clock.now() - action.boundary_s, 3),
            )
        return e.SnapshotTaken(
            action.module, action.round_index, snapshot.tokens, snapshot.is_finite
        )

    def _average(self, action: a.Average) -> e.Event | None:
        snapshot = self._snapshots[action.module, action.round_index]
        return self._outer_steps.average(action, snapshot)

    def _commit(self, action: a.Commit) -> None:
        step = self._outer_steps.take(action.reference.digest)
        state = step.state
        self._trainer.commit(step.snapshot, state)
        self._snapshots.pop((action.module, action.round_index), None)
        self._hold_anchor(state, save=action.save)
        self._certifier.committed(state.reference, step.snapshot.anchor.digest, step.table)
        self.status.last_commit[state.module] = (action.round_index, len(step.table))
        now = self.node.clock.now()
        self.events.emit(
            "commit",
            module=state.module,
            round=action.round_index,
            version=state.version,
            digest=state.digest,
            tokens=state.tokens,
            group=[row.peer for row in step.table],
            paths=sorted({row.path for row in step.table}),
            expected=action.expected,
            attempt=action.attempt,
            seconds_after_boundary=round(max(0.0, now - step.begin_s), 3),
            seconds=round(step.seconds, 3),
        )

    def _carry_on(self, action: a.CarryOn) -> None:
        self.events.emit(
            "carry_on",
            module=action.module,
            round=action.round_index,
            reason=action.reason,
            expected=action.expected,
            anchor=self._trainer.anchor(action.module).digest,
        )

    def _check(self, action: a.CheckState) -> e.Checked:
        """Score a state in place of an anchor, and the anchors."""
        state, data = self._errands.look_up(action.digest), self._path_data
        found = Comparison()
        if state is not None and data is not None:
            found = self._state_checks.compare(state, data.validation, is_rival=action.is_rival)
        return e.Checked(action.module, action.digest, *found)

    def _adopt(self, action: a.Adopt) -> None:
        state = self._errands.take(action.reference, "adopt")
        self._trainer.adopt(action.module, state, on_top=action.on_top, weight=action.weight)
        self._hold_anchor(state, save=action.save)
        self.events.emit(
            "adopt",
            module=action.module,
            version=state.version,
            digest=state.digest,
            tokens=state.tokens,
            own_work_merged=action.is_merged,
        )

    def _hold_anchor(self, state: ModuleState, *, save: bool) -> None:
        """Serve a new anchor at once; write it to disk in the background when a save is due."""
        self.node.held.hold(state)
        self._publisher.announce()
        if save:
            self._background.watch("saving", self._saver.submit(self.node.held.save, state))

    # -- the end of a round

    def _end_round(self, action: a.EndRound) -> None:
        ended = action.round_index
        self._progress.end_round(ended, self._last_loss)
        if action.save:
            self._optimizer.save()
        self.events.emit(
            "round",
            round=ended,
            path=self._trainer.path,
            path_step=self._trainer.path_step,
            loss=round(self._last_loss, 6),
            digests={m: s.digest for m, s in self._trainer.anchors().items()},
        )
        self.status.round_index = action.next_round
        if self.node.schedule.fixed_steps:
            # Who waits for this peer in the round that has ended need not.
            self._publisher.announce()

    # -- leaving

    def _leave(self, left: a.Left) -> None:
        """The member has left: keep what a return needs, and say so."""
        self._left = left
        if left.to_successor:
            self._successor = self._watch.take()
        if self._trainer.path is not None:
            self._optimizer.keep()
            self._progress.finish(1.0)
        if self._successor is None:
            self.events.emit(
                "leaving", path=self._trainer.path, handed_over=sorted(left.handed_over)
            )

    def _save_all(self) -> None:
        """Keep what a return needs when something unforeseen has ended the session."""
        if self._trainer.path is not None:
            self.node.held.save_all()
            self._optimizer.keep()

    def _close(self) -> None:
        """Stop what was started, whatever ended the session; bounded."""
        self._watch.stop()
        self._scoring.close()
        self._errands.stop()
        self._outer_steps.stop()
        self._saver.shutdown(wait=False, cancel_futures=True)
        self._progress.stop()
        self._publisher.stop(withdraw=True)
        if self._record is not None:
            self._record.close()


def _record_path(path: Path, node: Node) -> Path:
    """Return where a run is recorded: what a successor run decides is in a file of its own."""
    if node.earlier is None:
        return path
    return path.with_name(f"{path.stem}-{node.run_id}{path.suffix}")
