"""Which peer trains what: pure functions from a view of the swarm to a decision.

See design 4.6, claims. Every peer decides for itself, among the paths that its view covers: of the
others it is not known whether they wait. Peers with the same view decide compatibly; peers whose
views differ slightly share a path for a moment at worst. What is kept where is in `keeping.py`, and
which state wins in `chain/steps.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .grid import Grid
from .records import Claim
from .view import SwarmView


@dataclass(frozen=True)
class Decision:
    """A path to train, and why, for the person at the machine."""

    path: int
    reason: str


def _rendezvous(peer: str, path: int) -> bytes:
    """Order peers for a path, and paths for a peer, without anybody agreeing on anything."""
    return hashlib.sha256(f"{peer}/{path}".encode()).digest()


def choose_path(
    view: SwarmView,
    grid: Grid,
    me: str,
    *,
    pinned: int | None = None,
    exclude: Collection[int] = (),
) -> Decision:
    """Choose the path with the least service: fewest trainers, then longest waited, then hash.

    `exclude` holds while it leaves a path.
    """
    if pinned is not None:
        return Decision(pinned, "asked for by --path")
    paths = [path for path in view.paths(grid) if path not in exclude] or list(view.paths(grid))
    others = {path: _others(view, path, me) for path in paths}
    least = min(others.values())
    chosen = _best_fit(view, [path for path in paths if others[path] == least], me)
    return Decision(chosen, _reason(view, chosen, others[chosen]))


def _best_fit(view: SwarmView, paths: Collection[int], peer: str) -> int:
    """Return the path that has waited longest; of several the one that rendezvous hashing names."""
    first = min(view.last_round(path) for path in paths)
    return min(
        (p for p in paths if view.last_round(p) == first), key=lambda p: _rendezvous(peer, p)
    )


def _others(view: SwarmView, path: int, me: str) -> int:
    mine = view.claims.get(me)
    is_mine = mine is not None and mine.path == path and mine.state != "leaving"
    return view.claim_count(path) - is_mine


def _reason(view: SwarmView, path: int, others: int) -> str:
    last = view.last_round(path)
    if others == 0:
        # Nothing is known about a path whose last trainer has been gone for long.
        return f"nobody has trained it since round {last}" if last >= 0 else "nobody trains it"
    return f"least service: {others} other{'s' if others > 1 else ''} on it"


def choose_own_path(
    sequences: Mapping[int, int], rounds: Mapping[int, int], dwell_rounds: int
) -> Decision:
    """Choose where a peer trains on texts of its owner next: first where most of them are.

    `sequences` are these texts by path, and `rounds` those that it trained each path in this life.
    The next dwell goes to the path with the most texts for each round, that dwell included, so in
    the long run each path has its share of the rounds (D'Hondt). Where others are does not matter:
    nobody else has these texts.
    """
    chosen = max(sequences, key=lambda p: (sequences[p] / (rounds.get(p, 0) + dwell_rounds), -p))
    share = sequences[chosen] / sum(sequences.values())
    return Decision(chosen, f"{share:.0%} of your texts are for it")


def resolve_collision(
    view: SwarmView, grid: Grid, me: str, *, exclude: Collection[int] = ()
) -> Decision | None:
    """Give way, or stay (None), after a second look at a path that was just claimed.

    Those who already train the path stay. Those who are joining it take places one after another,
    in the order of their rendezvous hash: each goes where the fewest are by then, or stays here if
    that is as good. So newcomers that met on one path part at the first look, in as many
    directions. Everybody works out everybody's place and takes only its own; to this peer, those to
    `exclude` are no places.
    """
    mine = view.claims.get(me)
    if mine is None:
        return None
    joining = {
        claim.peer_id
        for claim in view.claimants(mine.path)
        if claim.state == "joining" and not claim.pinned
    } | {me}
    trainers = {path: view.claim_count(path) for path in view.paths(grid) if path not in exclude}
    trainers[mine.path] = sum(c.peer_id not in joining for c in view.claimants(mine.path))
    for peer in sorted(joining, key=lambda peer: _rendezvous(peer, mine.path)):
        least, place = min(trainers.values()), mine.path
        if trainers[place] > least:
            fewest = [path for path, count in trainers.items() if count == least]
            place = _best_fit(view, fewest, peer)
        if peer == me:
            break
        trainers[place] += 1
    if place == mine.path:
        return None
    return Decision(place, _reason(view, place, trainers[place]))


def should_move(
    view: SwarmView,
    grid: Grid,
    me: str,
    *,
    rounds_on_path: int,
    dwell_rounds: int,
    exclude: Collection[int] = (),
) -> Decision | None:
    """Move to a path that needs a trainer more, or stay (None). Asked at the end of a round.

    A path that nobody trains gets a spare replica at once. With fewer peers than paths everybody
    moves on after the dwell: the peer that has been longest on its path goes to the path that
    has waited longest, the next to the next, so that two movers rarely meet. When all paths are
    served, a path with two more trainers than another gives its newest one away. This peer goes to
    none of those to `exclude`.
    """
    mine = view.claims.get(me)
    if mine is None:
        return None
    waiting = sorted(
        (path for path in view.paths(grid) if path not in exclude and not view.claimants(path)),
        # Paths with equally many rounds are ordered by hash: in the order of their numbers, peers
        # that see different paths would all begin with those of the first modules.
        key=lambda path: (view.last_round(path), _rendezvous("", path)),
    )
    if not waiting:
        return _even_out(view, grid, mine, exclude) if rounds_on_path >= dwell_rounds else None
    spare = _spare_peers(view, grid)
    # A lead leaves its path to wait only when the spare peers are not enough.
    movers = spare if len(spare) >= len(waiting) else [*spare, *_leads(view, grid, dwell_rounds)]
    rank = movers.index(me) if me in movers else len(waiting)
    if rank >= len(waiting):
        return None
    target = waiting[rank]
    if me in spare:
        return Decision(target, "nobody trains it and this path has others")
    served_until = view.last_round(mine.path)
    if rounds_on_path > 0:
        served_until = max(served_until, mine.round - 1)
    if rounds_on_path < dwell_rounds or view.last_round(target) >= served_until:
        return None
    return Decision(target, f"{_reason(view, target, 0)}, and there are more paths than peers")


def _spare_peers(view: SwarmView, grid: Grid) -> list[str]:
    """Return who could leave without leaving a path alone, the newest first.

    Each path's oldest trainer stays, unless one that never moves stays anyway.
    """
    spare = []
    for path in view.paths(grid):
        claims = view.claimants(path)
        free = [claim for claim in claims if not claim.pinned]
        spare += free if len(free) < len(claims) else free[1:]
    return [claim.peer_id for claim in sorted(spare, key=lambda c: (-c.since_s, c.peer_id))]


def _leads(view: SwarmView, grid: Grid, dwell_rounds: int) -> list[str]:
    """Return the leads that may leave their paths to wait, the one longest on its path first.

    A lead that has not moved for several dwells may never move and comes last, or the path whose
    turn it is would wait for it for ever. Among several of these the order changes every round: one
    that never moves may have held up the others, and they cannot be told apart.
    """
    claimants = [view.claimants(path) for path in view.paths(grid)]
    leads = [claims[0] for claims in claimants if claims and not any(c.pinned for c in claims)]
    patience_rounds = 3 * dwell_rounds + 3
    waiting = [claim for claim in leads if view.rounds_held(claim) <= patience_rounds]
    stuck = [claim for claim in leads if view.rounds_held(claim) > patience_rounds]
    waiting.sort(key=lambda claim: (claim.since_s, claim.peer_id))
    stuck.sort(key=lambda claim: _rendezvous(claim.peer_id, int(view.rounds_held(claim))))
    return [claim.peer_id for claim in (*waiting, *stuck)]


def _even_out(
    view: SwarmView, grid: Grid, mine: Claim, exclude: Collection[int]
) -> Decision | None:
    """Move the newest trainer of a path to a path that has two fewer."""
    here = view.claimants(mine.path)
    if len(here) < 3 or here[-1].peer_id != mine.peer_id:
        return None
    counts = {path: len(view.claimants(path)) for path in view.paths(grid) if path not in exclude}
    counts[mine.path] = len(here)
    target = min(counts, key=lambda path: (counts[path], _rendezvous(mine.peer_id, path)))
    if counts[target] > len(here) - 2:
        return None
    trainers = f"{counts[target]} trainer" + ("" if counts[target] == 1 else "s")
    return Decision(target, f"it has {trainers}, path {mine.path} has {len(here)}")


def lead_rank(view: SwarmView, me: str, path: int) -> int:
    """Return this peer's place among the trainers of a path; 0 is the lead, the oldest claim."""
    peers = [claim.peer_id for claim in view.claimants(path)]
    return peers.index(me) if me in peers else len(peers)


def seniority(view: SwarmView, me: str, peer: str) -> tuple[bool, float, str]:
    """Return what orders peers: those that train first, among them the oldest claim first.

    `me` trains, whatever the view still says.
    """
    claim = view.claims.get(peer)
    if claim is None:
        return True, math.inf, peer
    return claim.state != "training" and peer != me, claim.since_s, peer
