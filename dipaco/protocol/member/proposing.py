"""When the step of a round is proposed and taken, and by whom (design 4.3, gather).

    from the boundary    the first mailbox, once it has the files of all who are awaited
    shortly before G     anybody who has more rows than what was proposed
    from G on            the first mailbox with what it has; the next one after each `grace_s`

G is `gather_s` after the boundary. A step that lacks somebody is taken at G, so the first
proposer does not decide whose rows count. With fixed steps G comes half of `duration_s` later.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from dipaco.protocol.chain import MAX_ROWS, Row, Step
from dipaco.protocol.chain_book import Link
from dipaco.protocol.round_rows import RoundRows

from .knowledge import Knowledge, mailbox_order
from .module_chain import ModuleChain
from .quorums import is_majority, may_propose

# For so many rounds a claim is young: who has just come is awaited before its first row.
YOUNG_ROUNDS = 2
# Peers that take rows and files of a round.
MAILBOXES = 2
# In so many graces before G rows that a proposal left out are proposed.
OUTBID_GRACES = 1.0
# So many graces after G a step of that round does not replace another one any more.
LATE_GRACES = 3.0
# Rounds for which a peer is not awaited, and its rows are left out, after a step that nobody could
# have because of its file.
WITHHELD_ROUNDS = 3


class Role(Enum):
    """What a peer has to do with a module."""

    MAILBOX = auto()
    KEEPER = auto()
    TRAINER = auto()


@dataclass
class Round:
    """Where a peer is in the rounds of a module."""

    role: Role = Role.MAILBOX
    index: int = -1
    boundary_s: float = -math.inf
    is_open: bool = False
    """A trainer's round has begun and is not over."""
    in_vain: int = 0
    """Rounds in a row that brought no step."""


class Proposing:
    """Of one module. It reads chain, rows and round, and changes none of them."""

    def __init__(
        self, known: Knowledge, chain: ModuleChain, rows: RoundRows, round_: Round
    ) -> None:
        self._known, self._chain, self._rows, self._round = known, chain, rows, round_
        self._withheld: dict[str, int] = {}
        """Peers whose files nobody could have, and until which round they are passed over."""
        self._boxes: list[str] = []
        self._boxes_of: tuple[object, ...] = ()
        """What `_boxes` follow from."""

    # -- whom it concerns

    def mailboxes(self) -> list[str]:
        """Return who takes rows and files of this round and proposes, the first in front.

        Those whose rows are in the last steps, who still train the module and can be called; before
        the first step all its trainers. Fewer than two are filled up with who keeps a copy, then
        with anybody.
        """
        known, chain = self._known, self._chain
        of = (known.edition, known.path, chain.stand, chain.head is None, self._round.index)
        if of != self._boxes_of:
            self._boxes, self._boxes_of = self._find_mailboxes(), of
        return self._boxes

    def _find_mailboxes(self) -> list[str]:
        known, module = self._known, self._chain.module
        trainers = known.trainers(module)
        boxes = self._in_order(self._chain.recent() & trainers or trainers)
        own = [known.me] if self._chain.head is not None else []
        for more in (trainers, {*known.holders(module), *own}):
            if len(boxes) < MAILBOXES:
                boxes += self._in_order(more - set(boxes))
        if len(boxes) < MAILBOXES:
            boxes += self._in_order({*known.callable_others(), known.me} - set(boxes))[:MAILBOXES]
        return boxes

    def _in_order(self, peers: Collection[str]) -> list[str]:
        able = {peer for peer in peers if self._known.is_callable(peer)}
        return mailbox_order(self._chain.module, self._round.index, able)

    def awaited(self) -> frozenset[str]:
        """Return the peers whose rows a proposer waits for: those that train the module and have
        shown it lately, or have just come, without those that kept a file back."""
        known, chain = self._known, self._chain
        trainers = known.trainers(chain.module)
        claims, held = known.view.claims, known.view.rounds_held
        young = {p for p in trainers if p in claims and held(claims[p]) < YOUNG_ROUNDS}
        shown = chain.recent() | young | self._rows.peers_here() | {known.me}
        return trainers & shown - self._passed_over()

    def _passed_over(self) -> set[str]:
        now = self._round.index
        return {peer for peer, until in self._withheld.items() if until > now}

    def withheld(self, peer: str) -> None:
        """Pass over a peer whose file nobody gives, although it is in a step."""
        if peer != self._known.me:
            self._withheld[peer] = self._round.index + WITHHELD_ROUNDS

    def is_withholding(self, peer: str) -> bool:
        """Tell whether a peer is passed over."""
        return peer in self._passed_over()

    def gave(self, peer: str) -> None:
        """Count a peer again: its file came."""
        self._withheld.pop(peer, None)

    # -- when

    def due_s(self, round_index: int) -> float:
        """Return G: from when on the step of a round is made, and taken, without all."""
        known, schedule = self._known, self._known.schedule
        if not schedule.fixed_steps:
            level = known.grid.level_of(self._chain.module)
            return schedule.boundary(round_index, level).time_s + known.gather_s
        if self._round.is_open or self._round.role is not Role.TRAINER:
            return self._round.boundary_s + known.gather_s + schedule.duration_s / 2
        return math.inf  # The boundary is still to come here.

    def ready_rows(self) -> dict[str, Row]:
        """Return the rows of this round that stand where this peer stands, with files here."""
        here = self._rows.here
        return {peer: row for peer, row in self._standing().items() if row.name in here}

    def _standing(self) -> dict[str, Row]:
        """Return the rows of this round that stand where this peer stands, and may be in a step."""
        head, over = self._chain.head, self._passed_over()
        state = head.digest if head is not None else ""
        rows = self._rows.standing(self._round.index, self._chain.stand, state)
        return {peer: row for peer, row in rows.items() if peer not in over}

    def _voters(self) -> frozenset[str]:
        """Return the peers of which a proposal needs more than half: the voters, and the trainers
        that have told a row of this round. Slow files are no reason to step without most others."""
        chain, trainers = self._chain, self._known.trainers(self._chain.module)
        return chain.voters(chain.stand) | trainers & self._standing().keys()

    def _heard(self) -> set[str]:
        """Return whose rows of this round are known and will get no better: the files of the others
        are on their way."""
        ready = self.ready_rows()
        refused, stand = self._rows.refused, self._chain.stand
        here = self._rows.here
        on_way = {
            peer
            for peer, row in self._rows.behind(self._round.index, stand).items()
            if peer not in ready and row.name not in here and row.name not in refused
        }
        return self._rows.of_round(self._round.index).keys() - on_way

    def proposal(self) -> Step | None:
        """Return the step that this peer has to propose now, if it has to."""
        known, round_, link = self._known, self._round, self._chain.link
        if not known.has_view or link.round_index >= round_.index:
            return None
        best, late_s = self._chain.heaviest(), known.now_s - self.due_s(round_.index)
        is_told = best.parent == link.name and best.round_index == round_.index
        # Nearly all peers are through here, at each of very many events: the rows come after it.
        if is_told:
            is_due = -OUTBID_GRACES * known.grace_s <= late_s < 0
        else:
            is_due = self._is_my_turn(late_s)
        if not is_due:
            return None
        rows = self.ready_rows()
        if not rows or best.weight >= link.weight + len(rows):
            return None
        if not may_propose(rows.keys(), self._voters(), round_.in_vain):
            return None
        if not is_told and late_s < 0 and not self.awaited() <= self._heard():
            return None
        step = Step.of(self._chosen(list(rows.values())))
        # One that cannot be taken here would be told again at every event.
        return None if step.name in self._chain.book else step

    def _is_my_turn(self, late_s: float) -> bool:
        """Tell whether this peer may propose now; before G, once it has all who are awaited."""
        known, boxes = self._known, self.mailboxes()
        if known.me not in boxes:
            return not boxes and late_s >= 4 * known.grace_s
        place = boxes.index(known.me)
        if late_s < 0:
            return place == 0 and self._may_be_early(boxes)
        return late_s >= place * known.grace_s

    def _may_be_early(self, boxes: list[str]) -> bool:
        """Tell whether this peer may make a step before G: once others could see it; before the
        round is over, to leave, only if nobody else can."""
        known = self._known
        if known.now_s < self._round.boundary_s:
            return boxes == [known.me]
        claim = known.view.claims.get(known.me)
        is_new = claim is not None and known.view.rounds_held(claim) < 1
        return bool(known.schedule.fixed_steps) or not is_new

    def _chosen(self, rows: list[Row]) -> list[Row]:
        """Return as many rows as a step may have: first of those who were in none lately."""
        if len(rows) <= MAX_ROWS:
            return rows
        recent = self._chain.recent()
        order = mailbox_order(self._chain.module, self._round.index, {row.peer for row in rows})
        place = {peer: number for number, peer in enumerate(order)}
        return sorted(rows, key=lambda row: (row.peer in recent, place[row.peer]))[:MAX_ROWS]

    def is_time(self, best: Link) -> bool:
        """Tell whether a chain is to be taken now, by the time and by who is in it."""
        known, step, own = self._known, best.step, self._chain.link
        if step is None:
            return True
        due_s = self.due_s(best.round_index)
        if due_s == math.inf and is_majority(step.peers, self._chain.voters(best.parent)):
            return True  # Others have counted to the end of this round, and most are in.
        if known.now_s < due_s:
            return self.awaited() <= step.peers | self._of_no_use(best)
        is_other_end = own.round_index == best.round_index and own.parent == best.parent
        is_late = known.now_s > due_s + LATE_GRACES * known.grace_s
        # A round in vain since then: those who would make it stand on the other step.
        is_kept = is_late and not known.schedule.fixed_steps and not self._round.in_vain
        return not (is_other_end and is_kept)

    def _of_no_use(self, best: Link) -> set[str]:
        """Return whose rows of a step's round cannot be in it: they stand elsewhere, or are bad."""
        step = best.step
        assert step is not None
        refused = self._rows.refused
        return {
            peer
            for peer, row in self._rows.of_round(best.round_index).items()
            if (row.parent, row.state) != (step.parent, step.state) or row.name in refused
        }
