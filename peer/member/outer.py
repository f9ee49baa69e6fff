"""Outer rounds: snapshot, meet, average, step; commit or carry on (design 4.2, 4.4).

One round of each level is under way at most, beside the inner loop. A group commits when it is
more than half of those who count. Before a second attempt the others are asked what they hold: a
group that committed without this peer has its state already, and a second version beside it would
fork the module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from dipaco.dht.agreement import expected_group
from dipaco.dht.policy import seniority
from dipaco.dht.records import refresh_period_s

from .actions import (
    Ask,
    Average,
    Await,
    CarryOn,
    Commit,
    Discard,
    ForgetSnapshot,
    TakeOuterStep,
    TakeSnapshot,
    Warn,
)
from .adoption import Adoption
from .chains import Chains
from .events import Answered, Averaged, AverageFailed, OuterStepFailed, OuterStepped, SnapshotTaken
from .gathering import (
    ATTEMPTS,
    SHORTEST_MEETING_S,
    awaited,
    close_after_s,
    gathering_text,
    has_contributed,
    is_cut_off,
    is_last_signed,
    is_whole,
    latest_s,
    leading_order,
    longest_wait_s,
    may_find_out,
    out_of_sight,
    possible_peers,
    where_others_stand,
    who_counts,
    whose_turn,
    why_not_alone,
)
from .knowledge import Knowledge
from .quorum import PATIENCE_ROUNDS, is_majority
from .round_under_way import Absentees, CatchingUp, Culprits, Phase, RoundUnderWay
from .rounds import Boundary, RoundPosition

# With fixed steps: after this an attempt in which no group formed begins anew.
AGAIN_AFTER_S = 0.5
# How long a failed attempt waits for certificates before it goes on without them.
TRACING_S = 5.0


@dataclass
class OuterRounds:
    """The outer rounds of the path in training."""

    known: Knowledge
    position: RoundPosition
    adoption: Adoption
    chains: Chains
    is_leaving: bool = False
    took_s: dict[str, float] = field(default_factory=dict)
    """What the last commit of each level took from its boundary on."""
    _running: dict[str, RoundUnderWay] = field(default_factory=dict)
    # Rounds without a commit from the present anchor, and what that was at the last boundary.
    _in_vain: Counter[str] = field(default_factory=Counter)
    _stood_on: dict[str, str] = field(default_factory=dict)
    _culprits: Culprits = field(default_factory=Culprits)
    _absentees: Absentees = field(default_factory=Absentees)
    _catching_up: CatchingUp = field(default_factory=CatchingUp)

    @property
    def running(self) -> Mapping[str, int]:
        """Levels that have an outer round under way, and which round that is."""
        return {level: one.boundary.round_index for level, one in self._running.items()}

    def begin_path(self) -> None:
        """Forget the last path; what was under way for it is answered to nobody.

        In a module that both paths have, whoever claims and does not come has been waited for.
        """
        self._running.clear()
        for module in self._in_vain.keys() - self.known.anchors.keys():
            del self._in_vain[module]
        self._catching_up.clear()

    @property
    def _is_counted(self) -> bool:
        return self.known.schedule.fixed_steps > 0

    def on_turn(self, step_s: float) -> None:
        """Start the rounds whose boundaries have come, and go on."""
        self._catching_up.go_on(self.known, self.adoption, self.position)
        for boundary in self.position.due(self.known.now_s, step_s):
            self.start(boundary)
        self.go_on()

    def go_on(self) -> None:
        """Go on where a wait has ended."""
        for running in list(self._running.values()):
            self._on_time(running)

    def clock_went_back(self) -> None:
        """End the meetings that are far in the future now: the others are not there."""
        known, rounds = self.known, self.known.plan.rounds
        for running in list(self._running.values()):
            if self._is_counted:
                running.come_near(known.now_s, longest_wait_s(rounds))
            elif running.is_far(known.now_s + rounds.duration_s):
                if running.phase is Phase.MEETING:  # Who is in its group was not said yet.
                    running.add_members({known.me, *possible_peers(known, running.module)})
                self._end(running, "the clock was put back", in_vain=False)

    def on_view(self) -> None:
        """With fixed steps the view says whom a meeting still waits for."""
        for running in self._running.values():
            if running.phase is Phase.MEETING and self._is_counted:
                awaited = self._awaited(running)
                if awaited != running.awaited:
                    running.awaited = awaited
                    self.known.do(Await(running.module, awaited))

    def _on_time(self, running: RoundUnderWay) -> None:
        if self.known.steady_s < running.until_s:
            return
        running.until_s = math.inf
        if running.phase is Phase.PAUSING:
            self._meet(running)
        elif running.phase is Phase.TRACING:
            self._after_answers(running)

    # -- start

    def start(self, boundary: Boundary) -> None:
        """Copy the module of the boundary's level, unless there is nothing to be done."""
        known, level = self.known, boundary.level
        module = next(m for m in known.anchors if known.grid.level_of(m) == level)
        late_s = known.now_s - boundary.time_s
        if level in self._running:
            self._skip(module, boundary, "the round before had not ended")
        elif not self._is_counted and late_s > latest_s(known.plan.rounds):
            self._skip(module, boundary, f"came {late_s:.1f} s after the boundary")
        elif known.descent.contains(known.anchors[module], known.me, boundary.round_index):
            # Before it came to this path, or in an earlier life: work is named by peer and round.
            self._skip(module, boundary, "this peer had taken the step before its time")
        elif self._is_counted and known.anchors[module].last_round >= boundary.round_index:
            self._skip(module, boundary, "the others had taken this step")
        else:
            self._tell_missing_steps(boundary)
            if self._stood_on.get(module) != known.anchors[module].digest:
                self._stood_on[module] = known.anchors[module].digest
                self._in_vain[module] = 0
            self._running[level] = RoundUnderWay(module, boundary, known.anchors[module].digest)
            known.do(TakeSnapshot(module, boundary.round_index, boundary.time_s))

    def _tell_missing_steps(self, boundary: Boundary) -> None:
        missing = self.position.missing_steps(boundary.level)
        if missing > 0:
            what = f"{missing} inner steps were not done before the boundary of {boundary.level}"
            remedy = "give the run a longer duration_s or fewer inner_steps"
            self.known.do(Warn(f"round {boundary.round_index}: {what}; {remedy}"))

    def on_snapshot(self, event: SnapshotTaken) -> None:
        """The copy is there: average it, unless it is not fit for that."""
        running = self._of(event.module, event.round_index, Phase.COPYING)
        if running is None:
            return
        known, round_index = self.known, event.round_index
        ledger, anchor = self.adoption.ledgers[event.module], known.anchors[event.module]
        others = where_others_stand(known, event.module)
        known.do(*ledger.cut(round_index, anchor, known.descent, others))
        if not event.is_finite:
            ledger.discard()
            text = f"{event.module} has become non-finite: back to its anchor"
            known.do(Warn(text), Discard(event.module))
            self._end(running, "own outer gradient is not finite")
        elif event.tokens == 0:
            self._end(running, "nothing was trained since the last commit")
        elif is_cut_off(known, running.module):
            self._end(running, "isolated: none of the peers that were here can be reached")
        else:
            self._meet(running)

    # -- meeting

    def _meet(self, running: RoundUnderWay) -> None:
        """Begin the present attempt, or what comes after it when there is no time left."""
        known, module, boundary = self.known, running.module, running.boundary
        possible = possible_peers(known, module) | {known.me}
        expected = expected_group(known.view, known.grid, module) | {known.me}
        running.expected = len(self._counting(running) | expected)
        # With fixed steps those who are about to join ask before they step.
        turn = whose_turn(known, module, boundary.round_index)
        if turn not in (None, known.me) or (turn and self.adoption.is_fetching(module)):
            self._end(running, "none of its trainers can be called: one a round", in_vain=False)
            return
        if turn or (expected if self._is_counted else possible) == {known.me}:
            self._step_alone(running)
            return
        if self._is_counted:
            self._meet_counted(running, possible)
            return
        close_s = boundary.time_s + close_after_s(self.known.plan.rounds, running.attempt)
        if close_s - known.now_s < SHORTEST_MEETING_S:
            self._next_attempt(running)
            return
        share = 0.5 if running.attempt == 0 else 1.0
        end_s = boundary.time_s + share * known.plan.rounds.window_s
        self._average(running, possible, close_s, max(end_s, close_s + 1.0))

    def _meet_counted(self, running: RoundUnderWay, possible: frozenset[str]) -> None:
        """Meet all that this round waits for, or those who come by its limit."""
        known, rounds = self.known, self.known.plan.rounds
        close_s = running.boundary.meet_until_s
        if running.attempt > 0:
            close_s = known.now_s + max(rounds.window_s / 2, 2 * rounds.matchmaking_s)
        longest_s = longest_wait_s(rounds)
        close_s = min(close_s, known.now_s + longest_s)
        running.awaited = self._awaited(running)
        if running.awaited is None:
            # The others are in later rounds, or hold a newer state already.
            running.failure = "the others go on without this peer"
            self._ask(running, possible)
            return
        self._average(running, possible, close_s, known.now_s + longest_s + rounds.window_s)

    def _awaited(self, running: RoundUnderWay) -> frozenset[str] | None:
        """Return whom a meeting with fixed steps waits for; None for nobody any more."""
        if self.is_leaving:
            return None
        module, round_index = running.module, running.boundary.round_index
        return awaited(
            self.known,
            module,
            round_index,
            culprits=running.culprits,
            absent=self._absentees.unawaited(module, round_index),
            alive=running.alive,
        )

    def _average(
        self, running: RoundUnderWay, possible: frozenset[str], close_s: float, end_s: float
    ) -> None:
        known = self.known
        # Where lines are slow, one attempt that ends is better than two that do not.
        window_end_s = running.boundary.time_s + known.plan.rounds.window_s
        latest_s = end_s if self._is_counted else max(end_s, window_end_s)
        candidates = leading_order(known, possible)
        running.phase, running.close_s = Phase.MEETING, close_s
        known.do(
            Average(
                running.module,
                running.boundary.round_index,
                running.attempt,
                known.anchors[running.module].digest,
                candidates,
                max(known.now_s, running.boundary.time_s),
                close_s,
                end_s,
                self._culprits.excluded(running.boundary.round_index, running.culprits),
                running.awaited,
                tuple(peer for peer in candidates if not known.can_lead(peer)),
                latest_s,
            )
        )

    # -- what came of it

    def on_averaged(self, event: Averaged) -> None:
        """The group holds an average: step, if the group may."""
        running = self._of(event.module, event.round_index, Phase.MEETING)
        if running is None or event.attempt != running.attempt:
            return
        self._culprits.blame(event.culprits, running.boundary.round_index, is_proven=True)
        group = frozenset(row.peer for row in event.table)
        self.known.meet(group)
        round_index = running.boundary.round_index
        self._absentees.note(running.module, round_index, running.awaited or (), group)
        counting = self._counting(running)
        running.expected = len(counting | group)
        if not is_majority(group, counting):
            running.add_members(group)
            have, need = f"{len(group)} of {running.expected} peers", running.expected // 2 + 1
            self._end(running, f"have {have} of {event.module}, need {need}")
            return
        running.group = group
        self._take_step(running, alone=False)

    def on_average_failed(self, event: AverageFailed) -> None:
        """Nothing was averaged here; ask the others whether it was there."""
        running = self._of(event.module, event.round_index, Phase.MEETING)
        if running is None or event.attempt != running.attempt:
            return
        known = self.known
        if self._is_counted and not event.members and self._may_meet_again(running):
            self._pause(running, AGAIN_AFTER_S)
            return
        round_index = running.boundary.round_index
        came = {*event.members, known.me}
        self._absentees.note(running.module, round_index, running.awaited or (), came)
        running.failure = event.reason
        running.add_members(event.members)
        culprits = set(event.culprits) - {known.me}
        running.culprits |= culprits
        self._culprits.blame(culprits, round_index, is_proven=event.is_proven)
        if self.is_leaving:
            self._end(running, "this peer leaves")
            return
        self._ask(running, possible_peers(known, running.module) | set(event.members))

    def _ask(self, running: RoundUnderWay, peers: frozenset[str]) -> None:
        running.phase, running.asked = Phase.ASKING, peers - {self.known.me}
        asked = tuple(sorted(running.asked))
        self.known.do(Ask(running.module, running.boundary.round_index, asked))

    def _may_meet_again(self, running: RoundUnderWay) -> bool:
        still_s = running.close_s - self.known.now_s
        return still_s >= SHORTEST_MEETING_S and self._awaited(running) is not None

    def on_answered(self, event: Answered) -> None:
        """The others said what they hold: where do states come from that are not known here?"""
        known = self.known
        for peer, state in sorted(event.holdings.items()):
            if state is not None and state.version > 0:
                known.hear(state, peer)
        known.meet(event.holdings)
        running = self._of(event.module, event.round_index, Phase.ASKING)
        if running is None:
            return
        silent = running.asked - frozenset(event.holdings)
        if known.doubts.called_in_vain(
            peer for peer in silent if not known.doubts.has_shown_itself(peer)
        ):
            known.forget_beliefs()
        running.alive = frozenset(event.holdings)
        anchor = known.anchors[event.module]
        states = [s for s in event.holdings.values() if s is not None and s.digest != anchor.digest]
        running.phase = Phase.TRACING
        running.until_s = known.steady_s + TRACING_S
        if not self.chains.learn(states, anchor):
            self._after_answers(running)

    def on_chain(self, module: str) -> None:
        """Certificates of a module came, or there are none."""
        traced = [r for r in self._running.values() if r.phase is Phase.TRACING]
        for running in traced:
            if running.module == module and not self.chains.is_wanted(module):
                self._after_answers(running)

    def _after_answers(self, running: RoundUnderWay) -> None:
        """Take what the others committed, or try again with those that are alive."""
        known, module = self.known, running.module
        running.until_s = math.inf
        if self.adoption.catch_up(module, None if self._is_counted else self._counting(running)):
            if self._is_counted:
                self._catching_up.add(self._running.pop(running.boundary.level))
                self._release(running)
                self._say_carry_on(running, "the group committed without this peer")
            else:
                self._end(running, "the group committed without this peer", in_vain=False)
            return
        claimed = expected_group(known.view, known.grid, module)
        expected = (claimed | out_of_sight(known, module)) - {known.me}
        alive = running.alive or frozenset()
        if self._is_counted and alive & expected and self._may_find_out(running):
            self._pause(running, max(AGAIN_AFTER_S, refresh_period_s(known.plan.rounds) / 4))
            return
        if not alive & expected or (self._is_counted and not running.had_members):
            running.attempt = ATTEMPTS
        self._next_attempt(running)

    def _may_find_out(self, running: RoundUnderWay) -> bool:
        if running.had_members or self._in_vain[running.module]:
            return False
        return may_find_out(self.known, running, self._awaited(running))

    def _pause(self, running: RoundUnderWay, pause_s: float) -> None:
        running.phase, running.until_s = Phase.PAUSING, self.known.steady_s + pause_s

    def _next_attempt(self, running: RoundUnderWay) -> None:
        running.attempt += 1
        if running.attempt < ATTEMPTS:
            self._meet(running)
        elif self._may_step_alone(running):
            self._step_alone(running)
        else:
            self._end(running, running.failure)

    def _may_step_alone(self, running: RoundUnderWay) -> bool:
        """Tell whether a peer that met nobody may commit its own work: nobody else counts.

        Of peers that live and do not meet only the one with the oldest claim may, or each would
        make its own version; after some rounds in vain anybody may.
        """
        known = self.known
        if not is_majority({known.me}, self._counting(running)):
            return False
        alive = running.alive or frozenset()
        if has_contributed(known, running.module, running.boundary.round_index):
            # Newcomers count this peer, and wait for it.
            alive &= self._counting(running)
        oldest = min((*alive, known.me), key=lambda p: seniority(known.view, known.me, p))
        return oldest == known.me or self._in_vain[running.module] >= PATIENCE_ROUNDS

    def _counting(self, running: RoundUnderWay) -> frozenset[str]:
        module, round_index = running.module, running.boundary.round_index
        return who_counts(self.known, module, round_index, self._in_vain[module], running.alive)

    # -- the step

    def _step_alone(self, running: RoundUnderWay) -> None:
        running.group = frozenset({self.known.me})
        reason = why_not_alone(self.known, self._counting(running), running.expected)
        if reason:
            self._end(running, reason)
        else:
            self._take_step(running, alone=True)

    def _take_step(self, running: RoundUnderWay, *, alone: bool) -> None:
        running.phase = Phase.STEPPING
        self.known.do(TakeOuterStep(running.module, running.boundary.round_index, alone))

    def on_stepped(self, event: OuterStepped) -> None:
        """Commit."""
        round_index = event.certificate.statement.round_index
        running = self._of(event.module, round_index, Phase.STEPPING)
        if running is None:
            return
        known, module, state = self.known, event.module, event.reference
        known.take_certificates((event.certificate,))
        ledger = self.adoption.ledgers[module]
        earlier = [part for part in ledger.parts if part < round_index]
        ledger.committed(
            round_index,
            running.group,
            is_whole=is_whole(known, module, running.group, max(earlier, default=round_index)),
            is_last_signed=is_last_signed(known, module),
        )
        save, attempt = known.is_save_due(round_index), running.attempt
        known.do(Commit(module, state, round_index, attempt, running.expected, save=save))
        known.anchors[module] = state
        known.serve(state)
        self._in_vain[module] = 0
        self.took_s[running.boundary.level] = known.now_s - running.boundary.time_s
        del self._running[running.boundary.level]
        self.position.closed(running.boundary)

    def on_step_failed(self, event: OuterStepFailed) -> None:
        """The average was no good: nothing changes."""
        running = self._of(event.module, event.round_index, Phase.STEPPING)
        if running is not None:
            if running.group != {self.known.me}:
                running.add_members(running.group)
            self._end(running, event.reason)

    def _of(self, module: str, round_index: int, phase: Phase) -> RoundUnderWay | None:
        """Return the round that an answer names, if it is in a phase: late ones are nobody's."""
        for running in self._running.values():
            if (running.module, running.boundary.round_index) == (module, round_index):
                return running if running.phase is phase else None
        return None

    # -- without a commit

    def _release(self, running: RoundUnderWay) -> None:
        """Let go of the copy. Where a group had formed, others may have merged what is in it."""
        module, round_index = running.module, running.boundary.round_index
        ledger = self.adoption.ledgers[module]
        if running.had_members:
            ledger.came_to_nothing(round_index, running.members)
        else:
            ledger.uncut(round_index)
            self.position.came_to_nothing(running.boundary)
        self.known.do(ForgetSnapshot(module, round_index, keeps_part=running.had_members))

    def _end(self, running: RoundUnderWay, reason: str, *, in_vain: bool = True) -> None:
        """Carry on: the work stays in `anchor - local`."""
        self._running.pop(running.boundary.level, None)
        self._release(running)
        self._in_vain[running.module] += in_vain
        self._say_carry_on(running, reason)
        self.position.closed(running.boundary)

    def _skip(self, module: str, boundary: Boundary, reason: str) -> None:
        self.known.do(CarryOn(module, boundary.round_index, reason, 0))
        self.position.came_to_nothing(boundary)
        self.position.closed(boundary)

    def _say_carry_on(self, running: RoundUnderWay, reason: str) -> None:
        round_index = running.boundary.round_index
        self.known.do(CarryOn(running.module, round_index, reason, running.expected))

    def waiting_for(self, together: Mapping[str, int]) -> tuple[str, float]:
        """With fixed steps: what the next inner step waits for, and until when at most.

        `together` are the members that a group of a level has here, as it forms.
        """
        if not self._running:
            return f"the state that others committed of {self._catching_up.levels}", 0.0
        texts, until_s = [], 0.0
        for level, running in sorted(self._running.items()):
            round_index, count = running.boundary.round_index, together.get(level, 0)
            need = gathering_text(self.known, running.module, round_index, count)
            texts.append(f"{level}: {need}")
            until_s = max(until_s, running.boundary.meet_until_s)
        return f"the outer step of {', '.join(texts)}", until_s
