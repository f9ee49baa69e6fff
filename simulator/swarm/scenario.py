"""What a seed stands for: the sizes of a history and the kinds of faults in it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dipaco.modules.config import (
    AveragingConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
)
from dipaco.modules.plan import RoutingPlan, RunBlobs, RunPlan

from .world import START_S

FAULTY = ("latency", "dht", "churn", "split", "suspend", "clock", "pause", "hostile")
PROFILES = ("calm", *FAULTY, "mixed", "closed", "invited", "falsified")
# What `mixed` draws from; hostile peers have a profile of their own and come with it at times.
FAULTS = ("latency", "dht", "churn", "split", "suspend", "clock")
GRIDS = ((1,), (2,), (3,), (4,), (1, 1), (2, 2), (1, 4), (2, 1))


@dataclass(frozen=True)
class Scenario:
    """What is drawn first."""

    seed: int
    profile: str
    faults: tuple[str, ...]
    grid: tuple[int, ...]
    private: bool
    members: int
    rounds: int
    duration_s: float
    inner_steps: int


def draw_scenario(
    seed: int,
    profile: str = "mixed",
    *,
    members: int | None = None,
    paths: int | None = None,
    rounds: int | None = None,
) -> Scenario:
    """Return what a seed stands for; what is given is not drawn."""
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got '{profile}'")
    random = Random(f"scenario {seed} {profile}")
    faults: tuple[str, ...] = () if profile == "calm" else (profile,)
    if profile == "mixed":
        faults = tuple(fault for fault in FAULTS if random.random() < 0.5)
        if random.random() < 0.3:
            faults = (*faults, "hostile")
    grid = random.choice(GRIDS)
    drawn_members, drawn_rounds = random.randint(2, 10), random.randint(8, 20)
    return Scenario(
        seed=seed,
        profile=profile,
        faults=faults,
        grid=grid if paths is None else _grid_of(paths, random),
        private=random.random() < 0.25,
        members=members or drawn_members,
        rounds=rounds or drawn_rounds,
        duration_s=random.choice((60.0, 120.0, 300.0)),
        inner_steps=random.choice((6, 8, 10)) if random.random() < 0.15 else 0,
    )


def _grid_of(paths: int, random: Random) -> tuple[int, ...]:
    """Return a grid of so many paths, with two levels where that is possible."""
    factors = [n for n in range(2, paths) if paths % n == 0]
    if not factors or random.random() < 0.3:
        return (paths,)
    first = random.choice(factors)
    return (first, paths // first)


def small_plan(
    modules_per_level: tuple[int, ...],
    *,
    duration_s: float,
    inner_steps: int = 0,
    private: bool = False,
    matchmaking_s: float = 2.0,
    dwell_rounds: int = 2,
    copies: int = 3,
    by_invitation: bool = False,
) -> RunPlan:
    """Return the plan of a run that begins at `START_S`; only its grid and rounds matter."""
    return RunPlan(
        name="simulated",
        start_s=START_S,
        model=ModelConfig(
            vocabulary_size=64, block_count=4, hidden_size=8, head_count=1, sequence_length=16
        ),
        grid=GridConfig(modules_per_level=modules_per_level, private_head=private),
        inner=InnerConfig(batch_sequences=2),
        outer=OuterConfig(),
        rounds=RoundsConfig(
            duration_s=duration_s,
            inner_steps=inner_steps,
            matchmaking_s=matchmaking_s,
            dwell_rounds=dwell_rounds,
            copies=copies,
        ),
        averaging=AveragingConfig(),
        routing=RoutingPlan(),
        admission="invitation" if by_invitation else "open",
        blobs=RunBlobs(tokenizer="1" * 64, router="2" * 64, base="3" * 64, shards="4" * 64),
    )
