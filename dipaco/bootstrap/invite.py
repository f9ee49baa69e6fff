"""Inviting peers to a run, and ending invitations (design 4.7, who may take part).

Both need the operator's key and the run folder alone, no network. What was revoked reaches the
swarm by any node that serves the folder; `DIR/invitations.jsonl` is the operator's own list.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.base.errors import ConfigurationError, ManifestError
from dipaco.base.files import append, atomic_write, ends_within_a_line, storage_errors
from dipaco.peer.node.guests import OWN_INVITATION, REVOCATIONS, given_invitation
from dipaco.protocol.admission import Gate
from dipaco.protocol.identity import raw_public_key
from dipaco.protocol.invitations import Invitation, Terms, make_invitation, read_invitation
from dipaco.protocol.manifest import (
    MANIFEST_FILE,
    SignedManifest,
    load_or_create_operator_key,
    verify_manifest,
)
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.revocations import read_revocations, sign_revocations

LIST_FILE = "invitations.jsonl"
_DAY_S = 86_400.0
# Bootstrap nodes that the operator starts from the run folder, or copies of it.
_OWN_PLACES = 8
# A list needs up to half a round from the folder to every peer, and a refresh may fail.
_KNOWN_ROUNDS, _KNOWN_S = 2.0, 60.0
# How like an id of the list another must be to be taken for a slip: a digit or two.
_ALIKE = 0.8


def invite(
    folder: Path,
    peers: int,
    *,
    expires_days: float | None = None,
    name: str = "",
    operator_key: Path | None = None,
) -> str:
    """Return the text of a new invitation, and note it in the operator's list.

    Raises ConfigurationError for an open run, ManifestError for the wrong key.
    """
    manifest, gate, key = _open(folder, operator_key)
    if is_open(manifest.plan):
        raise ConfigurationError(
            f"run '{manifest.plan.name}' is open, so everybody counts in it; prepare one with "
            "--admission invitation"
        )
    expires_s = 0 if expires_days is None else int(time.time() + expires_days * _DAY_S)
    invitation = make_invitation(Terms(gate.run_id, peers, expires_s), key)
    _note(folder, invitation, name or manifest.plan.name)
    return invitation.to_text()


def revoke(folder: Path, invitations: Iterable[str], *, operator_key: Path | None = None) -> str:
    """Sign a list with some more invitations in it, and return a line for the operator.

    A peer that has the list takes in no more rows by them. Steps in which others took such rows in
    count up to the round by which everybody can have the list: a step that counts for some peers
    and not for others would divide them for good.
    Raises ConfigurationError for what is no id of an invitation, for a slip of one in the
    operator's list, and for that of an open run.
    """
    manifest, gate, key = _open(folder, operator_key)
    invitations = tuple(invitations)
    if gate.everybody is not None and gate.everybody in invitations:
        raise ConfigurationError(
            f"run '{manifest.plan.name}' is open: everybody is in by {gate.everybody}, which "
            "cannot be revoked; prepare a successor by invitation"
        )
    whose = _noted(folder)
    for one in invitations:
        slips = difflib.get_close_matches(one, whose, n=1, cutoff=_ALIKE)
        if one not in whose and slips:
            raise ConfigurationError(
                f"{one} is no invitation in {folder / LIST_FILE}; did you mean {slips[0]} "
                f"({whose[slips[0]]})?"
            )
    file, version = folder / REVOCATIONS, 1
    known_s = max(_KNOWN_S, _KNOWN_ROUNDS * manifest.plan.rounds.duration_s)
    revoked = dict.fromkeys(invitations, int(time.time() + known_s))
    try:
        if file.exists():
            before = read_revocations(file.read_bytes())
            version, revoked = before.version + 1, {**revoked, **before.revoked}
        envelope = sign_revocations(gate.run_id, version, revoked, key)
        # Read it as others will.
        read_revocations(envelope)
    except RecordError as error:
        raise ConfigurationError(
            f"cannot revoke {', '.join(sorted(revoked))[:80]}: {error}; an invitation's id has 16 "
            f"hexadecimal digits, see {folder / LIST_FILE}"
        ) from None
    atomic_write(file, [envelope])
    count = "1 invitation is" if len(revoked) == 1 else f"{len(revoked)} invitations are"
    said = [f"{one} ({whose.get(one, f'not in {folder / LIST_FILE}')})" for one in invitations]
    return (
        f"revoked: {', '.join(said)}; {count} revoked in all (version {version} of the list); let "
        f"a node serve {folder} within {known_s:.0f} s, so that the list reaches all peers; "
        f"later, those that have it refuse steps of those that lack it"
    )


def keep_revocations(earlier: Path, folder: Path) -> None:
    """Put the operator's list of a run into the folder of a successor with the same invitations,
    unless that has one: later lists go on from it."""
    source, file = earlier / REVOCATIONS, folder / REVOCATIONS
    with storage_errors(file):
        if source.exists() and not file.exists():
            atomic_write(file, [source.read_bytes()])


def is_open(plan: RunPlan) -> bool:
    """Tell whether a run admits everybody, by the invitation in its plan."""
    return plan.admission is not None


def note_admission(
    folder: Path, plan: RunPlan, key: Ed25519PrivateKey, say: Callable[[str], None]
) -> None:
    """Note the invitation of an open run, or put one for the operator's own nodes into the folder
    of a run by invitation."""
    if plan.admission is not None:
        _note(folder, read_invitation(plan.admission), "everybody")
        return
    invitation = make_invitation(Terms(plan.admission_scope, _OWN_PLACES, 0), key)
    file = folder / OWN_INVITATION
    atomic_write(file, [invitation.to_text().encode() + b"\n"], mode=0o600)
    _note(folder, invitation, "bootstrap nodes")
    say(
        f"The run is by invitation: dipaco-bootstrap invite {folder} --peers N makes one; "
        f"{OWN_INVITATION} is for your own nodes, keep it to yourself"
    )


def own_invitation(folder: Path, say: Callable[[str], None]) -> str | None:
    """Return the invitation by which the operator's own nodes are in; None in an open run.

    Where it was lost and the operator's key is in the folder, another one is made.
    """
    file = folder / OWN_INVITATION
    if not file.exists() and (folder / "operator.pem").is_file():
        manifest, _, key = _open(folder, None)
        if not is_open(manifest.plan):
            note_admission(folder, manifest.plan, key, say)
    return given_invitation(None, file)


def _open(
    folder: Path, operator_key: Path | None
) -> tuple[SignedManifest, Gate, Ed25519PrivateKey]:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ManifestError(f"{folder} holds no manifest.json; name the folder of prepare --out")
    with storage_errors(path):
        manifest = verify_manifest(path.read_bytes())
    gate = Gate.of(manifest)
    file = operator_key or folder / "operator.pem"
    if not file.is_file():
        raise ManifestError(f"there is no {file}; give the operator's key with --operator-key")
    key = load_or_create_operator_key(file)
    if raw_public_key(key) != manifest.operator_key:
        raise ManifestError(f"{file} is not the key that signed {path}; give --operator-key")
    return manifest, gate, key


def _noted(folder: Path) -> dict[str, str]:
    """Return the invitations of the operator's list: id to whom it was made for."""
    file, found = folder / LIST_FILE, {}
    with storage_errors(file):
        lines = file.read_bytes().splitlines() if file.exists() else []
    for line in lines:
        # The end of one may be missing after a power cut.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            one = json.loads(line)
            found[str(one["id"])] = str(one["name"])
    return found


def _note(folder: Path, invitation: Invitation, name: str) -> None:
    """Append an invitation, without its secret, to the operator's list."""
    terms = invitation.terms
    said = {
        "id": invitation.id,
        "name": name,
        "peers": terms.places,
        "expires_s": terms.expires_s or None,
        "made_s": int(time.time()),
    }
    file = folder / LIST_FILE
    with storage_errors(file):
        cut_off = b"\n" if ends_within_a_line(file) else b""
    append(file, cut_off + json.dumps(said).encode() + b"\n")
