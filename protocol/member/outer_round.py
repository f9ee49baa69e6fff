"""One module's outer rounds, from the boundary to the step: publish, gather, propose.

See design 4.2, publish, and design 4.3, gather. What comes of it is taken in `taking`.

A peer follows a module as its *trainer*, who contributes, as a *keeper* of a copy, or as a
*mailbox* only, who knows the chain, the rows and the files, and no state. All three do the same
but for what the table says:

                     publishes   gathers   proposes          takes steps
    trainer          yes         yes       as a mailbox      computes or fetches the state
    keeper           no          yes       as a mailbox      the same
    mailbox          no          yes       as a mailbox      knows them

A round of a module, as it goes when nothing is wrong:

1. The boundary comes: `begin`. The shell encodes what was trained and signs the row: `published`.
2. The row is told to all who follow the module, and so are theirs here: `hear_rows`. Every file is
   gathered as soon as its row is known.
3. The first mailbox holds all files that it awaits: `propose` makes the step and tells it.
4. The others hear of it, or ask: `hear_steps`. It is on the heaviest chain, so all take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto

from dipaco.protocol.chain import MAX_ROWS, Head, Row, Step
from dipaco.protocol.chain_book import ChainBook, Link

from .actions import Ask, CarryOn, Discard, Gather, Publish, Put, Tell
from .events import Failed
from .knowledge import Knowledge, mailbox_order

# Steps whose contributors say who matters now.
RECENT_STEPS = 3
# Rounds without a step after which a proposal needs no quorum; for how many a claim is young.
ROUNDS_IN_VAIN, YOUNG_ROUNDS = 2, 2
# Peers that take rows and files of a round.
MAILBOXES = 2
# A peer that cannot be called asks at this share of `gather_s` after the boundary, then so often.
FIRST_ASK_OF_CLOSED, ASKS_OF_CLOSED = 0.45, 0.65
# Rows of so many rounds are remembered, of so many peers behind a step, and so many of a peer.
REMEMBERED_ROUNDS, REMEMBERED_PEERS, ROWS_OF_A_PEER = 3, 512, 8
# A parent that is not known is asked for once in so many seconds.
ASK_AGAIN_S = 2.0
# Branches that parted so many steps ago are forgotten.
REMEMBERED_STEPS = 64


class Role(Enum):
    """What a peer has to do with a module."""

    MAILBOX = auto()
    KEEPER = auto()
    TRAINER = auto()


class OuterRound:
    """The rounds of one module. `Strand` (its subclass) moves the head along the chain."""

    heaviest: Callable[[], Link]
    consider: Callable[[], None]
    note_teller: Callable[[str, str], None]
    trim: Callable[[], None]
    taking: object | None
    """Another state that is about to be taken."""

    def __init__(self, known: Knowledge, module: str) -> None:
        self.known, self.module = known, module
        self.level = known.grid.level_of(module)
        self.role = Role.MAILBOX
        self.book = ChainBook(known.plan.run_id, [module])
        self.head: Head | None = None
        """The state that is held; None of a mailbox."""
        self.stand = self.book.genesis(module)
        """Name of the step that this peer stands on; of a mailbox the heaviest that it knows."""
        self.round_index = -1
        self.boundary_s = -math.inf
        self.is_open = False
        """A trainer's round has begun and is not over."""
        self.in_vain = 0
        """Rounds in a row that brought no step."""
        self.last_told_s = known.now_s
        self.files: set[str] = set()
        self.refused_files: set[str] = set()
        self._rows: dict[tuple[int, str], dict[str, Row]] = {}
        self._asked_for: dict[str, float] = {}
        """File to when it was last wanted."""
        self._asked_s: dict[str, float] = {}
        self._proposed = -1
        self._asks = 0
        self._unanswered: set[str] = set()
        """Peers that were asked and have not answered yet."""
        self._sure_s = math.inf
        """Until then other mailboxes are waited for before a late proposal of this round."""

    # -- 1. publish

    def begin(self, round_index: int, boundary_s: float) -> None:
        """The boundary of a trainer came: contribute."""
        known = self.known
        if known.schedule.fixed_steps:
            round_index = self.link.round_index + 1
        if not known.schedule.fixed_steps and known.now_s > boundary_s + known.gather_s:
            return  # Slept through: others have stepped. The next round takes the work.
        self.open_round(round_index, boundary_s, is_again=round_index == self.round_index)
        if round_index <= self.link.round_index:
            return  # Others' step of this round is here already.
        self.is_open = True
        own = self._rows.get((round_index, self.stand), {}).get(known.me)
        if own is None:
            known.do(Publish(self.module, round_index, self.stand, boundary_s))
        else:
            self._spread(own)

    def open_round(self, round_index: int, boundary_s: float, *, is_again: bool = False) -> None:
        """A round that is newer than the last one begins here, or with fixed steps the last one
        once more, because it brought no step."""
        if round_index <= self.round_index - is_again:
            return
        if self.round_index >= 0:
            self.in_vain = 0 if self.link.round_index >= self.round_index else self.in_vain + 1
        self.round_index, self.boundary_s, self._asks = round_index, boundary_s, 0
        self._sure_s = math.inf
        for key in [key for key in self._rows if key[0] <= round_index - REMEMBERED_ROUNDS]:
            for peer in list(self._rows[key]):
                self._forget_row(key, peer)

    def published(self, row: Row) -> None:
        """The own file is here, and the row that names it."""
        if self.role is Role.TRAINER:
            self.files.add(row.file)
            self._note(row)
            self._spread(row)

    def _spread(self, row: Row) -> None:
        """Make the step of the own row, if it is time; otherwise others hear of it."""
        if self._propose_if_due():
            return
        boxes = self.mailboxes()
        self.known.do(Tell(self.audience(), self.module, rows=(row,)))
        if not self.known.can_be_called and boxes:
            self.known.do(Put(tuple(boxes[:MAILBOXES]), row))

    def publish_failed(self, event: Failed) -> None:
        """Nothing of this peer is in the round; others' step is taken all the same."""
        if event.is_final:
            self.known.do(Discard(self.module))
        if self.role is Role.TRAINER and self.known.trainers(self.module) <= {self.known.me}:
            self.carry_on(event.reason)

    def carry_on(self, reason: str) -> None:
        """End the round here without a step: `anchor - local` still holds all work."""
        if self.is_open:
            self.is_open = False
            expected = len(self.awaited())
            self.known.do(CarryOn(self.module, self.round_index, reason, expected))

    # -- 2. gather

    def hear_rows(self, rows: Iterable[Row], teller: str) -> None:
        """Rows of others are here, unasked or as an answer: get their files."""
        wanted: list[Row] = []
        for row in sorted(rows, key=lambda row: (row.round_index, row.path, row.peer)):
            if row.round_index <= self.round_index - REMEMBERED_ROUNDS or not self._note(row):
                continue
            if row.parent in self.book:
                wanted.append(row)
            elif teller:
                self.ask(teller)
        self.last_told_s = self.known.now_s
        self.open_as_heard()
        self.gather(wanted, (teller,) if teller else ())

    def open_as_heard(self) -> None:
        """Begin the round that rows here are of, where this peer trains nothing and so has no
        boundaries: once it has come, or as soon as the last one is over; who leaves is early."""
        schedule, link, now_s = self.known.schedule, self.link, self.known.now_s
        if self.role is Role.TRAINER:
            return
        for round_index in sorted(r for r, parent in self._rows if parent == self.stand):
            is_next, boundary_s = round_index == link.round_index + 1, now_s
            if not schedule.fixed_steps:
                is_next = round_index > link.round_index
                boundary_s = schedule.boundary(round_index, self.level).time_s
            if is_next and (boundary_s <= now_s or link.round_index >= self.round_index):
                self.open_round(round_index, max(now_s, boundary_s))

    def _note(self, row: Row) -> bool:
        """Take a row in; of a peer, a round and a parent the first counts, of a peer the newest."""
        key, peer = (row.round_index, row.parent), row.peer
        own = [key for key, others in self._rows.items() if peer in others]
        if key in own or len(self._rows.get(key, ())) >= REMEMBERED_PEERS:
            return False
        if len(own) >= ROWS_OF_A_PEER:
            self._forget_row(min(own), peer)
        self._rows.setdefault(key, {})[peer] = row
        return True

    def _forget_row(self, key: tuple[int, str], peer: str) -> None:
        file = self._rows[key].pop(peer).file
        if not self._rows[key]:
            del self._rows[key]
        self.files.discard(file)
        self.refused_files.discard(file)
        self._asked_for.pop(file, None)

    def gather(self, rows: Iterable[Row], others: tuple[str, ...] = ()) -> None:
        """Have files fetched that are not here: from their owners, mailboxes and `others`."""
        now_s = self.known.now_s
        again_s, here = now_s - self.known.gather_s, self.files | self.refused_files
        rows = (row for row in rows if row.file not in here)
        missing = [row for row in rows if self._asked_for.get(row.file, -math.inf) < again_s]
        if missing:
            self._asked_for.update((row.file, now_s) for row in missing)
            boxes = [box for box in self.mailboxes() if box != self.known.me][: 2 * MAILBOXES]
            others = tuple(dict.fromkeys((*others, *boxes)))
            self.known.do(Gather(self.module, tuple(missing), {r.file: others for r in missing}))

    # -- 3. propose

    def mailboxes(self) -> list[str]:
        """Return who takes rows and files of this round and proposes, the first in front.

        Those whose rows are in the last steps, who still train the module and can be called; before
        the first step all its trainers. Fewer than two are filled up with who keeps a copy, then
        with anybody.
        """
        known = self.known
        trainers = known.trainers(self.module)
        recent = self._recent() & trainers or trainers
        boxes = self._in_order(recent)
        holders = {*known.holders(self.module), *([known.me] if self.head is not None else [])}
        for more in (trainers, holders):
            if len(boxes) < MAILBOXES:
                boxes += self._in_order(more - set(boxes))
        if len(boxes) < MAILBOXES:
            boxes += self._in_order({*known.callable_others(), known.me} - set(boxes))[:MAILBOXES]
        return boxes

    def _in_order(self, peers: set[str] | frozenset[str]) -> list[str]:
        able = {peer for peer in peers if self.known.is_callable(peer)}
        return mailbox_order(self.module, self.round_index, able)

    def awaited(self) -> frozenset[str]:
        """Return whose rows a proposer waits for: who trains the module and has shown it lately, or
        has just come."""
        trainers = self.known.trainers(self.module)
        young = self._young(trainers, YOUNG_ROUNDS)
        return trainers & (self._recent() | young | self._heard() | {self.known.me})

    def _young(self, peers: Collection[str], rounds: int) -> set[str]:
        """Return whose claims, as they were read, have stood for fewer rounds than these."""
        claims, held = self.known.view.claims, self.known.view.rounds_held
        return {peer for peer in peers if peer in claims and held(claims[peer]) < rounds}

    def _heard(self) -> set[str]:
        """Return whose files of the last rounds came, in time or not: the slow get in again."""
        files = self.files
        return {p for found in self._rows.values() for p, row in found.items() if row.file in files}

    def _recent(self) -> frozenset[str]:
        return self.book.contributors(self.stand, RECENT_STEPS)

    def is_good(self, peers: frozenset[str], parent: str) -> bool:
        """Tell whether more than half of those who count are among some contributors."""
        if self.in_vain >= ROUNDS_IN_VAIN or parent not in self.book:
            return True
        trainers = self.known.trainers(self.module)
        voters = (self.book.contributors(parent, RECENT_STEPS) or trainers) & trainers
        return not voters or 2 * len(voters & peers) > len(voters)

    def _is_good_link(self, link: Link) -> bool:
        return link.step is not None and self.is_good(link.step.peers, link.parent)

    def _is_early(self, best: Link) -> bool:
        """Tell whether a chain has a step that few have made, and there is still time for a better
        one: nobody who is always first puts a state under the others."""
        known, schedule = self.known, self.known.schedule
        for link in self.book.back_from(best.name):
            if not schedule.fixed_steps:
                boundary_s = schedule.boundary(link.round_index, self.level).time_s
            elif self.is_open or self.role is not Role.TRAINER:
                boundary_s = self.boundary_s + schedule.duration_s / 2
            else:
                boundary_s = known.now_s  # It is still to come here.
            late_s = known.now_s - boundary_s - known.gather_s
            if link.name == self.stand or late_s > 3 * known.grace_s:
                return False
            if not self._is_good_link(link):
                return True
        return False

    def _ready_rows(self) -> dict[str, Row]:
        """Return the rows of this round that stand where this peer stands, with files here."""
        rows = self._rows.get((self.round_index, self.stand), {})
        return {peer: row for peer, row in rows.items() if row.file in self.files}

    def _propose_if_due(self) -> bool:
        """Make a step of what is here, if it is this peer's turn; returns whether it did."""
        known = self.known
        link, rows = self.link, self._ready_rows()
        if not rows or self._proposed >= self.round_index or not known.has_view:
            return False
        if link.round_index >= self.round_index or not self._is_my_turn(rows):
            return False
        if not self.is_good(frozenset(rows), self.stand):
            return False
        best = self.heaviest()
        if best.weight >= link.weight + len(rows):
            return False
        if best.round_index >= self.round_index and self._is_good_link(best):
            return False  # It is on its way here.
        if not self._is_sure():
            return False
        self._proposed = self.round_index
        step = Step.of(self._chosen(list(rows.values())))
        known.do(Tell(self.audience(), self.module, steps=(step,)))
        self.hear_steps((step,), known.me)
        return True

    def _is_my_turn(self, rows: dict[str, Row]) -> bool:
        known, boxes = self.known, self.mailboxes()
        late_s = known.now_s - self.boundary_s - known.gather_s
        if known.me not in boxes:
            return not boxes and late_s >= 4 * known.grace_s
        place = boxes.index(known.me)
        # Once others could see this peer; before the round is over, to leave, if nobody else can.
        may_be_early = bool(known.schedule.fixed_steps) or not self._young([known.me], 1)
        if known.now_s < self.boundary_s:
            may_be_early = boxes == [known.me]
        if place == 0 and may_be_early and self.awaited() <= self._heard_now(rows):
            return True
        limit_s = place * known.grace_s
        if known.schedule.fixed_steps and self.in_vain < ROUNDS_IN_VAIN:
            # Exactly what one process computes: everybody is waited for, as long as it takes.
            limit_s += known.schedule.duration_s / 2
        return late_s >= limit_s

    def _heard_now(self, rows: dict[str, Row]) -> set[str]:
        """Return whose rows of this round are known, but for those whose files are on their way."""
        heard = {p for (r, _), found in self._rows.items() if r == self.round_index for p in found}
        here = self._rows.get((self.round_index, self.stand), {}).items()
        return heard - {p for p, r in here if p not in rows and r.file not in self.refused_files}

    def _is_sure(self) -> bool:
        """Before a proposal out of turn or late, other mailboxes are asked: a step may have been
        told in vain. True once each of them has answered, or was silent, or says ever more."""
        known, boxes = self.known, self.mailboxes()
        late_s = known.now_s - self.boundary_s - known.gather_s
        if self._sure_s == math.inf and (boxes[:1] != [known.me] or late_s >= known.grace_s):
            self._sure_s = known.now_s + known.gather_s
            for box in [box for box in boxes if box != known.me][:MAILBOXES]:
                self.ask(box, 0.0)
        is_told = not self._unanswered or known.now_s >= self._sure_s
        return is_told or self._sure_s == math.inf

    def _chosen(self, rows: list[Row]) -> list[Row]:
        """Return as many rows as a step may have: first of those who were in none lately."""
        if len(rows) <= MAX_ROWS:
            return rows
        recent = self._recent()
        order = mailbox_order(self.module, self.round_index, {row.peer for row in rows})
        place = {peer: number for number, peer in enumerate(order)}
        return sorted(rows, key=lambda row: (row.peer in recent, place[row.peer]))[:MAX_ROWS]

    def audience(self) -> tuple[str, ...]:
        """Return who is told of rows and steps: who follows the module and can be called."""
        known = self.known
        peers = {*known.claimants(self.module), *known.holders(self.module), *self.mailboxes()}
        return tuple(p for p in sorted(peers - {known.me}) if known.is_callable(p))

    # -- 4. steps

    def hear_steps(self, steps: Iterable[Step], teller: str) -> None:
        """Steps of others are here, oldest first: they may make a chain heavier than the own."""
        for step in steps:
            try:
                is_added = self.book.add(step)
            except ValueError:
                return  # No honest peer says so.
            if not is_added:
                if teller != self.known.me:
                    self.ask(teller)
                return
            self.note_teller(step.name, teller)
        self.last_told_s = self.known.now_s
        self.trim()
        self.consider()

    # -- asking

    def ask(self, peer: str, again_s: float = ASK_AGAIN_S) -> None:
        """Ask a peer for the steps after the own chain and for rows, if it was not just now."""
        now_s = self.known.now_s
        if peer == self.known.me or now_s - self._asked_s.get(peer, -math.inf) < again_s:
            return
        self._asked_s[peer] = now_s
        self._unanswered.add(peer)
        self.known.do(Ask(peer, self.module, self.book.locator(self.heaviest().name)))

    def _ask_if_due(self) -> None:
        """Ask a mailbox for what this round brought, as long as it brought nothing here; a peer
        that cannot be called asks once in any case, as nobody tells it of other chains."""
        known = self.known
        if self.role is not Role.TRAINER or self.taking is not None:
            return
        if not self.is_open and (known.can_be_called or self._asks):
            return
        passed_s = known.now_s - self.boundary_s
        due_s = known.gather_s + (3 + self._asks * 4) * known.grace_s
        if not known.can_be_called:
            due_s = known.gather_s * (FIRST_ASK_OF_CLOSED + ASKS_OF_CLOSED * self._asks)
        if passed_s < due_s:
            return
        others = [box for box in self.mailboxes() if box != known.me][: 2 * MAILBOXES]
        if others:
            self.ask(others[self._asks % len(others)])
        self._asks += 1

    # -- the chain

    @property
    def link(self) -> Link:
        """The step that this peer stands on."""
        return self.book.link(self.stand)

    def waits_for(self) -> str:
        """Return what an open round waits for, for the person at the machine."""
        awaited, rows = self.awaited(), self._ready_rows()
        return f"the step of {self.module}: have {len(awaited & rows.keys())} of {len(awaited)}"
