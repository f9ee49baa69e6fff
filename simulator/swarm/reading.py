"""Views made of what was worked out of each key before: what nobody has written is not read again.

`dipaco.dht.view.view_of_records` reads every record of every key, as each real peer has to. In a
swarm of thousands the same records are read by hundreds of peers, so here a key remembers what it
says, and a view is put together from these. It is the same view, to the order of its entries; where
that takes more than putting together, `joined_view` says so, and all records are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dipaco.dht.coverage import Scope
from dipaco.dht.records import Claim, Holding
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


@dataclass(frozen=True, slots=True)
class _Said:
    """What peers claim, and the ages of their records, by which the newest is found."""

    claims: dict[str, Claim | None]
    ages: dict[str, tuple[float, int, int]]


class Contents:
    """What stands under one key: of each peer one record, the peers in order; and what these say.

    That is worked out when it is asked for, and kept up record by record.
    """

    def __init__(self, records: Iterable[Any]) -> None:
        self.by_peer: dict[str, Any] = {record.peer_id: record for record in records}
        self._said: _Said | None = None
        self.latest_s = 0.0
        """No claim here began later."""
        self.greatest_path = 0
        """None is on a path with a greater number."""
        self._holdings: dict[int, tuple[Holding, ...]] = {}
        self._progress: tuple[dict[int, PathService], int] | None = None

    @property
    def records(self) -> Collection[Any]:
        """The records."""
        return self.by_peer.values()

    def renew(self, peer: str, record: Any) -> bool:
        """Take what a peer says now, None for nothing; tells whether it has its place here."""
        if record is None or peer not in self.by_peer:
            return False
        self.by_peer[peer] = record
        if self._said is not None:
            self._note(self._said, peer, record)
        self._holdings, self._progress = {}, None
        return True

    def said(self) -> _Said:
        """Return what each peer claims, and how old that is."""
        if self._said is None:
            self._said = _Said({}, {})
            for peer, record in self.by_peer.items():
                self._note(self._said, peer, record)
        return self._said

    def _note(self, said: _Said, peer: str, record: Any) -> None:
        said.ages[peer] = record.age
        claim = said.claims[peer] = record.claim
        if claim is not None:
            self.latest_s = max(self.latest_s, claim.since_s)
            self.greatest_path = max(self.greatest_path, claim.path)

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
    everything = _Joined()
    for contents in peers:
        everything.take(contents)
    said = dict(everything.records)
    for contents in modules.values():
        everything.take(contents)
    claims = {peer: claim for peer, claim in everything.claims.items() if claim is not None}
    if any(
        contents.latest_s > now_s + CLOCK_SLACK_S or contents.greatest_path >= grid.path_count
        for contents in (*peers, *modules.values())
    ):
        return None
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


class _Joined:
    """What peers say under several keys: of each peer the newest, where it was said first."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        self.claims: dict[str, Claim | None] = {}
        self._ages: dict[str, tuple[float, int, int]] = {}

    def take(self, contents: Contents) -> None:
        """Take what stands under another key."""
        said, ages = contents.said(), self._ages
        common = ages.keys() & said.ages.keys()
        older = [peer for peer in common if said.ages[peer] <= ages[peer]]
        _update(self.records, contents.by_peer, older)
        _update(self.claims, said.claims, older)
        _update(ages, said.ages, older)


def _update(found: dict[str, Any], others: Mapping[str, Any], but: Sequence[str]) -> None:
    """Take the values of `others`, `but` those of some peers."""
    kept = {peer: found[peer] for peer in but}
    found.update(others)
    found.update(kept)
