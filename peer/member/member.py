"""What a peer decides, as one deterministic state machine: events and the time in, actions out.

A member joins, claims a path, gets what it needs, trains round by round, takes over what others
made, keeps copies for them, moves, and leaves. It is the only place where that is decided: a real
peer (`dipaco.peer.session`) and the swarm simulator are shells that carry its actions out and
report what came of them. Equal events give equal actions, so what a peer recorded can be played
again (`dipaco.peer.member.recording`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from dipaco.dht.agreement import trained_in_sight
from dipaco.dht.certificates import CertificateBook
from dipaco.dht.policy import Decision, lead_rank
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference

from . import events as e
from .actions import Action, Begun, EndRound, Left, Move, SaveAll, Stay, TakeStep, Wait, Warn
from .adoption import Adoption
from .chains import Chains
from .horizon import Horizon
from .joining import Joining
from .keeping import Keeping
from .knowledge import Knowledge, MemberSettings
from .outer import OuterRounds
from .parting import Parting, Pausing
from .rounds import round_position

# Of a leave: until when last work is merged, and until when all of it is done (promise 10).
MERGE_BUDGET_S, LEAVE_BUDGET_S = 3.5, 6.0
# A wait for other peers that ends sooner is not worth a line.
SHORT_WAIT_S = 1.0


class _Phase(Enum):
    NEW = auto()
    JOINING = auto()
    TRAINING = auto()
    THINKING = auto()
    PARTING = auto()
    PAUSED = auto()
    SERVING = auto()
    LEAVING = auto()
    GONE = auto()


class Member:
    """One peer's decisions in one run. `held` are the states that lie on its disk."""

    def __init__(
        self,
        settings: MemberSettings,
        plan: RunPlan,
        grid: Grid,
        *,
        book: CertificateBook | None = None,
        held: Sequence[StateReference] = (),
    ) -> None:
        self.known = known = Knowledge(settings, plan, grid, book or CertificateBook())
        for state in held:
            known.serve(state)
        self.position = round_position(known.schedule)
        self._chains = Chains(known)
        self._horizon = Horizon(known)
        self._joining = Joining(known, self._horizon, self._chains)
        self._adoption = Adoption(known, self._chains)
        self._outer = OuterRounds(known, self.position, self._adoption, self._chains)
        self._keeping = Keeping(known, self._chains)
        self._parting = Parting(known, self.position, self._outer)
        self._pausing = Pausing(known, self._joining, self._outer)
        self._moving: Decision | None = None
        self._phase = _Phase.NEW
        self._waits_since_s = 0.0
        self._rounds_on_path = 0
        self.rounds_done = 0
        """Rounds that ended here."""
        self._leave_s: float | None = None
        self._thinks = False
        self._successor = False
        self._to_successor = False
        self._error = ""

    @property
    def path(self) -> int | None:
        """The path in training."""
        return self.known.path

    @property
    def anchors(self) -> dict[str, StateReference]:
        """The last committed state of every module of the path in training."""
        return dict(self.known.anchors)

    @property
    def is_gone(self) -> bool:
        """Whether the member has left."""
        return self._phase is _Phase.GONE

    def handle(self, event: e.Event, now_s: float) -> list[Action]:
        """Take note of an event at `now_s`, swarm time, and return what is to be done, in order.

        Events after `Left` change nothing.
        """
        known = self.known
        went_back = known.note_time(now_s)
        if self._phase is _Phase.GONE:
            return []
        if went_back:
            self.position.clock_went_back(now_s)
            for part in (self._joining.claiming, self._outer, self._adoption, self._parting):
                part.clock_went_back()
        if isinstance(event, e.Turn):
            self._on_turn(event)
        elif isinstance(event, e.Viewed):
            self._on_view(event)
        elif isinstance(event, e.Probed):
            known.own_reachable = event.reachable
        elif isinstance(event, e.LeaveWanted):
            self._part_or_leave()
        elif isinstance(event, e.PauseWanted | e.ResumeWanted):
            self._pause_or_resume(event.reason if isinstance(event, e.PauseWanted) else "")
        elif isinstance(event, e.SuccessorReady):
            self._successor = True
        else:
            self._on_answer(event)
        self._horizon.watch(known.path, self._joining.claiming.path)
        actions, known.actions = known.actions, []
        return actions

    def _on_answer(self, event: e.Event) -> None:
        """Hand what came of an action to the part that wanted it."""
        match event:
            case e.LookFailed():
                self._on_look_failed(event)
            case e.PathReady() | e.PathFailed():
                self._joining.beginning.on_path(event)
            case e.StateFetched(purpose="begin") | e.FetchFailed(purpose="begin"):
                self._joining.beginning.on_state(event)
            case e.StateFetched(purpose="adopt") | e.FetchFailed(purpose="adopt"):
                self._adoption.on_state(event)
            case e.StateFetched() | e.FetchFailed():
                self._keeping.on_state(event)
            case e.ChainFetched():
                self._chains.on_fetched(event)
                self._outer.on_chain(event.reference.module)
                if self._phase is _Phase.TRAINING:
                    self._adoption.on_chain(event.reference.module, self._outer.running)
                self._keeping.on_chain()
            case e.SnapshotTaken():
                self._outer.on_snapshot(event)
            case e.Averaged():
                self._outer.on_averaged(event)
            case e.AverageFailed():
                self._outer.on_average_failed(event)
            case e.Answered():
                self._outer.on_answered(event)
            case e.CallAnswered():
                self._on_call_answered(event)
            case e.OuterStepped():
                self._outer.on_stepped(event)
                self._keeping.on_commit(event.module)
            case e.OuterStepFailed():
                self._outer.on_step_failed(event)
            case e.Checked():
                self._adoption.on_checked(event, self._outer.running)
            case e.Offered():
                self.known.meet([event.peer])
                self._keeping.on_offered(event)
            case e.OfferAnswered():
                if event.is_kept:
                    self.known.meet([event.peer])
                self._keeping.on_offer_answered(event)
            case e.Stepped():
                self.position.stepped()
            case e.Admitted() | e.Revoked():
                self.known.doubts.guests.note(event)

    # -- the swarm was read

    def _on_view(self, event: e.Viewed) -> None:
        self._horizon.learn(event.view)
        if event.is_answer:
            self._on_look()
        if self._phase in (_Phase.LEAVING, _Phase.GONE):
            return
        self.known.tell_isolation()
        if self._phase is _Phase.TRAINING:
            self._outer.on_view()
            self._adoption.look(self._outer.running)
        self._keeping.on_view()
        if not event.is_answer:
            self.known.call_unknown()

    def _on_look(self) -> None:
        if self._joining.claiming.is_under_way:
            self._joining.claiming.on_view()
        elif self._phase is _Phase.THINKING:
            self._phase = _Phase.TRAINING
            self._move_if_better()
        elif self._thinks and self._phase is _Phase.TRAINING:
            self._thinks = False
            if self._outer.running:
                self._horizon.settle()
            else:
                self._move_if_better()

    def _on_look_failed(self, event: e.LookFailed) -> None:
        self._joining.claiming.on_look_failed()
        self._thinks = False
        if self._phase is _Phase.THINKING:
            self._phase = _Phase.TRAINING
            self.known.do(Warn(f"thinks about moving another time: {event.reason}"))

    def _on_call_answered(self, event: e.CallAnswered) -> None:
        known = self.known
        known.on_call_answered(event)
        self._chains.on_called(event)
        if self._phase is _Phase.TRAINING:
            for module in known.anchors:
                self._adoption.on_chain(module, self._outer.running)
        self._keeping.on_chain()

    # -- one turn

    def _on_turn(self, turn: e.Turn) -> None:
        """Say what the shell does now: an inner step, or wait, or leave."""
        known = self.known
        if self._phase is _Phase.NEW:
            self._phase = _Phase.PAUSED if known.settings.trains else _Phase.SERVING
            if self._pausing.reason:
                self._pausing.begin()
        if self._phase is _Phase.PAUSED and not self._pausing.reason:
            self._phase = _Phase.JOINING
            self._joining.begin()
        if self._phase is _Phase.JOINING:
            self._turn_joining()
        if self._phase is _Phase.TRAINING:
            self._turn_training(turn)
        elif self._phase is _Phase.THINKING:
            known.do(Wait("a new view of the swarm", 0.0))
        elif self._phase is _Phase.SERVING:
            known.do(Wait("", 0.0))
        elif self._phase is _Phase.PAUSED:
            self._turn_paused()
        elif self._phase is _Phase.PARTING:
            self._turn_parting(turn)
        elif self._phase is _Phase.LEAVING:
            self._turn_leaving()

    def _turn_joining(self) -> None:
        joining = self._joining
        joining.on_turn()
        if joining.has_begun:
            self._begun()
        elif joining.failure and self.known.path is None:
            self._error = joining.failure
            self._leave(to_successor=False)
        elif joining.failure:
            self._stay(joining.failure)

    def _begun(self) -> None:
        known = self.known
        assert known.path is not None
        self._adoption.begin_path()
        self._outer.begin_path()
        self._rounds_on_path = 0
        self._phase = _Phase.TRAINING
        self._enter_round()
        self._joining.claiming.train()
        known.do(Begun(known.path, self.position.round_index))

    def _enter_round(self) -> None:
        """Take part from now on; with fixed steps also a peer that moves never goes back."""
        round_index = max(self.position.round_index, self.known.round_after_anchors())
        self.position.enter(self.known.now_s, round_index)

    def _turn_training(self, turn: e.Turn) -> None:
        """Start what is due, apply what is here, then step or wait.

        What is here is applied before a boundary takes its copy: a level's next round starts from
        the new anchor. An adoption waits while its level averages.
        """
        known, position, outer = self.known, self.position, self._outer
        self._adoption.apply(outer.running)
        if self._adoption.is_checking:
            # A boundary that comes first would leave it for the end of another round.
            known.do(Wait("", 0.0))
            return
        if known.schedule.fixed_steps and known.now_s < position.opens_s:
            have, need = trained_in_sight(known.view, known.grid, known.path or 0)
            if have == need:
                position.open(known.now_s)
        # Where steps are long the next round of a level begins at every turn.
        has_ended = position.round_ended(outer.running)
        if not has_ended:
            outer.on_turn(turn.step_s)
        if has_ended or position.round_ended(outer.running):
            self._end_round()
            if self._phase is _Phase.LEAVING:
                self._turn_leaving()
                return
            if self._phase is not _Phase.TRAINING:
                known.do(Wait("", 0.0))
                return
        if has_ended:
            outer.on_turn(turn.step_s)
        if position.may_step(known.now_s):
            self._waits_since_s = 0.0
            rank = None
            if position.steps_in_round == 0:
                # Once a round, when claims have settled: replicas of a path draw other batches.
                rank = lead_rank(known.view, known.me, known.path or 0)
            known.do(TakeStep(position.slack_s(known.now_s, turn.step_s), rank))
        else:
            self._wait_to_step(turn)

    def _wait_to_step(self, turn: e.Turn) -> None:
        """Wait for the run to start, or, with fixed steps, for other peers."""
        known, position = self.known, self.position
        start_s = known.schedule.start_s
        slack_s = position.slack_s(known.now_s, turn.step_s)
        if known.now_s < start_s:
            known.do(Wait("the run to start", start_s - known.now_s))
            return
        self._waits_since_s = self._waits_since_s or known.steady_s
        if known.steady_s - self._waits_since_s < SHORT_WAIT_S:
            known.do(Wait("", 0.0, slack_s))
            return
        if known.now_s < position.opens_s:
            have, need = trained_in_sight(known.view, known.grid, known.path or 0)
            what = f"a trainer for every path: have {have} of {need}"
            until_s = position.opens_s
        else:
            what, until_s = self._outer.waiting_for(turn.together)
        known.do(Wait(what, max(0.0, until_s - known.now_s), slack_s))

    # -- the end of a round

    def _end_round(self) -> None:
        """Go on to the next round, leave, or think about moving."""
        known, position = self.known, self.position
        ended = position.round_index
        self.rounds_done += 1
        self._rounds_on_path += 1
        position.next_round(known.now_s, self.known.round_after_anchors())
        known.do(EndRound(ended, position.round_index, known.is_save_due(ended)))
        most = known.settings.max_rounds
        if most and self.rounds_done >= most:
            self._leave(to_successor=False)
        elif self._successor and known.settings.follows:
            self._leave(to_successor=True)
        elif known.settings.pinned is None and not self._outer.running:
            self._think_of_moving()

    def _think_of_moving(self) -> None:
        """See whether another path needs this peer more, after a look at more of them."""
        known = self.known
        if known.schedule.fixed_steps:
            # Counted rounds may be shorter than the time between two views, and one of many
            # rounds ago says of a path that it waits when another peer has taken it since.
            self._phase = _Phase.THINKING
            self._horizon.look(anew=True)
        elif self._horizon.is_whole:
            self._move_if_better()
        elif self._horizon.is_worth_a_look(self._rounds_on_path):
            self._thinks = True
            self._horizon.look(anew=True)

    def _move_if_better(self) -> None:
        self._moving = self._horizon.better_path(self._rounds_on_path)
        if self._moving is not None:
            self._phase = _Phase.PARTING
            self._parting.begin(self.known.plan.rounds.window_s, waits_for_boundaries=False)

    def _move(self, decision: Decision) -> None:
        known = self.known
        assert known.path is not None
        self._moving = None
        known.do(Move(known.path, decision.path, decision.reason))
        self._phase = _Phase.JOINING
        self._joining.begin(decision)

    def _stay(self, reason: str) -> None:
        """Go on with the present path after a move failed: its model is untouched."""
        known = self.known
        assert known.path is not None
        self._rounds_on_path = 0
        self._phase = _Phase.TRAINING
        self._joining.claiming.take_back(known.path)
        self._enter_round()
        known.do(Stay(known.path, reason))

    # -- pausing

    def _pause_or_resume(self, reason: str) -> None:
        """Train nothing as long as there is a reason, once last work is merged (design 4.5)."""
        was_wanted, self._pausing.reason = bool(self._pausing.reason), reason
        if not reason or was_wanted or self._leave_s is not None:
            return
        if self._phase in (_Phase.TRAINING, _Phase.THINKING, _Phase.PARTING):
            self._phase, self._moving = _Phase.PARTING, None
            self._parting.begin(MERGE_BUDGET_S, waits_for_boundaries=True)
        elif self._phase is _Phase.JOINING:
            self._phase = _Phase.PAUSED
            self._pausing.begin()

    def _turn_paused(self) -> None:
        if self._successor and self.known.settings.follows:
            self._leave(to_successor=True)
            self._turn_leaving()
        else:
            self.known.do(Wait("", 0.0))

    # -- leaving

    def _part_or_leave(self) -> None:
        """Leave, once last work is merged if there is any: all in ten seconds (promise 10)."""
        if self._leave_s is not None:
            return
        self._leave_s, self._moving = self.known.steady_s, None
        if self._phase in (_Phase.TRAINING, _Phase.THINKING, _Phase.PARTING):
            self._phase = _Phase.PARTING
            self._parting.begin(MERGE_BUDGET_S, waits_for_boundaries=True)
        else:
            self._leave(to_successor=False)

    def _turn_parting(self, turn: e.Turn) -> None:
        if not self._parting.on_turn(turn.step_s):
            self.known.do(Wait("the last work on this path to be merged", self._parting.left_s))
        elif self._moving is not None:
            self._move(self._moving)
            self._turn_joining()
        elif self._leave_s is None:
            self._phase = _Phase.PAUSED
            self._pausing.begin()
            self._turn_paused()
        else:
            self._leave(to_successor=False)
            self._turn_leaving()

    def _leave(self, *, to_successor: bool) -> None:
        """Withdraw the claim, save, hand over."""
        self._phase = _Phase.LEAVING
        if self._leave_s is None:
            self._leave_s = self.known.steady_s
        self._to_successor = to_successor
        self._outer.is_leaving = True
        self._joining.beginning.stop()
        self._joining.claiming.leave()
        self.known.do(SaveAll())
        if not to_successor:
            self._keeping.hand_over(self._leave_s + LEAVE_BUDGET_S - self.known.steady_s)

    def _turn_leaving(self) -> None:
        known, keeping = self.known, self._keeping
        left_s = (self._leave_s or 0.0) + LEAVE_BUDGET_S - known.steady_s
        if keeping.is_handing_over and left_s > 0:
            known.do(Wait("others to take over the newest states", left_s))
            return
        if keeping.left_behind:
            what = "nobody took over the newest state in time; it stays on this disk"
            known.do(Warn(f"{', '.join(keeping.left_behind)}: {what}"))
        self._phase = _Phase.GONE
        known.do(Left(tuple(sorted(keeping.handed_over)), self._to_successor, self._error))
