"""Which of two states of a module wins, and what is in it: told by certificates (design 4.4).

The chain with more certified contributors since the common ancestor wins, then the one with more
tokens in its certificates since then, then the smaller digest. So one fast machine that was alone
never outweighs many, and nothing that a peer says of itself decides.
"""

from __future__ import annotations

from collections.abc import Iterable

from dipaco.dht.certificates import CertificateBook
from dipaco.modules.state import StateReference


class Descent:
    """What a member asks its book of certificates."""

    def __init__(self, book: CertificateBook) -> None:
        self.book = book

    def is_certified(self, state: StateReference) -> bool:
        """Tell whether somebody who contributed to a state has signed that."""
        certificate = self.book.get(state.module, state.digest)
        return certificate is not None and bool(certificate.signers)

    def wins(self, candidate: StateReference, own: StateReference) -> bool:
        """Tell whether a holder of `own` should take `candidate` instead.

        A genesis state never wins, nor one whose certificate is not known. `own` may be a state
        that stands for none, or one from an earlier life whose certificate is lost.
        """
        module = candidate.module
        if candidate.digest == own.digest or not self.is_certified(candidate):
            return False
        if own.version == 0:
            return True
        if not self.is_certified(own):
            return candidate.version >= own.version
        ancestor = self.book.common_ancestor(module, candidate.digest, own.digest)
        if ancestor == own.digest:
            return True
        if ancestor == candidate.digest:
            return False
        return self._merit(candidate, ancestor) > self._merit(own, ancestor)

    def _merit(self, state: StateReference, ancestor: str | None) -> tuple[int, int, int]:
        """Return what orders two chains that part at `ancestor`."""
        contributors = self.book.contributors_since(state.module, state.digest, ancestor)
        tokens = 0
        for certificate in self.book.chain(state.module, state.digest):
            if certificate.statement.digest == ancestor:
                break
            tokens += sum(row.tokens for row in certificate.statement.table)
        return len(contributors), tokens, -int(state.digest[:15], 16)

    def best(
        self, candidates: Iterable[StateReference], own: StateReference
    ) -> StateReference | None:
        """Return the candidate that should replace `own`, or None."""
        found = own
        for candidate in sorted(candidates, key=lambda state: state.digest):
            if self.wins(candidate, found):
                found = candidate
        return None if found is own else found

    def contains(self, state: StateReference, peer: str, round_index: int) -> bool:
        """Tell whether what `peer` contributed to a module in a round is in a state."""
        return self.book.contains(state.module, state.digest, peer, round_index)

    def reaches(self, state: StateReference, other: StateReference) -> bool:
        """Tell whether the certificates known connect two states, through genesis or later."""
        return self.book.common_ancestor(state.module, state.digest, other.digest) is not None
