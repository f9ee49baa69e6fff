"""What a peer knows of the chain of one module: where it stands, and what it does not take.

Of all steps that can be had the heaviest chain wins (design 4.4, chain). A step is passed over

    refused   for good, with what stands on it: a file in it is no contribution, or it names another
              state than the one that was computed here
    doubted   with what stands on it, until most of those who counted are in it: held-out documents
              say that its state is much worse
    absent    alone, until it can be had: nobody gives its files, or the state before it. What
              others have built on it may still be taken
"""

from __future__ import annotations

import math

from dipaco.protocol.chain import Head
from dipaco.protocol.chain_book import ChainBook, Link

from .actions import Serve
from .knowledge import Knowledge
from .quorums import is_majority

# Branches that parted so many steps ago are forgotten, and not looked at.
REMEMBERED_STEPS = 64


class ModuleChain:
    """Steps, heads, and what is passed over."""

    def __init__(self, known: Knowledge, module: str) -> None:
        self._known, self.module = known, module
        self.book = ChainBook(known.plan.run_id, [module])
        self.stand = self.book.genesis(module)
        """Name of the step that this peer stands on; of a mailbox the heaviest that it knows."""
        self.head: Head | None = None
        """The state that is held; None of a mailbox."""
        self.before: Head | None = None
        """The state that was held before, which is on the disk."""
        self._recent = "", frozenset[str]()
        """The step that this peer stands on, and who contributed to the last steps up to it."""
        self.refused: set[str] = set()
        self.doubted: set[str] = set()
        self.absent: dict[str, float] = {}
        """Until when; infinite: until its files come."""

    @property
    def link(self) -> Link:
        """The step that this peer stands on."""
        return self.book.link(self.stand)

    def heaviest(self) -> Link:
        """Return the heaviest chain of what can be had and is not refused."""
        now_s, module = self._known.now_s, self.module
        absent = {name for name, until_s in self.absent.items() if until_s > now_s}
        best = self.book.heaviest(module, self.refused, absent)
        if self.doubted and not self.is_of_most(best.name):
            best = self.book.heaviest(module, self.refused | self.doubted, absent)
        return best

    def recent(self, step: str | None = None) -> frozenset[str]:
        """Return who contributed to the last steps up to one, by itself the own."""
        if step and step != self.stand:
            return self.book.contributors(step)
        if self._recent[0] != self.stand:
            self._recent = self.stand, self.book.contributors(self.stand)
        return self._recent[1]

    def voters(self, step: str) -> frozenset[str]:
        """Return who contributed to the last steps up to one, and still trains the module."""
        return self.recent(step) & self._known.trainers(self.module)

    def is_of_most(self, step: str) -> bool:
        """Tell whether more than half of those who counted where two chains parted are in one.

        In a chain is whose row stands on a state of it: a step may hold rows of peers that never
        took it. Where it is one step that all can compute, its own rows count.
        """
        if self.head is None:
            return False
        fork = self.book.ancestor(step, self.stand).name
        steps = self.book.steps_between(fork, step)
        made = {peer for found in steps[1:] or steps for peer in found.peers}
        return is_majority(made, self.voters(fork))

    def is_of_own_round(self, step: str) -> bool:
        """Tell whether a step stands where the own one does, and holds this peer's row: it would
        have been taken if it had come first."""
        link = self.book.link(step)
        stands_beside = step != self.stand and link.parent == self.link.parent
        return stands_beside and link.step is not None and self._known.me in link.step.peers

    def contradicts(self, link: Link) -> bool:
        """Tell whether a step names another state than the one that is, or was, held here."""
        step = link.step
        held = {head.step: head.digest for head in (self.head, self.before) if head is not None}
        return step is not None and held.get(link.parent, step.state) != step.state

    # -- what is passed over

    def refuse(self, step: str) -> None:
        """Never take a step, nor what stands on it."""
        self.refused.add(step)

    def doubt(self, step: str) -> None:
        """Take a step only once most are in it."""
        self.doubted.add(step)

    def leave(self, step: str, until_s: float = math.inf) -> None:
        """Pass over a step that cannot be had."""
        self.absent[step] = until_s

    def files_came(self, here: set[str]) -> None:
        """Count steps again that only lacked files which are here now."""
        for name in list(self.absent):
            step = self.book.link(name).step if name in self.book else None
            if step is None or all(row.name in here for row in step.rows):
                del self.absent[name]

    # -- moving along

    def serve(self, step: str) -> None:
        """Have those who ask told of the chain to a step, and no more of the one to `stand`."""
        parted = self.book.ancestor(self.stand, step).name
        steps = self.book.steps_between(parted, step)
        self._known.do(Serve(self.module, step, steps))

    def take(self, head: Head) -> None:
        """Stand on a state."""
        if head.step != self.stand:
            self.before = self.head
        self.head, self.stand = head, head.step
        self.doubted = {n for n in self.doubted if not self.book.stands_on(head.step, n)}
        self.prune()

    def prune(self) -> None:
        """Forget what parted long ago, and what was noted of it."""
        self.book.prune(self.module, self.stand, REMEMBERED_STEPS)
        self.forget_gone()

    def trim(self, used: set[str]) -> bool:
        """Forget what others invent beyond a bound; `used` stays. Returns whether it was so."""
        is_trimmed = self.book.trim(self.module, {self.stand, *used})
        if is_trimmed:
            self.forget_gone()
        return is_trimmed

    def forget_gone(self) -> None:
        """Forget what was noted of steps that are not in the book any more."""
        self.refused = {name for name in self.refused if name in self.book}
        self.doubted = {name for name in self.doubted if name in self.book}
        self.absent = {name: s for name, s in self.absent.items() if name in self.book}
