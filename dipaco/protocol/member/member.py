"""What a peer decides, as one deterministic state machine: events and the time in, actions out.

A member joins, claims a path, gets what it needs, trains round by round, takes the heaviest chain
of each of its modules, keeps copies for others, moves, and leaves. It is the only place where that
is decided: a real peer (`dipaco.peer.shell`) and the swarm simulator are shells that carry its
actions out and report what came of them. Equal events give equal actions.

The outer round of a module is in `followed_module` and what it is put together from; this is the
life around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType

from dipaco.protocol.chain.steps import Head, Step
from dipaco.protocol.chain.trunk import Trunk
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.policy import Decision, lead_rank

from . import actions as a
from . import events as e
from .copies import Copies
from .followed_module import FollowedModule
from .joining import Joining
from .knowledge import Knowledge, MemberSettings
from .path_choice import PathChoice
from .rounds import Rounds
from .situation import Role

# Seconds of a leave in which others fetch a last contribution, and in which all is done (promise
# 10).
_LAST_ROUND_BUDGET_S, _LEAVE_BUDGET_S = 3.0, 6.0
# Share of a round: a peer that has trained for less contributes nothing when it leaves.
_LEAST_SHARE = 0.1
# A wait for other peers that ends sooner is not worth a line.
_SHORT_WAIT_S = 1.0
# Modules that are followed as a mailbox only, and for how many rounds in which nobody tells of one.
_MAX_MAILBOXES, _SILENT_ROUNDS = 256, 5


class _MemberPhase(Enum):
    PAUSED = auto()
    JOINING = auto()
    TRAINING = auto()
    PARTING = auto()
    SERVING = auto()
    LEAVING = auto()
    GONE = auto()


class Member:
    """One peer's decisions in one run.

    :param held: the states on its disk
    :param chains: those of their modules: the newest steps, and the trunk that these stand on
    """

    def __init__(
        self,
        settings: MemberSettings,
        plan: RunPlan,
        grid: Grid,
        *,
        chains: Mapping[str, tuple[Trunk, Sequence[Step]]] = MappingProxyType({}),
        held: Sequence[Head] = (),
    ) -> None:
        self.known = known = Knowledge(settings, plan, grid)
        self.modules: dict[str, FollowedModule] = {}
        self.rounds = Rounds.of(known.schedule)
        self._choice = PathChoice(known)
        self._joining = Joining(known, self._choice, self._module)
        self._copies = Copies(known, self.modules)
        self._phase = _MemberPhase.PAUSED if settings.trains else _MemberPhase.SERVING
        self._pause_reason = ""
        self._moving: Decision | None = None
        """The path to which it moves at its next turn."""
        self._part_s = 0.0
        self._leave_s: float | None = None
        self._waits_since_s = -1.0
        self._rounds_on_path = 0
        self._thinks = False
        """Whether it waits for a new view of the swarm, to see whether another path needs this peer
        more."""
        self._is_told_slow = False
        self._has_successor = self._to_successor = self._hands_over = False
        self._error, self._is_machine = "", False
        self.rounds_done = 0
        """Rounds that ended here."""
        for head in held:
            self._module(head.module).restore(head, *chains[head.module])

    def _module(self, module: str) -> FollowedModule:
        if module not in self.modules:
            self.modules[module] = FollowedModule(self.known, module)
        return self.modules[module]

    def _trained(self) -> list[FollowedModule]:
        path = self.known.path
        if path is None:
            return []
        return [self._module(module) for module in self.known.grid.modules_of_path(path)]

    def handle(self, event: e.Event, now_s: float) -> list[a.Action]:
        """Take note of an event at `now_s`, swarm time, and return what is to be done, in order;
        after `Left` nothing is."""
        known = self.known
        known.now_s = now_s
        if self._phase is _MemberPhase.GONE:
            return []
        match event:
            case e.Turn():
                self._on_turn(event)
            case e.Viewed():
                self._on_view(event)
            case e.Meanwhile():
                self._on_time()
            case e.Stepped():
                self.rounds.steps_in_round += 1
            case e.PathReady():
                self._joining.on_path(event.path)
            case e.Scored():
                self._joining.on_scored(event)
            case e.LeaveWanted():
                self._part_or_leave()
            case e.PauseWanted():
                self._pause_or_resume(event.reason)
            case e.SuccessorReady():
                self._has_successor = True
            case e.Told():
                self._on_told(event)
            case e.Failed(action=a.Look()):
                self._thinks = False
                if self._joining.is_claiming:
                    self._choice.look()
            case e.Failed(action=a.FetchPath(path=path)):
                self._joining.on_path(path, event.reason)
            case _:
                self._on_module(event)
        wanted = (known.path, self._joining.path)
        modules = sorted(self.modules.items())
        self._choice.watch(wanted, [m for m, of in modules if of.head or of.round.is_open])
        actions, known.actions = known.actions, []
        return actions

    def _on_module(self, event: e.Event) -> None:
        """Hand on what concerns one module."""
        about = event.action if isinstance(event, e.Failed) else event
        followed = self.modules.get(getattr(about, "module", ""))
        if followed is not None:
            followed.handle(event)

    def _on_told(self, event: e.Told) -> None:
        if event.module not in self.modules:
            mailboxes = sum(s.role is Role.ONLY_MAILBOX for s in self.modules.values())
            if mailboxes >= _MAX_MAILBOXES or not self.known.grid.has_module(event.module):
                return
        followed = self._module(event.module)
        followed.hear_steps(event.steps, event.peer)
        followed.hear_rows(event.rows, event.peer)
        if event.keep:
            self._copies.asked_to_keep(followed)

    # -- the swarm was read

    def _on_view(self, event: e.Viewed) -> None:
        self._choice.learn(event.view)
        if event.is_answer and self._joining.is_claiming:
            self._joining.on_view()
        elif event.is_answer and self._thinks:
            self._move_if_better()
        if self._phase in (_MemberPhase.LEAVING, _MemberPhase.GONE):
            return
        for followed in list(self.modules.values()):
            followed.on_view()
        self._copies.on_view()
        longest_s = _SILENT_ROUNDS * self.known.schedule.duration_s
        for module, followed in list(self.modules.items()):
            is_idle = followed.role is Role.ONLY_MAILBOX
            if is_idle and self.known.now_s - followed.last_told_s > longest_s:
                del self.modules[module]

    def _on_time(self) -> None:
        for followed in list(self.modules.values()):
            followed.on_time()

    # -- one turn

    def _on_turn(self, turn: e.Turn) -> None:
        """Say what the shell does now: take an inner step, wait, or leave."""
        self._on_time()
        if self._phase is _MemberPhase.PAUSED and not self._pause_reason:
            self._phase = _MemberPhase.JOINING
            self._joining.begin()
        if self._phase is _MemberPhase.JOINING:
            self._turn_joining()
        self._act(turn)

    def _act(self, turn: e.Turn) -> None:
        match self._phase:
            case _MemberPhase.TRAINING:
                self._turn_training(turn)
            case _MemberPhase.PARTING:
                self._turn_parting()
            case _MemberPhase.LEAVING:
                self._turn_leaving()
            case _MemberPhase.PAUSED if self._has_successor and self.known.settings.follows:
                self._leave(to_successor=True)
                self._turn_leaving()
            case _MemberPhase.PAUSED | _MemberPhase.SERVING:
                self.known.do(a.Wait("", 0.0))

    def _turn_joining(self) -> None:
        joining, path, before = self._joining, self.known.path, self._trained()
        joining.on_turn()
        if joining.has_begun:
            for followed in before:
                if followed not in self._trained():
                    followed.follow(Role.KEEPER)
            self._train()
        elif joining.failure and path is None:
            self._error = joining.failure
            self._leave(to_successor=False)
        elif joining.failure and path is not None:
            # The model of the present path is untouched.
            self.known.do(a.Warn(f"stays on path {path}: {joining.failure}"))
            joining.take_back(path)
            self._train()

    def _train(self) -> None:
        self._phase, self._rounds_on_path = _MemberPhase.TRAINING, 0
        newest = max((s.link.round_index for s in self._trained()), default=-1)
        self.rounds.enter(self.known.now_s, newest + 1)
        self._joining.train()
        self.known.do(a.Begun(self.rounds.present_round))

    def _turn_training(self, turn: e.Turn) -> None:
        """Begin what is due, end what is over, then step or wait."""
        known, rounds = self.known, self.rounds
        if self._moving is not None:
            self._part()  # Now that no step is under way: what was trained is contributed at once.
            self._turn_parting()
            return
        if self._thinks and known.schedule.is_counted:
            # Counted rounds may be shorter than the time between two views.
            known.do(a.Wait("a new view of the swarm", 0.0))
            return
        if known.schedule.is_counted and known.now_s < rounds.opens_s:
            have, need = known.view.trained_in_sight(known.grid, known.path or 0)
            if have == need:
                rounds.open(known.now_s)
        self._tell_if_slow(turn.step_s)
        for boundary in rounds.due(known.now_s, turn.step_s):
            for followed in self._trained():
                if followed.level == boundary.level:
                    followed.publishing.carry_on("no step came")
                    rounds.over_before(boundary)
                    followed.publishing.begin(boundary.round_index, boundary.time_s)
        self._close_rounds()
        if rounds.has_ended():
            self._end_round()
            self._act(turn)
        elif rounds.may_step(known.now_s):
            self._waits_since_s = -1.0
            rank = None
            if rounds.steps_in_round == 0:
                # This is done once a round, when claims have settled: replicas of a path draw
                # different batches.
                rank = lead_rank(known.view, known.me, known.path or 0)
            known.do(a.TakeStep(rank))
        else:
            self._wait_to_step()

    def _tell_if_slow(self, step_s: float) -> None:
        schedule = self.known.schedule
        if schedule.is_counted or self._is_told_slow or step_s <= schedule.duration_s / 2:
            return
        self._is_told_slow = True
        self.known.do(
            a.Warn(
                f"an inner step takes {step_s:.0f} s here and a round {schedule.duration_s:.0f} s, "
                "so much of this machine's work comes too late to count; end other programs, or "
                "join a run with longer rounds"
            )
        )

    def _close_rounds(self) -> None:
        """Close the levels whose step is here, and with fixed steps those whose limit has
        passed."""
        now_s, schedule = self.known.now_s, self.known.schedule
        for followed in self._trained():
            if schedule.is_counted and now_s > followed.round.boundary_s + schedule.duration_s:
                followed.publishing.carry_on("no step came within the limit")
            if not followed.round.is_open:
                self.rounds.over(followed.level)

    def _wait_to_step(self) -> None:
        """Wait for the run to start, or, with fixed steps, for other peers."""
        known, opens_s = self.known, self.rounds.opens_s
        now_s, start_s = known.now_s, known.schedule.start_s
        if self._waits_since_s < 0:
            self._waits_since_s = now_s
        if now_s < start_s:
            known.do(a.Wait("the run to start", start_s - now_s))
        elif now_s - self._waits_since_s < _SHORT_WAIT_S:
            known.do(a.Wait("", 0.0))
        elif now_s < opens_s:
            have, need = known.view.trained_in_sight(known.grid, known.path or 0)
            known.do(a.Wait(f"a trainer for every path: have {have} of {need}", opens_s - now_s))
        else:
            waiting = [followed for followed in self._trained() if followed.round.is_open]
            until_s = max((s.round.boundary_s for s in waiting), default=now_s)
            what = ", ".join(followed.waits_for() for followed in waiting)
            known.do(a.Wait(what, max(0.0, until_s + known.schedule.duration_s - now_s)))

    # -- the end of a round

    def _end_round(self) -> None:
        """Go on to the next round, leave, or think about moving."""
        known, ended = self.known, self.rounds.present_round
        self.rounds_done += 1
        self._rounds_on_path += 1
        self.rounds.next_round()
        known.do(a.EndRound(ended, self.rounds.present_round))
        most, alone = known.settings.max_rounds, [s.module for s in self._trained() if s.is_alone]
        if alone:
            self._is_machine = True
            self._error = (
                f"this machine computes {', '.join(alone)} otherwise than most others, twice with "
                f"the same result; test its memory, undo overclocking, and start again"
            )
            self._leave(to_successor=False)
        elif most and self.rounds_done >= most:
            self._leave(to_successor=False)
        elif self._has_successor and known.settings.follows:
            self._leave(to_successor=True)
        elif known.settings.own_texts:
            self._moving = self._choice.next_own_path(self._rounds_on_path)
        elif known.settings.pinned is None:
            self._think_of_moving()

    def _think_of_moving(self) -> None:
        """See whether another path needs this peer more, after a look at more of them."""
        is_counted, choice = self.known.schedule.is_counted, self._choice
        if choice.is_whole and not is_counted:
            self._move_if_better()
        elif is_counted or choice.is_worth_a_look(self._rounds_on_path):
            self._thinks = True
            choice.look(anew=True)

    def _move_if_better(self) -> None:
        self._thinks = False
        self._moving = self._choice.better_path(self._rounds_on_path)

    # -- parting: for another path, a pause, or for good

    def _part(self) -> None:
        """Contribute what was trained so far to the round that is under way, before it is gone."""
        self._phase, self._part_s = _MemberPhase.PARTING, self.known.now_s
        self._thinks = False
        if self.known.schedule.is_counted:
            return
        longest_s = (1.0 - _LEAST_SHARE) * self.known.schedule.duration_s
        for followed in self._trained():
            boundary = self.rounds.next_boundary(followed.level)
            if not followed.round.is_open and boundary.time_s - self.known.now_s <= longest_s:
                self.rounds.take_early(boundary)
                followed.publishing.begin(boundary.round_index, boundary.time_s)

    def _turn_parting(self) -> None:
        left_s = self._part_s + _LAST_ROUND_BUDGET_S - self.known.now_s
        if 0 < left_s <= _LAST_ROUND_BUDGET_S and any(s.round.is_open for s in self._trained()):
            self.known.do(a.Wait("others to fetch what was trained in this round", left_s))
            return
        if self._leave_s is not None:
            self._leave(to_successor=False)
            self._turn_leaving()
        elif self._moving is not None:
            self.known.do(a.Move(self._moving.path, self._moving.reason))
            decision, self._moving = self._moving, None
            self._phase = _MemberPhase.JOINING
            self._joining.begin(decision)
            self._turn_joining()
        else:
            self._pause()
            self.known.do(a.Wait("", 0.0))

    def _pause(self) -> None:
        for followed in self._trained():
            followed.follow(Role.KEEPER)
        self.known.do(a.Pause(self._pause_reason))
        self.known.path = None
        self._phase = _MemberPhase.PAUSED
        self._joining.pause(self._pause_reason)

    def _pause_or_resume(self, reason: str) -> None:
        """Train nothing as long as there is a reason."""
        was_wanted, self._pause_reason = bool(self._pause_reason), reason
        if not reason or was_wanted or self._leave_s is not None:
            return
        if self._phase in (_MemberPhase.TRAINING, _MemberPhase.PARTING):
            self._moving = None
            self._part()
        elif self._phase in (_MemberPhase.JOINING, _MemberPhase.PAUSED):
            self._joining.stop()
            self._pause()

    def _part_or_leave(self) -> None:
        """Leave, after a last contribution: all in ten seconds (promise 10)."""
        if self._leave_s is not None:
            return
        self._leave_s, self._moving = self.known.now_s, None
        if self._phase in (_MemberPhase.TRAINING, _MemberPhase.PARTING):
            self._part()
        else:
            self._leave(to_successor=False)

    def _leave(self, *, to_successor: bool) -> None:
        """Withdraw the claim, save, hand over."""
        self._phase, self._to_successor = _MemberPhase.LEAVING, to_successor
        if self._leave_s is None:
            self._leave_s = self.known.now_s
        self._joining.leave()
        self.known.do(a.SaveAll())
        self._hands_over = not to_successor and self._copies.hand_over()

    def _turn_leaving(self) -> None:
        left_s = (self._leave_s or 0.0) + _LEAVE_BUDGET_S - self.known.now_s
        if self._hands_over and 0 < left_s <= _LEAVE_BUDGET_S:
            self.known.do(a.Wait("others to take over the newest states", left_s))
            return
        self._phase = _MemberPhase.GONE
        self.known.do(a.Left(self._to_successor, self._error, self._is_machine))
