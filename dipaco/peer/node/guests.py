"""A node's place in a run by invitation, and what it tells its member of others.

See design 4.7, who may take part.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.base.errors import AdmissionError, StorageError
from dipaco.base.files import atomic_write, decoded
from dipaco.protocol.admission import Gate
from dipaco.protocol.identity import Identity
from dipaco.protocol.invitations import INVITATION_PREFIX, invitation_of, read_invitation
from dipaco.protocol.manifest import SignedManifest
from dipaco.protocol.record_errors import RecordError

if TYPE_CHECKING:
    # The operator's tools read this file too, and need no network.
    from dipaco.dht.directory import Directory

logger = logging.getLogger("dipaco.peer.node.guests")

# In a run's folder: the operator's newest list, and what its own nodes come in by.
REVOCATIONS, OWN_INVITATION = "revocations.json", "invitation.txt"
_MAX_INVITATION_BYTES = 4096


def open_gate(manifest: SignedManifest, folder: Path) -> Gate:
    """Return the gate of a run, with the operator's list that lies in its folder."""
    gate, file = Gate.of(manifest), folder / REVOCATIONS
    try:
        if file.exists():
            gate.revoke(file.read_bytes())
    except (OSError, RecordError) as error:
        logger.warning("%s is not used: %s", file, error)
    return gate


def given_invitation(given: str | None, own: Path | None = None) -> str | None:
    """Return the text of an invitation that is given as text or as a file; otherwise that of `own`.

    Raises `AdmissionError` for anything else, so the user hears of it before anything is joined.
    """
    if given is not None and given.strip().startswith(INVITATION_PREFIX):
        read_invitation(given)
        return given
    file = own if given is None else Path(given)
    if file is None or (given is None and not file.exists()):
        return None
    try:
        with file.open("rb") as opened:
            text = decoded(opened.read(_MAX_INVITATION_BYTES)).strip()
    except UnicodeDecodeError:
        raise AdmissionError(f"--invitation {file} is not a text with an invitation") from None
    except OSError as error:
        raise AdmissionError(
            f"--invitation {str(file)[:80]!r} is neither an invitation, which begins with "
            f"{INVITATION_PREFIX}, nor a file with one: {error.strerror}"
        ) from None
    read_invitation(text)
    return text


def admit(
    gate: Gate, identity: Identity, manifest: SignedManifest, now_s: float, invitation: str | None
) -> bytes:
    """Return this peer's admission: the one kept before, or one made with an invitation.

    The invitation is the one that was given, or the one in the manifest of an open run. The
    admission is kept beside the identity; the invitation, which is a secret, is not. Raises
    `AdmissionError` and `StorageError`.
    """
    file = admission_file(identity.path, gate)
    try:
        kept = file.read_bytes() if file.exists() else None
    except OSError as error:
        raise StorageError(f"{file}: {error.strerror}") from None
    if invitation is None and (kept is None or not _is_of(kept, identity, gate)):
        # In an open run, whose invitation everybody has, another admission is made.
        invitation = manifest.plan.admission
    if invitation is not None:
        given = read_invitation(invitation)
        gate.check_invitation(given)
        if kept is None or given.id != invitation_of(kept) or not _is_of(kept, identity, gate):
            kept = given.admit(identity.key, now_s)
            atomic_write(file, [kept])
    if kept is None:
        raise AdmissionError(
            f"run '{manifest.plan.name}' is by invitation; ask its operator "
            f"({manifest.operator_fingerprint}) for one and give it with --invitation"
        )
    check_admission(gate, identity.peer_id, kept)
    return kept


def admission_file(identity_file: Path, gate: Gate) -> Path:
    """Return where the admission of an identity is kept."""
    return identity_file.with_name(f"{identity_file.name}.admission-{gate.run_id}")


def check_admission(gate: Gate, peer: str, admission: bytes) -> None:
    """Raise `AdmissionError` for an admission that a peer of this id cannot be in by."""
    try:
        gate.check_own(peer, admission)
    except RecordError as error:
        raise AdmissionError(
            f"this peer is not admitted: {error}; ask the operator for another invitation and "
            "give it with --invitation"
        ) from None


def _is_of(admission: bytes, identity: Identity, gate: Gate) -> bool:
    """Tell whether an admission is of this identity: folders are copied to other machines."""
    try:
        gate.verify(identity.peer_id, admission)
    except RecordError:
        return False
    return True


class RevocationList:
    """The operator's newest list, stored again at every refresh, and kept on the disk.

    The operator may put a newer one there while the node runs (`dipaco-bootstrap revoke`).
    """

    def __init__(self, gate: Gate, folder: Path) -> None:
        self._gate, self._file = gate, folder / REVOCATIONS
        self._written: bytes | None = None

    def read(self, directory: Directory) -> None:
        """Look for a newer list on the disk, store the newest again, and keep it on the disk."""
        try:
            found = self._file.read_bytes() if self._file.exists() else self._written
            if found is not None and found != self._written:
                self._written = found
                directory.revoke(found)
        except (OSError, RecordError) as error:
            logger.warning("%s is not used: %s", self._file, error)
        directory.publish_revocations()
        envelope = self._gate.envelope
        if envelope is None or envelope == self._written:
            return
        self._written = envelope
        try:
            atomic_write(self._file, [envelope])
        except StorageError as error:
            logger.warning("revoked invitations kept in memory only: %s", error)
