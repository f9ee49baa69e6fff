"""What every node of the DHT checks in every record that it stores or reads.

Nothing enters the DHT but the records of `records.py`, each under the one key that its subkey
names, signed by its owner and within its kind's bounds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import struct
from collections import OrderedDict
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from dipaco.base.errors import ManifestError
from dipaco.base.repetition import Complaints
from dipaco.protocol.identity import SIGNATURE_BYTES, Identity, is_signed, raw_public_key
from dipaco.protocol.manifest import run_and_operator
from dipaco.protocol.record_errors import OtherProtocolError, RecordError
from dipaco.protocol.record_keys import MAX_SUBKEY_BYTES, Address, parse_record, parse_subkey
from dipaco.protocol.revocations import read_revocations

logger = logging.getLogger(__name__)

# Clocks differ by a few seconds, and what one node stored another must not refuse to read.
_CLOCK_TOLERANCE_S = 15.0
_COMPLAINT_PERIOD_S = 60.0
# Warnings in a period, all keys together: somebody who makes hundreds must not fill the log.
MAX_COMPLAINTS = 20
# Records accepted lately, of which a node remembers a hash instead of checking them again.
MAX_REMEMBERED = 16_384
# What a signature is over begins with this: the same key signs other things too.
SIGNED_PREFIX = b"dipaco-record/1\n"


class RecordValidator(RecordValidatorBase):
    """Signs this peer's records, and checks everybody's, so that a refusal is one line.

    The DHT process calls it. What one honest node stores another must not refuse to read. So all
    bounds are fixed, the only one that depends on time has a tolerance, and a record must be
    spelled as a node that passes it on spells it (its signature covers the spelling).
    """

    def __init__(self, private_key: Ed25519PrivateKey | None = None) -> None:
        self._private_key = private_key
        self._public_key = raw_public_key(private_key) if private_key else None
        self._complaints = Complaints(_COMPLAINT_PERIOD_S, MAX_COMPLAINTS)
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """Tell whether `record` may stand in the DHT."""
        owner, key = "an unnamed peer", ""
        try:
            subkey = _load_subkey(record.subkey)
            address = parse_subkey(subkey)
            owner = address.peer_id or f"whoever stores run {address.run_id}"
            key = address.key
            self._check(address, record)
        except OtherProtocolError as error:
            # Nobody's mistake: peers of two versions may know each other's addresses.
            logger.debug("refused a record: %s", error)
            return False
        except RecordError as error:
            self._complain(owner, str(error), key)
            return False
        except Exception as error:
            logger.debug("record of %s", owner, exc_info=True)
            self._complain(owner, f"it cannot be read ({type(error).__name__})", key)
            return False
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        """Return the value of this peer's record with its signature; of others, the value."""
        if self._private_key is None or _owner_key(record) != self._public_key:
            return record.value
        return record.value + self._private_key.sign(signed_bytes(record))

    def strip_value(self, record: DHTRecord) -> bytes:
        """Return the value without its signature; what is not signed has nothing to strip."""
        return record.value if _owner_key(record) is None else record.value[:-SIGNATURE_BYTES]

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Absorb another of its kind: one signs and checks already."""
        return isinstance(other, RecordValidator)

    def _check(self, address: Address, record: DHTRecord) -> None:
        kind = address.kind
        if record.key != DHTID.generate(source=address.key).to_bytes():
            raise RecordError(f"a {kind.name} record stands under a key that is not its own")
        if type(record.value) is not bytes or type(record.expiration_time) is not float:
            raise RecordError(f"a {kind.name} record has no bytes or no time of expiration")
        life_s = record.expiration_time - get_dht_time()
        # Not `>`: an expiration that is not a number compares with nothing.
        if not life_s <= kind.max_life_s + _CLOCK_TOLERANCE_S:
            raise RecordError(
                f"a {kind.name} record would live for {life_s:.0f} s, at most "
                f"{kind.max_life_s:.0f} s are allowed"
            )
        if len(record.value) > kind.max_bytes + SIGNATURE_BYTES:
            raise RecordError(_too_large(address, len(record.value)))
        fingerprint = _fingerprint(record)
        if fingerprint in self._accepted:
            return
        self._check_content(address, record)
        self._accepted[fingerprint] = None
        if len(self._accepted) > MAX_REMEMBERED:
            self._accepted.popitem(last=False)

    def _check_content(self, address: Address, record: DHTRecord) -> None:
        """Check what does not change with time; every refresh gives the same records many times."""
        kind = address.kind
        content = self.strip_value(record)
        if len(content) > kind.max_bytes:
            raise RecordError(_too_large(address, len(content)))
        if kind.record is None:
            _CHECKS[kind.name](address, MSGPackSerializer.loads(content))
            return
        stripped = dataclasses.replace(record, value=content)
        signature = record.value[-SIGNATURE_BYTES:]
        if not is_signed(signed_bytes(stripped), signature, address.public_key or b""):
            raise RecordError(f"a {kind.name} record has no valid signature of its owner")
        value = MSGPackSerializer.loads(content)
        if value is not None:  # None: withdrawn.
            parse_record(address, value)

    def _complain(self, owner: str, reason: str, key: str) -> None:
        """Log a refusal, as a warning at most once a minute for each key: one that was filled with
        thousands of bad records is one line."""
        logger.log(self._complaints.level(key), "refused a record of %s: %s", owner, reason)


def signed_bytes(record: DHTRecord) -> bytes:
    """Return what the signature of a record is over; its value is still without one."""
    parts = [record.key, record.subkey, record.value, record.expiration_time]
    return SIGNED_PREFIX + MSGPackSerializer.dumps(parts)


def _owner_key(record: DHTRecord) -> bytes | None:
    """Return the public key of the owner that a record's subkey names, if it names one."""
    try:
        return parse_subkey(_load_subkey(record.subkey)).public_key
    except Exception:
        # Whatever msgpack raises for what is not msgpack.
        return None


def _load_subkey(subkey: bytes | None) -> Any:
    if subkey is None or len(subkey) > MAX_SUBKEY_BYTES:
        raise RecordError("its subkey is not of this protocol")
    loaded = MSGPackSerializer.loads(subkey)
    # msgpack has several spellings of one value. Nodes pass on the shortest, whatever they got, and
    # a signature over another would spoil the answers of every node that stored the record.
    if MSGPackSerializer.dumps(loaded) != subkey:
        raise RecordError("its subkey is not in its canonical form")
    return loaded


def _fingerprint(record: DHTRecord) -> bytes:
    """Return a hash of a whole record; none of its parts can be shifted into another."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (record.key, record.subkey, struct.pack("<d", record.expiration_time)):
        digest.update(struct.pack("<I", len(part)) + part)
    digest.update(record.value)
    return digest.digest()


def _too_large(address: Address, size_bytes: int) -> str:
    kind = address.kind
    return f"a {kind.name} record has {size_bytes} bytes, at most {kind.max_bytes} are allowed"


def _check_manifest(address: Address, envelope: Any) -> None:
    if not isinstance(envelope, bytes):
        raise RecordError("a manifest record does not hold bytes")
    try:
        run_id, operator = run_and_operator(envelope)
    except ManifestError as error:
        raise RecordError(str(error)) from None
    if run_id != address.run_id:
        raise RecordError(f"the manifest of run {run_id} was stored as run {address.run_id}")
    if operator != address.item:
        raise RecordError(f"a manifest of operator {operator} was stored as of {address.item}")


def _check_revocations(address: Address, envelope: Any) -> None:
    if read_revocations(envelope).version != int(address.item or 0):
        raise RecordError(f"a list of revoked invitations was stored as version {address.item}")


_CHECKS = {"manifests": _check_manifest, "revocations": _check_revocations}


def record_validators(identity: Identity) -> list[RecordValidatorBase]:
    """Return the validators that every node of the swarm runs, with the identity's key to sign."""
    return [RecordValidator(identity.key)]
