"""Where records stand in the DHT: their kinds, keys and subkeys, and what may stand there.

Signed kinds carry the owner's public key in their subkey, so only the owner can change them, and
the peer id inside must be the owner's. Manifests and revocations certify themselves, so any
peer may store them again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from .identity import PUBLIC_KEY_BYTES, peer_id_of_public_key
from .manifest import MAX_MANIFEST_BYTES
from .plan import PROTOCOL_VERSION
from .record_errors import OtherProtocolError, RecordError
from .records import DAY_S, BlobRecord, ModuleRecord, PeerRecord, ProgressRecord, Record

NAMESPACE = f"dipaco/{PROTOCOL_VERSION}"
# The same in every protocol, so that a newcomer learns which one a run speaks.
MANIFESTS_KEY = "dipaco/1/manifests"
MAX_SUBKEY_BYTES = 160
# A list of revoked invitations, see `admission.py`.
MAX_LIST_BYTES = 2**16


@dataclass(frozen=True)
class Kind:
    """One kind of record: its type and its bounds."""

    name: str
    record: type[Record] | None
    max_bytes: int
    max_life_s: float
    item: str = ""
    """The pattern of its items; empty if it has none."""
    field: str = ""
    """The field that repeats the item."""
    is_of_present: bool = False
    """Whether it does not outlast its owner for long."""

    def shows_presence(self, content: Mapping[str, Any]) -> bool:
        """Tell whether a record with this content shows that its owner is there. A goodbye does
        not, although it can be read until it expires."""
        return self.is_of_present and content.get("state") != "leaving"


_BUCKET = r"0|[1-9][0-9]{0,8}"
_HASH = r"[0-9a-f]{64}"
KINDS = {
    kind.name: kind
    for kind in (
        Kind("modules", ModuleRecord, 1024, 2400.0, r"[LP][0-9.E]{1,12}", "module", True),
        Kind("peers", PeerRecord, 2304, 2400.0, _BUCKET, is_of_present=True),
        Kind("progress", ProgressRecord, 24_832, 2 * DAY_S, _BUCKET),
        Kind("blobs", BlobRecord, 640, 6 * 3600.0, _HASH, "sha256"),
        Kind("manifests", None, MAX_MANIFEST_BYTES, 2 * DAY_S),
        Kind("revocations", None, MAX_LIST_BYTES, 2 * DAY_S),
    )
}

_SIGNED = "|".join(
    f"(?:{kind.name}/(?:{kind.item}))" for kind in KINDS.values() if kind.record is not None
)
_SUBKEY = re.compile(
    rf"{NAMESPACE}/(?P<run>[0-9a-f]{{16}})/(?P<name>{_SIGNED})"
    rf"@(?P<owner>.{{{PUBLIC_KEY_BYTES}}})".encode(),
    re.DOTALL,
)
_ANY_PROTOCOL = re.compile(rf"dipaco/(?!{PROTOCOL_VERSION}/)(?P<version>[0-9]{{1,9}})/".encode())
_MANIFEST_SUBKEY = re.compile(
    rf"{MANIFESTS_KEY}/(?P<run>[0-9a-f]{{16}})/(?P<operator>[0-9a-f]{{16}})".encode()
)
_UNSIGNED_SUBKEY = re.compile(
    rf"{NAMESPACE}/(?P<run>[0-9a-f]{{16}})/"
    r"revocations/(?P<version>[0-9]{8})".encode()
)


@dataclass(frozen=True)
class Address:
    """What a subkey says: kind, run, item (a module, bucket, hash or version; of a manifest the
    operator's fingerprint), owner."""

    kind: Kind
    run_id: str
    item: str | None
    public_key: bytes | None
    """The owner's, 32 bytes; of the kinds that are not signed there is none."""

    @functools.cached_property
    def peer_id(self) -> str | None:
        """The owner's peer id."""
        return peer_id_of_public_key(self.public_key) if self.public_key else None

    @property
    def key(self) -> str:
        """The DHT key under which this record must stand."""
        return record_key(self.kind.name, self.run_id, self.item)


def record_key(kind: str, run_id: str, item: str | None = None) -> str:
    """Return the DHT key of a kind of record of a run."""
    if kind == "manifests":
        return MANIFESTS_KEY
    if kind == "revocations":
        return f"{NAMESPACE}/{run_id}/{kind}"
    return f"{NAMESPACE}/{run_id}/{kind}" + (f"/{item}" if item else "")


def record_subkey(kind: str, run_id: str, item: str | None, public_key: bytes) -> bytes:
    """Return the subkey of a record; `public_key` is the owner's, or empty if it has none."""
    if kind == "manifests":
        # Anybody can sign the plan of a run, whose hash is the run's id: with the operator beside
        # it, that takes the place of no manifest.
        return f"{MANIFESTS_KEY}/{run_id}/{item}".encode()
    if kind == "revocations":
        return f"{NAMESPACE}/{run_id}/{kind}/{item}".encode()
    return record_key(kind, run_id, item).encode() + b"@" + public_key


def parse_subkey(subkey: Any) -> Address:
    """Read a subkey. Raises `RecordError`."""
    if not isinstance(subkey, bytes) or len(subkey) > MAX_SUBKEY_BYTES:
        raise RecordError("its subkey is not of this protocol")
    return _parse_subkey(subkey)


@functools.lru_cache(maxsize=8192)
def _parse_subkey(subkey: bytes) -> Address:
    """Cached, because every node sees each peer's few subkeys again and again."""
    manifest = _MANIFEST_SUBKEY.fullmatch(subkey)
    if manifest:
        run, operator = manifest["run"].decode(), manifest["operator"].decode()
        return Address(KINDS["manifests"], run, operator, None)
    unsigned = _UNSIGNED_SUBKEY.fullmatch(subkey)
    if unsigned:
        item = unsigned["version"].decode()
        return Address(KINDS["revocations"], unsigned["run"].decode(), item, None)
    match = _SUBKEY.fullmatch(subkey)
    if not match and (other := _ANY_PROTOCOL.match(subkey)):
        raise OtherProtocolError(f"it is of protocol {other['version'].decode()}")
    if not match:
        raise RecordError("its subkey is not of this protocol")
    name, _, item = match["name"].decode().partition("/")
    return Address(KINDS[name], match["run"].decode(), item, match["owner"])


def parse_record(address: Address, value: Any) -> Record:
    """Check the content of a signed record against its address. Raises `RecordError`."""
    record_class = address.kind.record
    assert record_class is not None
    if not isinstance(value, dict):
        raise RecordError(f"a {address.kind.name} record is a {type(value).__name__}, not a map")
    # msgpack knows no tuples; the lists in a record are its bounded sequences.
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
    try:
        record = record_class.model_validate(fields)
    except (ValidationError, TypeError) as error:
        raise RecordError(f"a {address.kind.name} record is malformed: {_first(error)}") from None
    if record.peer_id != address.peer_id:
        raise RecordError(
            f"a {address.kind.name} record names {record.peer_id} but {address.peer_id} signed it"
        )
    item = getattr(record, address.kind.field, address.item)
    if item != address.item:
        raise RecordError(f"a {address.kind.name} record is about {item}, not {address.item}")
    return record


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}"
    return str(error)
