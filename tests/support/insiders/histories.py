"""Histories with insiders: with liars among the trainers, or with one peer that attacks."""

import math
from functools import partial
from random import Random

from dipaco.simulator.swarm.machine import Machine
from dipaco.simulator.swarm.one_history import run_history
from dipaco.simulator.swarm.scenario import Scenario, draw_scenario

from .attacks_by_rounds import BadTells, InflatedTokens, InventedDigest, RoundToCome
from .attacks_by_rows import BareQuorum, Crowd, Drips, ForeignFiles, PushedOut, Revoked
from .attacks_by_states import (
    FalseDigests,
    ForgedState,
    KeptBack,
    KeptBackPerfectly,
    LyingDirectory,
    SecretChain,
    SubtleSecretChain,
)
from .insider import Insider
from .liar import Liar

ATTACKS = {
    "none": Insider,
    "1": ForgedState,
    "2": LyingDirectory,
    "3": FalseDigests,
    "4": ForeignFiles,
    "5": BareQuorum,
    "6": PushedOut,
    "7": SecretChain,
    "7 subtle": SubtleSecretChain,
    "8": Crowd,
    "11": KeptBack,
    "11 perfect": KeptBackPerfectly,
    "12": Drips,
    "13": Revoked,
    "14": RoundToCome,
    "15": BadTells,
    "16": InflatedTokens,
    "17": InventedDigest,
}
# Very many rows take very long to live through: so many rounds are enough.
ROUNDS = {"8": 6}
GRIDS = ((1, 1), (2, 2))


def run_faulty(seed, profile="mixed", *, members=None, rounds=None, log=None):
    """Live through a history with the faults of a profile, with liars if it has them: every fourth trainer."""
    drawn = draw_scenario(seed, profile, members=members, rounds=rounds)
    liars = {f"p{number}" for number in range(1, drawn.members, 4)} if "hostile" in drawn.faults else set()
    return run_history(drawn, lambda peer: Liar if peer in liars else Machine, log=log)


def run_attacked(seed, attack, *, members=None, rounds=None, log=None):
    """Live through a history in which one trainer makes an attack of `ATTACKS`; count also what became of victims."""
    made = ATTACKS[attack]
    drawn = draw_attacked(seed, members=members, rounds=rounds or ROUNDS.get(attack))
    insider = partial(made, rounds=drawn.rounds)
    result = run_history(drawn, lambda peer: insider if peer == "p1" else made.honest, log=log)
    for module, victim in result.world.machines["p1"].victims.items():
        steps = [link.step for link in result.world.book.back_from(result.world.watch.final(module)) if link.step]
        is_in = [victim in step.peers for step in steps][::-1]
        since = is_in[is_in.index(True) :] if True in is_in else is_in
        result.figures["steps of victims"] += len(since)
        result.figures["victims left out"] += since.count(False)
    return result


def draw_attacked(seed, *, members=None, rounds=None):
    """Return the swarm that a seed stands for where an insider attacks: groups of 4 to 6 or 8."""
    random = Random(f"attacked {seed}")
    grid = random.choice(GRIDS)
    if members is not None and members < math.prod(grid):
        grid = GRIDS[0]
    paths = math.prod(grid)
    drawn_members = random.randint(8, 12) if paths > 1 else random.randint(4, 8)
    drawn_rounds = random.randint(10, 14)
    return Scenario(
        seed=seed,
        profile="attacked",
        faults=(),
        grid=grid,
        private=False,
        members=members or drawn_members,
        rounds=rounds or drawn_rounds,
        duration_s=random.choice((60.0, 120.0, 300.0)),
        inner_steps=random.choice((6, 8)) if random.random() < 0.25 else 0,
    )
