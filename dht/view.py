"""The swarm as one peer sees it at one moment: what policy decides from. Pure and immutable."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dipaco.modules.best_parameters import BestReference
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference

from .announced_bests import announced_bests
from .records import ClaimRecord, HoldingRecord, PeerRecord, ProgressEntry, ProgressRecord

logger = logging.getLogger("dipaco.dht.view")

# Clocks differ; a record from a little in the future is believed.
ROUND_SLACK = 1
CLOCK_SLACK_S = 15.0
# No volunteer's machine trains a path faster; a higher count is invented.
GREATEST_TOKENS_PER_S = 5e6
GREATEST_REPLICAS = 64


@dataclass(frozen=True)
class PathService:
    """How far a path is, as its latest trainer saw it."""

    last_round: int
    tokens: int
    validation_nll: float
    validation_tokens: int
    train_loss: float

    @property
    def validation_loss(self) -> float | None:
        """Mean negative log-likelihood in nats of the held-out split; None if not scored."""
        return self.validation_nll / self.validation_tokens if self.validation_tokens else None


@dataclass(frozen=True)
class SwarmView:
    """Everything fresh and plausible that the DHT shows of a run."""

    now_s: float
    claims: Mapping[str, ClaimRecord] = field(default_factory=dict)
    peers: Mapping[str, PeerRecord] = field(default_factory=dict)
    holdings: Mapping[str, tuple[HoldingRecord, ...]] = field(default_factory=dict)
    progress: Mapping[int, PathService] = field(default_factory=dict)
    bests: Mapping[int, tuple[BestReference, ...]] = field(default_factory=dict)
    """Announced best parameters of each path, those to be tried first in front."""
    duration_s: float = math.inf
    """Seconds of a round."""

    def states(self, module: str) -> tuple[StateReference, ...]:
        """Return the announced states of a module, one of each holding."""
        return tuple(holding.reference for holding in self.holdings.get(module, ()))

    def holders(self, state: StateReference) -> tuple[str, ...]:
        """Return the peers that announce a state."""
        held = self.holdings.get(state.module, ())
        return tuple(holding.peer_id for holding in held if holding.digest == state.digest)

    def claimants(self, path: int) -> tuple[ClaimRecord, ...]:
        """Return the claims on a path by peers that mean to stay, oldest first."""
        claims = [c for c in self.claims.values() if c.path == path and c.state != "leaving"]
        return tuple(sorted(claims, key=lambda c: (c.since_s, c.peer_id)))

    def last_round(self, path: int) -> int:
        """Return the last round in which a path is known to have been trained; -1 for never."""
        service = self.progress.get(path)
        return service.last_round if service else -1

    def rounds_held(self, claim: ClaimRecord) -> float:
        """Return for how many rounds a claim has stood."""
        return max(0.0, (self.now_s - claim.since_s) / self.duration_s)

    def lead(self, path: int) -> str | None:
        """Return the peer that has trained a path longest; None when nobody trains it."""
        return next((c.peer_id for c in self.claimants(path) if c.state == "training"), None)


def round_at(plan: RunPlan, now_s: float) -> int:
    """Return the round that `now_s` lies in; negative before the run starts."""
    return plan.rounds.round_at(now_s - plan.start_s)


def build_view(
    *,
    now_s: float,
    plan: RunPlan,
    grid: Grid,
    claims: Iterable[ClaimRecord],
    peers: Iterable[PeerRecord],
    holdings: Mapping[str, Iterable[HoldingRecord]],
    progress: Iterable[ProgressRecord],
) -> SwarmView:
    """Make a view of records, leaving out what this run cannot have.

    Dropped: unknown paths and modules, rounds of the future, versions and token counts beyond
    what the elapsed time allows. Expired records do not get here.
    """
    latest = round_at(plan, now_s) + ROUND_SLACK
    progress = tuple(progress)
    believed = {
        claim.peer_id: claim
        for claim in claims
        if claim.path < grid.path_count and claim.since_s <= now_s + CLOCK_SLACK_S
    }
    known_modules = set(grid.modules())
    return SwarmView(
        now_s=now_s,
        claims=believed,
        peers={p.peer_id: p for p in peers},
        holdings={
            module: tuple(
                h
                for h in held
                if h.module == module and plausible_state(h.reference, plan, grid, now_s)
            )
            for module, held in holdings.items()
            if module in known_modules
        },
        progress=_merge_progress(progress, grid.path_count, latest),
        bests=announced_bests(progress, believed, grid.path_count, latest),
        duration_s=plan.rounds.duration_s,
    )


def greatest_contribution(plan: RunPlan, now_s: float) -> int:
    """Return how many tokens one peer can have trained by `now_s` since its last commit."""
    rounds = max(0, round_at(plan, now_s)) + 1 + ROUND_SLACK
    if plan.rounds.inner_steps:
        step_tokens = plan.inner.batch_sequences * plan.model.sequence_length
        return rounds * plan.rounds.inner_steps * step_tokens
    return int(rounds * plan.rounds.duration_s * GREATEST_TOKENS_PER_S)


def plausible_state(state: StateReference, plan: RunPlan, grid: Grid, now_s: float) -> bool:
    """Tell whether a state can have got this far since the run began.

    Asked of announcements, and again of what was fetched. Also in a successor run: its genesis
    states have version 0 and count nothing.
    """
    rounds = max(0, round_at(plan, now_s)) + 1 + ROUND_SLACK
    if state.version == 0:
        return state.tokens == 0
    if state.version > rounds or state.last_round >= rounds:
        return False
    paths = len(grid.paths_of_module(state.module))
    if plan.rounds.inner_steps:
        step_tokens = plan.inner.batch_sequences * plan.model.sequence_length
        per_path = rounds * plan.rounds.inner_steps * step_tokens
        return state.tokens <= per_path * paths * GREATEST_REPLICAS
    return state.tokens <= rounds * plan.rounds.duration_s * GREATEST_TOKENS_PER_S * paths


def _merge_progress(
    records: Iterable[ProgressRecord], path_count: int, latest_round: int
) -> dict[int, PathService]:
    """Keep the newest entry of every path: the latest round, then the most tokens.

    Held-out scores are the newest there are, which may be of an earlier round.
    """
    newest: dict[int, ProgressEntry] = {}
    scored: dict[int, ProgressEntry] = {}
    for record in sorted(records, key=lambda r: r.peer_id):
        for entry in record.entries:
            if entry.path >= path_count or entry.last_round > latest_round:
                continue
            for found in (newest, scored) if entry.validation_tokens else (newest,):
                known = found.get(entry.path)
                if known is None or _age(entry) > _age(known):
                    found[entry.path] = entry
    return {
        path: PathService(
            last_round=entry.last_round,
            tokens=entry.tokens,
            validation_nll=scored.get(path, entry).validation_nll,
            validation_tokens=scored.get(path, entry).validation_tokens,
            train_loss=entry.train_loss,
        )
        for path, entry in sorted(newest.items())
    }


def _age(entry: ProgressEntry) -> tuple[int, int]:
    return entry.last_round, entry.tokens
