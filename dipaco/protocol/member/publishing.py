"""This peer's contribution to a round: begun, told, closed (design 4.2, publish)."""

from __future__ import annotations

from collections.abc import Callable

from dipaco.protocol.chain.steps import Row

from .actions import CarryOn, Discard, Publish, Put, Tell
from .events import Failed
from .group import MAILBOXES, Group
from .situation import Role, Round, Situation


class Publishing:
    """The contributions to one module. It makes, opens and closes rounds.

    `propose` makes a step of the rows here, if it is time, and returns whether it did.
    """

    def __init__(self, situation: Situation, group: Group, propose: Callable[[], bool]) -> None:
        self._at, self._group, self._propose = situation, group, propose
        self._known, self._rows = situation.known, situation.rows

    def begin(self, round_index: int, boundary_s: float) -> None:
        """Contribute, because the boundary of a trainer came."""
        known, at = self._known, self._at
        is_counted = known.schedule.is_counted
        if is_counted:
            round_index = at.link.round_index + 1
        elif known.now_s > boundary_s + known.gather_s:
            return  # Slept through: others have stepped. The next round takes the work.
        # A counted round that brought no step comes again.
        self._make_round(round_index, boundary_s, is_again=is_counted)
        if round_index <= at.link.round_index or at.head is None:
            return  # Others' step of this round is here already.
        at.round.is_open = True
        own = self._rows.on_top_of(round_index, at.stand).get(known.me)
        if own is None:
            anchor = at.head.digest
            known.do(Publish(at.module, round_index, at.stand, anchor, boundary_s))
        else:
            self._spread(own)

    def make_rounds_that_are_heard_of(self) -> None:
        """Begin the round that rows here are of, where this peer trains nothing and so has no
        boundaries: once it has come, or as soon as the last one is over; who leaves is early."""
        at, schedule, now_s = self._at, self._known.schedule, self._known.now_s
        if at.role is Role.TRAINER:
            return
        for index in self._rows.rounds_on_top_of(at.stand):
            is_next, boundary_s = index == at.link.round_index + 1, now_s
            if not schedule.is_counted:
                is_next = index > at.link.round_index
                boundary_s = schedule.boundary(index, at.level).time_s
            if is_next and (boundary_s <= now_s or at.link.round_index >= at.round.index):
                self._make_round(index, max(now_s, boundary_s))

    def _make_round(self, index: int, boundary_s: float, *, is_again: bool = False) -> None:
        """Begin a round that is newer than the last one; or one long before, as the clock was set
        back; or one whose boundary has come before that of the last one, which was told of too
        early; or the last one again."""
        at, last = self._at, self._at.round
        is_set_back = at.role is Role.TRAINER and index + 1 < last.index
        is_early = max(boundary_s, self._known.now_s) < last.boundary_s
        is_repeated = is_again and index == last.index
        if index <= last.index and not (is_set_back or is_early or is_repeated):
            return
        if last.index >= 0 and not is_early:
            is_in_vain = at.link.round_index < last.index
            at.rounds_in_vain = at.rounds_in_vain + 1 if is_in_vain else 0
        at.round = Round(index, boundary_s, last.is_open)
        self._rows.forget_before(index)

    def published(self, row: Row) -> None:
        """Tell others of this peer's row, whose file is here."""
        if self._at.role is Role.TRAINER:
            self._rows.note(row, lambda peer: peer == row.peer)
            self._rows.came(row)
            self._spread(row)

    def _spread(self, row: Row) -> None:
        """Make the step of this peer's row, if it is time; otherwise tell others of the row."""
        if self._propose():
            return
        boxes = () if self._known.can_be_called else self._group.mailboxes()
        # A peer that is given the file learns of the row by it, and does not look for the file.
        given = boxes[:MAILBOXES]
        told = tuple(peer for peer in self._group.audience() if peer not in given)
        self._known.do(Tell(told, self._at.module, rows=(row,)))
        if boxes:
            self._known.do(Put(tuple(boxes[: 2 * MAILBOXES]), row, MAILBOXES))

    def failed(self, event: Failed) -> None:
        """Note that nothing of this peer is in the round; others' step is taken all the same."""
        if event.is_final:
            self._known.do(Discard(self._at.module))
        trainers = self._known.trainers(self._at.module)
        if self._at.role is Role.TRAINER and trainers <= {self._known.me}:
            self.carry_on(event.reason)

    def carry_on(self, reason: str) -> None:
        """End the round here without a step: `anchor - local` still holds all work."""
        round_ = self._at.round
        if round_.is_open:
            round_.is_open = False
            expected = len(self._group.awaited())
            self._known.do(CarryOn(self._at.module, round_.index, reason, expected))
