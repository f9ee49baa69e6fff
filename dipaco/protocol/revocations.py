"""The operator's list of invitations that have ended: its bytes and its signature.

See design 4.7, who may take part.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.base.files import canonical_json

from .identity import is_signed, raw_public_key
from .record_errors import RecordError
from .record_keys import MAX_LIST_BYTES

_LIST_PREFIX = b"dipaco-revocations/1\n"
_LIST_FORMAT = "dipaco-revocations/1"
_MAX_REVOKED = 2000
_MAX_LIST_VERSION = 10**8 - 1
_END_OF_TIME_S = 2**63


@dataclass(frozen=True)
class Revocations:
    """A list of the operator's whose signature is right."""

    run_id: str
    version: int
    """Rises with every list; the greatest counts."""
    revoked: Mapping[str, int]
    """The Unix second in whose round the last rows by an invitation count, by its id."""
    operator_key: bytes


def sign_revocations(
    run_id: str, version: int, revoked: Mapping[str, int], key: Ed25519PrivateKey
) -> bytes:
    """Return the JSON envelope of a list, with the second at which each invitation ended."""
    said = {
        "format": _LIST_FORMAT,
        "run": run_id,
        "version": version,
        "revoked": dict(revoked),
    }
    signature = key.sign(_LIST_PREFIX + canonical_json(said))
    envelope = {
        "revocations": said,
        "operator": {"public_key": base64.b64encode(raw_public_key(key)).decode()},
        "signature": base64.b64encode(signature).decode(),
    }
    return canonical_json(envelope)


def read_revocations(envelope: Any) -> Revocations:
    """Check a list as far as it can be checked without knowing its run. Raises `RecordError`."""
    if type(envelope) is not bytes or len(envelope) > MAX_LIST_BYTES:
        raise RecordError("the list of revoked invitations is too large, or not bytes")
    try:
        content = json.loads(envelope)
        said = content["revocations"]
        operator_key = base64.b64decode(content["operator"]["public_key"], validate=True)
        signature = base64.b64decode(content["signature"], validate=True)
        signed = _LIST_PREFIX + canonical_json(said)
        run_id, version, revoked = said["run"], said["version"], said["revoked"]
        is_whole = (
            said["format"] == _LIST_FORMAT
            and _is_id(run_id)
            and type(version) is int
            and 0 < version <= _MAX_LIST_VERSION
            and type(revoked) is dict
            and len(revoked) <= _MAX_REVOKED
            and all(map(_is_id, revoked))
            and all(type(end) is int and 0 <= end < _END_OF_TIME_S for end in revoked.values())
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RecordError("a list of revoked invitations cannot be read")
    if not is_signed(signed, signature, operator_key):
        raise RecordError("a list of revoked invitations is badly signed")
    return Revocations(run_id, version, revoked, operator_key)


def _is_id(value: Any) -> bool:
    return type(value) is str and len(value) == 16 and set(value) <= set("0123456789abcdef")
