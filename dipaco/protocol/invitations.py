"""Invitations to a run, and what peers make of them: their texts and bytes.

See design 4.7, who may take part.

An invitation says for how many peers it is and until when, and has a key of its own, whose private
half is in the text that a volunteer is given. With it each of these peers makes its admission: its
public key, signed with the invitation's key and with its own. What of them counts, the `Gate` of
`admission.py` says.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.base.errors import AdmissionError

from .identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, raw_public_key
from .plan import RunPlan

INVITATION_PREFIX = "dipaco-invitation-1."
MAX_PLACES = 10_000
GRANT_PREFIX, ADMISSION_PREFIX = b"dipaco-invitation/1\n", b"dipaco-admission/2\n"
# Run id, places, and the Unix second after which nobody is admitted; 0 for never.
_TERMS = struct.Struct(">8sHQ")
TERMS_BYTES = _TERMS.size
# What the operator signed: the terms and the invitation's public key; then the signature.
GRANT_BYTES = TERMS_BYTES + PUBLIC_KEY_BYTES + SIGNATURE_BYTES
# The grant, and what the invitation's key and the peer's sign: the grant and the peer's public key.
# Without the second signature, anybody could tell of others under an invitation of his own.
ADMISSION_BYTES = GRANT_BYTES + 2 * SIGNATURE_BYTES
_CHECK_BYTES = 4
_INVITATION_BYTES = TERMS_BYTES + 32 + SIGNATURE_BYTES + _CHECK_BYTES


@dataclass(frozen=True)
class Terms:
    """What an invitation says."""

    run_id: str
    """The run that it is for; it also holds for its successors by invitation."""
    places: int
    """How many peers can count at a time."""
    expires_s: int
    """Unix second after which nobody counts by it; 0 for never."""


@dataclass(frozen=True)
class Invitation:
    """An invitation with its private key: a secret, worth its places."""

    terms: Terms
    seed: bytes
    signature: bytes
    """The operator's."""

    @property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)

    @property
    def public_key(self) -> bytes:
        """The public half of its key, 32 bytes."""
        return raw_public_key(self._key)

    @property
    def id(self) -> str:
        """The id that the operator revokes, and that status shows."""
        return _invitation_id(self.public_key)

    def to_text(self) -> str:
        """Return the line that a volunteer pastes."""
        body = pack_terms(self.terms) + self.seed + self.signature
        packed = body + hashlib.sha256(body).digest()[:_CHECK_BYTES]
        return INVITATION_PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    def admit(self, peer: Ed25519PrivateKey, now_s: float) -> bytes:
        """Return the admission of a peer by its key, to be kept with its identity.

        Raises `AdmissionError` when the invitation has expired.
        """
        if self.terms.expires_s and now_s > self.terms.expires_s:
            days = (now_s - self.terms.expires_s) / 86_400
            raise AdmissionError(
                f"the invitation {self.id} expired {days:.1f} days ago; ask the operator for "
                "another one"
            )
        grant = pack_terms(self.terms) + self.public_key + self.signature
        said = ADMISSION_PREFIX + grant + raw_public_key(peer)
        return grant + self._key.sign(said) + peer.sign(said)


def make_invitation(terms: Terms, operator: Ed25519PrivateKey) -> Invitation:
    """Return a new invitation. For `Terms` within bounds."""
    if not 1 <= terms.places <= MAX_PLACES:
        raise ValueError(f"an invitation is for 1 to {MAX_PLACES} peers")
    key = Ed25519PrivateKey.generate()
    seed = key.private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    signature = operator.sign(GRANT_PREFIX + pack_terms(terms) + raw_public_key(key))
    return Invitation(terms, seed, signature)


def opened(plan: RunPlan, operator: Ed25519PrivateKey, places: int = MAX_PLACES) -> RunPlan:
    """Return the plan of an open run: with an invitation in it by which everybody is in.

    Called before a manifest is signed; without it a run is by invitation.
    """
    plan = plan.model_copy(update={"admission": None, "invitations_of": None})
    invitation = make_invitation(Terms(plan.admission_scope, places, 0), operator)
    return plan.model_copy(update={"admission": invitation.to_text()})


def read_invitation(text: str) -> Invitation:
    """Read what a volunteer pasted. Raises `AdmissionError`; the operator's signature is checked
    by the `Gate` of the run, which knows the operator."""
    text = text.strip()
    encoded = text.removeprefix(INVITATION_PREFIX)
    expected = -(-_INVITATION_BYTES * 8 // 6)
    if encoded == text:
        raise AdmissionError(
            f"{text[:40]!r} is no invitation; it is a line that begins with {INVITATION_PREFIX}"
        )
    if len(encoded) != expected:
        raise AdmissionError(
            f"the invitation has {len(encoded)} characters after {INVITATION_PREFIX} and not "
            f"{expected}; paste all of the line"
        )
    try:
        padded = encoded + "=" * (-len(encoded) % 4)
        packed = base64.b64decode(padded, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        packed = b""
    body = packed[:-_CHECK_BYTES]
    if not packed or hashlib.sha256(body).digest()[:_CHECK_BYTES] != packed[-_CHECK_BYTES:]:
        raise AdmissionError("the invitation was changed on its way; paste the line once more")
    seed_end = TERMS_BYTES + 32
    return Invitation(unpack_terms(body[:TERMS_BYTES]), body[TERMS_BYTES:seed_end], body[seed_end:])


def invitation_of(admission: bytes) -> str:
    """Return which invitation an admission is of, unchecked."""
    return _invitation_id(admission[TERMS_BYTES : TERMS_BYTES + PUBLIC_KEY_BYTES])


def _invitation_id(public_key: bytes) -> str:
    """Return the name of an invitation: 16 hexadecimal digits of the hash of its key."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def pack_terms(terms: Terms) -> bytes:
    """Return the bytes of terms, as they are signed."""
    return _TERMS.pack(bytes.fromhex(terms.run_id), terms.places, terms.expires_s)


def unpack_terms(data: bytes) -> Terms:
    """Return the terms that `pack_terms` made bytes of."""
    run_id, places, expires_s = _TERMS.unpack(data)
    return Terms(run_id.hex(), places, expires_s)
