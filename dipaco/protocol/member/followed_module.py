"""One module as a peer follows it: the parts that know of its rounds and its chain, put together.

A peer follows a module as its *trainer*, who contributes, as a *keeper* of a copy, or as a
*mailbox* only, who knows the chain, the rows and the files, and no state. All three do the same
but for what the table says:

                     publishes   gathers   proposes          takes steps
    trainer          yes         yes       as a mailbox      computes them
    keeper           no          yes       as a mailbox      the same
    mailbox          no          yes       as a mailbox      knows them

A round of a module, as it goes when nothing is wrong:

1. The boundary comes. The shell encodes what was trained and signs the row (`publishing`).
2. The row is told to all who follow the module, and so are theirs here: `hear_rows`. Every file is
   gathered as soon as its row is known (`gathering`).
3. The first mailbox holds all files that it awaits, makes the step and tells it (`proposing`).
4. The others hear of it, or ask: `hear_steps`. It is the next step (`next_step`), and all take it
   (`taking`).

A path begins with states that are held like any copy: a module is *wanted* until then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from dipaco.protocol.chain.chain_book import MAX_REPLAY, Link
from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.chain.trunk import Trunk

from . import actions as a
from . import events as e
from .asking import Asking
from .contributors import Contributors
from .gathering import Gathering
from .group import MAILBOXES, Group
from .knowledge import Knowledge
from .proposing import Proposing
from .publishing import Publishing
from .situation import Role, Situation
from .taking import Stage, Taking

# A peer whose state differs from that of most others trains on for so many rounds.
_ALONE_ROUNDS = 3
# A newcomer asks so many holders what their chain is, and waits so long.
_FIRST_ASKED, _ANSWER_LIMIT_S = 3, 6.0
# A peer that waits for a state begins after G with the newest one that it can get. Where there is a
# chain, it begins with the genesis only after this many times G.
_GENESIS_GATHERS = 2.0
# What is told of a step that is being taken.
_PROGRESS = {
    Stage.GETTING: "getting its files",
    Stage.COMPUTING: "computing it",
    Stage.CHECKING: "scoring its state",
}


class FollowedModule(Situation):
    """Everything that a member knows about one module, and does for it."""

    def __init__(self, known: Knowledge, module: str) -> None:
        super().__init__(known, module)
        self.last_told_s = known.now_s
        self._contributors = Contributors(known, module)
        self._group = Group(self)
        self._asking = Asking(self, self._group)
        self._gathering = Gathering(self, self._group, self._asking)
        self._proposing = Proposing(self, self._group)
        self.publishing = Publishing(self, self._group, self._propose_if_due)
        self.taking = Taking(
            self, self._group, self._asking, self._gathering, on_taken=self._on_taken
        )
        self._wanted_s: float | None = None
        """Since when a state to begin with is wanted; None if none is."""

    # -- what others read of it

    @property
    def is_wanted(self) -> bool:
        """Whether a state is wanted to begin with."""
        return self._wanted_s is not None

    @property
    def is_alone(self) -> bool:
        """Whether others, who outweigh this peer, have gone on for some rounds from another state
        than was computed here."""
        book, refused = self.book, self.taking.contradicted
        if refused not in book:
            return False
        last = book.link(refused).round_index + _ALONE_ROUNDS - 1
        tips = [tip for tip in book.tips(self.module) if book.stands_on(tip.name, refused)]
        return any(tip.rank < self.link.rank and tip.round_index >= last for tip in tips)

    @property
    def last_step(self) -> tuple[Step, ...]:
        """The step that the head is of, if it is not the genesis."""
        return (self.link.step,) if self.link.step else ()

    def waits_for(self) -> str:
        """Return what an open round is waiting for, for the person at the machine."""
        awaited, rows = self._group.awaited(), self._proposing.ready_rows()
        so_far = f"have {len(awaited & rows.keys())} of {len(awaited)}"
        return f"the step of {self.module}: {_PROGRESS.get(self.taking.stage, so_far)}"

    # -- what happens

    def handle(self, event: e.Event) -> None:
        """Take note of what concerns this module."""
        match event:
            case e.Published():
                self.publishing.published(event.row)
            case e.Gathered():
                self._gathered(event.row)
            case e.Answered():
                self._answered(event)
            case e.StateHere():
                self.taking.state_here(event)
            case e.Checked():
                self.taking.checked(event)
            case e.Failed(action=a.Publish()):
                self.publishing.failed(event)
            case e.Failed(action=a.Gather(rows=rows)):
                self._gathering.failed(rows[0], is_refused=event.is_final)
                self.taking.file_failed(rows[0], is_refused=event.is_final)
            case e.Failed(action=a.Ask(peer=peer)):
                self._asking.unanswered.discard(peer)
                self._contributors.is_gone(peer)
            case e.Failed(action=a.Compute(steps=steps)):
                self.taking.compute_failed(steps[-1].name, is_refused=event.is_final)
                if event.is_final:
                    self.consider()
            case e.Failed(action=a.FetchState(head=head)):
                self.taking.fetch_failed(head.step)

    def on_time(self) -> None:
        """Do what is due now."""
        self.publishing.make_rounds_that_are_heard_of()
        self.taking.hurry()
        if self.taking.stage is Stage.IDLE:
            self._asking.ask_if_due()
        self._propose_if_due()
        self.consider()

    def on_view(self) -> None:
        """See whether somebody holds a heavier chain, or is hidden."""
        for peer in self._contributors.look(self.recent()):
            self._asking.ask(peer, self.known.gather_s)
        self.see_doubts()
        if self.known.view.covers_module(self.module):
            self._asking.ask_holders_of_heavier()

    # -- gather

    def hear_rows(self, rows: Collection[Row], teller: str) -> None:
        """Take in rows of others, told unasked or as an answer, and get their files."""
        for row in rows:
            self._contributors.heard(row.peer)
        self.last_told_s = self.known.now_s
        self._gathering.hear_rows(rows, teller)
        self.publishing.make_rounds_that_are_heard_of()

    def _gathered(self, row: Row) -> None:
        self._gathering.came(row)
        self.taking.file_came(row.name)
        self._propose_if_due()
        self.consider()

    # -- propose

    def _propose_if_due(self) -> bool:
        """Make a step of what is here, if it is this peer's turn; returns whether it did."""
        step = self._proposing.proposal()
        if step is None or not self._make_sure():
            return False
        self.known.do(a.Tell(self._group.audience(), self.module, steps=(step,)))
        self.notes.make(step.name)
        self.hear_steps((step,), self.known.me)
        return True

    def _make_sure(self) -> bool:
        """Ask other mailboxes before a proposal out of turn or late: a step may have been told in
        vain. True once each of them has answered, or was silent, or says ever more."""
        known, boxes, round_ = self.known, self._group.mailboxes(), self.round
        late_s = self._proposing.late_s()
        is_late = late_s >= 0 and (boxes[:1] != [known.me] or late_s >= known.grace_s)
        if is_late and round_.sure_s == math.inf:
            round_.sure_s = known.now_s + known.gather_s
            for box in [box for box in boxes if box != known.me][:MAILBOXES]:
                self._asking.ask(box, 0.0)
        is_told = not self._asking.unanswered or known.now_s >= round_.sure_s
        return is_told or round_.sure_s == math.inf

    # -- steps

    def hear_steps(self, steps: Iterable[Step], teller: str) -> None:
        """Take in steps of others, oldest first: they may make a chain heavier than this peer's."""
        steps, book = tuple(steps), self.book
        others = "" if teller == self.known.me else teller
        for step in steps:
            is_new, used = step.name not in book, {self.stand, self.taking.target}
            try:
                if not book.add(step, others, used):
                    if others:
                        self._asking.ask(teller)
                    break
            except ValueError:
                break  # No honest peer says so.
            if step.name not in book:
                break  # It was forgotten at once, because its teller has told of too many branches.
            self.last_told_s = self.known.now_s
            # A newcomer hears of the first steps of the run too: their files are gone anywhere.
            if is_new and step.round_index + MAX_REPLAY > steps[-1].round_index:
                self._hear_new(step)
        self.notes.forget_gone(book)
        self._gathering.see_what_lacks_files()
        self.see_doubts()
        self.consider()

    def _hear_new(self, step: Step) -> None:
        if self.rows.is_refused(step):
            self.notes.refuse(step.name)
        elif step.parent == self.stand:
            self._gathering.hear_rows_of(step)

    def consider(self) -> None:
        """Take the next step, unless this peer stands on it or takes one below it."""
        taking, best = self.taking, self.best()
        if taking.stage is not Stage.IDLE:
            target = self.book.link(taking.target)
            is_on_top = target.version > 0 and self.book.stands_on(best.name, target.name)
            if best.rank >= target.rank or is_on_top:
                return
            if self.head is not None and not self._proposing.is_time(best):
                return
            taking.give_up()
        is_heavier = best.rank < self.link.rank
        if self.role is Role.ONLY_MAILBOX:
            if is_heavier and self._proposing.is_time(best):
                self._know(best)
        elif self.head is None:
            # Holders that were asked for the chain may still answer.
            if not self.is_wanted or not self._asking.unanswered or self._is_late:
                taking.begin(best)
        elif is_heavier and self._proposing.is_time(best):
            taking.begin(best)

    def _know(self, link: Link) -> None:
        """Let a mailbox know the chain up to a step, without a state."""
        self.serve(link.name)
        self.stand = link.name
        self.prune()
        self._gathering.see_what_lacks_files()

    def _on_taken(self, head: Head, state_before: Head | None) -> None:
        """Make a state the one on which this peer stands."""
        known, book, before, round_ = self.known, self.book, self.stand, self.round
        is_next = book.stands_on(head.step, before)
        steps = book.steps_between(before, head.step) if is_next else ()
        is_round = round_.is_open and head.round_index >= round_.index
        round_.is_open = round_.is_open and not is_round
        is_own_in = any(known.me in step.peers for step in steps)
        expected, step = len(self._group.awaited()), book.link(head.step).step
        known.do(a.Adopt(head, step, is_round, expected, is_own_in))
        self.serve(head.step)
        self.take(head, state_before)
        self._gathering.see_what_lacks_files()
        self.consider()

    def _answered(self, event: e.Answered) -> None:
        peer, book = event.peer, self.book
        self._asking.unanswered.discard(peer)
        if not event.trains:
            self._contributors.is_gone(peer)
        self.hear_steps(event.steps, peer)
        self.hear_rows(event.rows, peer)
        if event.held is not None and event.held.step in book:
            book.note_teller(event.held.step, peer)
        if event.has_more and event.steps and event.steps[-1].name in book:
            self._asking.ask_after(peer, event.steps[-1].name)

    # -- roles

    def want(self) -> None:
        """Hold a state that a path can begin with; holders are asked for their chains first."""
        known, self._wanted_s = self.known, self.known.now_s
        if self.role is Role.ONLY_MAILBOX:
            self.role = Role.KEEPER
        held = sorted(
            known.view.holdings.get(self.module, ()),
            key=lambda h: (h.head.rank, not known.is_callable(h.peer_id), h.peer_id),
        )
        others = dict.fromkeys(h.peer_id for h in held if h.peer_id != known.me)
        for peer in list(others)[:_FIRST_ASKED]:
            self._asking.ask(peer, 0.0)

    @property
    def is_settled(self) -> bool:
        """Whether a state to begin with is here, and none of a heavier chain may still come."""
        if self.head is None or (self._asking.unanswered and not self._is_late):
            return False
        waited_s = self.known.now_s - (self._wanted_s or 0.0)
        if self.head.version == 0 and not self.is_of_genesis:
            return waited_s >= _GENESIS_GATHERS * self.known.gather_s
        return self.taking.stage is Stage.IDLE or waited_s >= self.known.gather_s

    @property
    def _is_late(self) -> bool:
        """Whether holders that were asked for the chain had long enough."""
        return self.known.now_s - (self._wanted_s or 0.0) >= _ANSWER_LIMIT_S

    def follow(self, role: Role) -> None:
        """Train the module from the state that is held on, or keep it, or only know it."""
        self.role, self._wanted_s = role, None
        if role is Role.ONLY_MAILBOX:
            self.head = self.before = None
        self.round.is_open = False
        self.taking.give_up()
        self._gathering.see_what_lacks_files()

    def refuse_state(self, reason: str) -> None:
        """Begin with another state than the one that is held, which was fetched: never with this
        one, nor with what stands on it."""
        self.taking.refuse(self.stand, reason)
        self.head = self.before = None
        self.consider()

    def stop_wanting(self) -> None:
        """Note that no path begins with it: what is held stays, as a copy for others."""
        self._wanted_s = None
        if self.head is None:
            self.follow(Role.ONLY_MAILBOX)

    def keep(self) -> None:
        """Hold a copy from now on."""
        if self.role is Role.ONLY_MAILBOX:
            self.role = Role.KEEPER
            self.taking.begin(self.best())

    def restore(self, head: Head, trunk: Trunk, steps: Sequence[Step]) -> None:
        """Begin with the state on this disk, which is held as a copy."""
        self.book.begin_with(self.module, trunk)
        for step in steps:
            self.book.add(step)
        if head.step in self.book:
            self.known.do(a.Serve(self.module, head.step, tuple(steps)))
            self.head, self.stand = head, head.step
            self.role = Role.KEEPER
