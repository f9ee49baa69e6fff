"""Peers that sign commits, without a network: for tests of certificates."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dipaco.dht.certificate_check import encode_certificate, sign_statement
from dipaco.dht.certificates import Certificate, CommitStatement
from dipaco.dht.identity import Identity, peer_id_of_public_key, raw_public_key
from dipaco.modules.errors import NetworkError
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution, canonical_table
from dipaco.modules.state import StateReference
from dipaco.peer.exchange.certifier import Certifier

from support.make_plan import make_plan

RUN = "0123456789abcdef"
MODULE = "L0.E0"


@cache
def grid() -> Grid:
    """A run's grid, of which `MODULE` is a module with the paths 0 and 1."""
    plan = make_plan()
    return Grid(plan.model, plan.grid)


@cache
def key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"%d" % number).digest())


@cache
def peer(number: int) -> str:
    return peer_id_of_public_key(raw_public_key(key(number)))


def identity(number: int) -> Identity:
    return Identity(peer(number), Path("nowhere"), key(number), -1)


def digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def table(members: Sequence[int], tokens: int = 10) -> tuple[Contribution, ...]:
    return canonical_table(Contribution(n % 2, peer(n), tokens + n) for n in members)


def statement(version: int, members: Sequence[int], name: str = "s") -> CommitStatement:
    """The step to `version` of a chain, in the round of the same number."""
    return CommitStatement(
        run_id=RUN,
        module=MODULE,
        version=version,
        parent=digest_of(f"{name}{version - 1}"),
        digest=digest_of(f"{name}{version}"),
        round_index=version,
        table=table(members),
    )


def certificate(
    version: int, members: Sequence[int], signers: Sequence[int] | None = None, name: str = "s"
) -> Certificate:
    said = statement(version, members, name)
    signed = members if signers is None else signers
    return Certificate(
        said, {peer(n): sign_statement(said, key(n)).signatures[peer(n)] for n in signed}
    )


def reference(of: Certificate) -> StateReference:
    said = of.statement
    return StateReference(said.module, said.version, said.digest, 100, said.round_index, 1)


class Line:
    """A line over which certifiers ask each other; a peer that is not on it does not answer."""

    def __init__(self) -> None:
        self.peers: dict[str, Certifier] = {}
        self.answers: dict[str, list[bytes]] = {}
        """What a peer answers to whatever it is asked, instead of what it knows."""
        self.asked: list[tuple[str, str, int]] = []
        self.answered_bytes = 0

    def certificates(self, peer: str, module: str, digest: str, count: int) -> Sequence[bytes]:
        self.asked.append((peer, digest, count))
        if peer in self.answers:
            return self.answers[peer]
        if peer not in self.peers:
            raise NetworkError(f"peer {peer} does not answer")
        found = [encode_certificate(c) for c in self.peers[peer].chain(module, digest)[:count]]
        self.answered_bytes += sum(map(len, found))
        return found

    def certifier(self, number: int, folder: Path, **options: object) -> Certifier:
        made = Certifier(
            RUN,
            grid(),
            identity(number),
            self,
            folder / str(number),
            **options,  # type: ignore[arg-type]
        )
        self.peers[peer(number)] = made
        return made
