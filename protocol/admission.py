"""Runs by invitation: who counts in one (design 4.7, who may take part).

Signatures and bounds; nothing is sent here.

The operator signs an *invitation*: for how many peers, and a key of its own, whose private half is
in the text that a volunteer is given. With it each of these peers makes its *admission*: its public
key and the time, signed. An admission goes wherever its peer's word is to count, and anybody can
check it with the operator's key alone. Of an invitation no more than its number of peers count with
any reader, however many were admitted with it. The operator ends one by a signed list.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import struct
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.base.errors import AdmissionError
from dipaco.base.files import canonical_json
from dipaco.modules.plan import RunPlan

from .identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    is_signed,
    public_key_of_peer_id,
    raw_public_key,
)
from .manifest import SignedManifest
from .record_keys import MAX_LIST_BYTES
from .records import RecordError

INVITATION_PREFIX = "dipaco-invitation-1."
MOST_PLACES = 10_000
_GRANT_PREFIX, _ADMISSION_PREFIX = b"dipaco-invitation/1\n", b"dipaco-admission/1\n"
_LIST_PREFIX = b"dipaco-revocations/1\n"
LIST_FORMAT = "dipaco-revocations/1"
MOST_REVOKED = 3000
GREATEST_LIST_VERSION = 10**8 - 1
# Run id, places, and the Unix second after which nobody is admitted; 0 for never.
_TERMS = struct.Struct(">8sHQ")
_GRANT_BYTES = _TERMS.size + PUBLIC_KEY_BYTES + SIGNATURE_BYTES
_TIME = struct.Struct(">Q")
ADMISSION_BYTES = _GRANT_BYTES + _TIME.size + SIGNATURE_BYTES
_CHECK_BYTES = 4
_INVITATION_BYTES = _TERMS.size + 32 + SIGNATURE_BYTES + _CHECK_BYTES
# Identities that one place may have had, one after the other: machines are set up anew. Whoever
# changes its identity to be believed once more runs out of them.
IDENTITIES_PER_PLACE = 4


@dataclass(frozen=True)
class Terms:
    """What an invitation says."""

    run_id: str
    """The run that it is for: also for its successors by invitation."""
    places: int
    """How many peers count at a time."""
    expires_s: int
    """Unix second after which it admits nobody; 0 for never. A peer that is in stays in."""


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
    def id(self) -> str:
        """What the operator revokes, and status shows."""
        return invitation_id(raw_public_key(self._key))

    def to_text(self) -> str:
        """Return the line that a volunteer pastes."""
        body = _pack(self.terms) + self.seed + self.signature
        packed = body + hashlib.sha256(body).digest()[:_CHECK_BYTES]
        return INVITATION_PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    def admit(self, public_key: bytes, now_s: float) -> bytes:
        """Return the admission of a peer, to be kept with its identity.

        Raises `AdmissionError` when the invitation has expired.
        """
        if self.terms.expires_s and now_s > self.terms.expires_s:
            days = (now_s - self.terms.expires_s) / 86_400
            raise AdmissionError(
                f"the invitation {self.id} expired {days:.1f} days ago; ask the operator for "
                "another one"
            )
        grant = _pack(self.terms) + raw_public_key(self._key) + self.signature
        body = grant + _TIME.pack(int(now_s))
        return body + self._key.sign(_ADMISSION_PREFIX + body + public_key)


def make_invitation(terms: Terms, operator: Ed25519PrivateKey) -> Invitation:
    """Return a new invitation. For `Terms` within bounds."""
    if not 1 <= terms.places <= MOST_PLACES:
        raise ValueError(f"an invitation is for 1 to {MOST_PLACES} peers")
    key = Ed25519PrivateKey.generate()
    seed = key.private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    signature = operator.sign(_GRANT_PREFIX + _pack(terms) + raw_public_key(key))
    return Invitation(terms, seed, signature)


def opened(plan: RunPlan, operator: Ed25519PrivateKey, places: int = MOST_PLACES) -> RunPlan:
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
    seed_end = _TERMS.size + 32
    return Invitation(_unpack(body[: _TERMS.size]), body[_TERMS.size : seed_end], body[seed_end:])


def invitation_of(admission: bytes) -> str:
    """Return which invitation an admission is of, unchecked."""
    return invitation_id(admission[_TERMS.size : _TERMS.size + PUBLIC_KEY_BYTES])


def invitation_id(public_key: bytes) -> str:
    """Return the name of an invitation: 16 hexadecimal digits of the hash of its key."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def _pack(terms: Terms) -> bytes:
    return _TERMS.pack(bytes.fromhex(terms.run_id), terms.places, terms.expires_s)


def _unpack(data: bytes) -> Terms:
    run_id, places, expires_s = _TERMS.unpack(data)
    return Terms(run_id.hex(), places, expires_s)


@dataclass(frozen=True)
class Admission:
    """Somebody is in: by which invitation, and since when it says so."""

    invitation: str
    places: int
    admitted_s: int


def counted(admissions: Iterable[tuple[str, Admission]]) -> frozenset[str]:
    """Return which of some admitted peers count: those of an invitation that came first.

    A peer says itself when it came; one that lies takes a place of others of its invitation.
    """
    by_invitation: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for peer, found in admissions:
        came = by_invitation.setdefault((found.invitation, found.places), [])
        came.append((found.admitted_s, peer))
    return frozenset(
        peer for (_, places), came in by_invitation.items() for _, peer in sorted(came)[:places]
    )


class Gate:
    """The peers that are in, in one run. Thread-safe; can be sent to another process.

    :param run_id: the run that invitations are for, `RunPlan.invitations_of` or the run itself
    :param operator_key: the operator's public key, 32 bytes
    :param envelope: the operator's list of what is revoked, if there is one
    """

    def __init__(self, run_id: str, operator_key: bytes, envelope: bytes | None = None) -> None:
        self.run_id, self._operator_key = run_id, operator_key
        self.envelope: bytes | None = None
        """The newest list of the operator, to be stored again."""
        self._version = 0
        self._revoked: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._grants: dict[bytes, Terms] = {}
        self._admitted: dict[str, dict[str, tuple[bytes, Admission]]] = {}
        self._on_admitted: Callable[[str, Admission], None] | None = None
        self._on_revoked: Callable[[frozenset[str]], None] | None = None
        if envelope is not None:
            self.revoke(envelope)

    @classmethod
    def of(cls, manifest: SignedManifest) -> Gate:
        """Return the gate of a run."""
        return cls(manifest.plan.admission_scope, manifest.operator_key)

    def __getstate__(self) -> tuple[str, bytes, bytes | None]:
        return self.run_id, self._operator_key, self.envelope

    def __setstate__(self, state: tuple[str, bytes, bytes | None]) -> None:
        Gate.__init__(self, *state)

    def listen(
        self,
        on_admitted: Callable[[str, Admission], None],
        on_revoked: Callable[[frozenset[str]], None],
    ) -> None:
        """Tell who is known to be in, now and as more are, and which invitations are revoked.

        Called on the thread that learns of it, before anything else is made of what it read.
        """
        self._on_admitted, self._on_revoked = on_admitted, on_revoked
        for peer, admission in self.admitted().items():
            on_admitted(peer, admission)
        on_revoked(self._revoked)

    def learn_from(self, other: Gate) -> None:
        """Take over what another gate of the same run has checked."""
        with other._lock:
            grants = dict(other._grants)
            admitted = {name: dict(known) for name, known in other._admitted.items()}
        with self._lock:
            self._grants, self._admitted = grants, admitted

    # -- who is in

    def check(self, peer: str, data: Any, *, even_revoked: bool = False) -> Admission:
        """Return what the admission of a peer says. Raises `RecordError`.

        What was signed before its signer was revoked stays signed: `even_revoked` is for readers
        of that.
        """
        if type(data) is not bytes or len(data) != ADMISSION_BYTES:
            raise RecordError("it has no admission to this run")
        name = invitation_of(data)
        if name in self._revoked and not even_revoked:
            raise RecordError(f"the invitation {name} was revoked by the operator")
        known = self._admitted.get(name, {}).get(peer)
        if known is not None and known[0] == data:
            return known[1]
        admission = self._verify(peer, data, name)
        with self._lock:
            others = self._admitted.setdefault(name, {})
            is_used_up = len(others.keys() | {peer}) > IDENTITIES_PER_PLACE * admission.places
            if not is_used_up:
                others[peer] = data, admission
        if is_used_up and even_revoked:
            return admission
        if is_used_up:
            raise RecordError(
                f"{IDENTITIES_PER_PLACE} times as many peers used the invitation {name} as it has "
                f"places: {admission.places}"
            )
        if self._on_admitted is not None and name not in self._revoked:
            self._on_admitted(peer, admission)
        return admission

    def _verify(self, peer: str, data: bytes, name: str) -> Admission:
        grant, body = data[:_GRANT_BYTES], data[:-SIGNATURE_BYTES]
        key_end = _TERMS.size + PUBLIC_KEY_BYTES
        terms = self._grants.get(grant)
        if terms is None:
            terms = self._read_grant(grant[:key_end], grant[key_end:])
            with self._lock:
                self._grants[grant] = terms
        (admitted_s,) = _TIME.unpack(body[_GRANT_BYTES:])
        if terms.expires_s and admitted_s > terms.expires_s:
            raise RecordError(f"it was admitted after the invitation {name} had expired")
        signed = _ADMISSION_PREFIX + body + public_key_of_peer_id(peer)
        if not is_signed(signed, data[-SIGNATURE_BYTES:], grant[_TERMS.size : key_end]):
            raise RecordError(f"its admission by the invitation {name} is not for it")
        return Admission(name, terms.places, admitted_s)

    def _read_grant(self, said: bytes, signature: bytes) -> Terms:
        terms = _unpack(said[: _TERMS.size])
        if terms.run_id != self.run_id:
            raise RecordError(f"it was invited to run {terms.run_id}, not to {self.run_id}")
        if not 1 <= terms.places <= MOST_PLACES:
            raise RecordError(
                f"an invitation is for 1 to {MOST_PLACES} peers, not for {terms.places}"
            )
        if not is_signed(_GRANT_PREFIX + said, signature, self._operator_key):
            raise RecordError("its invitation is not signed by the operator of the run")
        return terms

    def admission_of(self, peer: str) -> Admission | None:
        """Return the admission of a peer that is known to be in and was not revoked."""
        with self._lock:
            for name, known in self._admitted.items():
                if peer in known and name not in self._revoked:
                    return known[peer][1]
        return None

    def admitted(self) -> dict[str, Admission]:
        """Return all that are known to be in, also those beyond the places of an invitation."""
        with self._lock:
            return {
                peer: admission
                for name, known in self._admitted.items()
                if name not in self._revoked
                for peer, (_, admission) in known.items()
            }

    def counted_of(
        self, seen: Collection[str], own: tuple[str, bytes] | None = None
    ) -> frozenset[str]:
        """Return which of the peers that were seen count. `own`: a peer's id and admission.

        Raises `AdmissionError` when that peer is out: more peers use its invitation than it is for,
        or the operator has revoked it.
        """
        if own is not None:
            try:
                self.check(*own)
            except RecordError as error:
                raise AdmissionError(f"this peer is no longer admitted: {error}") from None
            seen = {*seen, own[0]}
        known = self.admitted()
        admitted = {peer: known[peer] for peer in seen if peer in known}
        found = counted(admitted.items())
        if own is not None and own[0] not in found:
            name = invitation_of(own[1])
            places = admitted[own[0]].places
            raise AdmissionError(
                f"all places of the invitation {name} are taken, by {places} that came before this "
                "peer; ask the operator for another one, or wait until one of them has left"
            )
        return found

    # -- what the operator has revoked

    @property
    def revoked(self) -> frozenset[str]:
        """The invitations that the operator has ended."""
        return self._revoked

    def revoke(self, envelope: bytes) -> bool:
        """Take a list of the operator's; returns whether it is newer than what was known.

        Raises `RecordError` for one that is not of this run's operator, or not of this run.
        """
        found = read_revocations(envelope)
        if found.operator_key != self._operator_key:
            raise RecordError("the list of revoked invitations is not the operator's")
        if found.run_id != self.run_id:
            raise RecordError(f"the list of revoked invitations is of run {found.run_id}")
        with self._lock:
            if found.version <= self._version:
                return False
            self._version, self._revoked = found.version, found.revoked
            self.envelope = envelope
        if self._on_revoked is not None:
            self._on_revoked(found.revoked)
        return True

    def check_invitation(self, invitation: Invitation) -> None:
        """Check that a pasted invitation is for this run, and good. Raises `AdmissionError`."""
        if invitation.terms.run_id != self.run_id:
            raise AdmissionError(
                f"the invitation {invitation.id} is for run {invitation.terms.run_id} and not for "
                f"{self.run_id}; ask the operator for one, or check the address"
            )
        if invitation.id in self._revoked:
            raise AdmissionError(
                f"the operator has revoked the invitation {invitation.id}; ask for another one"
            )
        said = _pack(invitation.terms) + raw_public_key(invitation._key)
        try:
            self._read_grant(said, invitation.signature)
        except RecordError:
            raise AdmissionError(
                f"the invitation {invitation.id} is not signed by the operator of this run; ask "
                "the operator for one"
            ) from None


@dataclass(frozen=True)
class Revocations:
    """A list of the operator's whose signature is right."""

    run_id: str
    version: int
    """Rises with every list; the greatest counts."""
    revoked: frozenset[str]
    operator_key: bytes


def sign_revocations(
    run_id: str, version: int, revoked: Iterable[str], key: Ed25519PrivateKey
) -> bytes:
    """Return the JSON envelope of a list."""
    said = {
        "format": LIST_FORMAT,
        "run": run_id,
        "version": version,
        "revoked": sorted(set(revoked)),
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
            said["format"] == LIST_FORMAT
            and _is_id(run_id)
            and type(version) is int
            and 0 < version <= GREATEST_LIST_VERSION
            and type(revoked) is list
            and len(revoked) <= MOST_REVOKED
            and all(map(_is_id, revoked))
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RecordError("a list of revoked invitations cannot be read")
    if not is_signed(signed, signature, operator_key):
        raise RecordError("a list of revoked invitations is badly signed")
    return Revocations(run_id, version, frozenset(revoked), operator_key)


def _is_id(value: Any) -> bool:
    return type(value) is str and len(value) == 16 and set(value) <= set("0123456789abcdef")
