"""One module as a peer follows it: the parts that know of its rounds and its chain, put together.

A peer follows a module as its *trainer*, who contributes, as a *keeper* of a copy, or as a
*mailbox* only, who knows the chain, the rows and the files, and no state. All three do the same
but for what the table says:

                     publishes   gathers   proposes          takes steps
    trainer          yes         yes       as a mailbox      computes them
    keeper           no          yes       as a mailbox      the same
    mailbox          no          yes       as a mailbox      knows them

A round of a module, as it goes when nothing is wrong:

1. The boundary comes: `begin`. The shell encodes what was trained and signs the row: `_published`.
2. The row is told to all who follow the module, and so are theirs here: `hear_rows`. Every file is
   gathered as soon as its row is known (`round_rows`).
3. The first mailbox holds all files that it awaits, makes the step and tells it (`proposing`).
4. The others hear of it, or ask: `hear_steps`. It is on the heaviest chain (`module_chain`), and
   all take it (`taking`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from dipaco.protocol.chain import Head, Row, Step
from dipaco.protocol.chain_book import MAX_REPLAY, RECENT_STEPS, Link
from dipaco.protocol.round_rows import RoundRows

from . import actions as a
from . import events as e
from .contributors import Contributors
from .knowledge import Knowledge
from .module_chain import REMEMBERED_STEPS, ModuleChain
from .proposing import MAILBOXES, Proposing, Role, Round
from .taking import Stage, Taking

# A peer that cannot be called asks at this share of `gather_s` after the boundary, then so often.
FIRST_ASK_OF_CLOSED, ASKS_OF_CLOSED = 0.45, 0.65
# A parent that is not known is asked for once in so many seconds.
ASK_AGAIN_S = 2.0
# Peers of which it is remembered when they were asked last.
MAX_ASKED = 1024
# Peers that are remembered to have told of a step: they may have its state.
TELLERS = 8
# A newcomer asks so many holders what their chain is, and waits so long.
FIRST_ASKED, ANSWER_LIMIT_S = 3, 6.0
# A peer that waits for a state begins after G with the newest one that it can get. Where there is a
# chain, it begins with the genesis only after this many times G.
GENESIS_GATHERS = 2.0


class FollowedModule:
    """All that a member knows and does of one module."""

    def __init__(self, known: Knowledge, module: str) -> None:
        self.known, self.module = known, module
        self.level = known.grid.level_of(module)
        self.last_told_s = known.now_s
        self.round = Round()
        self.chain = ModuleChain(known, module)
        self._rows = RoundRows()
        self._contributors = Contributors(known, module)
        self._proposing = Proposing(known, self.chain, self._rows, self.round)
        self._taking = Taking(
            known,
            self.chain,
            self._rows,
            self._proposing,
            gather=self._gather_for_step,
            sources=self._sources,
            on_taken=self._on_taken,
        )
        self._asked_s: dict[str, float] = {}
        self._asks = 0
        """Of mailboxes, in this round."""
        self._unanswered: set[str] = set()
        """Peers that were asked and have not answered yet."""
        self._sure_s = math.inf
        """Until then other mailboxes are waited for before a late proposal of this round."""
        self._tellers: dict[str, dict[str, None]] = {}
        self._wanted_s: float | None = None
        """Since when a state to begin with is wanted; None: it is not."""

    # -- what others read of it

    @property
    def role(self) -> Role:
        """What this peer has to do with the module."""
        return self.round.role

    @property
    def is_open(self) -> bool:
        """Whether a round of this trainer has begun and is not over."""
        return self.round.is_open

    @property
    def boundary_s(self) -> float:
        """When the round that began last did."""
        return self.round.boundary_s

    @property
    def head(self) -> Head | None:
        """The state that is held; None of a mailbox."""
        return self.chain.head

    @property
    def stand(self) -> str:
        """Name of the step that this peer stands on."""
        return self.chain.stand

    @property
    def link(self) -> Link:
        """The step that this peer stands on."""
        return self.chain.link

    @property
    def is_wanted(self) -> bool:
        """Whether a state is wanted to begin with."""
        return self._wanted_s is not None

    @property
    def is_fetching(self) -> bool:
        """Whether a state is on its way."""
        return self._taking.is_fetching

    @property
    def last_step(self) -> tuple[Step, ...]:
        """The step that the head is of, if it is not the genesis."""
        return (self.link.step,) if self.link.step else ()

    def waits_for(self) -> str:
        """Return what an open round waits for, for the person at the machine."""
        awaited, rows = self._proposing.awaited(), self._proposing.ready_rows()
        return f"the step of {self.module}: have {len(awaited & rows.keys())} of {len(awaited)}"

    # -- what happens

    def handle(self, event: e.Event) -> None:
        """Take note of what concerns this module."""
        match event:
            case e.Published():
                self._published(event.row)
            case e.Gathered():
                self._gathered(event.row)
            case e.Answered():
                self._answered(event)
            case e.StateHere():
                self._taking.state_here(event)
            case e.Checked():
                self._taking.checked(event)
            case e.Failed(action=a.Publish()):
                self._publish_failed(event)
            case e.Failed(action=a.Gather(rows=rows)):
                self._rows.gather_failed(rows[0], is_refused=event.is_final)
                self._taking.file_failed(rows[0], is_refused=event.is_final)
            case e.Failed(action=a.Ask(peer=peer)):
                self._unanswered.discard(peer)
                self._contributors.failed(peer)
            case e.Failed(action=a.Compute(steps=steps)):
                self._taking.compute_failed(steps[-1].name)
            case e.Failed(action=a.FetchState(head=head)):
                self._taking.fetch_failed(head.step)

    def on_time(self) -> None:
        """Time has passed."""
        self._open_as_heard()
        self._taking.hurry()
        self._ask_if_due()
        self._propose_if_due()
        self.consider()

    def on_view(self) -> None:
        """See whether somebody holds a heavier chain, or is hidden."""
        known, view = self.known, self.known.view
        for peer in self._contributors.look(self.chain.recent()):
            self.ask(peer, known.gather_s)
        if not view.covers_module(self.module):
            return
        mine, passed_over = self.chain.heaviest().rank, self.chain.refused | self.chain.doubted
        heavier = {
            holding.peer_id: holding.head.rank
            for holding in view.holdings.get(self.module, ())
            if holding.head.rank < mine
            and holding.peer_id != known.me
            and view.reachable(holding.peer_id) != "outgoing"
            and holding.head.step not in passed_over
        }
        # The longest unasked first: what some say of their chains may be untrue.
        asked_s = {peer: self._asked_s.get(peer, -math.inf) for peer in heavier}
        for peer in sorted(heavier, key=lambda peer: (asked_s[peer], heavier[peer], peer))[:2]:
            self.ask(peer, known.gather_s)

    # -- 1. publish

    def begin(self, round_index: int, boundary_s: float) -> None:
        """The boundary of a trainer came: contribute."""
        known, round_ = self.known, self.round
        if known.schedule.fixed_steps:
            round_index = self.link.round_index + 1
        elif known.now_s > boundary_s + known.gather_s:
            return  # Slept through: others have stepped. The next round takes the work.
        self._open_round(round_index, boundary_s, is_again=round_index == round_.index)
        if round_index <= self.link.round_index or self.head is None:
            return  # Others' step of this round is here already.
        round_.is_open = True
        own = self._rows.behind(round_index, self.stand).get(known.me)
        if own is None:
            anchor = self.head.digest
            known.do(a.Publish(self.module, round_index, self.stand, anchor, boundary_s))
        else:
            self._spread(own)

    def _open_round(self, index: int, boundary_s: float, *, is_again: bool = False) -> None:
        """A round that is newer than the last one begins here, or with fixed steps the last one
        once more, because it brought no step; or one long before, as the clock was set back; or one
        whose boundary has come before that of the last one, which was told of too early."""
        round_ = self.round
        is_set_back = self.role is Role.TRAINER and index + 1 < round_.index
        is_early = max(boundary_s, self.known.now_s) < round_.boundary_s
        if index <= round_.index - is_again and not is_set_back and not is_early:
            return
        if round_.index >= 0 and not is_early:
            round_.in_vain = 0 if self.link.round_index >= round_.index else round_.in_vain + 1
        round_.index, round_.boundary_s, self._asks = index, boundary_s, 0
        self._sure_s = math.inf
        self._rows.forget_before(index)

    def _published(self, row: Row) -> None:
        """The own file is here, and the row that names it."""
        if self.role is Role.TRAINER:
            self._rows.note(row, lambda peer: peer == row.peer)
            self._rows.came(row)
            self._spread(row)

    def _spread(self, row: Row) -> None:
        """Make the step of the own row, if it is time; otherwise others hear of it."""
        if self._propose_if_due():
            return
        boxes = () if self.known.can_be_called else self._proposing.mailboxes()
        # A peer that is given the file learns of the row by it, and does not look for the file.
        given = boxes[:MAILBOXES]
        told = tuple(peer for peer in self._audience() if peer not in given)
        self.known.do(a.Tell(told, self.module, rows=(row,)))
        if boxes:
            self.known.do(a.Put(tuple(boxes[: 2 * MAILBOXES]), row, MAILBOXES))

    def _publish_failed(self, event: e.Failed) -> None:
        """Nothing of this peer is in the round; others' step is taken all the same."""
        if event.is_final:
            self.known.do(a.Discard(self.module))
        if self.role is Role.TRAINER and self.known.trainers(self.module) <= {self.known.me}:
            self.carry_on(event.reason)

    def carry_on(self, reason: str) -> None:
        """End the round here without a step: `anchor - local` still holds all work."""
        if self.round.is_open:
            self.round.is_open = False
            expected = len(self._proposing.awaited())
            self.known.do(a.CarryOn(self.module, self.round.index, reason, expected))

    # -- 2. gather

    def hear_rows(self, rows: Iterable[Row], teller: str) -> None:
        """Rows of others are here, unasked or as an answer: get their files."""
        has_room_first, wanted = self._room_first(), list[Row]()
        for row in sorted(rows, key=lambda row: (row.round_index, row.path, row.peer)):
            self._contributors.heard(row.peer)
            is_old = row.round_index < self.link.round_index
            if is_old or not self._rows.note(row, has_room_first):
                continue
            if row.parent in self.chain.book:
                wanted.append(row)
            elif teller:
                self.ask(teller)
        self.last_told_s = self.known.now_s
        self._open_as_heard()
        self._gather(wanted, (teller,) if teller else ())

    def _room_first(self) -> Callable[[str], bool]:
        """Return what tells whose rows have room before those of others."""
        recent, trainers = self.chain.recent(), self.known.trainers(self.module)
        return lambda peer: peer in recent or peer in trainers

    def _open_as_heard(self) -> None:
        """Begin the round that rows here are of, where this peer trains nothing and so has no
        boundaries: once it has come, or as soon as the last one is over; who leaves is early."""
        schedule, link, now_s = self.known.schedule, self.link, self.known.now_s
        if self.role is Role.TRAINER:
            return
        for index in self._rows.rounds_behind(self.stand):
            is_next, boundary_s = index == link.round_index + 1, now_s
            if not schedule.fixed_steps:
                is_next = index > link.round_index
                boundary_s = schedule.boundary(index, self.level).time_s
            if is_next and (boundary_s <= now_s or link.round_index >= self.round.index):
                self._open_round(index, max(now_s, boundary_s))

    def _gather(self, rows: Iterable[Row], others: tuple[str, ...] = ()) -> None:
        """Have files fetched that are not here: from their owners, mailboxes and `others`."""
        known = self.known
        missing = self._rows.to_gather(rows, known.now_s, known.gather_s)
        if missing:
            boxes = self._proposing.mailboxes()[: 2 * MAILBOXES]
            others = tuple(p for p in dict.fromkeys((*others, *boxes)) if p != known.me)
            known.do(a.Gather(self.module, missing, others))

    def _gather_for_step(self, rows: Iterable[Row], step: str) -> None:
        """Have files fetched that a step needs, also if they are on their way: who told of it and
        who is in it has them, while an owner may give its own to a few only."""
        link = self.chain.book.link(step)
        peers = link.step.peers - {self.known.me} if link.step is not None else ()
        sources = tuple(dict.fromkeys((*self._sources(link), *sorted(peers))))
        self.known.do(a.Gather(self.module, tuple(rows), sources))

    def _gathered(self, row: Row) -> None:
        self._rows.came(row)
        self._proposing.gave(row.peer)
        self.chain.files_came(self._rows.here)
        self._taking.file_came(row.name)
        self._propose_if_due()
        self.consider()

    # -- 3. propose

    def _propose_if_due(self) -> bool:
        """Make a step of what is here, if it is this peer's turn; returns whether it did."""
        step = self._proposing.proposal()
        if step is None or not self._is_sure():
            return False
        self.known.do(a.Tell(self._audience(), self.module, steps=(step,)))
        self.hear_steps((step,), self.known.me)
        return True

    def _is_sure(self) -> bool:
        """Before a proposal out of turn or late, other mailboxes are asked: a step may have been
        told in vain. True once each of them has answered, or was silent, or says ever more."""
        known, boxes = self.known, self._proposing.mailboxes()
        late_s = known.now_s - self._proposing.due_s(self.round.index)
        is_late = late_s >= 0 and (boxes[:1] != [known.me] or late_s >= known.grace_s)
        if self._sure_s == math.inf and is_late:
            self._sure_s = known.now_s + known.gather_s
            for box in [box for box in boxes if box != known.me][:MAILBOXES]:
                self.ask(box, 0.0)
        is_told = not self._unanswered or known.now_s >= self._sure_s
        return is_told or self._sure_s == math.inf

    def _audience(self) -> tuple[str, ...]:
        """Return the peers that are told of rows and steps: followers that can be called."""
        known, boxes = self.known, self._proposing.mailboxes()
        trainers = known.trainers(self.module)
        peers = {*known.claimants(self.module), *trainers, *known.holders(self.module), *boxes}
        return tuple(p for p in sorted(peers - {known.me}) if known.is_callable(p))

    # -- 4. steps

    def hear_steps(self, steps: Iterable[Step], teller: str) -> None:
        """Steps of others are here, oldest first: they may make a chain heavier than the own."""
        steps = tuple(steps)
        for step in steps:
            is_new = step.name not in self.chain.book
            try:
                is_added = self.chain.book.add(step)
            except ValueError:
                return  # No honest peer says so.
            if not is_added:
                if teller != self.known.me:
                    self.ask(teller)
                return
            self._note_teller(step.name, teller)
            # A newcomer hears of the first steps of the run too: their files are gone anywhere.
            is_old = step.round_index + MAX_REPLAY <= steps[-1].round_index
            if is_new and not is_old and step.parent == self.stand:
                self._hear_rows_of_next(step)
        self.last_told_s = self.known.now_s
        if self.chain.trim({self._taking.target} - {""}):
            self._forget_gone()
        self.consider()

    def _hear_rows_of_next(self, step: Step) -> None:
        """Note the rows of a step that stands on the own one.

        So a peer that keeps its row back until it tells a step with it shuts nobody out: the fuller
        step has its row too.
        """
        has_room_first = self._room_first()
        for row in step.rows:
            self._rows.note(row, has_room_first)
        self._gather_early(self._rows.missing(step), step.name)

    def _gather_early(self, rows: Iterable[Row], step: str) -> None:
        """Have files fetched of a step that is not being taken: of somebody who tells steps without
        end those of a few."""
        if may := tuple(filter(self._rows.may_fetch, rows)):
            self._gather_for_step(may, step)

    def _note_teller(self, step: str, peer: str) -> None:
        tellers = self._tellers.setdefault(step, {})
        if len(tellers) < TELLERS and peer != self.known.me:
            tellers[peer] = None

    def _sources(self, link: Link) -> tuple[str, ...]:
        """Return who may have what belongs to a step, the state after it and its files: who signed
        that it stands on it, who announces it or the next one, and who told of it."""
        known, book = self.known, self.chain.book
        held = known.view.holdings.get(self.module, ())
        said = [h.peer_id for h in held if h.head.step in book]
        near = [h.peer_id for h in held if h.head.step in book and self._is_near(h.head, link)]
        nexts = [other for other in book.back_from(self._taking.target) if other.name != link.name]
        signed = [p for n in nexts[:RECENT_STEPS] if n.step for p in sorted(n.step.peers)]
        told = [*self._tellers.get(link.name, ()), *self._tellers.get(self._taking.target, ())]
        found = dict.fromkeys((*near, *told, *signed, *said))
        return tuple(peer for peer in found if peer != known.me)

    def _is_near(self, head: Head, link: Link) -> bool:
        is_on = self.chain.book.stands_on(head.step, link.name)
        return is_on and head.version - link.version <= 1

    def consider(self) -> None:
        """Take the heaviest chain if it is not the own, nor on top of what is being taken."""
        taking, best = self._taking, self._heaviest()
        if taking.stage is not Stage.IDLE:
            target = self.chain.book.link(taking.target)
            is_on_top = target.version > 0 and self.chain.book.stands_on(best.name, target.name)
            if best.rank >= target.rank or is_on_top:
                return
            if self.head is not None and not self._proposing.is_time(best):
                return
            taking.give_up()
        if self.role is Role.MAILBOX:
            if best.rank < self.link.rank and self._proposing.is_time(best):
                self._know(best)
        elif self.head is None:
            # Holders that were asked for the chain may still answer.
            if not self.is_wanted or not self._unanswered or self._is_late:
                taking.begin(best)
        elif best.rank < self.link.rank and self._proposing.is_time(best):
            taking.begin(best)

    def _heaviest(self) -> Link:
        """Return the heaviest chain without what is known not to be had: a step with a file that
        is no contribution, or one that lacks the file of a peer that keeps files back.

        A mailbox computes nothing, so another step of the last round or the next one counts for it
        once it has all files.
        """
        while True:
            best = self.chain.heaviest()
            is_near = best.name != self.stand and best.parent in (self.stand, self.link.parent)
            missing = self._rows.missing(best.step) if is_near else ()
            if self.role is not Role.MAILBOX:
                missing = tuple(r for r in missing if self._proposing.is_withholding(r.peer))
            if self._rows.is_refused(best.step):
                self.chain.refuse(best.name)
            elif missing:
                self.chain.leave(best.name)
                self._gather_early(missing, best.name)
            else:
                return best

    def _know(self, link: Link) -> None:
        """Of a mailbox: know the chain, without a state."""
        if link.name != self.stand:
            self.chain.serve(link.name)
            self.chain.stand = link.name
            self.chain.prune()
            self._forget_gone()

    def _on_taken(self, head: Head) -> None:
        self._stand_on(head)
        self.consider()

    def _stand_on(self, head: Head) -> None:
        """Make a state the one that this peer stands on."""
        known, book, before, round_ = self.known, self.chain.book, self.stand, self.round
        is_next = book.stands_on(head.step, before)
        steps = book.steps_between(before, head.step) if is_next else ()
        is_round = round_.is_open and head.round_index >= round_.index
        round_.is_open = round_.is_open and not is_round
        is_own_in = any(known.me in step.peers for step in steps)
        expected, step = len(self._proposing.awaited()), book.link(head.step).step
        known.do(a.Adopt(head, step, is_round, expected, is_own_in))
        self.chain.serve(head.step)
        self.chain.take(head)
        self._forget_gone()

    def _forget_gone(self) -> None:
        """Forget who told of steps that are gone, or that nobody needs the files of any more."""
        book, newest = self.chain.book, self.link.version - REMEMBERED_STEPS
        gone = [s for s in self._tellers if s not in book or book.link(s).version < newest]
        for step in gone:
            del self._tellers[step]

    # -- asking

    def ask(self, peer: str, again_s: float = ASK_AGAIN_S) -> None:
        """Ask a peer for the steps after the own chain and for rows, if it was not just now."""
        now_s = self.known.now_s
        # Less than nothing, where the clock was set back meanwhile.
        is_just_asked = 0 <= now_s - self._asked_s.get(peer, -math.inf) < again_s
        if peer == self.known.me or is_just_asked:
            return
        self._asked_s.pop(peer, None)
        self._asked_s[peer] = now_s
        if len(self._asked_s) > MAX_ASKED:
            del self._asked_s[next(iter(self._asked_s))]
        self._unanswered.add(peer)
        locator = self.chain.book.locator(self.chain.heaviest().name)
        self.known.do(a.Ask(peer, self.module, locator))

    def _answered(self, event: e.Answered) -> None:
        peer = event.peer
        self._unanswered.discard(peer)
        self._contributors.answered(peer, trains=event.trains)
        self.hear_steps(event.steps, peer)
        self.hear_rows(event.rows, peer)
        if event.held is not None and event.held.step in self.chain.book:
            self._note_teller(event.held.step, peer)
        has_more = event.has_more and bool(event.steps) and event.steps[-1].name in self.chain.book
        if has_more:
            self._unanswered.add(peer)
            locator = self.chain.book.locator(event.steps[-1].name)
            self.known.do(a.Ask(peer, self.module, locator))

    def _ask_if_due(self) -> None:
        """Ask a mailbox for what this round brought, as long as it brought nothing here; a peer
        that cannot be called asks once in any case, as nobody tells it of other chains."""
        known = self.known
        if self.role is not Role.TRAINER or self._taking.stage is not Stage.IDLE:
            return
        if not self.is_open and (known.can_be_called or self._asks):
            return
        passed_s = known.now_s - self.boundary_s
        due_s = known.gather_s + (3 + self._asks * 4) * known.grace_s
        if not known.can_be_called:
            due_s = known.gather_s * (FIRST_ASK_OF_CLOSED + ASKS_OF_CLOSED * self._asks)
        if passed_s < due_s:
            return
        others = [box for box in self._proposing.mailboxes() if box != known.me][: 2 * MAILBOXES]
        if others:
            self.ask(others[self._asks % len(others)])
        self._asks += 1

    # -- roles

    def want(self) -> None:
        """Hold a state that a path can begin with; holders are asked for their chains first."""
        known, self._wanted_s = self.known, self.known.now_s
        if self.role is Role.MAILBOX:
            self.round.role = Role.KEEPER
        held = sorted(
            known.view.holdings.get(self.module, ()),
            key=lambda h: (h.head.rank, not known.is_callable(h.peer_id), h.peer_id),
        )
        others = dict.fromkeys(h.peer_id for h in held if h.peer_id != known.me)
        for peer in list(others)[:FIRST_ASKED]:
            self.ask(peer, 0.0)

    @property
    def is_settled(self) -> bool:
        """Whether a state to begin with is here, and none of a heavier chain may still come."""
        if self.head is None or (self._unanswered and not self._is_late):
            return False
        waited_s = self.known.now_s - (self._wanted_s or 0.0)
        known = self.chain.book.heaviest(self.module, self.chain.refused | self.chain.doubted)
        if self.head.version == 0 < known.version:
            return waited_s >= GENESIS_GATHERS * self.known.gather_s
        return self._taking.stage is Stage.IDLE or waited_s >= self.known.gather_s

    @property
    def _is_late(self) -> bool:
        """Whether holders that were asked for the chain had long enough."""
        return self.known.now_s - (self._wanted_s or 0.0) >= ANSWER_LIMIT_S

    def follow(self, role: Role) -> None:
        """Train the module from the state that is held on, or keep it, or only know it."""
        self.round.role, self._wanted_s = role, None
        if role is Role.MAILBOX:
            self.chain.head = self.chain.before = None
        self.round.is_open = False
        self._taking.give_up()

    def stop_wanting(self) -> None:
        """No path begins with it: what is held stays, as a copy for others."""
        self._wanted_s = None
        if self.head is None:
            self.follow(Role.MAILBOX)

    def keep(self) -> None:
        """Hold a copy from now on."""
        if self.role is Role.MAILBOX:
            self.round.role = Role.KEEPER
            self._taking.begin(self.chain.heaviest())

    def restore(self, head: Head, steps: Collection[Step]) -> None:
        """Begin with what is on this disk: the state is held, as a copy."""
        for step in steps:
            self.chain.book.add(step)
        if head.step in self.chain.book:
            self.chain.serve(head.step)
            self.chain.head, self.chain.stand = head, head.step
            self.round.role = Role.KEEPER
