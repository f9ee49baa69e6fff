"""Runs by invitation: who counts in one (design 4.7, who may take part).

Signatures and bounds; nothing is sent here.

The operator signs an *invitation*: for how many peers, until when, and a key of its own, whose
private half is in the text that a volunteer is given. With it each of these peers makes its
*admission*: its public key, signed with the invitation's key and with its own, so nobody else
chooses by which invitation it counts. An admission goes wherever its peer's word is to count, and
anybody can check it with the operator's key alone. Of an invitation no more than its number of
peers count with any reader, however many were admitted with it: first those whose rows came first
into the chain, then those that the reader saw first. What a peer says of when it came says nothing.

An invitation ends when it expires, or by a signed list of the operator's. Then the rows of later
rounds do not count, and all who read a chain agree on which these are (`Gate.counts`).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dipaco.base.errors import AdmissionError
from dipaco.base.waits import BriefLock

from .identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, is_signed, public_key_of_peer_id
from .invitations import (
    ADMISSION_BYTES,
    ADMISSION_PREFIX,
    GRANT_BYTES,
    GRANT_PREFIX,
    MAX_PLACES,
    TERMS_BYTES,
    Invitation,
    Terms,
    invitation_of,
    pack_terms,
    read_invitation,
    unpack_terms,
)
from .manifest import SignedManifest, fingerprint_of
from .plan import RunPlan
from .record_errors import RecordError
from .revocations import read_revocations
from .view import least_round_s

# A place is free again when its peer has not been seen for so long.
AWAY_S = 900.0
# Admissions whose signatures were checked, of peers with a place and of peers in old steps.
MAX_VERIFIED = 2**15
_NEVER = 2**63


@dataclass(frozen=True)
class Admission:
    """An admission of a peer: by which invitation, with how many places, and until when (0: for
    good)."""

    invitation: str
    places: int
    expires_s: int = 0


@dataclass
class _Place:
    """A place of an invitation that is taken."""

    admission: Admission
    came: int
    """Counts the peers that were seen for the first time."""
    seen_s: float
    first_round: int = _NEVER
    """The first round of its rows in the chain."""

    @property
    def rank(self) -> tuple[int, int]:
        """The rank of a peer; lower ranks get their places first."""
        return self.first_round, self.came


def _everybody_of(plan: RunPlan) -> str | None:
    """Return the invitation by which everybody is in an open run, None for other runs."""
    try:
        return None if plan.admission is None else read_invitation(plan.admission).id
    except AdmissionError:
        return None  # Nobody can be admitted by the text that stands there.


class Gate:
    """The peers that are in, in one run. Thread-safe; can be sent to another process.

    :param run_id: the run that invitations are for, `RunPlan.invitations_of` or the run itself
    :param operator_key: the operator's public key, 32 bytes
    :param envelope: the operator's list of what is revoked, if there is one
    :param start_s: Unix second of round 0
    :param round_s: seconds of a round; with fixed steps of the shortest
    :param everybody: of an open run, the id of the invitation in its plan; it cannot be revoked, or
        the operator could end the run
    """

    def __init__(
        self,
        run_id: str,
        operator_key: bytes,
        envelope: bytes | None = None,
        *,
        start_s: float = 0.0,
        round_s: float = 1.0,
        everybody: str | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.run_id, self._operator_key = run_id, operator_key
        self.operator_fingerprint = fingerprint_of(operator_key)
        self._start_s, self._round_s, self._now = start_s, round_s, now
        self.everybody = everybody
        """The invitation in the plan of an open run, if it is one."""
        self.envelope: bytes | None = None
        """The newest list of the operator, to be stored again."""
        self._version = 0
        self._revoked: Mapping[str, int] = {}
        self._lock = BriefLock()
        self._grants: dict[bytes, Terms] = {}
        self._verified: OrderedDict[str, tuple[bytes, Admission]] = OrderedDict()
        """The last admission with a right signature of each peer."""
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
            round_s=least_round_s(plan),
            everybody=_everybody_of(plan),
        )

    def __getstate__(self) -> tuple[Any, ...]:
        first = self.run_id, self._operator_key, self.envelope
        return *first, self._start_s, self._round_s, self.everybody

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *first, start_s, round_s, everybody = state
        Gate.__init__(self, *first, start_s=start_s, round_s=round_s, everybody=everybody)

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
            self._forget_some()
        return admission

    def _forget_some(self) -> None:
        """Forget those that were verified longest ago and have no place: anybody who is invited
        can admit more keys than are remembered."""
        for _ in range(len(self._verified)):
            if len(self._verified) <= MAX_VERIFIED:
                return
            peer, known = self._verified.popitem(last=False)
            if peer in self._places.get(known[1].invitation, ()):
                self._verified[peer] = known

    def data_of(self, peer: str) -> bytes | None:
        """Return the admission of a peer as it was checked last, if it was."""
        with self._lock:
            known = self._verified.get(peer)
        return None if known is None else known[0]

    def _verify(self, peer: str, data: bytes) -> Admission:
        grant, name = data[:GRANT_BYTES], invitation_of(data)
        key_end = TERMS_BYTES + PUBLIC_KEY_BYTES
        terms = self._grants.get(grant)
        if terms is None:
            terms = self._read_grant(grant[:key_end], grant[key_end:])
            with self._lock:
                self._grants[grant] = terms
        public_key = public_key_of_peer_id(peer)
        signed = ADMISSION_PREFIX + grant + public_key
        by_invitation = data[GRANT_BYTES : GRANT_BYTES + SIGNATURE_BYTES]
        by_peer = data[GRANT_BYTES + SIGNATURE_BYTES :]
        if not is_signed(signed, by_invitation, grant[TERMS_BYTES:key_end]):
            raise RecordError(f"its admission by the invitation {name} is not for it")
        if not is_signed(signed, by_peer, public_key):
            raise RecordError(f"its admission by the invitation {name} is not its own")
        return Admission(name, terms.places, terms.expires_s)

    def _read_grant(self, said: bytes, signature: bytes) -> Terms:
        terms = unpack_terms(said[:TERMS_BYTES])
        if terms.run_id != self.run_id:
            raise RecordError(f"it was invited to run {terms.run_id}, not to {self.run_id}")
        if not 1 <= terms.places <= MAX_PLACES:
            raise RecordError(
                f"an invitation is for 1 to {MAX_PLACES} peers, not for {terms.places}"
            )
        if not is_signed(GRANT_PREFIX + said, signature, self._operator_key):
            raise RecordError("its invitation is not signed by the operator of the run")
        return terms

    # -- whose rows count, which all who read a chain agree on

    def last_round(self, admission: Admission) -> int | None:
        """Return the last round whose rows count by an admission; None if all do."""
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

    def check(self, peer: str, data: Any, *, is_here: bool = True) -> Admission:
        """Return what the admission of a peer says, which is in now and has a place.

        `is_here`: what came with it shows that the peer is there at present. A record that
        outlasts its peer keeps no place from others. Raises `RecordError`.
        """
        admission = self.verify(peer, data)
        self._check_present(admission)
        with self._lock:
            if not self._has_place(peer, admission, is_here=is_here):
                raise RecordError(
                    f"all places of the invitation {admission.invitation} are taken, by "
                    f"{admission.places} that came before it"
                )
        return admission

    def may_be_in(self, peer: str, data: Any) -> bool:
        """Tell whether `check` may pass. Nobody counts as seen by this call: it is for data that
        may not come from the peer itself. Raises `RecordError`."""
        admission = self.verify(peer, data)
        self._check_present(admission)
        with self._lock:
            places = self._places.get(admission.invitation, {})
            has_room = len(places) < admission.places or any(map(self._is_away, places.values()))
            return peer in places or has_room

    def check_own(self, peer: str, data: Any) -> Admission:
        """Return what this peer's own admission says, which is in now. Raises `RecordError`.

        Whether it has a place others see, see `counted_of`.
        """
        admission = self.verify(peer, data)
        self._check_present(admission)
        return admission

    def _check_present(self, admission: Admission) -> None:
        if ended := self._why_ended(admission):
            raise RecordError(f"the invitation {admission.invitation} {ended}")

    def _why_ended(self, admission: Admission) -> str:
        if admission.invitation in self._revoked:
            return "was revoked by the operator"
        is_over = admission.expires_s and self._now() > admission.expires_s
        return "has expired" if is_over else ""

    def _has_place(
        self, peer: str, admission: Admission, first_round: int = _NEVER, *, is_here: bool = True
    ) -> bool:
        """Note that a peer was seen, if it is here; returns whether it has a place."""
        places = self._places.setdefault(admission.invitation, {})
        seen_s = self._now() if is_here else -math.inf
        place = places.get(peer)
        if place is not None:
            place.admission, place.seen_s = admission, seen_s if is_here else place.seen_s
            place.first_round = min(first_round, place.first_round)
            return True
        if len(places) >= admission.places and not is_here:
            return False
        self._came += 1
        mine = _Place(admission, self._came, seen_s, first_round)
        if len(places) >= admission.places:
            away = [name for name, other in places.items() if self._is_away(other)]
            last = max(away or places, key=lambda name: places[name].rank)
            if not away and places[last].rank < mine.rank:
                return False
            del places[last]
        places[peer] = mine
        return True

    def _is_away(self, place: _Place) -> bool:
        return place.seen_s < self._now() - AWAY_S

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
            return None if self._why_ended(known[1]) else known[1]

    def is_out(self, peer: str) -> bool:
        """Tell whether a peer was admitted by an invitation that has ended."""
        with self._lock:
            known = self._verified.get(peer)
        return known is not None and bool(self._why_ended(known[1]))

    def admitted(self) -> dict[str, Admission]:
        """Return all peers that are in now and have a place."""
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
                # Peers that were here when it came were here before it.
                self._came += 1
                self._own_rank = _NEVER, self._came
            mine = places[own[0]].first_round if own[0] in places else _NEVER
            self._own_rank = min(mine, self._own_rank[0]), self._own_rank[1]
            before = [
                peer
                for peer in found - {own[0]}
                if (place := places.get(peer)) is not None
                and place.rank < self._own_rank
                and not self._is_away(place)
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
            # Of two lists of one version, all peers end with the same.
            if (found.version, envelope) <= (self._version, self.envelope or b""):
                return False
            ended = {name: s for name, s in found.revoked.items() if name != self.everybody}
            self._version, self._revoked = found.version, ended
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
        said = pack_terms(invitation.terms) + invitation.public_key
        try:
            self._read_grant(said, invitation.signature)
        except RecordError:
            raise AdmissionError(
                f"the invitation {invitation.id} is not signed by the operator of this run; ask "
                "the operator for one"
            ) from None
