"""Certificates between peers: signing a statement, checking what others send, and their bytes.

What comes from a peer is refused with `RecordError`, which says why. Whoever takes certificates
from elsewhere into a `CertificateBook` passes them through `verify_certificate`.
"""

from __future__ import annotations

import re
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution, canonical_table

from .admission import ADMISSION_BYTES, Gate
from .certificates import STEPS_PER_ROUND, Certificate, CommitStatement
from .identity import (
    SIGNATURE_BYTES,
    is_signed,
    peer_id_of_public_key,
    public_key_of_peer_id,
    raw_public_key,
)
from .records import MAX_COUNT, RecordError

SIGNED_PREFIX = b"dipaco-commit/1\n"
MAX_MEMBERS = 1024
# A member's row with its signature takes at most 120 bytes.
MAX_CERTIFICATE_BYTES = 2**17

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MODULE_BYTES = 64
_SIGNATURES = (SIGNATURE_BYTES, SIGNATURE_BYTES + ADMISSION_BYTES)


def sign_statement(
    statement: CommitStatement, key: Ed25519PrivateKey, admission: bytes = b""
) -> Certificate:
    """Return a certificate with one signature, that of the owner of `key`.

    In a run by invitation its admission follows the signature.
    """
    signature = key.sign(SIGNED_PREFIX + statement.to_bytes()) + admission
    return Certificate(statement, {peer_id_of_public_key(raw_public_key(key)): signature})


def verify_certificate(
    certificate: Certificate,
    run_id: str,
    grid: Grid,
    *,
    checked: Certificate | None = None,
    gate: Gate | None = None,
) -> None:
    """Check that a certificate may stand in the book of a run. Raises `RecordError`.

    Its statement has to be one that a group of this run can make, and every signature has to be
    of a member of the group; one at least is there. Signatures that `checked`, a certificate of
    the same statement, has too are not checked again. In a run by invitation (`gate`) every signer
    shows its admission, also one that is revoked by now.
    """
    statement = certificate.statement
    if statement.run_id != run_id:
        raise RecordError(f"it is of run {statement.run_id[:16]}")
    if statement.module not in grid.modules():
        raise RecordError("it is of a module that this run does not have")
    what = f"version {statement.version} of {statement.module}"
    if not (_is_count(statement.version) and statement.version > 0):
        raise RecordError(f"{statement.module} cannot have the version {statement.version!r}")
    is_round = _is_count(statement.round_index)
    if not (is_round and statement.version <= STEPS_PER_ROUND * (statement.round_index + 1)):
        raise RecordError(f"{what} cannot be of the round {statement.round_index!r}")
    if not (_DIGEST.fullmatch(statement.digest) and _DIGEST.fullmatch(statement.parent)):
        raise RecordError(f"{what} names no digests")
    _check_table(statement, grid, what)
    members = statement.peers
    if not certificate.signatures or not certificate.signatures.keys() <= members:
        raise RecordError(f"{what} is not signed by members of its group alone")
    message = SIGNED_PREFIX + statement.to_bytes()
    known = checked.signatures if checked and checked.statement == statement else {}
    for peer, signature in certificate.signatures.items():
        if known.get(peer) == signature:
            continue
        signed, admission = signature[:SIGNATURE_BYTES], signature[SIGNATURE_BYTES:]
        if gate is not None:
            gate.check(peer, admission, even_revoked=True)
        elif admission:
            raise RecordError(f"{what} has an admission, in an open run")
        if not is_signed(message, signed, public_key_of_peer_id(peer)):
            raise RecordError(f"{what} has a signature that is not of {peer}")


def _check_table(statement: CommitStatement, grid: Grid, what: str) -> None:
    if len(statement.table) > MAX_MEMBERS:
        raise RecordError(f"{what} names {len(statement.table)} members")
    paths = grid.paths_of_module(statement.module)
    for row in statement.table:
        if type(row.path) is not int or row.path not in paths:
            raise RecordError(f"{what} names the path {row.path!r}")
        if not (_is_count(row.tokens) and row.tokens > 0):
            raise RecordError(f"{what} names {row.tokens!r} tokens")
        try:
            public_key_of_peer_id(row.peer)
        except ValueError:
            raise RecordError(f"{what} names a member that is no peer") from None
    try:
        is_canonical = canonical_table(statement.table) == statement.table
    except ValueError as error:
        raise RecordError(f"{what}: {error}") from None
    if not is_canonical:
        raise RecordError(f"{what} has its members in another order")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def encode_certificate(certificate: Certificate) -> bytes:
    """Return the bytes of a certificate, without the run's id: whoever reads them knows it.

    Signatures of others than members are left out.
    """
    statement = certificate.statement
    rows = [
        [
            row.path,
            public_key_of_peer_id(row.peer),
            row.tokens,
            certificate.signatures.get(row.peer, b""),
        ]
        for row in statement.table
    ]
    packed: bytes = msgpack.packb(
        [
            statement.module,
            statement.version,
            bytes.fromhex(statement.parent),
            bytes.fromhex(statement.digest),
            statement.round_index,
            rows,
        ],
        use_bin_type=True,
    )
    return packed


def decode_certificate(data: bytes, run_id: str) -> Certificate:
    """Read a certificate of a run, in its one spelling. Raises `RecordError`.

    It is not verified yet.
    """
    if len(data) > MAX_CERTIFICATE_BYTES:
        raise RecordError(f"it has {len(data)} bytes, at most {MAX_CERTIFICATE_BYTES} are allowed")
    try:
        certificate = _parse(msgpack.unpackb(data, raw=False), run_id)
        spelled = encode_certificate(certificate)
    except Exception as error:  # Whatever msgpack, or a value of another type, raises.
        raise RecordError(f"it cannot be read ({type(error).__name__})") from None
    if spelled != data:
        raise RecordError("it is not in its canonical form")
    return certificate


def _parse(values: Any, run_id: str) -> Certificate:
    module, version, parent, digest, round_index, rows = values
    if type(module) is not str or len(module) > _MODULE_BYTES or len(rows) > MAX_MEMBERS:
        raise ValueError
    table: list[Contribution] = []
    signatures: dict[str, bytes] = {}
    for path, public_key, tokens, signature in rows:
        peer = peer_id_of_public_key(public_key)
        table.append(Contribution(path, peer, tokens))
        if signature:
            if type(signature) is not bytes or len(signature) not in _SIGNATURES:
                raise ValueError
            signatures[peer] = signature
    statement = CommitStatement(
        run_id=run_id,
        module=module,
        version=version,
        parent=parent.hex(),
        digest=digest.hex(),
        round_index=round_index,
        table=tuple(table),
    )
    return Certificate(statement, signatures)
