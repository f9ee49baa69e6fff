"""What progress records say of the best states of the paths. Pure.

Claiming a low loss costs nothing, so nobody has to believe it: the path's lead trainer, and
anybody who evaluates, scores the parameters again on the path's held-out rows (`claim_holds`).
What the lead trainer names has been checked by it, so its claim comes first; the others follow in
the order of their losses. Somebody who invents losses can cost others a transfer and a scoring,
and a keeper's copy while nobody trains the path, but cannot displace what an honest trainer found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dipaco.modules.evaluate import LossSum

from .records import ClaimRecord, ProgressEntry, ProgressRecord

# Further claims on a path are left out: each may cost a reader a transfer.
GREATEST_NOTICES = 4


@dataclass(frozen=True)
class BestNotice:
    """That a blob holds the best states of a path."""

    sha256: str
    score: LossSum
    round_index: int

    @property
    def loss(self) -> float:
        """The claimed mean held-out loss in nats."""
        return self.score.nll / self.score.tokens


def best_of_entry(entry: ProgressEntry) -> BestNotice | None:
    """Return the best states that a progress entry names, if it does."""
    if not entry.best_sha256:
        return None
    return BestNotice(
        entry.best_sha256, LossSum(entry.best_nll, entry.best_tokens), entry.best_round
    )


def entry_of_kept(path: int, best: BestNotice, known: ProgressEntry | None = None) -> ProgressEntry:
    """Return what a peer says that keeps a path's best states and does not train the path.

    `known` is its entry from when it did. The entry speaks when the trainers are gone; that of
    anybody who trained the path is newer, or has more tokens.
    """
    entry = known or ProgressEntry(
        path=path,
        last_round=0,
        tokens=0,
        validation_nll=0.0,
        validation_tokens=0,
        train_loss=float("nan"),
    )
    return ProgressEntry(
        **{
            **entry.model_dump(),
            "last_round": max(entry.last_round, best.round_index),
            "best_sha256": best.sha256,
            "best_nll": best.score.nll,
            "best_tokens": best.score.tokens,
            "best_round": best.round_index,
        }
    )


def announced_bests(
    records: Iterable[ProgressRecord],
    claims: Mapping[str, ClaimRecord],
    path_count: int,
    latest_round: int,
) -> dict[int, tuple[BestNotice, ...]]:
    """Return the best states announced for every path, the one to be tried first in front.

    First what the path's lead trainer says, the oldest claim in training; then by loss. Dropped:
    unknown paths, rounds of the future, what a peer says twice, and all but the first few.
    """
    leads = _lead_trainers(claims.values())
    found: dict[int, dict[str, tuple[bool, float, str, BestNotice]]] = {}
    for record in records:
        for entry in {entry.path: entry for entry in reversed(record.entries)}.values():
            best = best_of_entry(entry)
            if best is None or entry.path >= path_count or entry.last_round > latest_round:
                continue
            is_from_lead = leads.get(entry.path) == record.peer_id
            ranked = (not is_from_lead, best.loss, best.sha256, best)
            known = found.setdefault(entry.path, {})
            if best.sha256 not in known or ranked[:3] < known[best.sha256][:3]:
                known[best.sha256] = ranked
    return {
        path: tuple(
            ranked[3] for ranked in sorted(known.values(), key=lambda r: r[:3])[:GREATEST_NOTICES]
        )
        for path, known in sorted(found.items())
    }


def _lead_trainers(claims: Iterable[ClaimRecord]) -> dict[int, str]:
    """Return the peer that has trained each path longest."""
    leads: dict[int, str] = {}
    for claim in sorted(claims, key=lambda c: (c.since_s, c.peer_id)):
        if claim.state == "training":
            leads.setdefault(claim.path, claim.peer_id)
    return leads
