"""The signed manifest: a run's plan with the operator's signature.

The envelope is JSON: the plan, the operator's public key (Ed25519) and the signature over the
plan's canonical bytes. It certifies itself, so anybody may store and pass it on. A run's id is
the hash of the plan alone; who signed is shown to the volunteer as the operator's fingerprint.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.base.errors import (
    ConfigurationError,
    ManifestError,
    ProtocolVersionError,
    StorageError,
)
from dipaco.base.files import atomic_write, canonical_json

from .config import parse_config
from .identity import PUBLIC_KEY_BYTES, is_signed, raw_public_key
from .plan import PROTOCOL_VERSION, RunPlan, protocol_remedy

# Its name in the folder of a run.
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 2**16
_END_OF_VERSIONS = 2**31
_SIGNED_PREFIX = b"dipaco-manifest/1\n"


@dataclass(frozen=True)
class SignedManifest:
    """A manifest whose signature was verified."""

    plan: RunPlan
    operator_fingerprint: str
    """First 16 hexadecimal digits of the hash of the operator's public key."""
    envelope: bytes
    """The bytes that were verified; store these again, not a copy made from the plan."""
    operator_key: bytes = b""
    """The operator's public key, 32 bytes."""


def load_or_create_operator_key(path: Path) -> Ed25519PrivateKey:
    """Return the operator's key, made on first use and never overwritten (mode 600).

    Raises `ManifestError` for a file that is no Ed25519 key, `StorageError` when it cannot be
    read or written.
    """
    path = Path(path)
    try:
        if not path.exists():
            return _create_key(path)
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"operator key {path}: {error.strerror}") from None
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ManifestError(
            f"{path} is not an Ed25519 private key in PEM; move it away to have a new one made"
        )
    return key


def _create_key(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    atomic_write(path, pem, mode=0o600)
    return key


def operator_fingerprint(key: Ed25519PrivateKey) -> str:
    """Return the fingerprint under which volunteers know the owner of `key`."""
    return fingerprint_of(raw_public_key(key))


def fingerprint_of(public_key: bytes) -> str:
    """Return the fingerprint of an operator by the public key, 32 bytes."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def sign_manifest(plan: RunPlan, key: Ed25519PrivateKey) -> bytes:
    """Return the JSON envelope of `plan`, signed. Raises `ManifestError` when nobody would take
    it, because it is too large."""
    signature = key.sign(_SIGNED_PREFIX + plan.canonical_json())
    envelope = {
        "plan": plan.model_dump(mode="json"),
        "operator": {"public_key": base64.b64encode(raw_public_key(key)).decode()},
        "signature": base64.b64encode(signature).decode(),
    }
    signed = json.dumps(envelope, indent=1, sort_keys=True).encode() + b"\n"
    if len(signed) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"the manifest would have {len(signed)} bytes, and at most {MAX_MANIFEST_BYTES} are "
            f"allowed; give fewer mirrors, or a base of fewer and larger files"
        )
    return signed


def verify_manifest(
    envelope: bytes, expected_run_id: str | None = None, *, older: bool = False
) -> SignedManifest:
    """Check an envelope from a file or from the DHT and return its plan.

    With `older` it may be of an older protocol: a run is moved to a new one by a successor.

    Raises `ManifestError` when it is too large, unreadable, badly signed or not the run expected,
    and `ProtocolVersionError` when it is of another protocol. Nothing of a bad manifest is used.
    """
    values, public_key, run_id = _verify_signature(envelope)
    if expected_run_id is not None and run_id != expected_run_id:
        raise ManifestError(
            f"the manifest is of run {run_id}, it was stored as run {expected_run_id}"
        )
    _check_version(values, older)
    try:
        plan = parse_config(RunPlan, values, "the manifest")
    except ConfigurationError as error:
        raise ManifestError(str(error)) from None
    if plan.run_id != run_id:
        raise ManifestError(
            f"the manifest of run {run_id} leaves out or respells parts of its plan; ask the "
            "operator to sign it again with `dipaco-bootstrap prepare`"
        )
    return SignedManifest(plan, fingerprint_of(public_key), bytes(envelope), public_key)


def run_and_operator(envelope: bytes) -> tuple[str, str]:
    """Return the run id and the operator's fingerprint of a correctly signed envelope, whatever
    protocol its plan is of.

    Nodes that only store a manifest check this much, so that a swarm in which two versions of
    the protocol meet can still tell a newcomer so. Raises `ManifestError`.
    """
    _, public_key, run_id = _verify_signature(envelope)
    return run_id, fingerprint_of(public_key)


def foreign_successor(envelope: bytes, manifest: SignedManifest) -> tuple[str, str] | None:
    """Return the id of a successor of a run in another protocol, and what its peers should know.

    None for any other envelope, also for one that another operator signed. Raises `ManifestError`.
    """
    values, public_key, run_id = _verify_signature(envelope)
    version = values.get("protocol_version")
    if (
        values.get("successor_of") != manifest.plan.run_id
        or fingerprint_of(public_key) != manifest.operator_fingerprint
        or type(version) is not int
        or not 0 < version < _END_OF_VERSIONS
        or version == PROTOCOL_VERSION
    ):
        return None
    name = str(values.get("name"))[:64]
    return run_id, (
        f"the operator continues this run as {name!r} ({run_id}) in protocol {version}, this "
        f"dipaco speaks {PROTOCOL_VERSION}: the peer stays here; {protocol_remedy(version)}"
    )


def _verify_signature(envelope: bytes) -> tuple[Mapping[str, Any], bytes, str]:
    """Return the plan's values, the operator's key and the run id, once the signature is right."""
    if len(envelope) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"the manifest has {len(envelope)} bytes; at most {MAX_MANIFEST_BYTES} are allowed"
        )
    try:
        content = json.loads(envelope)
        values = content["plan"]
        public_key = base64.b64decode(content["operator"]["public_key"], validate=True)
        signature = base64.b64decode(content["signature"], validate=True)
        if not isinstance(values, Mapping) or len(public_key) != PUBLIC_KEY_BYTES:
            raise TypeError
        signed = canonical_json(values)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ManifestError(
            "the manifest cannot be read: it is not a plan with a key and a signature"
        ) from None
    run_id = hashlib.sha256(signed).hexdigest()[:16]
    if not is_signed(_SIGNED_PREFIX + signed, signature, public_key):
        raise ManifestError(
            f"the signature of run {str(values.get('name'))[:64]!r} ({run_id}) is wrong: the "
            "manifest was changed after it was signed; do not train it, ask the operator for a "
            "new one"
        )
    return values, public_key, run_id


def _check_version(values: Mapping[str, Any], older: bool) -> None:
    """Refuse another protocol before its unknown fields are called mistakes."""
    version = values.get("protocol_version", PROTOCOL_VERSION)
    if older and type(version) is int and version < PROTOCOL_VERSION:
        return
    is_one = type(version) is int and 0 < version < _END_OF_VERSIONS
    if is_one and version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"run {str(values.get('name'))[:64]!r} speaks protocol {version}, this installation "
            f"speaks {PROTOCOL_VERSION}; {protocol_remedy(version)}"
        )


def _next_run(manifest: SignedManifest, others: Iterable[SignedManifest]) -> SignedManifest | None:
    """Return the run that succeeds `manifest`'s directly, if there is one among `others`."""
    following = [other for other in others if _succeeds(other, manifest)]
    return max(following, key=_age, default=None)


def newest_run(manifest: SignedManifest, others: Iterable[SignedManifest]) -> SignedManifest:
    """Follow the chain of successors to its end: the run that peers of `manifest` go to.

    They go there directly; the runs in between were steps for their own peers only. A chain has
    an end, because every run in it starts later than the one before.
    """
    others = tuple(others)
    while (following := _next_run(manifest, others)) is not None:
        manifest = following
    return manifest


def current_runs(manifests: Iterable[SignedManifest]) -> list[SignedManifest]:
    """Return the runs that a newcomer who names none may mean: the ends of all chains."""
    manifests = tuple(manifests)
    first = [m for m in manifests if not any(_succeeds(m, other) for other in manifests)]
    current = {newest_run(manifest, manifests).plan.run_id for manifest in first}
    return [m for m in manifests if m.plan.run_id in current]


def chain_of_runs(
    manifest: SignedManifest, others: Iterable[SignedManifest]
) -> list[SignedManifest]:
    """Return the runs that succeed a run, directly or not, those that it succeeds, and itself."""
    chain, left = [manifest], list(others)
    while found := [m for m in left if any(_succeeds(m, n) or _succeeds(n, m) for n in chain)]:
        chain += found
        left = [m for m in left if m not in found]
    return chain


def _succeeds(new: SignedManifest, old: SignedManifest) -> bool:
    return (
        new.plan.successor_of == old.plan.run_id
        and new.operator_key == old.operator_key
        and new.plan.start_s > old.plan.start_s
    )


def _age(manifest: SignedManifest) -> tuple[float, str]:
    return manifest.plan.start_s, manifest.plan.run_id
