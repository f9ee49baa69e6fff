"""A trainer that counts: what a ledger makes of each round's work, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from dipaco.modules.state import StateReference
from dipaco.peer.member.actions import DropPart, JoinParts
from dipaco.peer.member.descent import Descent
from dipaco.peer.member.ledger import Ledger, Others

from .family import Family, genesis

ME = "M"


class Trainer:
    """Every round's work as a thing that can be counted, put where a ledger says it is."""

    def __init__(self, family: Family, anchor: StateReference) -> None:
        self.family = family
        self.descent = Descent(family.book)
        self.anchor = anchor
        self.ledger = Ledger(anchor, ME)
        self.trained: Counter[int] = Counter()
        self.tail: Counter[int] = Counter()
        """Work since the last cut."""
        self.parts: dict[int, Counter[int]] = {}
        self.contributions: dict[str, Counter[int]] = {}
        """What this peer gave to the step that came to a state."""

    @property
    def local(self) -> Counter[int]:
        """Work in the local parameters that is not in the anchor."""
        return sum((self.parts[part] for part in self.ledger.unmerged), Counter(self.tail))

    def train(self, round_index: int) -> None:
        self.trained[round_index] += 1
        self.tail[round_index] += 1

    def cut(
        self,
        round_index: int,
        stood_on: Collection[int] = (),
        *likelier: Collection[int],
        held: frozenset[str] = frozenset(),
        is_clear: bool = True,
    ) -> None:
        self.parts[round_index], self.tail = self.tail, Counter()
        others = Others((stood_on, *likelier), held, is_clear)
        done = self.ledger.cut(round_index, self.anchor, self.descent, others)
        for action in done:
            if isinstance(action, JoinParts):
                self.parts[action.newer] += self.parts.pop(action.older)
            elif isinstance(action, DropPart):
                del self.parts[action.part]
        assert set(self.parts) == set(self.ledger.parts)

    def commit(
        self,
        round_index: int,
        group: str,
        *,
        is_whole: bool = False,
        stood_on: Collection[int] = (),
        likelier: Collection[Collection[int]] = (),
        held: frozenset[str] = frozenset(),
        is_clear: bool = True,
    ) -> StateReference:
        self.cut(round_index, stood_on, *likelier, held=held, is_clear=is_clear)
        state = self.family.commit(self.anchor, round_index, set(group) | {ME})
        self.contributions[state.digest] = self.local
        self.ledger.committed(
            round_index, frozenset({*group, ME}), is_whole=is_whole, is_last_signed=is_whole
        )
        self.anchor = state
        return state

    def miss(self, round_index: int, group: str) -> StateReference:
        """Others commit with this peer's contribution, and it does not learn of that."""
        self.cut(round_index)
        state = self.family.commit(self.anchor, round_index, set(group) | {ME})
        self.contributions[state.digest] = self.local
        return state

    def give_up(self, round_index: int, group: str) -> None:
        """A group averages, and what it comes to is not committed here."""
        self.cut(round_index)
        self.ledger.came_to_nothing(round_index, frozenset({*group, ME}))

    def fail(self, round_index: int) -> None:
        """Nobody came."""
        self.cut(round_index)
        self.ledger.uncut(round_index)
        self.tail += self.parts.pop(round_index)

    def adopt(self, state: StateReference) -> None:
        self.ledger.adopt(state, self.anchor, self.descent)
        self.anchor = state

    def counted(self) -> Counter[int]:
        """Work in the anchor's chain, and in the local parameters."""
        found = Counter(self.local)
        for certificate in self.family.chain(self.anchor):
            found += self.contributions.get(certificate.statement.digest, Counter())
        return found


def began(family: Family) -> Trainer:
    return Trainer(family, family.commit(genesis(), 0, "ABC"))
