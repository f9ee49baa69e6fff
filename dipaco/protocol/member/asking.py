"""The peers that are asked about a module, and those that may have what belongs to a step."""

from __future__ import annotations

import itertools
import math

from dipaco.protocol.chain.chain_book import RECENT_STEPS, Link
from dipaco.protocol.chain.steps import Head

from .actions import Ask
from .group import MAILBOXES, Group
from .situation import Role, Situation

# A peer that cannot be called asks first at this share of `gather_s` after the boundary, and then
# again each time that the second share has passed.
_FIRST_ASK_OF_CLOSED, _ASKS_OF_CLOSED = 0.45, 0.65
# A parent that is not known is asked for once in so many seconds.
_ASK_AGAIN_S = 2.0
# How many peers are remembered with the time of their last request.
_MAX_ASKED = 1024


class Asking:
    """The requests of one module for steps and rows. It counts those of a round."""

    def __init__(self, situation: Situation, group: Group) -> None:
        self._at, self._group = situation, group
        self._known = situation.known
        self._asked_s: dict[str, float] = {}
        self.unanswered: set[str] = set()
        """Peers that were asked and have not answered yet."""

    def ask(self, peer: str, again_s: float = _ASK_AGAIN_S) -> None:
        """Ask a peer for rows and for steps that are not here, unless it was asked just now."""
        now_s = self._known.now_s
        # The time is negative if the clock was set back meanwhile.
        is_just_asked = 0 <= now_s - self._asked_s.get(peer, -math.inf) < again_s
        if peer == self._known.me or is_just_asked:
            return
        self._asked_s.pop(peer, None)
        self._asked_s[peer] = now_s
        if len(self._asked_s) > _MAX_ASKED:
            del self._asked_s[next(iter(self._asked_s))]
        self.ask_after(peer, self._at.best().name)

    def ask_after(self, peer: str, step: str) -> None:
        """Ask a peer for the steps after one."""
        self.unanswered.add(peer)
        self._known.do(Ask(peer, self._at.module, self._at.book.locator(step)))

    def ask_holders_of_heavier(self) -> None:
        """Ask two of those who announce a heavier chain. What some say of their chains may be
        untrue, so the longest unasked come first."""
        known, notes, mine = self._known, self._at.notes, self._at.best().rank
        heavier = {
            holding.peer_id: holding.head.rank
            for holding in known.view.holdings.get(self._at.module, ())
            if holding.head.rank < mine
            and holding.peer_id != known.me
            and known.view.reachable(holding.peer_id) != "outgoing"
            and holding.head.step not in notes.refused | notes.doubted
        }
        asked_s = {peer: self._asked_s.get(peer, -math.inf) for peer in heavier}
        for peer in sorted(heavier, key=lambda peer: (asked_s[peer], heavier[peer], peer))[:2]:
            self.ask(peer, known.gather_s)

    def ask_if_due(self) -> None:
        """Ask a mailbox for what this round brought, as long as it brought nothing here; a peer
        that cannot be called asks once in any case, as nobody tells it of other chains."""
        known, round_ = self._known, self._at.round
        if self._at.role is not Role.TRAINER:
            return
        if not round_.is_open and (known.can_be_called or round_.asks):
            return
        due_s = known.gather_s + (3 + round_.asks * 4) * known.grace_s
        if not known.can_be_called:
            due_s = known.gather_s * (_FIRST_ASK_OF_CLOSED + _ASKS_OF_CLOSED * round_.asks)
        if known.now_s - round_.boundary_s < due_s:
            return
        others = [box for box in self._group.mailboxes() if box != known.me][: 2 * MAILBOXES]
        if others:
            self.ask(others[round_.asks % len(others)])
        round_.asks += 1

    # -- who may have what

    def sources(self, link: Link, target: str) -> tuple[str, ...]:
        """Return who may have what belongs to a step, the state after it and its files: who signed
        that it stands on it, who announces it or the next one, and who told of it.

        :param target: the step that is being taken, on top of `link`
        """
        known, book = self._known, self._at.book
        held = known.view.holdings.get(self._at.module, ())
        said = [h.peer_id for h in held if h.head.step in book]
        near = [h.peer_id for h in held if h.head.step in book and self._is_near(h.head, link)]
        nexts = (other for other in book.back_from(target) if other.name != link.name)
        signed = [p for n in itertools.islice(nexts, RECENT_STEPS) for p in sorted(n.peers)]
        told = [*book.tellers(link.name), *book.tellers(target)]
        found = dict.fromkeys((*near, *told, *signed, *said))
        return tuple(peer for peer in found if peer != known.me)

    def _is_near(self, head: Head, link: Link) -> bool:
        is_on = self._at.book.stands_on(head.step, link.name)
        return is_on and head.version - link.version <= 1
