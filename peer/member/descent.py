"""Which of two states of a module wins, and what is in it: told by certificates (design 4.4).

The chain with more certified contributors since the common ancestor wins, then the one with more
tokens in its certificates since then, then the smaller digest. So one fast machine that was alone
never outweighs many, and nothing that a peer says of itself decides. Invented contributors weigh
nothing (`quorum.weigh`): who has not shown itself here, as it sleeps or was gone before this member
came, decides only between chains that weigh the same. Who cannot be called may be unable to show
itself to another one that cannot: where none of the contributors has, whoever has, and holds a
state of their chain, speaks for one of them. Among several the oldest fork is decided first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dipaco.dht.certificates import CertificateBook
from dipaco.modules.state import StateReference


class Descent:
    """What a member asks its book of certificates.

    `weigh`: what contributors weigh together; `standing_on`: who of those that have shown
    themselves holds one of some states of a module.
    """

    def __init__(
        self,
        book: CertificateBook,
        weigh: Callable[[Collection[str]], int] = len,
        standing_on: Callable[[str, Collection[str]], Collection[str]] = lambda *_: (),
    ) -> None:
        self.book = book
        self.weigh = weigh
        self._standing_on = standing_on

    def is_certified(self, state: StateReference) -> bool:
        """Tell whether somebody who contributed to a state has signed that."""
        certificate = self.book.get(state.module, state.digest)
        return certificate is not None and bool(certificate.signers)

    def wins(
        self,
        candidate: StateReference,
        own: StateReference,
        among: Iterable[StateReference] = (),
    ) -> bool:
        """Tell whether a holder of `own` should take `candidate` instead, `among` the states there.

        A genesis state never wins, nor one whose certificate is not known. `own` may be a state
        that stands for none, or one from an earlier life whose certificate is lost.
        """
        if candidate.digest == own.digest or not self._may_replace(candidate, own):
            return False
        order = [state.digest for state in self.in_order((*among, candidate, own))]
        if candidate.digest not in order:
            return False
        return own.digest not in order or order.index(candidate.digest) > order.index(own.digest)

    def best(
        self, candidates: Iterable[StateReference], own: StateReference
    ) -> StateReference | None:
        """Return the candidate that should replace `own`, or None.

        Whoever holds one of the states chooses the same of them.
        """
        able = [state for state in candidates if self._may_replace(state, own)]
        if not able:
            return None
        order = self.in_order((*able, own))
        return order[-1] if order and order[-1].digest != own.digest else None

    def _may_replace(self, candidate: StateReference, own: StateReference) -> bool:
        if not self.is_certified(candidate):
            return False
        if not self.is_certified(own):
            return candidate.version >= own.version
        common = self.book.common_ancestor(candidate.module, candidate.digest, own.digest)
        return self._weight(candidate, common) > 0

    def _weight(self, state: StateReference, ancestor: str | None) -> int:
        """Return what those weigh who contributed to a state since an ancestor.

        Never more than there are of them, or than peers that have shown themselves.
        """
        contributors = self.book.contributors_since(state.module, state.digest, ancestor)
        weight = self.weigh(contributors)
        if weight or not contributors:
            return weight
        line = self.book.ancestors(state.module, state.digest)
        since = itertools.takewhile(lambda digest: digest != ancestor, line)
        return int(bool(self._standing_on(state.module, frozenset(since))))

    def parted(self, state: StateReference, other: StateReference) -> frozenset[str]:
        """Return who contributed to a state since it and another one parted."""
        ancestor = self.book.common_ancestor(state.module, state.digest, other.digest)
        return self.book.contributors_since(state.module, state.digest, ancestor)

    def in_order(self, states: Iterable[StateReference]) -> list[StateReference]:
        """Return the certified ones of some states of one module, the worst first.

        Compared two by two, three states can each win over the next in a circle, and their
        holders would chase each other. So the oldest fork is decided first, between the best of
        each side, and a whole side stands behind another.
        """
        known = {state.digest: state for state in states if self.is_certified(state)}
        children: dict[str, set[str]] = {}
        for state in known.values():
            line = self.book.ancestors(state.module, state.digest)
            for digest, parent in itertools.pairwise(line):
                children.setdefault(parent, set()).add(digest)
        # Certificates that go round in a circle have no beginning, and count for nothing.
        begins = sorted(children.keys() - {d for made in children.values() for d in made})
        return self._side(None, begins, known, children)

    def _side(
        self,
        fork: str | None,
        branches: Iterable[str],
        known: Mapping[str, StateReference],
        children: Mapping[str, Collection[str]],
    ) -> list[StateReference]:
        """Return the known states of all `branches` that begin at `fork`, the worst first."""
        sides: list[list[StateReference]] = []
        for begin in branches:
            side: list[StateReference] = []
            last, made = begin, [begin]
            while len(made) == 1:
                (last,) = made
                if last in known:
                    side.append(known[last])
                made = [*children.get(last, ())]
            sides.append([*side, *self._side(last, made, known, children)])
        if len(sides) > 1:
            merits = {side[-1].digest: self._merit(side, fork) for side in sides}
            left = set() if fork is not None else self._left_behind(sides, merits)
            sides.sort(key=lambda s: (s[-1].digest not in left, merits[s[-1].digest]))
        return list(itertools.chain.from_iterable(sides))

    def _left_behind(
        self,
        sides: Collection[list[StateReference]],
        merits: Mapping[str, tuple[int, ...]],
    ) -> set[str]:
        """Return the best state of each side that ends before what is known of another begins.

        Of a long chain only the newest certificates are known, so an old copy seems to stand
        beside its own descendants, with as many contributors. A side that weighs something is
        left behind by one that does too, whatever invented identities have signed.
        """
        ends, begins = {}, {}
        for side in sides:
            chains = [self.book.chain(state.module, state.digest) for state in side]
            oldest = min((chain[-1].statement for chain in chains), key=lambda said: said.version)
            newest = [chain[0].statement for chain in chains]
            best = side[-1].digest
            begins[best] = oldest.version - 1, oldest.round_index
            ends[best] = (
                max(said.version for said in newest),
                max(said.round_index for said in newest),
            )
        left = set()
        for best, (version, round_index) in ends.items():
            # Who went on more slowly after a fork is not behind: its rounds are as late.
            if any(
                begin > version
                and begin_round > round_index
                and (merits[other][0] > 0 or merits[best][0] == 0)
                for other, (begin, begin_round) in begins.items()
            ):
                left.add(best)
        return left

    def _merit(
        self, side: Sequence[StateReference], ancestor: str | None
    ) -> tuple[int, int, int, int, int]:
        """Return what orders sides that part at `ancestor`: what their best states, the last ones,
        weigh, then the heaviest state of each, how many made the best ones, and only then tokens.

        The best of a side may have fewer contributors than another state of it, if they parted
        later. Who holds that one would give them up for fewer, if tokens came before it.
        """
        best, tokens = side[-1], 0
        for certificate in self.book.chain(best.module, best.digest):
            if certificate.statement.digest == ancestor:
                break
            tokens += sum(row.tokens for row in certificate.statement.table)
        weights = [self._weight(state, ancestor) for state in side]
        makers = len(self.book.contributors_since(best.module, best.digest, ancestor))
        return weights[-1], max(weights), makers, tokens, -int(best.digest[:15], 16)

    def contains(self, state: StateReference, peer: str, round_index: int) -> bool:
        """Tell whether what `peer` contributed to a module in a round is in a state."""
        return self.book.contains(state.module, state.digest, peer, round_index)

    def are_of_one_chain(self, state: StateReference, other: StateReference) -> bool:
        """Tell whether one of two states is the other, or descends from it."""
        ancestor = self.book.common_ancestor(state.module, state.digest, other.digest)
        return ancestor in (state.digest, other.digest)

    def goes_on_from(self, state: StateReference, earlier: StateReference) -> bool:
        """Tell whether a state was made from an earlier one, in one step or many."""
        return earlier.digest in self.book.ancestors(state.module, state.digest)[1:]

    def reaches(self, state: StateReference, other: StateReference) -> bool:
        """Tell whether the certificates known connect two states, through genesis or later."""
        return self.book.common_ancestor(state.module, state.digest, other.digest) is not None
