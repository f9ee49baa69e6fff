"""The operator's signed request that the peers score its router documents with their paths.

A small JSON envelope like the manifest's: the request, the operator's public key (Ed25519) and
the signature over the request's canonical bytes. It certifies itself, so any node may store it;
peers answer only the operator whose key signed the manifest of their run (DiPaCo section 2.4.2).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from dipaco.modules.config import Config, parse_config
from dipaco.modules.errors import ConfigurationError, DipacoError
from dipaco.modules.files import canonical_json
from dipaco.modules.plan import Sha256
from pydantic import Field

SCORE_REQUEST_FORMAT: Final = "dipaco-score-request/1"
MAX_SCORE_REQUEST_BYTES = 2048
MAX_REQUESTED_DOCUMENTS = 2**20
_SIGNED_PREFIX = SCORE_REQUEST_FORMAT.encode() + b"\n"


class ScoreRequestError(DipacoError):
    """A score request that is refused; the message says what is wrong with it."""


class ScoreRequest(Config):
    """What the operator asks for. Its id is the hash of this."""

    format: Literal["dipaco-score-request/1"] = SCORE_REQUEST_FORMAT
    run_id: str = Field(pattern=r"^[0-9a-f]{16}$", description="The run whose paths are to score.")
    documents_sha256: Sha256 = Field(description="The blob with the router documents.")
    documents: int = Field(ge=1, le=MAX_REQUESTED_DOCUMENTS, description="How many they are.")
    made_s: float = Field(ge=0, le=1e11, description="Unix time at which it was signed.")

    def canonical_json(self) -> bytes:
        """Return the one byte string that is hashed and signed."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def request_id(self) -> str:
        """First 16 digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json()).hexdigest()[:16]


@dataclass(frozen=True)
class SignedScoreRequest:
    """A score request whose signature was verified."""

    request: ScoreRequest
    operator_fingerprint: str
    """First 16 hexadecimal digits of the hash of the operator's public key."""
    envelope: bytes
    """The bytes that were verified; store these again."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id


def sign_score_request(request: ScoreRequest, key: Ed25519PrivateKey) -> bytes:
    """Return the envelope of `request`, signed. Called by `dipaco-bootstrap prepare --from`."""
    public = key.public_key().public_bytes(
        serialization.Encoding.Raw, serialization.PublicFormat.Raw
    )
    signature = key.sign(_SIGNED_PREFIX + request.canonical_json())
    return canonical_json(
        {
            "request": request.model_dump(mode="json"),
            "operator": {"public_key": base64.b64encode(public).decode()},
            "signature": base64.b64encode(signature).decode(),
        }
    )


def verify_score_request(
    envelope: bytes, *, run_id: str | None = None, operator_fingerprint: str | None = None
) -> SignedScoreRequest:
    """Check an envelope and return its request.

    With `run_id` and `operator_fingerprint` it must be about that run and signed by that operator.
    Raises `ScoreRequestError`; nothing of a bad request is used.
    """
    if len(envelope) > MAX_SCORE_REQUEST_BYTES:
        raise ScoreRequestError(
            f"a score request has {len(envelope)} bytes, at most {MAX_SCORE_REQUEST_BYTES} are "
            "allowed"
        )
    values, public_key = _verify_signature(envelope)
    try:
        request = parse_config(ScoreRequest, values, "the score request")
    except ConfigurationError as error:
        raise ScoreRequestError(str(error)) from None
    if request.canonical_json() != canonical_json(values):
        raise ScoreRequestError("a score request leaves out or respells a part")
    if run_id is not None and request.run_id != run_id:
        raise ScoreRequestError(f"a score request is of run {request.run_id}, not {run_id}")
    fingerprint = hashlib.sha256(public_key).hexdigest()[:16]
    if operator_fingerprint is not None and fingerprint != operator_fingerprint:
        raise ScoreRequestError(
            f"a score request is signed by {fingerprint}, the run's operator is "
            f"{operator_fingerprint}"
        )
    return SignedScoreRequest(request, fingerprint, bytes(envelope))


def stated_operator(envelope: Any) -> str | None:
    """Return the fingerprint of who is said to have signed an envelope; nothing is verified."""
    try:
        public_key = base64.b64decode(json.loads(envelope)["operator"]["public_key"])
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error):
        return None
    return hashlib.sha256(public_key).hexdigest()[:16]


def _verify_signature(envelope: bytes) -> tuple[Mapping[str, Any], bytes]:
    """Return the request's values and the signer's key, once the signature is right."""
    try:
        content = json.loads(envelope)
        values = content["request"]
        public_key = base64.b64decode(content["operator"]["public_key"], validate=True)
        signature = base64.b64decode(content["signature"], validate=True)
        if not isinstance(values, Mapping):
            raise TypeError
        verifier = Ed25519PublicKey.from_public_bytes(public_key)
        signed = canonical_json(values)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error):
        raise ScoreRequestError(
            "a score request cannot be read: it is not a request with a key and a signature"
        ) from None
    try:
        verifier.verify(signature, _SIGNED_PREFIX + signed)
    except InvalidSignature:
        raise ScoreRequestError(
            "the signature of a score request is wrong: it was changed after it was signed"
        ) from None
    return values, public_key
