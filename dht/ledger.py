"""Who trained how many tokens since the run began, told by certificates alone (design 4.4). Pure.

The rule, in full:

* Of each module the certificates of one chain count, at most one for each version. At a fork the
  side counts that the swarm takes too: more signers since the fork, then more tokens, then the
  smaller digest. What lost is put on top of the winner by those who trained it, and counts there.
* A certificate is *witnessed* when more than half of its members have signed it, at least two.
  Each of its rows counts. Of any other certificate only the rows of its signers do, and they count
  as trained *alone*: nobody but the peer itself says so.
* What a peer trains on a path goes into every module of that path, and is the same work. So its
  tokens on a path are those of the module that counts the most of them, not the sum of all.

A union of two sets of certificates gives the same as having seen them together, whatever the
order, and seeing one again changes nothing. Kept on disk by `ledger_file`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .certificates import Certificate
from .records import MAX_COUNT

EXPORT_FORMAT = "dipaco-ledger/1"
LEAST_WITNESSES = 2


def is_witnessed(certificate: Certificate) -> bool:
    """Tell whether others of the group stand behind a certificate."""
    signers = len(certificate.signers)
    return signers >= LEAST_WITNESSES and 2 * signers > len(certificate.statement.table)


def counted_chain(certificates: Iterable[Certificate]) -> tuple[Certificate, ...]:
    """Return the certificates of one module that count, the oldest first, one for each version.

    The certificates may have gaps: a keeper was away for longer than they are kept. Pieces that
    do not overlap all count. Where two do, they are compared by what both can show, that is from
    the version on with which the later one begins.
    """
    known = _one_statement_each(certificates)
    children: dict[str, list[Certificate]] = defaultdict(list)
    begins: list[Certificate] = []
    for certificate in known.values():
        said = certificate.statement
        parent = known.get(said.parent)
        # Versions grow along every link that is followed, so there are no circles.
        if parent is not None and parent.statement.version == said.version - 1:
            children[said.parent].append(certificate)
        else:
            begins.append(certificate)
    following = _followed(known.values(), children)
    chain: list[Certificate] = []
    for begin in sorted(begins, key=lambda c: (c.statement.version, c.statement.digest)):
        piece = _tail(begin, following)
        first = begin.statement.version
        overlap = [c for c in chain if c.statement.version >= first]
        if not overlap or _merit(piece) > _merit(overlap):
            chain = [c for c in chain if c.statement.version < first] + piece
    return tuple(chain)


def _one_statement_each(certificates: Iterable[Certificate]) -> dict[str, Certificate]:
    """Return one certificate for each digest: with the most signers, then the smallest bytes.

    Signatures under equal statements are put together first.
    """
    merged: dict[bytes, Certificate] = {}
    for certificate in certificates:
        key = certificate.statement.to_bytes()
        before = merged.get(key)
        merged[key] = certificate if before is None else before.merged(certificate)
    chosen: dict[str, Certificate] = {}
    for key in sorted(merged):
        certificate = merged[key]
        digest = certificate.statement.digest
        if digest not in chosen or len(certificate.signers) > len(chosen[digest].signers):
            chosen[digest] = certificate
    return chosen


def _followed(
    certificates: Iterable[Certificate], children: Mapping[str, Sequence[Certificate]]
) -> dict[str, Certificate]:
    """Return which certificate counts after which: at a fork the best chain of the best side."""
    following: dict[str, Certificate] = {}
    # From the newest on, so that what comes after a fork is decided before the fork.
    for certificate in sorted(certificates, key=lambda c: -c.statement.version):
        digest = certificate.statement.digest
        sides = children.get(digest, ())
        if len(sides) == 1:
            following[digest] = sides[0]
        elif sides:
            following[digest] = max(sides, key=lambda side: _merit(_tail(side, following)))
    return following


def _tail(begin: Certificate, following: Mapping[str, Certificate]) -> list[Certificate]:
    chain: list[Certificate] = []
    current: Certificate | None = begin
    while current is not None:
        chain.append(current)
        current = following.get(current.statement.digest)
    return chain


def _merit(chain: Sequence[Certificate]) -> tuple[int, int, int]:
    """Return what orders chains: see the rule of `peer.member.descent`."""
    signers = {signer for certificate in chain for signer in certificate.signers}
    tokens = sum(row.tokens for certificate in chain for row in certificate.statement.table)
    return len(signers), tokens, -int(chain[-1].statement.digest, 16)


@dataclass(frozen=True)
class Said:
    """What a peer calls itself, as its signed record said in a round."""

    peer: str
    round_index: int
    name: str = ""
    team: str = ""

    @property
    def rank(self) -> tuple[int, str, str]:
        """The greatest of several counts."""
        return self.round_index, self.name, self.team


@dataclass(frozen=True)
class Credit:
    """What the certificates say of one peer."""

    peer: str
    tokens: int
    """Trained, and witnessed by others of its groups."""
    alone: int
    """Said by the peer itself and nobody else."""
    paths: Mapping[int, int] = field(default_factory=dict)
    """Witnessed tokens by path."""
    commits: int = 0
    """Witnessed certificates that it stands in, over all modules."""
    first_round: int = 0
    last_round: int = 0
    """Of all certificates that it stands in and that count."""


@dataclass
class _Tally:
    """Sums of one peer, by (path, module)."""

    witnessed: Counter[tuple[int, str]] = field(default_factory=Counter)
    everything: Counter[tuple[int, str]] = field(default_factory=Counter)
    commits: int = 0
    first_round: int = MAX_COUNT
    last_round: int = 0


class Ledger:
    """Sums up the certificates of a run, one module after the other."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = defaultdict(_Tally)

    def count(self, module: str, certificates: Iterable[Certificate]) -> None:
        """Count all certificates of one module. Once for each module."""
        for certificate in counted_chain(certificates):
            said, witnessed = certificate.statement, is_witnessed(certificate)
            for row in said.table:
                if not witnessed and row.peer not in certificate.signers:
                    continue
                tally = self._tallies[row.peer]
                tally.everything[row.path, module] += row.tokens
                tally.first_round = min(tally.first_round, said.round_index)
                tally.last_round = max(tally.last_round, said.round_index)
                if witnessed:
                    tally.witnessed[row.path, module] += row.tokens
                    tally.commits += 1

    def credits(self) -> dict[str, Credit]:
        """Return the credit of each peer that stands in a certificate that counts."""
        return {peer: _credit(peer, tally) for peer, tally in sorted(self._tallies.items())}


def _credit(peer: str, tally: _Tally) -> Credit:
    witnessed, everything = _by_path(tally.witnessed), _by_path(tally.everything)
    return Credit(
        peer=peer,
        tokens=sum(witnessed.values()),
        alone=sum(most - witnessed.get(path, 0) for path, most in everything.items()),
        paths=dict(sorted(witnessed.items())),
        commits=tally.commits,
        first_round=tally.first_round,
        last_round=tally.last_round,
    )


def _by_path(sums: Mapping[tuple[int, str], int]) -> dict[int, int]:
    """Return the tokens of each path: those of the module that counts the most."""
    most: dict[int, int] = {}
    for (path, _), tokens in sums.items():
        most[path] = max(most.get(path, 0), tokens)
    return most


def ledger_of(certificates: Iterable[Certificate]) -> dict[str, Credit]:
    """Return the credit of each peer by the certificates of several modules."""
    modules: dict[str, list[Certificate]] = defaultdict(list)
    for certificate in certificates:
        modules[certificate.statement.module].append(certificate)
    ledger = Ledger()
    for module, found in modules.items():
        ledger.count(module, found)
    return ledger.credits()


def exported(
    run_id: str, credits: Mapping[str, Credit], sayings: Mapping[str, Said]
) -> dict[str, Any]:
    """Return the ledger as plain values; its keys are part of the command's contract.

    A name is what its owner says, and two owners may say the same: peers are told apart by id. A
    peer's tokens count for the name and the team that it said last.
    """
    ranked = sorted(credits.values(), key=lambda credit: (-credit.tokens, credit.peer))
    said = {credit.peer: sayings.get(credit.peer, Said(credit.peer, 0)) for credit in ranked}
    return {
        "format": EXPORT_FORMAT,
        "run": run_id,
        "tokens": sum(credit.tokens for credit in ranked),
        "tokens_alone": sum(credit.alone for credit in ranked),
        "peers": [_exported_peer(credit, said[credit.peer]) for credit in ranked],
        "names": _together("name", ranked, {peer: one.name for peer, one in said.items()}),
        "teams": _together("team", ranked, {peer: one.team for peer, one in said.items()}),
    }


def _exported_peer(credit: Credit, said: Said) -> dict[str, Any]:
    return {
        "peer_id": credit.peer,
        "name": said.name,
        "team": said.team,
        "tokens": credit.tokens,
        "tokens_alone": credit.alone,
        "commits": credit.commits,
        "first_round": credit.first_round,
        "last_round": credit.last_round,
        "paths": {str(path): tokens for path, tokens in credit.paths.items()},
    }


def _together(word: str, ranked: Iterable[Credit], said: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the sums of those who say the same name or team, the most tokens first."""
    members: dict[str, list[Credit]] = defaultdict(list)
    for credit in ranked:
        if said[credit.peer]:
            members[said[credit.peer]].append(credit)
    found: list[dict[str, Any]] = [
        {
            word: name,
            "tokens": sum(credit.tokens for credit in those),
            "tokens_alone": sum(credit.alone for credit in those),
            "peers": [credit.peer for credit in those],
        }
        for name, those in members.items()
    ]
    return sorted(found, key=lambda entry: (-entry["tokens"], entry[word]))
