"""Which step is next: of all steps that a peer knows, the heads that may be taken now, in order.

See design 4.3, gather and step, and design 4.4, chain. The heaviest chain wins. A step is passed
over

                  until                          with what stands on it
    not due       the boundary of its round      yes: rounds grow along a chain
                  (counted: see `candidates`)
    refused       for good                       yes
    doubted       enough of those who counted    yes
                  are in its chain
                  (`quorums.may_overrule`)
    absent        its files, or a time, come     no: others may have built on it

    refused   a file in it is no contribution, its files give no state, or it names another state
              than was computed here
    doubted   held-out documents say that its state is much worse
    absent    nobody gives its files, or the state before it

The answer is a function of the book, the notes and the time. Notes are written where something
happens, and never while the question is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dipaco.protocol.chain.chain_book import ChainBook, Link


@dataclass
class Notes:
    """What happened to the steps of a module. Names of steps."""

    refused: set[str] = field(default_factory=set)
    doubted: set[str] = field(default_factory=set)
    absent: dict[str, float] = field(default_factory=dict)
    """Until when each step is passed over; infinite: until its files come."""
    own: set[str] = field(default_factory=set)
    """Steps made here: they count at once, even if the peer leaves before the boundary."""
    edition: int = 0
    """Counts up with every note."""

    def refuse(self, step: str) -> None:
        """Never take a step, nor what stands on it."""
        self.refused.add(step)
        self.edition += 1

    def doubt(self, step: str) -> None:
        """Take a step only once enough peers are in its chain (`quorums.may_overrule`)."""
        self.doubted.add(step)
        self.edition += 1

    def believe(self, steps: Iterable[str]) -> None:
        """Stop doubting all steps."""
        self.doubted.difference_update(steps)
        self.edition += 1

    def leave(self, step: str, until_s: float = math.inf) -> None:
        """Pass over a step that cannot be had; without a time: until its files come."""
        self.absent[step] = until_s
        self.edition += 1

    def can_be_had(self, step: str) -> None:
        """Stop passing over a step, because its files are here."""
        if self.absent.pop(step, None) is not None:
            self.edition += 1

    def make(self, step: str) -> None:
        """Note a step as made here."""
        self.own.add(step)
        self.edition += 1

    def forget_gone(self, book: ChainBook) -> None:
        """Forget what was noted of steps that are not in the book any more."""
        for names in (self.refused, self.doubted, self.own, self.absent):
            for name in [name for name in names if name not in book]:
                names.discard(name) if isinstance(names, set) else names.pop(name)
                self.edition += 1


@dataclass(frozen=True)
class Candidates:
    """The heads that may be taken, the heaviest first; there is at least one, which may be the
    genesis."""

    heads: tuple[Link, ...]
    until_s: float
    """When the passing of time alone changes the answer."""


def candidates(
    module: str,
    book: ChainBook,
    notes: Notes,
    now_s: float,
    boundary_s: Callable[[Link], float],
) -> Candidates:
    """Return the heads of a module that may be taken at `now_s`, swarm time.

    :param boundary_s: when the round of a step ends. Where rounds are counted there is no such
        time: plus or minus infinity (`ModuleChain.boundary_s`)
    """
    until_s = math.inf
    excluded = [book.link(name).version for name in notes.refused | notes.doubted if name in book]
    oldest = min(excluded, default=math.inf)

    def is_open(link: Link) -> bool:
        """Tell whether a link is due and can be had."""
        nonlocal until_s
        if link.version == 0:
            return True
        opens_s = notes.absent.get(link.name, -math.inf)
        if link.name not in notes.own:
            opens_s = max(opens_s, boundary_s(link))
        if opens_s > now_s:
            until_s = min(until_s, opens_s)
        return opens_s <= now_s

    def head_of(tip: Link) -> Link:
        """Return the newest link of a chain that may be taken."""
        found = tip
        for link in book.back_from(tip.name):
            if link.version < oldest:
                break
            if link.name in notes.refused or link.name in notes.doubted:
                found = book.link(link.parent)
        while not is_open(found):
            found = book.link(found.parent)
        return found

    heads = {link.name: link for link in map(head_of, book.tips(module))}
    return Candidates(tuple(sorted(heads.values(), key=lambda link: link.rank)), until_s)
