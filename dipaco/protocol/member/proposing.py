"""When the step of a round is proposed and taken, and by whom (design 4.3, gather and step).

G is `gather_s` after the boundary; with fixed steps it is half of `duration_s` later. Mailbox k
is the k-th in the order of the round, from 0.

    time                     proposed by                      if
    before the boundary      the only mailbox                 it leaves
    from the boundary on     mailbox 0                        it has what all awaited peers have,
                                                              and did not claim just now
    a grace before G         anybody                          a step was told, and this one has
                                                              more rows
    k graces after G         mailbox k                        no step was told
    four graces after G      anybody                          there is no mailbox, or two rounds
                                                              have brought no step

A step is taken as soon as it lacks nobody who is awaited, and otherwise at G. So the first proposer
does not decide whose rows count.
"""

from __future__ import annotations

import itertools
import math

from dipaco.protocol.chain.chain_book import RECENT_STEPS, Link
from dipaco.protocol.chain.steps import MAX_ROWS, Row, Step

from .group import Group
from .knowledge import mailbox_order
from .quorums import ROUNDS_IN_VAIN, is_majority, may_propose
from .situation import Role, Situation

# So many `grace_s` before G, rows that a proposal left out are proposed.
_OUTBID_GRACES = 1.0
# So many `grace_s` after G, anybody proposes where no mailbox is expected to.
_ANYBODY_GRACES = 4.0
# So many `grace_s` after G, a step of that round no longer replaces another one.
LATE_GRACES = 3.0


class Proposing:
    """Decides when a step of one module is made. It changes nothing of the situation."""

    def __init__(self, situation: Situation, group: Group) -> None:
        self._at, self._group = situation, group
        self._known, self._rows = situation.known, situation.rows

    # -- the time

    def _due_s(self, round_index: int) -> float:
        """Return G: the time from which the step of a round is made, and taken, without all
        rows."""
        known, schedule, round_ = self._known, self._known.schedule, self._at.round
        if not schedule.is_counted:
            return schedule.boundary(round_index, self._at.level).time_s + known.gather_s
        if round_.is_open or self._at.role is not Role.TRAINER:
            return round_.boundary_s + known.gather_s + schedule.duration_s / 2
        return math.inf  # The boundary is still to come here.

    def late_s(self) -> float:
        """Return the seconds since G of this round; negative before it."""
        return self._known.now_s - self._due_s(self._at.round.index)

    def _is_told(self) -> bool:
        """Tell whether the best step that is known is of this round and stands on this peer's."""
        best = self._at.best()
        return best.parent == self._at.stand and best.round_index == self._at.round.index

    def _is_turn(self) -> bool:
        """Tell whether this peer may propose now, by the table above."""
        late_s, grace_s = self.late_s(), self._known.grace_s
        if self._is_outbidding():
            return True
        if late_s >= 0 and self._is_told():
            return False
        boxes, me = self._group.mailboxes(), self._known.me
        if me not in boxes:
            # Mailboxes may all stand on a chain that this peer has refused.
            is_left = not boxes or self._at.rounds_in_vain >= ROUNDS_IN_VAIN
            return is_left and late_s >= _ANYBODY_GRACES * grace_s
        if self._known.now_s < self._at.round.boundary_s:
            return boxes == [me]
        if late_s < 0:
            return boxes[0] == me and not self._has_just_claimed()
        return late_s >= boxes.index(me) * grace_s

    def _is_outbidding(self) -> bool:
        """Tell whether anybody may propose more rows than a step has that was told."""
        return -_OUTBID_GRACES * self._known.grace_s <= self.late_s() < 0 and self._is_told()

    def _has_just_claimed(self) -> bool:
        """Tell whether others may not see this peer's claim yet. Counted rounds wait for all."""
        claim = self._known.view.claims.get(self._known.me)
        is_new = claim is not None and self._known.view.rounds_held(claim) < 1
        return is_new and not self._known.schedule.is_counted

    # -- the rows

    def _standing(self) -> dict[str, Row]:
        """Return the rows of this round that stand where this peer stands, and may be in a step."""
        head, over = self._at.head, self._group.passed_over()
        state = head.digest if head is not None else ""
        rows = self._rows.standing(self._at.round.index, self._at.stand, state)
        counting = {peer: row for peer, row in rows.items() if peer not in over}
        return {peer: row for peer, row in counting.items() if self._is_claimed(row)}

    def _is_claimed(self, row: Row) -> bool:
        """Tell whether the signer of a row is known to train its path: what it says there moves the
        schedule of the path. The first row of a newcomer can be here before its claim."""
        if self._known.has_claimed(row.peer, row.path) or self._is_first(row):
            return True
        links = itertools.islice(self._at.book.back_from(self._at.stand), RECENT_STEPS)
        before = [known for link in links if link.step is not None for known in link.step.rows]
        return any((known.peer, known.path) == (row.peer, row.path) for known in before)

    def _is_first(self, row: Row) -> bool:
        """Tell whether a peer without a claim has told no row of another round."""
        if self._known.has_claimed(row.peer):
            return False
        return all(
            other.round_index == row.round_index
            for other in self._rows.all()
            if other.peer == row.peer
        )

    def ready_rows(self) -> dict[str, Row]:
        """Return the standing rows whose files are here."""
        here = self._rows.here
        return {peer: row for peer, row in self._standing().items() if row.name in here}

    def _voters(self) -> frozenset[str]:
        """Return the peers of which a proposal needs more than half: the voters, and the trainers
        that have told a row of this round. Slow files are no reason to step without most others."""
        at, trainers = self._at, self._known.trainers(self._at.module)
        return at.voters(at.stand) | trainers & self._standing().keys()

    def _heard(self) -> set[str]:
        """Return the peers whose rows of this round are final: the files of the others are still on
        their way."""
        ready, round_index = self.ready_rows(), self._at.round.index
        refused, here = self._rows.refused, self._rows.here
        on_way = {
            peer
            for peer, row in self._rows.on_top_of(round_index, self._at.stand).items()
            if peer not in ready and row.name not in here and row.name not in refused
        }
        return self._rows.of_round(round_index).keys() - on_way

    # -- the step

    def proposal(self) -> Step | None:
        """Return the step that this peer has to propose now, if it has to."""
        # Nearly all calls end here, at each of very many events: the rows come after it.
        if not self._known.has_view or self._at.link.round_index >= self._at.round.index:
            return None
        if not self._is_turn():
            return None
        rows = self.ready_rows()
        if not self._are_a_step(rows):
            return None
        step = Step.of(self._chosen(list(rows.values())))
        # A step that cannot be taken here would be told again at every event.
        return None if step.name in self._at.book else step

    def _are_a_step(self, rows: dict[str, Row]) -> bool:
        """Tell whether these rows make a step now: more than any that was told, of enough voters,
        and before G only with all who are awaited."""
        if not rows or self._at.best().weight >= self._at.link.weight + len(rows):
            return False
        if not may_propose(rows.keys(), self._voters(), self._at.rounds_in_vain):
            return False
        is_early = self.late_s() < 0 and not self._is_outbidding()
        return not is_early or self._group.awaited() <= self._heard()

    def _chosen(self, rows: list[Row]) -> list[Row]:
        """Return as many rows as a step may have: first of those who were in none lately."""
        if len(rows) <= MAX_ROWS:
            return rows
        recent = self._at.recent()
        order = mailbox_order(self._at.module, self._at.round.index, {r.peer for r in rows})
        place = {peer: number for number, peer in enumerate(order)}
        return sorted(rows, key=lambda row: (row.peer in recent, place[row.peer]))[:MAX_ROWS]

    # -- taking it

    def is_time(self, best: Link) -> bool:
        """Tell whether a chain is to be taken now, by the time and by who is in it."""
        known, step, own = self._known, best.step, self._at.link
        if step is None:
            return True
        due_s = self._due_s(best.round_index)
        if due_s == math.inf and is_majority(step.peers, self._at.voters(best.parent)):
            return True  # Others have counted to the end of this round, and most are in.
        if known.now_s < due_s:
            return self._group.awaited() <= step.peers | self._of_no_use(best)
        is_other_end = own.round_index == best.round_index and own.parent == best.parent
        is_late = known.now_s > due_s + LATE_GRACES * known.grace_s
        # A round in vain since then: those who would make it stand on the other step.
        is_kept = is_late and not known.schedule.is_counted and not self._at.rounds_in_vain
        return not (is_other_end and is_kept)

    def _of_no_use(self, best: Link) -> set[str]:
        """Return whose rows of a step's round cannot be in it: they stand elsewhere, are bad, or
        are of a path that their signer does not claim."""
        step = best.step
        assert step is not None
        refused = self._rows.refused
        return {
            peer
            for peer, row in self._rows.of_round(best.round_index).items()
            if (row.parent, row.state) != (step.parent, step.state)
            or row.name in refused
            or not self._is_claimed(row)
        }
