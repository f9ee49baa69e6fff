"""States of one module and the certificates that say who made which out of which, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from dipaco.dht.certificates import Certificate, CertificateBook, CommitStatement
from dipaco.modules.outer import Contribution
from dipaco.modules.state import StateReference

MODULE = "L0.E0"


def genesis(module: str = MODULE) -> StateReference:
    """Return the first state of a module."""
    digest = hashlib.sha256(f"genesis of {module}".encode()).hexdigest()
    return StateReference(module, 0, digest, 0, -1, 1)


class Family:
    """Makes states, and knows all their certificates. Digests follow from what a state is."""

    def __init__(self) -> None:
        self.book = CertificateBook()

    def commit(
        self,
        parent: StateReference,
        round_index: int,
        peers: Iterable[str],
        *,
        tokens: int = 10,
        signers: Collection[str] | None = None,
        path: int = 0,
        digest: str = "",
    ) -> StateReference:
        """Return the state after an outer step of `peers`, signed by all or by `signers`."""
        table = tuple(Contribution(path, peer, tokens) for peer in sorted(peers))
        made = hashlib.sha256(f"{parent.digest}{round_index}{table}".encode()).hexdigest()
        state = StateReference(
            parent.module,
            parent.version + 1,
            digest or made,
            parent.tokens + sum(row.tokens for row in table),
            round_index,
            1,
        )
        statement = CommitStatement(
            "run", state.module, state.version, parent.digest, state.digest, round_index, table
        )
        names = [row.peer for row in table] if signers is None else signers
        self.book.add(Certificate(statement, dict.fromkeys(names, b"")))
        return state

    def commits(
        self, parent: StateReference, rounds: Iterable[int], peers: Iterable[str], **fields: int
    ) -> StateReference:
        """Return the state after a step of the same peers in each of several rounds."""
        names = tuple(peers)
        for round_index in rounds:
            parent = self.commit(parent, round_index, names, **fields)  # type: ignore[arg-type]
        return parent

    def certificate(self, state: StateReference) -> Certificate:
        """Return what was signed of a state."""
        found = self.book.get(state.module, state.digest)
        assert found is not None
        return found

    def chain(self, state: StateReference) -> tuple[Certificate, ...]:
        """Return the certificates of a state and of those before it, the newest first."""
        return self.book.chain(state.module, state.digest)
