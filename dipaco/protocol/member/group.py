"""The peers that a module concerns: its mailboxes, those awaited, passed over and told.

A *mailbox* takes rows and files of a round and proposes (design 4.2, publish). Peers that have
shown lately that they train the module are *awaited* (design 4.3, gather and step).
"""

from __future__ import annotations

from collections.abc import Collection

from .knowledge import mailbox_order
from .situation import Situation

# A claim is young for so many rounds: a peer that has just come is awaited before its first row.
_YOUNG_ROUNDS = 2
# Least number of mailboxes of a round, where so many peers can be called.
MAILBOXES = 2
# Rounds for which a peer is not awaited, and its rows are left out, after a step that nobody could
# have because of its file.
_WITHHELD_ROUNDS = 3


class Group:
    """The peers that share one module. It changes nothing of the situation."""

    def __init__(self, situation: Situation) -> None:
        self._at, self._known = situation, situation.known
        self._withheld: dict[str, int] = {}
        """Peers whose files nobody could get, and until which round they are passed over."""
        self._boxes: list[str] = []
        self._boxes_of: tuple[object, ...] = ()
        """The inputs that `_boxes` follow from."""

    def mailboxes(self) -> list[str]:
        """Return the peers that take rows and files of this round and propose, the first one first.

        Those whose rows are in the last steps, who still train the module and can be called; before
        the first step all its trainers. Fewer than two are filled up with other trainers, then
        with peers that keep a copy, then with any.
        """
        known, at = self._known, self._at
        of = (known.edition, known.path, at.stand, at.head is None, at.round.index)
        if of != self._boxes_of:
            self._boxes, self._boxes_of = self._find_mailboxes(), of
        return self._boxes

    def _find_mailboxes(self) -> list[str]:
        known, module = self._known, self._at.module
        trainers = known.trainers(module)
        boxes = self._in_order(self._at.recent() & trainers or trainers)
        own = [known.me] if self._at.head is not None else []
        for more in (trainers, {*known.holders(module), *own}):
            if len(boxes) < MAILBOXES:
                boxes += self._in_order(more - set(boxes))
        if len(boxes) < MAILBOXES:
            boxes += self._in_order({*known.callable_others(), known.me} - set(boxes))[:MAILBOXES]
        return boxes

    def _in_order(self, peers: Collection[str]) -> list[str]:
        able = {peer for peer in peers if self._known.is_callable(peer)}
        return mailbox_order(self._at.module, self._at.round.index, able)

    def awaited(self) -> frozenset[str]:
        """Return the peers whose rows a proposer waits for: those that train the module and have
        shown it lately, or have just come, without those that kept a file back."""
        known, at = self._known, self._at
        trainers = known.trainers(at.module)
        claims, held = known.view.claims, known.view.rounds_held
        young = {p for p in trainers if p in claims and held(claims[p]) < _YOUNG_ROUNDS}
        shown = at.recent() | young | at.rows.peers_here() | {known.me}
        return trainers & shown - self.passed_over()

    def audience(self) -> tuple[str, ...]:
        """Return the peers that are told of rows and steps: followers that can be called."""
        known, module = self._known, self._at.module
        peers = {*known.claimants(module), *known.holders(module)}
        peers |= set(self.mailboxes())
        return tuple(p for p in sorted(peers - {known.me}) if known.is_callable(p))

    # -- who keeps files back

    def passed_over(self) -> set[str]:
        """Return the peers that are not awaited, and whose rows are left out."""
        now = self._at.round.index
        return {peer for peer, until in self._withheld.items() if until > now}

    def withheld(self, peer: str) -> None:
        """Pass over a peer whose file nobody gives, although it is in a step."""
        if peer != self._known.me:
            self._withheld[peer] = self._at.round.index + _WITHHELD_ROUNDS

    def gave(self, peer: str) -> None:
        """Count a peer again, because its file came."""
        self._withheld.pop(peer, None)
