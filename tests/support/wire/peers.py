"""Peers with keys of their own that never change, and a gate that everybody passes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.protocol.admission import Admission, Gate
from dipaco.protocol.identity import Identity, peer_id_of_public_key, raw_public_key

RUN = "0123456789abcdef"


@cache
def key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"%d" % number).digest())


@cache
def peer(number: int) -> str:
    return peer_id_of_public_key(raw_public_key(key(number)))


def identity(number: int) -> Identity:
    return Identity(peer(number), Path("nowhere"), key(number), -1)


class OpenGate(Gate):
    """Lets everybody in, for tests of what admission does not change."""

    def __init__(self, run_id: str = RUN, operator_key: bytes = bytes(32)) -> None:
        super().__init__(run_id, operator_key)

    def verify(self, peer: str, data: Any) -> Admission:
        return Admission("everybody", 10_000)

    def check(self, peer: str, data: Any, *, is_here: bool = True) -> Admission:
        return Admission("everybody", 10_000)

    def may_be_in(self, peer: str, data: Any) -> bool:
        return True

    def admission_of(self, peer: str) -> Admission | None:
        return Admission("everybody", 10_000)

    def counted_of(
        self, seen: Collection[str], own: tuple[str, bytes] | None = None
    ) -> frozenset[str]:
        return frozenset(seen)
