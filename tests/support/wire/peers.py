"""Peers with keys of their own that never change, and a gate that everybody passes."""

import hashlib
from functools import cache
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.protocol.admission import Admission, Gate
from dipaco.protocol.identity import Identity, peer_id_of_public_key, raw_public_key

RUN = "0123456789abcdef"


@cache
def key(number):
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"%d" % number).digest())


@cache
def peer(number):
    return peer_id_of_public_key(raw_public_key(key(number)))


def identity(number):
    return Identity(peer(number), Path("nowhere"), key(number), -1)


class OpenGate(Gate):
    """Lets everybody in, for tests of what admission does not change."""

    def __init__(self, run_id=RUN, operator_key=bytes(32)):
        super().__init__(run_id, operator_key)

    def verify(self, peer, data):
        return Admission("everybody", 10_000)

    def check(self, peer, data, *, is_here=True):
        return Admission("everybody", 10_000)

    def may_be_in(self, peer, data):
        return True

    def admission_of(self, peer):
        return Admission("everybody", 10_000)

    def counted_of(self, seen, own=None):
        return frozenset(seen)
