"""Runs by invitation: who counts in one (design 4.7, who may take part).

Signatures and bounds; nothing is sent here.

The operator signs an *invitation*: for how many peers, until when, and a key of its own, whose
private half is in the text that a volunteer is given. With it each of these peers makes its
*admission*: its public key, signed. An admission goes wherever its peer's word is to count, and
anybody can check it with the operator's key alone. Of an invitation no more than its number of
peers count with any reader, however many were admitted with it: first those whose rows came first
into the chain, then those that the reader saw first. What a peer says of when it came says nothing.

An invitation ends when it expires, or by a signed list of the operator's. Then the rows of later
rounds do not count, and all who read a chain agree on which these are (`Gate.counts`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
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
MOST_REVOKED = 2000
GREATEST_LIST_VERSION = 10**8 - 1
# Run id, places, and the Unix second after which nobody is admitted; 0 for never.
_TERMS = struct.Struct(">8sHQ")
_GRANT_BYTES = _TERMS.size + PUBLIC_KEY_BYTES + SIGNATURE_BYTES
ADMISSION_BYTES = _GRANT_BYTES + SIGNATURE_BYTES
_CHECK_BYTES = 4
_INVITATION_BYTES = _TERMS.size + 32 + SIGNATURE_BYTES + _CHECK_BYTES
# A place is free again when its peer was not seen for so long.
AWAY_S = 900.0
# Admissions whose signatures were checked, of peers with a place and of peers in old steps.
MOST_VERIFIED = 2**15
_NEVER = 2**63


@dataclass(frozen=True)
class Terms:
    """What an invitation says."""

    run_id: str
    """The run that it is for: also for its successors by invitation."""
    places: int
    """How many peers count at a time."""
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
        return grant + self._key.sign(_ADMISSION_PREFIX + grant + public_key)


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
    """Somebody is in: by which invitation, of how many places and until when (0: for good)."""

    invitation: str
    places: int
    expires_s: int = 0


@dataclass
class _Place:
    """A place of an invitation that is taken."""

    admission: Admission
    came: int
    """Counts those that were seen for the first time."""
    seen_s: float
    first_round: int = _NEVER
    """Of its rows in the chain."""

    @property
    def rank(self) -> tuple[int, int]:
        """Those with lower ones have their places before others."""
        return self.first_round, self.came


class Gate:
    """The peers that are in, in one run. Thread-safe; can be sent to another process.

    :param run_id: the run that invitations are for, `RunPlan.invitations_of` or the run itself
    :param operator_key: the operator's public key, 32 bytes
    :param envelope: the operator's list of what is revoked, if there is one
    :param start_s: Unix second of round 0
    :param round_s: seconds of a round
    """

    def __init__(
        self,
        run_id: str,
        operator_key: bytes,
        envelope: bytes | None = None,
        *,
        start_s: float = 0.0,
        round_s: float = 1.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.run_id, self._operator_key = run_id, operator_key
        self._start_s, self._round_s, self._now = start_s, round_s, now
        self.envelope: bytes | None = None
        """The newest list of the operator, to be stored again."""
        self._version = 0
        self._revoked: Mapping[str, int] = {}
        self._lock = threading.RLock()
        self._grants: dict[bytes, Terms] = {}
        self._verified: OrderedDict[str, tuple[bytes, Admission]] = OrderedDict()
        """The last admission of each peer whose signature was right."""
        self._places: dict[str, dict[str, _Place]] = {}
        self._came = 0
        self._own_rank: tuple[int, int] | None = None
        if envelope is not None:
            self.revoke(envelope)

    @classmethod
    def of(cls, manifest: SignedManifest) -> Gate:
        """Return the gate of a run."""
        plan = manifest.plan
        return cls(
            plan.admission_scope,
            manifest.operator_key,
            start_s=plan.start_s,
            round_s=plan.rounds.duration_s,
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return self.run_id, self._operator_key, self.envelope, self._start_s, self._round_s

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *first, start_s, round_s = state
        Gate.__init__(self, *first, start_s=start_s, round_s=round_s)

    def learn_from(self, other: Gate) -> None:
        """Take over what another gate of the same run has checked."""
        with other._lock, self._lock:
            self._grants, self._verified = dict(other._grants), other._verified.copy()
            self._places = {name: dict(places) for name, places in other._places.items()}
            self._came = other._came

    # -- whose signature is right

    def verify(self, peer: str, data: Any) -> Admission:
        """Return what the admission of a peer says. Raises `RecordError`.

        It says nothing of whether the peer has a place, or the invitation was revoked.
        """
        if type(data) is not bytes or len(data) != ADMISSION_BYTES:
            raise RecordError("it has no admission to this run")
        with self._lock:
            known = self._verified.get(peer)
            if known is not None and known[0] == data:
                self._verified.move_to_end(peer)
                return known[1]
        admission = self._verify(peer, data)
        with self._lock:
            self._verified[peer] = data, admission
            while len(self._verified) > MOST_VERIFIED:
                self._verified.popitem(last=False)
        return admission

    def data_of(self, peer: str) -> bytes | None:
        """Return the admission of a peer as it was checked last, if it was."""
        with self._lock:
            known = self._verified.get(peer)
        return None if known is None else known[0]

    def _verify(self, peer: str, data: bytes) -> Admission:
        grant, name = data[:_GRANT_BYTES], invitation_of(data)
        key_end = _TERMS.size + PUBLIC_KEY_BYTES
        terms = self._grants.get(grant)
        if terms is None:
            terms = self._read_grant(grant[:key_end], grant[key_end:])
            with self._lock:
                self._grants[grant] = terms
        signed = _ADMISSION_PREFIX + grant + public_key_of_peer_id(peer)
        if not is_signed(signed, data[_GRANT_BYTES:], grant[_TERMS.size : key_end]):
            raise RecordError(f"its admission by the invitation {name} is not for it")
        return Admission(name, terms.places, terms.expires_s)

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

    # -- whose rows count, which all who read a chain agree on

    def last_round(self, admission: Admission) -> int | None:
        """Return the last round whose rows count by an admission; None: all do."""
        ends = [self._revoked.get(admission.invitation), admission.expires_s or None]
        end_s = min((end for end in ends if end is not None), default=None)
        return None if end_s is None else math.floor((end_s - self._start_s) / self._round_s)

    def counts(self, peer: str, data: Any, round_index: int) -> bool:
        """Tell whether a row of a round counts in a step, by its peer's admission.

        It depends on the admission, the round and the operator's newest list alone.
        """
        try:
            last = self.last_round(self.verify(peer, data))
        except (RecordError, ValueError):
            return False
        return last is None or round_index <= last

    # -- who is in now

    def check(self, peer: str, data: Any) -> Admission:
        """Return what the admission of a peer says, which is in now and has a place.

        Raises `RecordError`.
        """
        admission = self.verify(peer, data)
        self._check_present(admission)
        with self._lock:
            if not self._has_place(peer, admission):
                raise RecordError(
                    f"all places of the invitation {admission.invitation} are taken, by "
                    f"{admission.places} that came before it"
                )
        return admission

    def check_own(self, peer: str, data: Any) -> Admission:
        """Return what this peer's own admission says, which is in now. Raises `RecordError`.

        Whether it has a place others see, see `counted_of`.
        """
        admission = self.verify(peer, data)
        self._check_present(admission)
        return admission

    def _check_present(self, admission: Admission) -> None:
        name = admission.invitation
        if name in self._revoked:
            raise RecordError(f"the invitation {name} was revoked by the operator")
        if admission.expires_s and self._now() > admission.expires_s:
            raise RecordError(f"the invitation {name} has expired")

    def _has_place(self, peer: str, admission: Admission, first_round: int = _NEVER) -> bool:
        """Note that a peer was seen; returns whether it has a place."""
        places, now_s = self._places.setdefault(admission.invitation, {}), self._now()
        place = places.get(peer)
        if place is not None:
            place.admission, place.seen_s = admission, now_s
            place.first_round = min(first_round, place.first_round)
            return True
        self._came += 1
        mine = _Place(admission, self._came, now_s, first_round)
        if len(places) >= admission.places:
            away = [name for name, other in places.items() if other.seen_s < now_s - AWAY_S]
            last = max(away or places, key=lambda name: places[name].rank)
            if not away and places[last].rank < mine.rank:
                return False
            del places[last]
        places[peer] = mine
        return True

    def contributed(self, peer: str, round_index: int) -> None:
        """Note that rows of a peer came into the chain: it has its place before those without."""
        with self._lock:
            known = self._verified.get(peer)
            if known is None:
                return
            admission = known[1]
            last = self.last_round(admission)
            if last is None or round_index <= last:
                self._has_place(peer, admission, round_index)

    def admission_of(self, peer: str) -> Admission | None:
        """Return the admission of a peer that is in now and has a place."""
        with self._lock:
            known = self._verified.get(peer)
            if known is None or peer not in self._places.get(known[1].invitation, ()):
                return None
            try:
                self._check_present(known[1])
            except RecordError:
                return None
            return known[1]

    def admitted(self) -> dict[str, Admission]:
        """Return all that are in now and have a place."""
        with self._lock:
            peers = [peer for places in self._places.values() for peer in places]
        found = {peer: self.admission_of(peer) for peer in peers}
        return {peer: admission for peer, admission in found.items() if admission is not None}

    def counted_of(
        self, seen: Collection[str], own: tuple[str, bytes] | None = None
    ) -> frozenset[str]:
        """Return which of the peers that were seen count. `own`: a peer's id and admission.

        Raises `AdmissionError` when that peer is out: more peers that came before it use its
        invitation than it is for, or it has ended.
        """
        found = {peer for peer in seen if self.admission_of(peer) is not None}
        if own is None:
            return frozenset(found)
        try:
            admission = self.check_own(*own)
        except RecordError as error:
            raise AdmissionError(f"this peer is no longer admitted: {error}") from None
        with self._lock:
            places = self._places.get(admission.invitation, {})
            if self._own_rank is None:
                # Those that were here when it came were here before it.
                self._came += 1
                self._own_rank = _NEVER, self._came
            mine = places[own[0]].first_round if own[0] in places else _NEVER
            self._own_rank = min(mine, self._own_rank[0]), self._own_rank[1]
            before = [
                peer
                for peer in found - {own[0]}
                if peer in places and places[peer].rank < self._own_rank
            ]
        if len(before) >= admission.places:
            raise AdmissionError(
                f"all places of the invitation {admission.invitation} are taken, by "
                f"{admission.places} that came before this peer; ask the operator for another "
                "one, or wait until one of them has left"
            )
        return frozenset(found | {own[0]})

    # -- what the operator has revoked

    @property
    def revoked(self) -> frozenset[str]:
        """The invitations that the operator has ended."""
        return frozenset(self._revoked)

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
    revoked: Mapping[str, int]
    """By id of an invitation, the Unix second in whose round the last rows by it count."""
    operator_key: bytes


def sign_revocations(
    run_id: str, version: int, revoked: Mapping[str, int], key: Ed25519PrivateKey
) -> bytes:
    """Return the JSON envelope of a list, with the second at which each invitation ended."""
    said = {
        "format": LIST_FORMAT,
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
            said["format"] == LIST_FORMAT
            and _is_id(run_id)
            and type(version) is int
            and 0 < version <= GREATEST_LIST_VERSION
            and type(revoked) is dict
            and len(revoked) <= MOST_REVOKED
            and all(map(_is_id, revoked))
            and all(type(end_s) is int and 0 <= end_s < _NEVER for end_s in revoked.values())
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
