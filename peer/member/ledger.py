"""What became of this peer's own work: which part of it is in which state, by name (design 4.4).

Work is cut into parts at the boundaries. What a round contributes is all that is not in the anchor,
so a row of a certificate, a peer and a round, stands for parts that are remembered here. A state
has in it what the rows in its chain stand for; the rest goes on top of it. The tensors lie in the
trainer, and are done as they are told here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dipaco.modules.state import StateReference

from .actions import Action, DropPart, JoinParts
from .descent import Descent

# Parts of own work that are kept apart, for each module; each takes memory of its size. One more
# for a round while nobody has said where the states come from that others hold.
MOST_PARTS = 6
GREATEST_PARTS = MOST_PARTS + 1
# Work that is put on a state of so many rounds later keeps its length; what is older is shortened.
STALE_ROUNDS = 4


@dataclass(frozen=True)
class Others:
    """Where others stand, as far as this peer knows."""

    rounds: tuple[Collection[int], ...] = ((),)
    """Of the own chain, after which others may go another way; after it the likelier of these."""
    held: frozenset[str] = frozenset()
    """Digests of states that they were seen to hold, or may hold."""
    is_clear: bool = True
    """Whether the chains of what they hold are all known."""


@dataclass(frozen=True)
class Reckoning:
    """What adopting a state means for own work."""

    on_top: tuple[int, ...]
    """Parts that are not in it."""
    is_merged: bool
    """Whether work is in it that was not in the anchor."""
    weight: float
    """How much of the length of the work that goes on top is kept."""


class Ledger:
    """Own work in one module of the path in training. A part is named by the round that cut it."""

    def __init__(self, anchor: StateReference, me: str) -> None:
        self._module = anchor.module
        self._me = me
        self._base_round = anchor.last_round
        self.parts: list[int] = []
        """What is remembered, the oldest first."""
        self.unmerged: list[int] = []
        """Those that are not in the anchor."""
        self._rows: dict[int, frozenset[int]] = {}
        """The parts that the contribution of a round has in it."""
        self._earlier: dict[int, tuple[str, ...]] = {}
        """Digests of states that there were before a round's part was cut."""
        self._in_vain: dict[int, frozenset[str]] = {}
        """Who was in the group of a round that this peer did not commit."""
        self._merged_in: dict[int, int] = {}
        """The round of the step by which a part came into the anchor."""
        self._joinable: set[int] = set()
        """Parts of a commit in which nobody stood aside: no fork lies before them."""
        self._whole: int | None = None
        """The newest such part; whether all stand on that commit shows at the next one."""
        self._followed: set[int] = set()
        """Parts of a commit with all of the group before: a fork is hardly before them either."""
        self._group: frozenset[str] | None = None
        """Who made the anchor, if this peer was among them."""

    def cut(
        self,
        round_index: int,
        own: StateReference,
        descent: Descent,
        others: Others,
    ) -> list[Action]:
        """Note that a snapshot was taken: what came since the last one is a part.

        Returns what the trainer does to keep few parts. `own` is the anchor.
        """
        if round_index not in self.parts:
            self._note_earlier(round_index, descent, others)
            self.parts.append(round_index)
            self.unmerged.append(round_index)
        self._rows[round_index] = frozenset(self.unmerged)
        most = MOST_PARTS if others.is_clear else GREATEST_PARTS
        return self._make_room(most, own, descent, others)

    def _note_earlier(self, round_index: int, descent: Descent, others: Others) -> None:
        """Note which states there are that may have a step of this round already.

        Whoever starts with an empty disk steps in rounds that bear the names of earlier ones.
        """
        made = {c.statement.digest: c.statement for c in descent.book.all_of(self._module)}
        own = {
            digest
            for digest, said in made.items()
            if said.round_index == round_index and self._me in said.peers
        }
        held = {d for d in others.held if d not in made or made[d].round_index >= round_index}
        self._earlier[round_index] = tuple(sorted(own | held))

    def came_to_nothing(self, round_index: int, members: Collection[str]) -> None:
        """Note who was in the group of a round that this peer did not commit."""
        self._in_vain[round_index] = frozenset(members)

    def uncut(self, round_index: int) -> None:
        """Forget a snapshot that nobody else can have averaged: its part goes on growing."""
        if round_index in self.unmerged:
            self.parts.remove(round_index)
            self.unmerged.remove(round_index)
        self._rows.pop(round_index, None)

    def committed(
        self, round_index: int, group: frozenset[str], *, is_whole: bool, is_last_signed: bool
    ) -> None:
        """Note a commit. `is_whole`: all who claim to train were in the group, those of the group
        before among them. `is_last_signed`: these have all signed the commit before this one."""
        self._base_round = round_index
        row = self._rows[round_index]
        self._merged_in |= dict.fromkeys(row & {*self.unmerged}, round_index)
        self.unmerged = [part for part in self.unmerged if part not in row]
        if self._group is not None and self._group <= group and row == {round_index}:
            self._followed.add(round_index)
        self._group = group
        if is_last_signed and self._whole is not None:
            self._joinable.add(self._whole)
        self._whole = round_index if is_whole and row == {round_index} else None

    def discard(self) -> None:
        """Note that what was not in the anchor is thrown away."""
        self.parts = [part for part in self.parts if part not in self.unmerged]
        self._rows = {r: row for r, row in self._rows.items() if not row & {*self.unmerged}}
        self.unmerged = []

    def adopt(self, state: StateReference, own: StateReference, descent: Descent) -> Reckoning:
        """Work out what of the own work a state contains, and note that it is the anchor."""
        contained: dict[int, int] = {}
        for round_index, row in sorted(self._rows.items(), reverse=True):
            if self._is_in(state, round_index, descent):
                contained |= dict.fromkeys(row, round_index)
        for part in self._surely_shared(state, own, descent) - frozenset(contained):
            contained[part] = self._merged_in.get(part, part)
        on_top = [part for part in self.parts if part not in contained]
        self._merged_in = {part: contained[part] for part in self.parts if part in contained}
        is_merged = any(part in contained for part in self.unmerged)
        oldest = min((part - 1 for part in on_top), default=self._base_round)
        age = max(0, state.last_round - min(oldest, self._base_round))
        self.unmerged = on_top
        self._joinable.clear()
        self._followed.clear()
        self._whole = self._group = None
        self._base_round = state.last_round
        weight = min(1.0, STALE_ROUNDS / age) if age else 1.0
        return Reckoning(tuple(on_top), is_merged, weight)

    def _is_in(self, state: StateReference, round_index: int, descent: Descent) -> bool:
        """Tell whether the contribution of a round is in a state, by a step that came after it."""
        if not descent.contains(state, self._me, round_index):
            return False
        there_was = self._earlier.get(round_index)
        if not there_was:
            return True
        before = {d for digest in there_was for d in descent.book.ancestors(self._module, digest)}
        return any(
            made.statement.round_index == round_index
            and self._me in made.statement.peers
            and made.statement.digest not in before
            for made in descent.book.chain(state.module, state.digest)
        )

    def _surely_shared(
        self, state: StateReference, own: StateReference, descent: Descent
    ) -> set[int]:
        """Return the parts in the own anchor that lie before the fork, further back than
        certificates name them; all of them when nothing is known of a fork."""
        merged = {part for part in self.parts if part not in self.unmerged}
        if own.version == 0:
            return set()
        ancestor = descent.book.common_ancestor(state.module, state.digest, own.digest)
        if ancestor is None:
            return merged
        # By name, not by which round is earlier: a clock that was put back steps in old rounds.
        own_side = descent.book.chain(own.module, own.digest)
        behind_fork = {
            made.statement.round_index
            for made in itertools.takewhile(lambda m: m.statement.digest != ancestor, own_side)
            if self._me in made.statement.peers
        }
        return {part for part in merged if self._merged_in.get(part, part) not in behind_fork}

    def _make_room(
        self,
        most: int,
        own: StateReference,
        descent: Descent,
        others: Others,
    ) -> list[Action]:
        """Join parts between which no fork lies, as far as one can tell, or do without the
        oldest."""
        done: list[Action] = []
        while len(self.parts) > most:
            pair = self._pair_to_join(own, descent, others)
            if pair is None:
                # What no anchor has is in the local parameters, and has to be known by its name.
                oldest = next(part for part in self.parts if part not in self.unmerged)
                self.parts.remove(oldest)
                self._merged_in.pop(oldest, None)
                self._rows = {r: row - {oldest} for r, row in self._rows.items()}
                done.append(DropPart(self._module, oldest))
                continue
            older, newer = pair
            self.parts.remove(older)
            for near in (self._joinable, self._followed):
                if older not in near:
                    # A fork may lie before the whole of it.
                    near.discard(newer)
            if older in self.unmerged:
                self.unmerged.remove(older)
            self._merged_in.pop(older, None)
            self._rows = {
                r: (row - {older}) | {newer} if older in row else row
                for r, row in self._rows.items()
            }
            done.append(JoinParts(self._module, older, newer))
        self._rows = {r: row for r, row in self._rows.items() if row}
        self._in_vain = {r: who for r, who in self._in_vain.items() if r in self._rows}
        self._earlier = {r: there for r, there in self._earlier.items() if r in self._rows}
        return done

    def _pair_to_join(
        self,
        own: StateReference,
        descent: Descent,
        others: Others,
    ) -> tuple[int, int] | None:
        """Return two neighbours that are in a state together or not at all, as far as one can
        tell. Where there are none, parts that no anchor has are kept all the same: then the first
        two of which others can least have committed only one."""
        merged = [part for part in self.parts if part not in self.unmerged]
        unmerged = list(itertools.pairwise(self.unmerged))
        if not merged:
            return min(unmerged, key=lambda pair: self._what_parts(pair, own, descent))
        # Without the oldest, work is lost where somebody goes another way from before it.
        is_needed = any(r < self._merged_in.get(merged[0], merged[0]) for r in others.rounds[0])
        together = [
            pair
            for pair in itertools.pairwise(merged)
            if not self._parts_between(*pair, own, descent)
        ]
        apart = [pair for pair in together if not self._is_open_between(*pair, own, descent)]
        sure, *likely = (
            [pair for pair in apart if not self._is_stood_between(*pair, rounds)]
            for rounds in others.rounds
        )
        for near in (self._joinable, self._followed):
            for older, newer in sure:
                if newer in near:
                    return older, newer
        if not is_needed:
            return None
        # What came into the anchor by one step lies together on this side. Between the parts lie
        # chains that have lost to it: better than to do without the oldest.
        lost = [
            (older, newer)
            for older, newer in itertools.pairwise(merged)
            if self._merged_in.get(older, older) == self._merged_in.get(newer, newer)
        ]
        surely_lost = [pair for pair in lost if not self._is_open_between(*pair, own, descent)]
        # So do chains of which nobody was seen to hold a state.
        unheld = (
            pair
            for pair in itertools.pairwise(merged)
            if not self._is_open_between(*pair, own, descent)
            and not self._is_stood_between(*pair, others.rounds[0])
            and others.held.isdisjoint(s.digest for s in self._chains_between(*pair, own, descent))
        )
        pairs = (pair for pair in together if not self._is_stood_between(*pair, others.rounds[0]))
        new = (pair for pair in unmerged if not self._parts_between(*pair, own, descent))
        return next(itertools.chain(sure, surely_lost, unheld, *likely, pairs, lost, new), None)

    def _what_parts(
        self, pair: tuple[int, int], own: StateReference, descent: Descent
    ) -> tuple[bool, bool, bool]:
        """Return how likely others are to have one of two parts and not the other, least first: by
        a chain that has lost to this one, by a contribution of which one cannot tell, or by a chain
        that wins."""
        chains = list(self._chains_between(*pair, own, descent))
        wins = any(descent.wins(state, own) for state in chains)
        return wins, self._is_open_between(*pair, own, descent), bool(chains)

    def _is_open_between(
        self, older: int, newer: int, own: StateReference, descent: Descent
    ) -> bool:
        """Tell whether a contribution with one of two parts and without the other came to nothing,
        as far as is known: others of its group may have committed it."""
        return any(
            older in row
            and newer not in row
            and not self._is_known(round_index, descent)
            and not self._is_given_up(round_index, own, descent)
            for round_index, row in self._rows.items()
        )

    def _is_given_up(self, round_index: int, own: StateReference, descent: Descent) -> bool:
        """Tell whether all others of a group that came to nothing here have gone on without what
        it averaged: they signed later states of the own chain."""
        members = self._in_vain.get(round_index)
        if members is None:
            return False
        signed: set[str] = set()
        for made in descent.book.chain(own.module, own.digest):
            if made.statement.round_index <= round_index:
                break
            signed |= made.signers
        return members <= signed | {self._me}

    def _is_known(self, round_index: int, descent: Descent) -> bool:
        """Tell whether a commit is known that has the contribution of a round in it."""
        return any(
            made.statement.round_index == round_index and self._me in made.statement.peers
            for made in descent.book.all_of(self._module)
        )

    def _is_stood_between(self, older: int, newer: int, stood_on: Collection[int]) -> bool:
        """Tell whether others may go on from a state that has one of two parts and not the other.

        A chain of theirs would show too late, when they are out of sight.
        """
        first, last = (self._merged_in.get(part, part) for part in (older, newer))
        return any(first <= round_index < last for round_index in stood_on)

    def _parts_between(self, older: int, newer: int, own: StateReference, descent: Descent) -> bool:
        """Tell whether a chain is known that has one of two parts in it and not the other.

        Whoever was not in sight yet when the group was thought to be whole makes such chains.
        """
        return any(True for _ in self._chains_between(older, newer, own, descent))

    def _chains_between(
        self, older: int, newer: int, own: StateReference, descent: Descent
    ) -> Iterator[StateReference]:
        line = descent.book.ancestors(own.module, own.digest)
        rounds = [[r for r, row in self._rows.items() if part in row] for part in (older, newer)]
        for certificate in descent.book.all_of(own.module):
            state = certificate.reference
            if state.digest not in line:
                has = [any(self._is_in(state, r, descent) for r in rs) for rs in rounds]
                if has[0] != has[1]:
                    yield state
