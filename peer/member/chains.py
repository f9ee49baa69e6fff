"""Learning where announced states come from: their certificates are asked for, once each."""

from __future__ import annotations

from collections.abc import Iterable

from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference

from .actions import FetchChain
from .events import ChainFetched
from .knowledge import Knowledge

# Refresh periods for which a chain that could not be had is not asked for again.
RETRY_PERIODS = 2
# States of one module that are looked into at once: inventors announce many.
AT_ONCE = 4


class Chains:
    """What certificates are on their way."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._known = knowledge
        self._wanted: dict[str, StateReference] = {}
        self._asked_s: dict[str, float] = {}

    def learn(self, states: Iterable[StateReference], own: StateReference | None) -> bool:
        """Ask for the chains of states that cannot be compared with `own` yet.

        Returns whether any is on its way, or waits for its turn.
        """
        known = self._known
        retry_s = RETRY_PERIODS * refresh_period_s(known.plan.rounds.duration_s)
        on_their_way = False
        for state in sorted(set(states), key=lambda state: state.digest):
            if state.version == 0 or not self._is_unknown(state, own):
                continue
            if state.digest in self._wanted:
                on_their_way = True
                continue
            if known.now_s - self._asked_s.get(state.digest, float("-inf")) < retry_s:
                continue
            if sum(wanted.module == state.module for wanted in self._wanted.values()) >= AT_ONCE:
                # Its turn comes when one of those has been answered.
                on_their_way = True
                break
            self._wanted[state.digest] = state
            self._asked_s[state.digest] = known.now_s
            known.do(FetchChain(state, known.holders(state)))
            on_their_way = True
        self._forget()
        return on_their_way

    def _is_unknown(self, state: StateReference, own: StateReference | None) -> bool:
        descent = self._known.descent
        if not descent.is_certified(state):
            return True
        if own is None or own.version == 0 or not descent.is_certified(own):
            return False
        return not descent.reaches(state, own)

    def _forget(self) -> None:
        while len(self._asked_s) > 1024:
            del self._asked_s[next(iter(self._asked_s))]

    def is_wanted(self, module: str) -> bool:
        """Tell whether certificates of a module are on their way."""
        return any(state.module == module for state in self._wanted.values())

    def on_fetched(self, event: ChainFetched) -> None:
        """Take what came: checked certificates, or none."""
        self._wanted.pop(event.reference.digest, None)
        self._known.take_certificates(event.certificates)
