"""What became of this peer's own work: which rounds are in which state, by name (design 4.4).

A contribution is either in the anchor's chain, where a certificate names peer and round, or it is
a part of the local parameters. The tensors lie in the trainer; here are only rounds and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from dipaco.modules.state import StateReference

from .descent import Descent

# Bundles of merged work that can be put back, for each module; each takes memory of its size.
GREATEST_BUNDLES = 3
# Snapshots of failed rounds that a state may turn out to contain.
GREATEST_SNAPSHOTS = 2
# Work that is put on a state of so many rounds later keeps its length; what is older is shortened.
STALE_ROUNDS = 4


@dataclass(frozen=True)
class Bundle:
    """Contributions that were merged one after the other while nobody stood aside.

    A fork begins where a trainer does not take a step that others take, so a bundle is in another
    state as a whole or not at all, and one sum of its shifts is enough.
    """

    rounds: tuple[int, ...]
    members: frozenset[str]


@dataclass(frozen=True)
class Reckoning:
    """What adopting a state means for own work."""

    merged_round: int | None
    """The newest snapshot that is in it."""
    put_back: tuple[int, ...]
    """First rounds of the bundles that are not in it."""
    weight: float
    """How much of the length of the work that stays on top is kept."""


class Ledger:
    """Own work in one module of the path in training."""

    def __init__(self, anchor: StateReference, me: str) -> None:
        self._me = me
        self._base_round = anchor.last_round
        self._is_open = False
        self.bundles: list[Bundle] = []
        self.snapshots: list[int] = []
        """Rounds whose copies are kept, because others may have merged them."""

    def committed(
        self, round_index: int, members: frozenset[str], *, is_whole: bool = True
    ) -> bool:
        """Note a commit of own work. Returns whether it begins a new bundle.

        `is_whole` tells that no trainer stood aside: all who claim to train are in the group, and
        all of the group of the last commit have signed it.
        """
        self._base_round = round_index
        last = self.bundles[-1] if self.bundles else None
        if is_whole and self._is_open and last is not None and last.members <= members:
            self.bundles[-1] = Bundle((*last.rounds, round_index), members)
            return False
        self._begin_bundle(Bundle((round_index,), members))
        return True

    def _begin_bundle(self, bundle: Bundle) -> None:
        self._is_open = True
        self.bundles.append(bundle)
        del self.bundles[:-GREATEST_BUNDLES]

    def remember(self, round_index: int) -> tuple[int, ...]:
        """Keep the copy of a failed round; returns the rounds whose copies are to be forgotten."""
        self.snapshots.append(round_index)
        forgotten = tuple(self.snapshots[:-GREATEST_SNAPSHOTS])
        del self.snapshots[:-GREATEST_SNAPSHOTS]
        return forgotten

    def forget_all(self) -> tuple[int, ...]:
        """Forget the copies of failed rounds: their work is in an anchor. Returns the rounds."""
        forgotten = tuple(self.snapshots)
        self.snapshots.clear()
        return forgotten

    def adopt(self, state: StateReference, own: StateReference, descent: Descent) -> Reckoning:
        """Work out what of the own work a state contains, and note that it is the anchor."""
        merged = [r for r in self.snapshots if descent.contains(state, self._me, r)]
        put_back: list[Bundle] = []
        # Without a common ancestor in sight nothing is known of old work: it is not merged twice.
        if own.version == 0 or descent.reaches(state, own):
            for bundle in self.bundles:
                contained = [r for r in bundle.rounds if descent.contains(state, self._me, r)]
                if not contained and not self._is_shared(bundle, state, own, descent):
                    put_back.append(bundle)
        oldest = min((b.rounds[0] - 1 for b in put_back), default=self._base_round)
        age = max(0, state.last_round - min(oldest, self._base_round))
        self.bundles = [bundle for bundle in self.bundles if bundle not in put_back]
        if merged:
            self._begin_bundle(Bundle((max(merged),), _members(state, max(merged), descent)))
        # Others went on without this peer, and may do so from there again.
        self._is_open = state.last_round == max(merged, default=None)
        self._base_round = state.last_round
        return Reckoning(
            max(merged, default=None),
            tuple(bundle.rounds[0] for bundle in put_back),
            min(1.0, STALE_ROUNDS / age) if age else 1.0,
        )

    def _is_shared(
        self, bundle: Bundle, state: StateReference, own: StateReference, descent: Descent
    ) -> bool:
        """Tell whether a bundle lies before the fork, further back than certificates name it."""
        ancestor = descent.book.common_ancestor(state.module, state.digest, own.digest)
        certificate = descent.book.get(state.module, ancestor or "")
        return certificate is not None and bundle.rounds[-1] <= certificate.statement.round_index


def _members(state: StateReference, round_index: int, descent: Descent) -> frozenset[str]:
    """Return the group of a round in the chain of a state."""
    for certificate in descent.book.chain(state.module, state.digest):
        if certificate.statement.round_index == round_index:
            return frozenset(row.peer for row in certificate.statement.table)
    return frozenset()
