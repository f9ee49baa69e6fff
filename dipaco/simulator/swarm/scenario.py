"""What a seed stands for: the sizes of a history and the kinds of faults in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from dipaco.protocol.config import (
    ContributionsConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
)
from dipaco.protocol.plan import RoutingPlan, RunBlobs, RunPlan

from .world import START_S

# The faults of each profile; `mixed` draws its own.
_FAULTS: dict[str, tuple[str, ...]] = {
    "calm": (),
    "churn": ("churn",),
    "suspend": ("suspend",),
    "split": ("split",),
    "loss": ("loss",),
    "latency": ("latency",),
    "nat": ("nat",),
    "all_nat": ("all_nat",),
    "nat_churn": ("all_nat", "churn"),
    "clock": ("clock",),
    "hostile": ("hostile",),
    "nat_hostile": ("all_nat", "hostile"),
    "moving": (),
    "fixed": (),
    "dying": ("dying",),
    "mixed": ("churn", "suspend", "split", "loss", "latency", "nat", "clock"),
}
PROFILES = tuple(_FAULTS)
_GRIDS = ((1,), (1,), (2,), (3,), (1, 1), (2, 2), (1, 2))
_GRIDS_OF_MOVERS = ((4,), (2, 2), (2, 4), (8,))
_GRIDS_OF_DYING = ((4,), (2, 2), (2, 3))
_DURATION_OF_DYING_S = 20.0


@dataclass(frozen=True)
class Scenario:
    """The sizes and faults that are drawn before a history begins."""

    seed: int
    profile: str
    faults: tuple[str, ...]
    grid: tuple[int, ...]
    private: bool
    members: int
    rounds: int
    """Rounds with faults."""
    duration_s: float
    inner_steps: int


def draw_scenario(
    seed: int, profile: str = "mixed", *, members: int | None = None, rounds: int | None = None
) -> Scenario:
    """Return what a seed stands for, with the sizes that are given in place of drawn ones."""
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got '{profile}'")
    random = Random(f"scenario {seed} {profile}")
    faults = _FAULTS[profile]
    if profile == "mixed":
        faults = tuple(fault for fault in faults if random.random() < 0.45)
    grids = {"moving": _GRIDS_OF_MOVERS, "dying": _GRIDS_OF_DYING}
    grid = random.choice(grids.get(profile, _GRIDS))
    most = math.prod(grid) - 1 if profile in grids else 10
    drawn_members, drawn_rounds = random.randint(2, most), random.randint(8, 20)
    is_fixed = profile == "fixed" or (profile == "mixed" and random.random() < 0.15)
    return Scenario(
        seed=seed,
        profile=profile,
        faults=faults,
        grid=grid,
        private=random.random() < 0.2,
        members=members or drawn_members,
        rounds=rounds or drawn_rounds,
        duration_s=(
            random.choice((60.0, 120.0, 300.0)) if profile != "dying" else _DURATION_OF_DYING_S
        ),
        inner_steps=random.choice((6, 8, 10)) if is_fixed else 0,
    )


def small_plan(
    modules_per_level: tuple[int, ...],
    *,
    duration_s: float,
    inner_steps: int = 0,
    private: bool = False,
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
        rounds=RoundsConfig(duration_s=duration_s, inner_steps=inner_steps, dwell_rounds=2),
        contributions=ContributionsConfig(),
        routing=RoutingPlan(),
        blobs=RunBlobs(tokenizer="1" * 64, router="2" * 64, base="3" * 64, shards="4" * 64),
    )
