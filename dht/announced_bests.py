"""What progress records say of the best parameters of the paths. Pure.

Claiming a low loss costs nothing, so nobody has to believe it: the path's lead trainer, and
anybody who evaluates, runs the parameters again on the path's held-out rows (`claim_holds`).
What the lead trainer names has been checked by it, so its claim comes first; the others follow in
the order of their losses. Somebody who invents losses can cost others a transfer and a check,
and a keeper's copy while nobody trains the path, but cannot displace what an honest trainer found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dipaco.modules.best_parameters import BestReference

from .records import Claim, ProgressEntry, ProgressRecord

# Further claims on a path are left out: each may cost a reader a transfer.
MOST_ANNOUNCED = 4


def entry_of_kept(best: BestReference, known: ProgressEntry | None = None) -> ProgressEntry:
    """Return what a peer says that keeps a path's best parameters and does not train the path.

    `known` is its entry from when it did. The entry speaks when the trainers are gone; that of
    anybody who trained the path is newer, or has more tokens.
    """
    entry = known or ProgressEntry(
        path=best.path,
        last_round=0,
        tokens=0,
        validation_nll=0.0,
        validation_tokens=0,
        train_loss=float("nan"),
    )
    return entry.naming(best)


def announced_bests(
    records: Iterable[ProgressRecord],
    claims: Mapping[str, Claim],
    path_count: int,
    latest_round: int,
) -> dict[int, tuple[BestReference, ...]]:
    """Return the best parameters announced for every path, the one to be tried first in front.

    First what the path's lead trainer says, the oldest claim in training; then by loss. Dropped:
    unknown paths, rounds of the future, what a peer says twice, and all but the first few.
    """
    naming = [r for r in records if any(entry.best_sha256 for entry in r.entries)]
    leads = _lead_trainers(claims.values()) if naming else {}
    found: dict[int, dict[str, tuple[bool, BestReference]]] = {}
    for record in naming:
        for entry in {entry.path: entry for entry in reversed(record.entries)}.values():
            best = entry.best
            if best is None or entry.path >= path_count or entry.last_round > latest_round:
                continue
            is_from_lead = leads.get(entry.path) == record.peer_id
            claimed = (not is_from_lead, best)
            known = found.setdefault(entry.path, {})
            if best.sha256 not in known or _place(claimed) < _place(known[best.sha256]):
                known[best.sha256] = claimed
    return {
        path: tuple(best for _, best in sorted(known.values(), key=_place)[:MOST_ANNOUNCED])
        for path, known in sorted(found.items())
    }


def _place(claimed: tuple[bool, BestReference]) -> tuple[bool, tuple[float, str]]:
    return claimed[0], claimed[1].rank


def _lead_trainers(claims: Iterable[Claim]) -> dict[int, str]:
    """Return the peer that has trained each path longest."""
    leads: dict[int, str] = {}
    for claim in sorted(claims, key=lambda c: (c.since_s, c.peer_id)):
        if claim.state == "training":
            leads.setdefault(claim.path, claim.peer_id)
    return leads
