"""Joining a path: it is claimed, and then what it needs is fetched.

Where that cannot be had, a newcomer takes another path, and who moves goes on with its old one.
"""

from __future__ import annotations

from dipaco.dht.policy import Decision

from .actions import Wait, Warn
from .beginning import LIMIT_S, LONGEST_S, Beginning
from .chains import Chains
from .claiming import Claiming
from .horizon import Horizon
from .knowledge import Knowledge


class Joining:
    """One path at a time; `has_begun` or `failure` once it is over."""

    def __init__(self, knowledge: Knowledge, horizon: Horizon, chains: Chains) -> None:
        self._known = knowledge
        self._horizon = horizon
        self.claiming = Claiming(knowledge, horizon)
        self.beginning = Beginning(knowledge, chains)
        self._since_s = 0.0
        """Since when the swarm's answer to a claim is waited for."""
        self._wanted_s = 0.0
        """Since when a path is wanted."""
        self.has_begun = False
        """Whether a path can be trained now."""
        self.failure = ""
        """Why none can."""

    def begin(self, decision: Decision | None = None) -> None:
        """Claim a path: `decision`, if given (a move), otherwise the least served one."""
        self.has_begun, self.failure = False, ""
        self._wanted_s = self._known.steady_s
        self._horizon.want_path()
        self._claim(decision)

    def _claim(self, decision: Decision | None = None) -> None:
        self._since_s = self._known.steady_s
        self.claiming.begin(decision)

    def on_turn(self) -> None:
        """Time has passed."""
        if not self.beginning.is_under_way:
            self._turn_claiming()
        if self.beginning.is_under_way:
            self._turn_beginning()

    def _turn_claiming(self) -> None:
        known, claiming = self._known, self.claiming
        claiming.on_turn()
        decision = claiming.decision
        if not claiming.is_under_way and decision is not None:
            others = known.path is None and self._horizon.has_another(decision.path)
            self.beginning.begin(decision.path, has_others=others)
            return
        left_s = self._since_s + LIMIT_S - known.steady_s
        if left_s > 0:
            known.do(Wait("the swarm's answer to a claim", left_s))
            return
        self.failure = f"the DHT did not answer for {LIMIT_S:.0f} s"
        if known.path is None:
            self.failure += "; check the network and start again"

    def _turn_beginning(self) -> None:
        known, beginning = self._known, self.beginning
        beginning.on_turn()
        if beginning.is_ready:
            assert beginning.path is not None
            self._horizon.begun(beginning.path)
            beginning.start()
            self.has_begun = True
        elif beginning.has_failed:
            self._leave_alone(beginning.reason or f"waited in vain for {beginning.waits_for}")
        else:
            what = beginning.waits_for
            if beginning.reason:
                what += f" ({beginning.reason})"
            known.do(Wait(what, beginning.left_s))

    def _leave_alone(self, reason: str) -> None:
        """The claimed path cannot be begun."""
        known, path = self._known, self.beginning.path
        assert path is not None
        self.beginning.stop()
        self._horizon.pass_over(path)
        is_late = known.steady_s - self._wanted_s >= LONGEST_S
        if known.path is not None or is_late or not self._horizon.has_another(path):
            self.failure = reason if known.path is not None else f"{reason}; start again later"
            return
        known.do(Warn(f"looks for another path than {path}: {reason}"))
        self._claim()
        known.do(Wait("the swarm's answer to a claim", LIMIT_S))
