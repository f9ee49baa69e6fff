"""A training peer's shell: it does what its member decides (`dipaco.protocol.member`), and reports.

The functions here are called on the model's thread, one after the other: inner steps, and between
two of them whatever concerns the model. Nothing is decided here.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from dipaco.base.errors import IntegrityError, MachineError, NetworkError
from dipaco.modules.device import return_freed_memory, wait_for
from dipaco.peer.keeping.path_files import OptimizerFiles, PathFiles
from dipaco.peer.node.node import Node
from dipaco.peer.owner.pauses import Pauses
from dipaco.peer.peer_settings import PeerSettings
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.knowledge import MemberSettings
from dipaco.routing.own_texts import OwnTexts
from dipaco.training.interruption import PassInterrupted
from dipaco.training.trainer import PathTrainer, RateMeter

from .handlers import Handlers
from .progress_reports import ProgressReports
from .running_node import RunningNode
from .shell import LONGEST_WAIT_S, Shell
from .successor import SuccessorWatch


def rest_s(worked_s: float, duty_percent: float) -> float:
    """Return the seconds of rest after which `worked_s` is `duty_percent` of the time."""
    return worked_s * (100.0 / duty_percent - 1.0)


class Session:
    """One training peer in one run. `run` returns when it was stopped, has done its rounds, or
    can move to the run's successor."""

    def __init__(
        self,
        settings: PeerSettings,
        running: RunningNode,
        trainer: PathTrainer,
        pauses: Pauses | None = None,
        own_texts: OwnTexts | None = None,
    ) -> None:
        node, status, events = running.node, running.status, running.events
        refresher, background = running.refresher, running.background
        self.node = node
        self.status = status
        self.events = events
        self._pauses = pauses
        self._stopping, self._duty_percent = running.stopping, settings.duty
        self._rests_until_s = 0.0
        self._refresher = refresher
        self._background = background
        self._trainer = trainer
        self._meter = RateMeter()
        self._own_texts = own_texts
        sequences = {} if own_texts is None else own_texts.sequences
        self._files = PathFiles(node, own_texts, with_shards=not settings.only_my_texts)
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
        self._optimizer = OptimizerFiles(
            node.folder / "optimizers" / node.me, trainer, self._saver, background
        )
        self._waiting_for = ""
        self._last_loss = float("nan")
        self._resumed = False
        self._shell = Shell(
            running,
            MemberSettings(
                node.me,
                pinned=settings.path,
                max_rounds=settings.max_rounds,
                follows=not settings.stay,
                # If a path was asked for, it is the only one.
                own_texts=sequences if settings.path is None else {},
            ),
            files=self._files,
            trainer=trainer,
            model_handlers=self._model_handlers(),
            next_turn=self._next_turn,
        )
        self._progress = ProgressReports(running, trainer, self._files)
        self._watch = SuccessorWatch(node, events, background, follow=not settings.stay)
        self._is_successor_told = False
        self._successor: Node | None = None
        refresher.refresh_too(self._watch.read)

    # -- life cycle

    def run(self) -> Node | None:
        """Train until `stopping` is set or `max_rounds` rounds have ended; then leave cleanly.

        Returns the successor's node when a round has ended and the run has one that is at hand:
        this run was left then, and the swarm was not. Raises what ended a background thread, and
        `NetworkError` when a path could not be begun.
        """
        try:
            left = self._shell.run()
            self._leave(left)
        except Exception:
            self._save_all()
            raise
        finally:
            self._close()
        if left.error:
            raise MachineError(left.error) if left.is_machine else NetworkError(left.error)
        return self._successor

    @property
    def rounds_done(self) -> int:
        """Rounds that ended here."""
        return self._shell.member.rounds_done

    def _next_turn(self) -> e.Turn:
        """Tell the member what this machine or its owner has to say, before it is asked."""
        if self._watch.ready_run is not None and not self._is_successor_told:
            self._is_successor_told = True
            self._shell.happen(e.SuccessorReady())
        if self._pauses is not None:
            if (reason := self._pauses.change()) is not None:
                self._shell.happen(e.PauseWanted(reason))
            claim = self.status.claim
            self._pauses.tell(claim.state, claim.path, claim.reason)
        return e.Turn(self._meter.step_s * self._duty_percent / 100.0)

    def _model_handlers(self) -> Handlers:
        """Return what carries out which of the actions that only a training peer has."""
        return {
            a.TakeStep: self._take_step,
            a.Wait: self._wait,
            a.FetchPath: self._fetch_path,
            a.StartPath: self._start_path,
            a.Begun: self._begun,
            a.CarryOn: self._carry_on,
            a.Discard: self._discard,
            a.EndRound: self._end_round,
            a.Move: self._move,
            a.Pause: self._pause,
        }

    # -- between two turns

    def _take_step(self, instruction: a.TakeStep) -> e.Stepped | None:
        self._set_waiting("")
        if (left_s := self._rests_until_s - time.perf_counter()) > 0.0:
            # Piece by piece: rounds go on meanwhile, and a pause does not wait.
            self._stopping.wait(min(left_s, LONGEST_WAIT_S))
            return None
        if instruction.rank is not None:
            self._trainer.replica = instruction.rank
        started = time.perf_counter()
        try:
            self._last_loss = self._trainer.inner_step()
        except PassInterrupted:
            return None
        step_s = self._with_rest(started)
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
        return e.Stepped()

    def _with_rest(self, started: float) -> float:
        """Return the seconds of a step, with those for which `--duty` leaves the device alone."""
        if self._duty_percent < 100.0:
            # A step on a GPU has ended when the GPU says so.
            wait_for(self._trainer.device)
        ended = time.perf_counter()
        rest = rest_s(ended - started, self._duty_percent)
        self._rests_until_s = ended + rest
        return ended - started + rest

    def _wait(self, instruction: a.Wait) -> None:
        if instruction.what:
            self._set_waiting(instruction.what, instruction.limit_s)
            if self.node.schedule.fixed_steps:
                self._refresher.look_often()

    def _set_waiting(self, what: str, limit_s: float = 0.0) -> None:
        limit = f", at most {limit_s:.0f} s more" if limit_s else ""
        if what != self._waiting_for:
            self._waiting_for = what
            if what:
                self.events.emit("waiting", what=what + limit)
        self.status.waiting_for = what + limit

    # -- a path

    def _fetch_path(self, action: a.FetchPath) -> None:
        claim = self.status.claim
        if self._files.want(action.path) and claim.path == action.path:
            self.events.emit("claimed", path=claim.path, reason=claim.reason)

        def fetch() -> None:
            try:
                self._files.fetch(action.path)
            except (NetworkError, IntegrityError) as error:
                self._shell.report(e.Failed(action, str(error)))
                return
            self._shell.report(e.PathReady(action.path))

        # An empty shard or a full disk does not get better with time: it ends the peer.
        self._background.watch("files", self._shell.messenger.run(fetch))

    def _start_path(self, action: a.StartPath) -> None:
        data = self._files.take(action.path)
        states = self._shell.outer_steps.hold(action.heads)
        self.node.held.forget_all()
        optimizer_state = self._optimizer.load(action.path)
        self._trainer.start_path(action.path, states, data.stream, optimizer_state=optimizer_state)
        self.node.trained_modules = frozenset(states)
        self._resumed = optimizer_state is not None
        self.status.validation_loss = float("nan")
        self.status.own_texts_loss = None
        if self._own_texts is not None:
            documents = self._own_texts.documents[action.path]
            self.events.emit("own_texts", path=action.path, documents=documents)

    def _begun(self, action: a.Begun) -> None:
        self._set_waiting("")
        self._files.release()
        return_freed_memory()  # Beginning took several times the memory that stays in use.
        self.status.round_index = action.round_index
        self.events.emit(
            "training",
            path=self._trainer.path,
            path_step=self._trainer.path_step,
            round=action.round_index,
            modules={m: state.version for m, state in self._trainer.anchors().items()},
            resumed_optimizer=self._resumed,
        )

    def _move(self, action: a.Move) -> None:
        path, reason = self._trainer.path, action.reason
        self.events.emit("move", from_path=path, to_path=action.path, reason=reason)
        self._keep_place()
        self._background.watch("saving", self._saver.submit(self.node.held.save_all))

    def _pause(self, action: a.Pause) -> None:
        """Keep what a return needs, and give device and memory back."""
        path = self._trainer.path
        self._keep_place()
        self.node.held.save_all()
        self.node.held.forget_all()
        self.node.trained_modules = frozenset()
        self._files.forget()
        self._trainer.release()
        self._set_waiting("")
        self._meter = RateMeter()
        self.status.tokens_per_s = 0.0
        self.events.emit("paused", path=path, reason=action.reason)

    # -- rounds

    def _discard(self, action: a.Discard) -> None:
        self._trainer.discard(action.module)

    def _carry_on(self, action: a.CarryOn) -> None:
        self.events.emit(
            "carry_on",
            module=action.module,
            round=action.round_index,
            reason=action.reason,
            expected=action.expected,
            anchor=self._trainer.anchor(action.module).digest,
        )

    def _end_round(self, action: a.EndRound) -> None:
        ended = action.round_index
        self._progress.end_round(ended, self._last_loss)
        self._optimizer.save()
        if self._own_texts is not None:
            self._own_texts.keep_places()
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
            # Peers that wait for this one in the round that has ended need not.
            self._refresher.announce()

    # -- leaving

    def _leave(self, left: a.Left) -> None:
        """The member has left: keep what a return needs, and say so."""
        if left.to_successor:
            self._successor = self._watch.take()
        self._keep_place()
        if self._successor is None:
            self.events.emit("leaving", path=self._trainer.path)

    def _save_all(self) -> None:
        """Keep what a return needs when something unforeseen has ended the session."""
        if self._trainer.path is not None:
            self.node.held.save_all()
        self._keep_place()

    def _keep_place(self) -> None:
        """Keep how the path in training is trained further: its optimizer, and how far the owner's
        texts were read."""
        if self._trainer.path is not None:
            self._optimizer.keep()
        if self._own_texts is not None:
            self._own_texts.keep_places()

    def _close(self) -> None:
        """Stop what was started, whatever ended the session; bounded."""
        self._watch.stop()
        self._saver.shutdown(wait=False, cancel_futures=True)
        self._refresher.stop(withdraw=True)
