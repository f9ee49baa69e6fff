"""Certificates: who made which state out of which, signed by those who did (design 4.4).

A commit leaves a certificate. Together they are the family tree of a module's states, and the
answer to what no count and no claim can tell: whether one's own work is in a state, what a state
descends from, who really trains. Pure: signatures are made and checked elsewhere, and a book holds
only what has been checked.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dipaco.modules.files import canonical_json
from dipaco.modules.outer import Contribution
from dipaco.modules.state import StateReference

# Versions of one module whose certificates are kept, forks included.
KEPT_PER_MODULE = 512
# Rows in all their tables: what bounds the memory when groups are large.
KEPT_ROWS_PER_MODULE = 2**14
# The longest chain that is followed and sent.
LONGEST_CHAIN = 256
# Digests and pairs of them of one module for which chains are kept worked out.
FOLLOWED = 4096
# Steps of one module: that at the boundary, and one that whoever leaves takes alone before it.
STEPS_PER_ROUND = 2


@dataclass(frozen=True)
class CommitStatement:
    """What all members of a group say of their commit, each by itself and all the same."""

    run_id: str
    module: str
    version: int
    parent: str
    """Digest of the state that the step was taken from."""
    digest: str
    """Digest of the state that came out."""
    round_index: int
    table: tuple[Contribution, ...]
    """The canonical rows of the group: who contributed how many tokens on which path."""

    @cached_property
    def peers(self) -> frozenset[str]:
        """The members of the group."""
        return frozenset(row.peer for row in self.table)

    def to_bytes(self) -> bytes:
        """Return what is signed: canonical JSON, the same on every machine."""
        return canonical_json(
            {
                "format": "dipaco-commit/1",
                "run": self.run_id,
                "module": self.module,
                "version": self.version,
                "parent": self.parent,
                "digest": self.digest,
                "round": self.round_index,
                "table": [[row.path, row.peer, row.tokens] for row in self.table],
            }
        )


@dataclass(frozen=True)
class Certificate:
    """A statement and who has signed it. Signatures of others than the group's members count
    for nothing."""

    statement: CommitStatement
    signatures: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def signers(self) -> frozenset[str]:
        """Members of the group whose signature is here."""
        return self.statement.peers & frozenset(self.signatures)

    @cached_property
    def reference(self) -> StateReference:
        """What names the state, as far as its certificate says: with the tokens of its last step
        alone, and without its size."""
        said = self.statement
        tokens = sum(row.tokens for row in said.table)
        return StateReference(said.module, said.version, said.digest, tokens, said.round_index, 0)

    def merged(self, other: Certificate) -> Certificate:
        """Return this certificate with the signatures of another one of the same statement."""
        if other.statement != self.statement:
            raise ValueError("certificates of two statements")
        return Certificate(self.statement, {**other.signatures, **self.signatures})


class _Followed:
    """What was worked out of the certificates of one module; none of them changes meanwhile."""

    def __init__(self) -> None:
        self.chains: dict[str, tuple[Certificate, ...]] = {}
        self.ancestors: dict[str, tuple[str, ...]] = {}
        self.common: dict[tuple[str, str], str | None] = {}
        self.contributors: dict[tuple[str, str | None], frozenset[str]] = {}
        self.recent: dict[tuple[str, int], frozenset[str]] = {}

    def is_full(self) -> bool:
        """Tell whether it is to be forgotten: whoever announces digests makes entries."""
        return len(self.chains) + len(self.common) + len(self.contributors) > FOLLOWED


class CertificateBook:
    """What a peer knows of the descent of the states of a run, bounded for each module."""

    def __init__(self) -> None:
        self._by_module: dict[str, dict[str, Certificate]] = {}
        self._rows: Counter[str] = Counter()
        self._stands_on: dict[str, str] = {}
        self._followed: dict[str, _Followed] = {}

    def keep(self, module: str, digest: str) -> None:
        """Forget the chain of this state last: the peer stands on it.

        Who invents chains of newer rounds does not push it out.
        """
        self._stands_on[module] = digest

    def add(self, certificate: Certificate) -> bool:
        """Take a checked certificate; returns whether it said anything new.

        A digest has one statement: that with the most signers, and of as many the first. What this
        peer stands on keeps its statements, however many identities somebody invents.
        """
        statement = certificate.statement
        known = self._by_module.setdefault(statement.module, {})
        before = known.get(statement.digest)
        if before is None:
            known[statement.digest] = certificate
            self._followed.pop(statement.module, None)
            self._rows[statement.module] += len(statement.table)
            self._forget_oldest(statement.module)
            return statement.digest in known
        if before.statement != statement:
            return self._replace(before, certificate)
        if certificate.signers <= before.signers:
            return False
        # Who has all signatures may be kept as it came, and shared.
        has_all = before.signatures.keys() <= certificate.signatures.keys()
        known[statement.digest] = certificate if has_all else before.merged(certificate)
        self._followed.pop(statement.module, None)
        return True

    def _replace(self, before: Certificate, certificate: Certificate) -> bool:
        module, digest = before.statement.module, before.statement.digest
        if len(certificate.signers) <= len(before.signers):
            return False
        if digest in self.ancestors(module, self._stands_on.get(module, "")):
            return False
        self._by_module[module][digest] = certificate
        self._followed.pop(module, None)
        self._rows[module] += len(certificate.statement.table) - len(before.statement.table)
        self._forget_oldest(module)
        return True

    def _forget_oldest(self, module: str) -> None:
        known = self._by_module[module]
        if len(known) <= KEPT_PER_MODULE and self._rows[module] <= KEPT_ROWS_PER_MODULE:
            return
        own = {c.statement.digest for c in self.chain(module, self._stands_on.get(module, ""))}
        self._followed.pop(module, None)
        statements = sorted(
            (certificate.statement for certificate in known.values()),
            key=lambda said: (said.digest in own, said.round_index, said.digest),
        )
        for said in statements:
            if len(known) <= KEPT_PER_MODULE and self._rows[module] <= KEPT_ROWS_PER_MODULE:
                return
            del known[said.digest]
            self._rows[module] -= len(said.table)

    def get(self, module: str, digest: str) -> Certificate | None:
        """Return the certificate of a state; None for a genesis state or an unknown one."""
        return self._by_module.get(module, {}).get(digest)

    def all_of(self, module: str) -> tuple[Certificate, ...]:
        """Return the certificates of one module."""
        return tuple(self._by_module.get(module, {}).values())

    def reference(self, module: str, digest: str) -> StateReference:
        """Return what names the state of a certificate; how many bytes it has is not known.

        Its tokens are those of the chain, as far as that is known.
        """
        chain = self.chain(module, digest)
        tokens = sum(certificate.reference.tokens for certificate in chain)
        return replace(chain[0].reference, tokens=tokens)

    def all(self) -> tuple[Certificate, ...]:
        """Return every certificate, those of one module after those of another."""
        return tuple(
            itertools.chain.from_iterable(
                known.values() for _, known in sorted(self._by_module.items())
            )
        )

    def _of(self, module: str) -> _Followed:
        """Return what was worked out of the present certificates of a module."""
        followed = self._followed.get(module)
        if followed is None or followed.is_full():
            followed = self._followed[module] = _Followed()
        return followed

    def chain(self, module: str, digest: str) -> tuple[Certificate, ...]:
        """Return the certificates of a state and of those before it, the newest first."""
        found = self._of(module).chains
        if digest not in found:
            found[digest] = tuple(itertools.islice(self._walk(module, digest), LONGEST_CHAIN))
        return found[digest]

    def _walk(self, module: str, digest: str) -> Iterator[Certificate]:
        known = self._by_module.get(module, {})
        seen: set[str] = set()
        while (certificate := known.get(digest)) is not None and digest not in seen:
            seen.add(digest)
            yield certificate
            digest = certificate.statement.parent

    def ancestors(self, module: str, digest: str) -> tuple[str, ...]:
        """Return the digest itself and those of the states before it, as far as is known."""
        found = self._of(module).ancestors
        if digest not in found:
            chain = self.chain(module, digest)
            found[digest] = (digest, *(certificate.statement.parent for certificate in chain))
        return found[digest]

    def common_ancestor(self, module: str, one: str, other: str) -> str | None:
        """Return the newest state that both descend from, either itself included; None if it
        is older than what is known."""
        found, pair = self._of(module).common, (one, other)
        if pair not in found:
            others = set(self.ancestors(module, other))
            found[pair] = next((d for d in self.ancestors(module, one) if d in others), None)
        return found[pair]

    def contributors_since(self, module: str, digest: str, ancestor: str | None) -> frozenset[str]:
        """Return who signed the chain of a state behind `ancestor`; None goes back all the way."""
        found, pair = self._of(module).contributors, (digest, ancestor)
        if pair not in found:
            since = itertools.takewhile(
                lambda certificate: certificate.statement.digest != ancestor,
                self.chain(module, digest),
            )
            found[pair] = frozenset().union(*(certificate.signers for certificate in since))
        return found[pair]

    def contains(self, module: str, digest: str, peer: str, round_index: int) -> bool:
        """Tell whether what `peer` contributed in a round is in a state, by name.

        A round can have two steps: who leaves takes one alone before its time, and whoever comes
        after it another.
        """
        return any(
            row.peer == peer
            for certificate in self.chain(module, digest)
            if certificate.statement.round_index == round_index
            for row in certificate.statement.table
        )

    def recent_contributors(self, module: str, digest: str, since_round: int) -> frozenset[str]:
        """Return who signed the chain of a state in `since_round` and later."""
        found, pair = self._of(module).recent, (digest, since_round)
        if pair not in found:
            found[pair] = frozenset(
                signer
                for certificate in self.chain(module, digest)
                if certificate.statement.round_index >= since_round
                for signer in certificate.signers
            )
        return found[pair]

    def add_all(self, certificates: Iterable[Certificate]) -> bool:
        """Take several; returns whether any said anything new."""
        new = [self.add(certificate) for certificate in certificates]
        return any(new)
