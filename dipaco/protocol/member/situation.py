"""Where a peer is with one module: its chain, its rows and its round.

The parts of a `FollowedModule` share it, and each says what it changes. See design 4.4, chain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from dipaco.protocol.chain.chain_book import ChainBook, Link
from dipaco.protocol.chain.round_rows import RoundRows
from dipaco.protocol.chain.steps import Head, Row

from .actions import Serve
from .knowledge import Knowledge
from .next_step import Candidates, Notes, candidates
from .quorums import may_overrule

# Branches that parted so many steps ago are forgotten, and not looked at; of older steps in the
# peer's own chain, too, only the names are in memory.
REMEMBERED_STEPS = 64


class Role(Enum):
    """The role of a peer in a module. Trainers and keepers are its mailboxes too, in turn
    (`Group.mailboxes`)."""

    ONLY_MAILBOX = auto()
    """The peer knows the chain, the rows and the files, and no state."""
    KEEPER = auto()
    """The peer holds a copy of the state, or wants one."""
    TRAINER = auto()
    """The peer contributes."""


@dataclass
class Round:
    """A round of a module, made once; a trainer opens it with its boundary and closes it."""

    index: int = -1
    boundary_s: float = -math.inf
    is_open: bool = False
    asks: int = 0
    """How often mailboxes were asked for what the round brought."""
    sure_s: float = math.inf
    """Until when this peer waits for other mailboxes before a late proposal."""


class Situation:
    """The steps of a module, the notes about them, the state that is held, and the round with its
    rows."""

    def __init__(self, known: Knowledge, module: str) -> None:
        self.known, self.module = known, module
        self.level = known.grid.level_of(module)
        self.book = ChainBook(known.plan.run_id, (module,))
        self.notes = Notes()
        self.stand = self.book.genesis(module)
        """Name of the step that this peer stands on; for a mailbox, the heaviest that it knows."""
        self.head: Head | None = None
        """The state that is held; None for a mailbox, and before the first one is here."""
        self.before: Head | None = None
        """The state that was held before, which is on the disk."""
        self.computed = {self.stand}
        """Steps whose states this peer knows by its own computation, or as everybody does."""
        self.rows = RoundRows()
        self.role = Role.ONLY_MAILBOX
        self.round = Round()
        self.rounds_in_vain = 0
        """Rounds in a row that brought no step."""
        self._candidates = Candidates((), -math.inf)
        self._candidates_of = (-1, -1, -1)
        """Editions of book and notes, and the round, from which the candidates were computed."""
        self._candidates_s = math.inf
        """When they were computed."""

    @property
    def link(self) -> Link:
        """The step that this peer stands on."""
        return self.book.link(self.stand)

    def best(self) -> Link:
        """Return the heaviest head that may be taken."""
        now_s, of = self.known.now_s, (self.book.edition, self.notes.edition, self.round.index)
        is_new = of != self._candidates_of
        if is_new or not self._candidates_s <= now_s < self._candidates.until_s:
            self._candidates = self._find(self.notes)
            self._candidates_of, self._candidates_s = of, now_s
        return self._candidates.heads[0]

    def _find(self, notes: Notes) -> Candidates:
        now_s = self.known.now_s
        return candidates(self.module, self.book, notes, now_s, self.boundary_s)

    def boundary_s(self, link: Link) -> float:
        """Return when the round of a step ends.

        Where rounds are counted it has ended for whoever has counted to its end. That most of those
        who contributed before are in the step shows it, too, to a peer that has not.
        """
        schedule = self.known.schedule
        if not schedule.is_counted:
            return schedule.boundary(link.round_index, self.level).time_s
        is_here = link.round_index <= self.round.index or self.book.is_vouched_by_most(link)
        return -math.inf if is_here else math.inf

    def recent(self, step: str | None = None) -> frozenset[str]:
        """Return who contributed to the last steps up to one: by default, to this peer's."""
        return self.book.contributors(step or self.stand)

    def voters(self, step: str) -> frozenset[str]:
        """Return who contributed to the last steps up to one, and still trains the module."""
        return self.recent(step) & self.known.trainers(self.module)

    def is_of_most(self, step: str) -> bool:
        """Tell whether enough of those who counted where two chains parted are in one.

        In a chain is whose row stands on a state of it: a step may hold rows of peers that never
        took it. If one step that all can compute parts them, the step's own rows count.
        """
        if self.head is None:
            return False
        fork = self.book.ancestor(step, self.stand).name
        steps = self.book.steps_between(fork, step)
        made = {peer for found in steps[1:] or steps for peer in found.peers}
        return may_overrule(made, self.voters(fork))

    def is_of_own_round(self, step: str) -> bool:
        """Tell whether a step stands where this peer's does, and holds this peer's row: it would
        have been taken if it had come first."""
        link = self.book.link(step)
        stands_beside = step != self.stand and link.parent == self.link.parent
        return stands_beside and link.step is not None and self.known.me in link.step.peers

    def contradicts(self, link: Link) -> bool:
        """Tell whether a step names another state than the one that was computed here."""
        heads = [head for head in (self.head, self.before) if head is not None]
        held = {head.step: head.digest for head in heads if head.step in self.computed}
        step = link.step
        return step is not None and held.get(link.parent, step.state) != step.state

    def near(self) -> list[Link]:
        """Return the steps that might be taken next: on top of this peer's, or beside it and
        heavier."""
        beside = self.book.on_top_of(self.link.parent) if self.link.parent else []
        heavier = [link for link in beside if link.rank < self.link.rank]
        return [*self.book.on_top_of(self.stand), *heavier]

    @property
    def is_of_genesis(self) -> bool:
        """Whether no step is known that might be taken, now or once its files are here."""
        anyway = Notes(self.notes.refused, self.notes.doubted)
        return self._find(anyway).heads[0].version == 0

    # -- what is noted

    def refuse_file(self, row: Row) -> None:
        """Refuse the steps that contain a row whose file is no contribution."""
        for link in self.book.with_row(row):
            self.notes.refuse(link.name)

    def files_came(self, here: set[str]) -> None:
        """Count steps again that only lacked files which are here now."""
        for name in list(self.notes.absent):
            step = self.book.link(name).step if name in self.book else None
            if step is None or all(row.name in here for row in step.rows):
                self.notes.can_be_had(name)

    def see_doubts(self) -> None:
        """Stop doubting steps that stand in a chain with enough peers (`is_of_most`)."""
        for tip in self.book.tips(self.module) if self.notes.doubted else ():
            doubted = [n for n in self.notes.doubted if self.book.stands_on(tip.name, n)]
            if doubted and self.is_of_most(tip.name):
                self.notes.believe(doubted)

    # -- moving along

    def serve(self, step: str) -> None:
        """Answer those who ask with the chain to a step, and no longer with the one to `stand`."""
        parted = self.book.ancestor(self.stand, step).name
        steps = self.book.steps_between(parted, step)
        self.known.do(Serve(self.module, step, steps))

    def take(self, head: Head, before: Head | None) -> None:
        """Move on to a state; the one before it is on the disk."""
        if head.step != self.stand:
            self.before = before
        self.head, self.stand = head, head.step
        self.notes.believe([n for n in self.notes.doubted if self.book.stands_on(head.step, n)])
        self.prune()

    def prune(self) -> None:
        """Forget branches that parted long ago, and the notes about them."""
        self.book.prune(self.stand, REMEMBERED_STEPS)
        self.notes.forget_gone(self.book)
        held = {head.step for head in (self.head, self.before) if head is not None}
        self.computed &= {*held, self.book.genesis(self.module)}
