"""Who scores which path for the operator's request: pure functions, as in `policy.py`.

A path is scored by its trainers, the oldest claim first. Paths that nobody trains, or whose
trainers do not begin, go to the other peers by rendezvous hash, each a while after the one before.
A claim to score expires like any record, and finished scores exist as long as somebody serves them,
so every path is scored while one peer lives. If several score one path, the earliest goes on.
Once somebody scores or has scored every path, each is scored by a second peer, so that the operator
can compare, and nobody who lies keeps others from scoring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .policy import rendezvous
from .records import ScoreEntry, ScoresRecord
from .score_request import ScoreRequest
from .view import CLOCK_SLACK_S, SwarmView

# Peers that score a path.
SCORERS = 2
# Nobody scores more documents a second: who says so is believed for as many paths as that gives.
GREATEST_DOCUMENTS_PER_S = 10_000.0


@dataclass(frozen=True)
class ScoringBoard:
    """What the swarm shows of one score request at one moment."""

    path_count: int
    entries: Mapping[str, tuple[ScoreEntry, ...]] = field(default_factory=dict)
    """By peer: what it scores and what scores it serves."""

    def done(self) -> dict[int, tuple[tuple[str, str], ...]]:
        """Return for each scored path who serves which blob: (SHA-256, peer id), in order."""
        found: dict[int, list[tuple[str, str]]] = {}
        for peer, entries in self.entries.items():
            for entry in entries:
                if entry.sha256 is not None:
                    found.setdefault(entry.path, []).append((entry.sha256, peer))
        return {path: tuple(sorted(found[path])) for path in sorted(found)}

    def finished(self) -> frozenset[int]:
        """Return the paths that as many peers have scored as are to."""
        scorers = {path: {peer for _, peer in found} for path, found in self.done().items()}
        return frozenset(path for path, peers in scorers.items() if len(peers) >= SCORERS)

    def scoring(self) -> dict[int, tuple[str, ...]]:
        """Return for each path that is not finished who scores it, the earliest first."""
        finished = self.finished()
        claims = sorted(
            (entry.since_s, peer, entry.path)
            for peer, entries in self.entries.items()
            for entry in entries
            if entry.state == "scoring" and entry.path not in finished
        )
        found: dict[int, list[str]] = {}
        for _, peer, path in claims:
            found.setdefault(path, []).append(peer)
        return {path: tuple(found[path]) for path in sorted(found)}

    def open_paths(self) -> tuple[int, ...]:
        """Return the paths that nobody has scored and nobody scores; if there are none, those that
        nobody scores and too few have scored."""
        scoring = self.scoring().keys()
        for taken in (self.done().keys() | scoring, self.finished() | scoring):
            if found := tuple(path for path in range(self.path_count) if path not in taken):
                return found
        return ()

    def busy(self) -> frozenset[str]:
        """Return the peers that score a path that is not finished."""
        return frozenset(peer for peers in self.scoring().values() for peer in peers)


def build_board(
    request: ScoreRequest, path_count: int, records: Iterable[ScoresRecord], now_s: float
) -> ScoringBoard:
    """Make a board of records, leaving out what cannot be.

    Dropped: unknown paths, claims from before the request and from the future, and more scores of
    one peer than it can have made since then.
    """
    earliest_s, latest_s = request.made_s - CLOCK_SLACK_S, now_s + CLOCK_SLACK_S
    most = 1 + int((latest_s - request.made_s) * GREATEST_DOCUMENTS_PER_S / request.documents)
    entries = {}
    for record in records:
        possible = [
            entry
            for entry in record.entries
            if entry.path < path_count and earliest_s <= entry.since_s <= latest_s
        ]
        done = [entry for entry in possible if entry.state == "done"]
        under_way = [entry for entry in possible if entry.state == "scoring"]
        entries[record.peer_id] = (*under_way, *done[:most])
    return ScoringBoard(path_count, entries)


def path_to_score(
    board: ScoringBoard,
    view: SwarmView,
    me: str,
    *,
    open_s: Mapping[int, float],
    idle_s: float,
    patience_s: float,
    exclude: Collection[int] = (),
) -> int | None:
    """Choose the path that this peer, which scores none, should score; None to wait.

    `open_s` says for how many seconds each open path has been seen open here, `idle_s` for how
    many seconds this peer has been free. The free peers stand in an order for each path: its
    trainers, the oldest first, then the others by rendezvous hash. The first takes the path at
    once if it trains it, else after it was open for `patience_s`; each further one waits
    `patience_s` longer, also after its own last score, so that the claim of the one before can be
    seen. `exclude` are paths that could not be scored here lately. Who trains a path that the view
    does not cover is not known: it is left to others.
    """
    busy, done = board.busy() - {me}, board.done()
    choices = []
    for path in board.open_paths():
        if path in exclude or not view.covers_path(path):
            continue
        trainers = [c.peer_id for c in view.claimants(path) if c.state == "training"]
        served = {peer for _, peer in done.get(path, ())}
        place = _place(view, me, path, trainers, busy | served - {me})
        if place * patience_s > idle_s:
            continue
        if (place + (me not in trainers)) * patience_s > open_s.get(path, 0.0):
            continue
        choices.append((me not in trainers, place, rendezvous(me, path), path))
    return min(choices)[3] if choices else None


def _place(view: SwarmView, me: str, path: int, trainers: list[str], busy: Collection[str]) -> int:
    """Return how many peers that score nothing come before this one for a path."""
    others = {claim.peer_id for claim in view.claims.values() if claim.state == "training"} - set(
        trainers
    )
    order = [*trainers, *sorted(others | {me} - set(trainers), key=lambda p: rendezvous(p, path))]
    return [peer for peer in order if peer not in busy].index(me)


def keeps_scoring(board: ScoringBoard, me: str, path: int) -> bool:
    """Tell whether this peer should go on scoring `path`: too few have, nobody began before."""
    if path in board.finished():
        return False
    scorers = board.scoring().get(path, ())
    return me not in scorers or scorers[0] == me
