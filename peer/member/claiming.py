"""Claiming a path (design 4.5): look, claim, look again after a short random wait, give way."""

from __future__ import annotations

import math
from enum import Enum, auto

from dipaco.dht.policy import CANNOT_LEAD, Decision, choose_path, resolve_collision

from .actions import Say
from .horizon import Horizon
from .knowledge import Knowledge

MAX_LOOKS = 5
# How long newcomers wait before the second look: not equally long, or they would collide again.
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.2, 0.8


class _Phase(Enum):
    IDLE = auto()
    CHOOSING = auto()
    TAKING = auto()
    SETTLING = auto()
    CHECKING = auto()


class Claiming:
    """One claim after another; `decision` is there once the claim stands."""

    def __init__(self, knowledge: Knowledge, horizon: Horizon) -> None:
        self._known = knowledge
        self._horizon = horizon
        self._phase = _Phase.IDLE
        self._until_s = math.inf
        self._looks = 0
        self._since_s = 0.0
        self._said = ""
        self._chosen: Decision | None = None
        self.decision: Decision | None = None
        """What was claimed, once nobody is in the way."""

    @property
    def is_under_way(self) -> bool:
        """Whether a path is being chosen and claimed."""
        return self._phase is not _Phase.IDLE

    @property
    def path(self) -> int | None:
        """The path that is claimed, or is about to be."""
        return self._chosen.path if self._chosen is not None else None

    def begin(self, decision: Decision | None = None) -> None:
        """Claim a path: `decision`, if given (a move), otherwise the least served one."""
        self.decision, self._looks = None, 0
        if decision is None:
            self._phase = _Phase.CHOOSING
            self._horizon.look(anew=self._known.settings.pinned is None)
        else:
            self._take(decision)

    def _take(self, decision: Decision) -> None:
        self._chosen = decision
        self._since_s = self._known.now_s
        self._phase = _Phase.TAKING
        self._say("joining", decision)
        self._horizon.look()

    def _say(self, state: str, decision: Decision) -> None:
        known, self._said = self._known, state
        known.do(
            Say(
                "training" if state == "training" else "joining",
                decision.path,
                self._since_s,
                decision.reason,
                known.settings.pinned is not None,
            )
        )

    def on_view(self) -> None:
        """A view that was asked for is here."""
        known = self._known
        if self._phase is _Phase.CHOOSING:
            self._take(
                choose_path(
                    known.choice,
                    known.grid,
                    known.me,
                    pinned=known.settings.pinned,
                    exclude=self._horizon.passed_over(),
                    can_lead=known.own_reachable not in CANNOT_LEAD,
                )
            )
        elif self._phase is _Phase.TAKING:
            self._phase = _Phase.SETTLING
            self._until_s = known.steady_s + known.random.uniform(SHORTEST_WAIT_S, LONGEST_WAIT_S)
        elif self._phase is _Phase.CHECKING:
            self._looks += 1
            better = None
            if known.settings.pinned is None and self._looks < MAX_LOOKS:
                passed_over = self._horizon.passed_over()
                better = resolve_collision(known.choice, known.grid, known.me, exclude=passed_over)
            if better is None:
                self._phase = _Phase.IDLE
                self.decision = self._chosen
                self._horizon.settle()
            else:
                self._take(better)

    def on_look_failed(self) -> None:
        """The DHT did not answer: look again; who waits for the claim has a limit of its own."""
        if self._phase in (_Phase.CHOOSING, _Phase.TAKING, _Phase.CHECKING):
            self._horizon.look()

    def on_turn(self) -> None:
        """Time has passed."""
        if self._phase is _Phase.SETTLING and self._known.steady_s >= self._until_s:
            self._phase = _Phase.CHECKING
            self._horizon.look()

    def clock_went_back(self) -> None:
        """Say again what was said to have begun later than now: nobody believes that."""
        if self._chosen is not None and self._said and self._since_s > self._known.now_s:
            self._since_s = self._known.now_s
            self._say(self._said, self._chosen)

    def stop(self) -> None:
        """Choose no more; what was said last stands."""
        self._phase = _Phase.IDLE

    def train(self) -> None:
        """Say that the claimed path is in training."""
        assert self.decision is not None
        self._say("training", self.decision)

    def take_back(self, path: int) -> None:
        """Claim the path in training again, after a move that did not succeed."""
        self._phase = _Phase.IDLE
        self._since_s = self._known.now_s
        self.decision = self._chosen = Decision(path, "the move to another path failed")
        self._horizon.settle()
        self._say("training", self.decision)

    def pause(self, reason: str) -> None:
        """Claim nothing, and say why."""
        self._phase, self._chosen, self.decision = _Phase.IDLE, None, None
        known = self._known
        pinned = known.settings.pinned is not None
        known.do(Say("paused", None, known.now_s, reason, pinned))

    def leave(self) -> None:
        """Withdraw the claim."""
        self._phase, self._said = _Phase.IDLE, ""
        path = self.decision.path if self.decision is not None else None
        self._known.do(
            Say("leaving", path, self._since_s, "", self._known.settings.pinned is not None)
        )
