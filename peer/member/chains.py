"""Learning where announced states come from: their certificates are asked for, once each.

Who has signed them is called before it counts: identities cost nothing, answers do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference

from .actions import Call, FetchChain
from .events import CallAnswered, ChainFetched
from .knowledge import Knowledge

# Refresh periods for which a chain that could not be had is not asked for again; twice as many each
# time that it could not.
RETRY_PERIODS, GREATEST_RETRY_PERIODS = 2, 32
# States of one module that are looked into at once: inventors announce many.
AT_ONCE = 4
# Contributors of one chain that are called, the newest first, and how long an answer is waited for.
CALLED, CALL_LIMIT_S = 12, 10.0
# Who was called in vain for a chain is not called for another one for so many refresh periods.
CALL_AGAIN_PERIODS = 4


class Chains:
    """What certificates are on their way."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._known = knowledge
        self._wanted: dict[str, StateReference] = {}
        self._asked_s: dict[str, float] = {}
        self._in_vain: Counter[str] = Counter()
        self._called_s: dict[str, float] = {}
        self._calling: dict[str, float] = {}
        """Contributors that have not answered yet, and until when they may."""

    def learn(self, states: Iterable[StateReference], own: StateReference | None) -> bool:
        """Ask for the chains of states that cannot be compared with `own` yet, and see whether
        those who made them are there.

        Returns whether any is on its way, or waits for its turn.
        """
        known = self._known
        on_their_way = False
        distinct = set(states)
        for state in sorted(distinct, key=self._turn) if len(distinct) > 1 else distinct:
            if state.version == 0:
                continue
            if not self._is_unknown(state, own):
                on_their_way |= self._see(state, own)
                continue
            if state.digest in self._wanted:
                on_their_way = True
                continue
            if known.steady_s < self._again_s(state):
                continue
            if sum(wanted.module == state.module for wanted in self._wanted.values()) >= AT_ONCE:
                # Its turn comes when one of those has been answered.
                on_their_way = True
                break
            self._wanted[state.digest] = state
            self._asked_s[state.digest] = known.steady_s
            known.do(FetchChain(state, known.holders(state)))
            on_their_way = True
        self._forget()
        return on_their_way

    def _turn(self, state: StateReference) -> tuple[int, bool, str]:
        """Order states: those first that have not been asked for in vain, and that somebody holds
        who has shown itself."""
        holders = self._known.holders(state)
        is_seen = any(self._known.doubts.has_shown_itself(peer) for peer in holders)
        return self._in_vain[state.digest], not is_seen, state.digest

    def _again_s(self, state: StateReference) -> float:
        """Return when a chain may be asked for again."""
        if state.digest not in self._asked_s:
            return float("-inf")
        periods = RETRY_PERIODS * 2 ** min(10, max(0, self._in_vain[state.digest] - 1))
        period_s = refresh_period_s(self._known.plan.rounds)
        return self._asked_s[state.digest] + min(periods, GREATEST_RETRY_PERIODS) * period_s

    def _is_unknown(self, state: StateReference, own: StateReference | None) -> bool:
        descent = self._known.descent
        if not descent.is_certified(state):
            return True
        if own is None or own.version == 0 or not descent.is_certified(own):
            return False
        return not descent.reaches(state, own)

    def _see(self, state: StateReference, own: StateReference | None) -> bool:
        """Call those who made a state or `own` since these parted; returns whether that is waited
        for. After a start nobody has shown itself, those neither who made what lies on the disk."""
        known = self._known
        again_s = CALL_AGAIN_PERIODS * refresh_period_s(known.plan.rounds)
        unseen = self._unseen_of_both(state, own)
        called = [
            peer
            for peer in unseen
            if known.steady_s - self._called_s.get(peer, float("-inf")) >= again_s
        ]
        if called:
            self._called_s.update(dict.fromkeys(called, known.steady_s))
            self._calling.update(dict.fromkeys(called, known.steady_s + CALL_LIMIT_S))
            known.do(Call(tuple(called)))
        return self._is_answer_due(unseen)

    def _unseen_of_both(self, state: StateReference, own: StateReference | None) -> list[str]:
        unseen = self._unseen(state, own)
        if own is not None and own.version:
            unseen += [peer for peer in self._unseen(own, state) if peer not in unseen]
        return unseen

    def _unseen(self, state: StateReference, own: StateReference | None) -> list[str]:
        """Return contributors that have not shown themselves, the newest first, not too many."""
        known = self._known
        book, doubts = known.book, known.doubts
        parted = known.descent.parted(state, own or StateReference.untrained(state.module))
        left = {peer for peer in parted if not doubts.has_shown_itself(peer)}
        unseen: list[str] = []
        for certificate in book.chain(state.module, state.digest) if left else ():
            found = left & certificate.signers
            left -= found
            unseen += sorted(found)
            if not left or len(unseen) >= CALLED:
                break
        return unseen[:CALLED]

    def _is_answer_due(self, peers: Iterable[str]) -> bool:
        return any(self._calling.get(peer, float("-inf")) > self._known.steady_s for peer in peers)

    def is_seen(self, state: StateReference, own: StateReference) -> bool:
        """Tell whether no contributor to either state is being called at the moment."""
        return not self._calling or not self._is_answer_due(self._unseen_of_both(state, own))

    def on_called(self, event: CallAnswered) -> None:
        """Those who were called have answered, or not."""
        for peer in event.called:
            self._calling.pop(peer, None)

    def _forget(self) -> None:
        remembered: dict[str, Any]
        for remembered in (self._asked_s, self._in_vain, self._called_s, self._calling):
            while len(remembered) > 1024:
                del remembered[next(iter(remembered))]

    def is_wanted(self, module: str) -> bool:
        """Tell whether certificates of a module are on their way."""
        return any(state.module == module for state in self._wanted.values())

    def on_fetched(self, event: ChainFetched) -> None:
        """Take what came: checked certificates, or none."""
        if self._wanted.pop(event.reference.digest, None) is not None and not event.certificates:
            self._in_vain[event.reference.digest] += 1
        self._known.take_certificates(event.certificates)
