"""Views made of what was worked out of each key before: what nobody has written is not read again.

`dipaco.dht.view.view_of_records` reads every record of every key, as each real peer has to. In a
swarm of thousands the same records are read by hundreds of peers, so here a key remembers what it
says, and a view is put together from these. It is the same view, to the order of its entries; where
that takes more than putting together, `joined_view` says so, and all records are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dipaco.dht.coverage import Scope
from dipaco.dht.records import Claim, Holding, PeerRecord
from dipaco.dht.view import (
    CLOCK_SLACK_S,
    ROUND_SLACK,
    PathService,
    SwarmView,
    greatest_rounds,
    merged_progress,
    plausible_holdings,
    round_at,
)
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan

Ages = dict[str, tuple[float, int, int]]


@dataclass(frozen=True, slots=True)
class _Standing:
    """What peers say of themselves under a key, by peer."""

    records: dict[str, Any]
    ages: Ages
    claims: dict[str, Claim | None]
    latest_s: float
    """When the latest claim began."""
    greatest_path: int


class Contents:
    """What stands under one key, worked out when it is asked for."""

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = records
        self._standing: _Standing | None = None
        self._holdings: dict[int, tuple[Holding, ...]] = {}
        self._progress: tuple[dict[int, PathService], int] | None = None

    def standing(self) -> _Standing:
        """Return what the peers say of themselves."""
        if self._standing is None:
            records = {record.peer_id: record for record in self.records}
            claims = {peer: record.claim for peer, record in records.items()}
            made = [claim for claim in claims.values() if claim is not None]
            self._standing = _Standing(
                records,
                {peer: record.age for peer, record in records.items()},
                claims,
                max((claim.since_s for claim in made), default=0.0),
                max((claim.path for claim in made), default=0),
            )
        return self._standing

    def holdings(self, module: str, plan: RunPlan, grid: Grid, rounds: int) -> tuple[Holding, ...]:
        """Return what is held of a module and can have got this far in so many rounds."""
        found = self._holdings.get(rounds)
        if found is None:
            held = [holding for r in self.records if (holding := r.holding) is not None]
            found = plausible_holdings(module, held, plan, grid, rounds)
            self._holdings = {rounds: found}
        return found

    def progress(self, path_count: int) -> tuple[dict[int, PathService], int]:
        """Return how far the paths are, and the latest round that is spoken of; of best parameters
        a key says nothing, or -2 stands for that round."""
        if self._progress is None:
            entries = [entry for record in self.records for entry in record.entries]
            latest = max((entry.last_round for entry in entries), default=-1)
            if any(entry.best_sha256 for entry in entries):
                latest = -2
            self._progress = merged_progress(self.records, path_count, latest), latest
        return self._progress


def joined_view(
    now_s: float,
    plan: RunPlan,
    grid: Grid,
    scope: Scope | None,
    peers: Sequence[Contents],
    modules: Mapping[str, Contents],
    progress: Sequence[Contents],
) -> SwarmView | None:
    """Return the view of the contents of some keys; None where the records have to be read."""
    if plan.rounds.inner_steps:
        return None
    services: dict[int, PathService] = {}
    for contents in progress:
        found, latest = contents.progress(grid.path_count)
        if latest == -2 or latest > round_at(plan, now_s) + ROUND_SLACK:
            return None
        if not services.keys().isdisjoint(found):
            return None
        services = {**services, **found} if services else found
    standings = [contents.standing() for contents in (*peers, *modules.values())]
    if any(
        said.latest_s > now_s + CLOCK_SLACK_S or said.greatest_path >= grid.path_count
        for said in standings
    ):
        return None
    said, claims = _joined(standings, len(peers))
    rounds = greatest_rounds(plan, now_s)
    return SwarmView(
        now_s=now_s,
        claims=claims,
        peers=said,
        holdings={
            module: contents.holdings(module, plan, grid, rounds)
            for module, contents in modules.items()
            if grid.has_module(module)
        },
        progress=services if len(progress) == 1 else dict(sorted(services.items())),
        bests={},
        duration_s=plan.rounds.duration_s,
        scope=scope,
    )


def _joined(
    standings: Sequence[_Standing], peer_keys: int
) -> tuple[dict[str, PeerRecord], dict[str, Claim]]:
    """Return peer records and claims: of what a peer says under several keys the newest.

    The first `peer_keys` are those of buckets.
    """
    said: dict[str, PeerRecord] = {}
    ages: Ages = {}
    claims: dict[str, Claim | None] = {}
    for number, standing in enumerate(standings):
        # Whoever stands there already keeps its place.
        common = ages.keys() & standing.ages.keys()
        older = [peer for peer in common if standing.ages[peer] <= ages[peer]]
        if number < peer_keys:
            kept = {peer: said[peer] for peer in older}
            said = {**said, **standing.records, **kept}
        claims = {**claims, **standing.claims, **{peer: claims[peer] for peer in older}}
        ages = {**ages, **standing.ages, **{peer: ages[peer] for peer in older}}
    return said, {peer: claim for peer, claim in claims.items() if claim is not None}
