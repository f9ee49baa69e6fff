"""One outer round of one module: gather a group, average, step; commit or carry on (design 4.4).

Runs on a worker thread while the inner loop goes on. It changes nothing: it returns what should
happen, and the session applies that between two inner steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from dipaco.dht.agreement import enough_for_commit
from dipaco.dht.view import greatest_contribution
from dipaco.modules.errors import IntegrityError
from dipaco.modules.outer import AveragingRule, Contribution, outer_step
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState, StateReference

from .averaging.averager import AveragingFailed, AveragingOutcome, ExactAverager
from .averaging.group import group_bits
from .member.rounds import Boundary
from .trainer import Snapshot

logger = logging.getLogger("dipaco.peer.outer_round")

ATTEMPTS = 2
# Rounds without a commit after which a peer no longer waits for others that do not come.
PATIENCE_ROUNDS = 2
# A group that closes sooner than this from now cannot form any more.
SHORTEST_MATCHMAKING_S = 0.3
# With fixed steps: the longest that a group waits for its members, whatever `duration_s` is. The
# DHT keeps a declaration for an hour.
LONGEST_WAIT_S = 3000.0
# With fixed steps: after this an attempt in which no group formed begins anew.
AGAIN_AFTER_S = 0.5


@dataclass(frozen=True)
class Committed:
    """The group's result: everybody in it holds the same state."""

    state: ModuleState
    table: tuple[Contribution, ...]
    attempt: int
    expected: int
    seconds: float


@dataclass(frozen=True)
class CommittedElsewhere:
    """This peer failed, but others of its group committed: fetch their state."""

    state: StateReference
    holders: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class CarriedOn:
    """No commit; the work stays in `anchor - local`."""

    reason: str
    expected: int


@dataclass(frozen=True)
class Answers:
    """What the other peers of a group said when they were asked after a failure."""

    alive: frozenset[str] = frozenset()
    """Those that answered at all."""
    committed: CommittedElsewhere | None = None
    """The heaviest state that they hold, if it is heavier than the anchor."""


OuterResult = Committed | CommittedElsewhere | CarriedOn
_Attempt = tuple[AveragingOutcome | None, AveragingFailed | None]


@dataclass(frozen=True)
class OuterRound:
    """Everything that one outer round needs, so that it can run on another thread."""

    plan: RunPlan
    me: str
    module_index: int
    rule: AveragingRule
    averager: ExactAverager
    expected_group: Callable[[str], frozenset[str]]
    """Peers that train a path through the module, from the newest view."""
    possible_group: Callable[[str], frozenset[str]]
    """Those and the peers that are about to: they may have begun since the view was read."""
    ask_others: Callable[[str, ModuleState, frozenset[str]], Answers]
    """Ask the given peers what they hold; called when a group failed."""
    seniority: Callable[[str], tuple[bool, float, str]]
    """Orders peers: those that train before those that join, then the oldest claim first."""
    rounds_in_vain: int
    """Rounds of this module in a row that ended without a commit anywhere."""
    stopping: Callable[[], bool]
    """Whether this peer leaves: then nothing is tried again."""
    local_time: Callable[[float], float]
    """Swarm time to this machine's clock."""
    awaited_group: Callable[[str], frozenset[str]] = lambda _: frozenset()
    """With fixed steps: those of the expected group that have not left this round behind."""
    is_overtaken: Callable[[ModuleState], bool] = lambda _: False
    """With fixed steps: whether most others are known to hold a heavier state than this."""

    def run(self, snapshot: Snapshot, boundary: Boundary) -> OuterResult:
        """Run the attempts that fit into the commit window and return what should happen.

        Before a second attempt, and before a step alone, the others are asked what they hold: a
        group that committed without this peer has its state already, and a second version beside
        it would fork the module. So a failure here may still have been a commit there.

        With fixed steps a group waits for its members (`_meet`), and a peer whose expected group
        is only itself does not wait for those who are about to join: they ask before they step.
        """
        started = time.monotonic()
        module = snapshot.module
        mine = Contribution(path=snapshot.path, peer=self.me, tokens=snapshot.tokens)
        gradient = snapshot.outer_gradient()
        expected = self.expected_group(module) | {self.me}
        possible = self.possible_group(module) | expected
        if len(expected if self._counted else possible) == 1:
            return self._step(snapshot, self._alone(gradient, mine), 0, 1, started)
        failure: AveragingFailed | None = None
        answers = Answers()
        for attempt in range(ATTEMPTS):
            culprits = failure.culprits if failure is not None else ()
            if self._counted:
                alive = None if failure is None else answers.alive
                outcome, failure = self._meet(
                    snapshot, gradient, mine, boundary, attempt, alive, culprits
                )
            else:
                close_s = self.local_time(boundary.time_s + self._close_after_s(attempt))
                if close_s - time.time() < SHORTEST_MATCHMAKING_S:
                    continue
                size = len(possible) if failure is None else 1 + len(answers.alive)
                outcome, failure = self._attempt(
                    snapshot, gradient, mine, boundary, attempt, close_s, size, culprits
                )
            expected = self.expected_group(module) | {self.me}
            if outcome is not None:
                if not enough_for_commit(len(outcome.table), len(expected)):
                    return CarriedOn(
                        f"have {len(outcome.table)} of {len(expected)} peers of {module}, "
                        "need at least half",
                        len(expected),
                    )
                return self._step(snapshot, outcome, attempt, len(expected), started)
            if self.stopping():
                return CarriedOn("this peer leaves", len(expected))
            others = (self.possible_group(module) | expected) - {self.me}
            answers = self.ask_others(module, snapshot.anchor, others)
            if answers.committed is not None:
                return answers.committed
            if not answers.alive & expected:
                break
            if self._counted and failure is not None and not failure.peers_seen:
                break  # The first attempt has waited for all of them.
        if failure is None:
            return CarriedOn("the commit window had passed", len(expected))
        if enough_for_commit(1, len(expected)) and self._may_step_alone(answers):
            outcome = self._alone(gradient, mine)
            return self._step(snapshot, outcome, ATTEMPTS, len(expected), started)
        return CarriedOn(str(failure), len(expected))

    def _may_step_alone(self, answers: Answers) -> bool:
        """Tell whether a peer that met nobody may commit its own work.

        It may when the others are gone. Of peers that live and still do not meet, only the one
        with the oldest claim may, or each would make its own version; a newer one may not even be
        taking part yet. After some rounds without a commit anybody may, because the oldest
        evidently does not train.
        """
        oldest = min((*answers.alive, self.me), key=self.seniority)
        return oldest == self.me or self.rounds_in_vain >= PATIENCE_ROUNDS

    def _close_after_s(self, attempt: int) -> float:
        """Return when after the boundary an attempt's group closes: the same for every peer."""
        rounds = self.plan.rounds
        return (
            rounds.matchmaking_s
            if attempt == 0
            else max(rounds.window_s / 2, 2 * rounds.matchmaking_s)
        )

    def _attempt(
        self,
        snapshot: Snapshot,
        gradient: torch.Tensor,
        mine: Contribution,
        boundary: Boundary,
        attempt: int,
        close_s: float,
        expected_peers: int,
        culprits: Collection[str],
    ) -> _Attempt:
        """Average once with the group that forms at the boundary."""
        rounds = self.plan.rounds
        end_s = self.local_time(
            boundary.time_s + (rounds.window_s / 2 if attempt == 0 else rounds.window_s)
        )
        return self._average(
            snapshot,
            gradient,
            mine,
            boundary,
            attempt,
            scheduled_time=close_s,
            timeout_s=max(end_s - time.time(), close_s - time.time() + 1.0),
            expected_peers=max(2, expected_peers),
            exclude=culprits,
        )

    def _meet(
        self,
        snapshot: Snapshot,
        gradient: torch.Tensor,
        mine: Contribution,
        boundary: Boundary,
        attempt: int,
        alive: frozenset[str] | None,
        culprits: Collection[str],
    ) -> _Attempt:
        """Average once with all that this round waits for, or with those who came by its limit.

        The view says whom it waits for, again and again: a claim that has expired or goes on to a
        later round is not waited for. Of the second attempt's group only those that are `alive`.
        As long as no group formed, the same attempt begins anew: the others are in it too.
        """
        rounds = self.plan.rounds
        close_s = self.local_time(boundary.meet_until_s)
        if attempt > 0:
            close_s = time.time() + max(rounds.window_s / 2, 2 * rounds.matchmaking_s)
        longest_wait_s = min(
            LONGEST_WAIT_S, rounds.duration_s + rounds.window_s / 2 + rounds.matchmaking_s
        )
        close_s = min(close_s, time.time() + longest_wait_s)

        def awaited() -> frozenset[str] | None:
            others = self.awaited_group(snapshot.module) - {self.me, *culprits}
            if alive is not None:
                others &= alive
            if not others or self.stopping() or self.is_overtaken(snapshot.anchor):
                return None
            return others | {self.me}

        while True:
            outcome, failure = self._average(
                snapshot,
                gradient,
                mine,
                boundary,
                attempt,
                scheduled_time=close_s,
                timeout_s=longest_wait_s + rounds.window_s,
                awaited=awaited,
                longest_wait_s=longest_wait_s,
                exclude=culprits,
            )
            if failure is None or failure.peers_seen or awaited() is None:
                return outcome, failure
            if close_s - time.time() < SHORTEST_MATCHMAKING_S:
                return outcome, failure
            time.sleep(AGAIN_AFTER_S)

    def _average(
        self,
        snapshot: Snapshot,
        gradient: torch.Tensor,
        mine: Contribution,
        boundary: Boundary,
        attempt: int,
        **meeting: Any,
    ) -> _Attempt:
        """Return the averager's outcome or failure; `meeting` says how its group forms."""
        digest = snapshot.anchor.digest
        try:
            outcome = self.averager.average(
                gradient,
                group_bits=group_bits(self.module_index, snapshot.round_index, attempt, digest),
                contribution=mine,
                module=snapshot.module,
                round_index=snapshot.round_index,
                anchor_digest=digest,
                greatest_tokens=greatest_contribution(
                    self.plan, boundary.time_s, snapshot.round_index
                ),
                **meeting,
            )
        except AveragingFailed as failure:
            logger.debug("%s attempt %d: %s", snapshot.module, attempt, failure)
            return None, failure
        return outcome, None

    @property
    def _counted(self) -> bool:
        return self.plan.rounds.inner_steps > 0

    def _alone(self, gradient: torch.Tensor, mine: Contribution) -> AveragingOutcome:
        """Be a group of one; the gradient passes through the codec like everybody's."""
        return AveragingOutcome(average=self.rule.average([gradient], (mine,)), table=(mine,))

    def _step(
        self,
        snapshot: Snapshot,
        outcome: AveragingOutcome,
        attempt: int,
        expected: int,
        started: float,
    ) -> OuterResult:
        """Take the Nesterov step on a copy."""
        try:
            state = outer_step(
                snapshot.anchor,
                outcome.average,
                outcome.table,
                self.plan.outer,
                snapshot.round_index,
            )
            state.digest  # noqa: B018  computed here, on this thread, and cached
        except IntegrityError as error:
            return CarriedOn(str(error), expected)
        return Committed(state, outcome.table, attempt, expected, time.monotonic() - started)
