"""A swarm of real processes whose peers are killed, leave, are suspended and join all the time.

    python benchmarks/churn.py [--rounds 45] [--peers 8] [--no-calm] [--out DIR]
    python benchmarks/churn.py --peers 10 --elders 1 --closed 3 --clocks-off-s 1 --bootstrap-dies \\
        --rounds 575 --round-s 10.7 --step-s 0.3 --no-calm     # 600 joins, an hour and a half
    python benchmarks/churn.py --scene calm --rounds 900       # two hours: does anything grow?
    python benchmarks/churn.py --scene calm --peers 6 --closed 4 --round-s 20      # peers at home
    python benchmarks/churn.py --scene calm --peers 5 --mbps 2 --round-s 20        # on slow lines
    python benchmarks/churn.py --scene calm --peers 4 --one-path --mbps 20 --round-s 128 --step-s 1
    python benchmarks/churn.py --scene split --peers 6 --rounds 10 --round-s 12

Real `dipaco-peer` processes train a tiny run of four paths (2x2) by the clock. In the scene *churn*
every peer has a mean life of five rounds; then it gets SIGKILL, or SIGINT (a clean leave), or
SIGSTOP, to all of its processes, for up to two and a half rounds. In place of one that has gone
comes the same peer with its disk, or one that was never there. What happens when follows from
--seed. At the end three rounds are quiet, and three more once all that were started last train.
With --bootstrap-dies the bootstrap node is killed when two fifths are over; newcomers join through
a peer, until after three fifths another one comes. With --clocks-off-s the clock of every peer's
machine is off by up to so many seconds. Nothing happens to the first --elders peers. In *calm*
nothing happens. In *split* a cable between a third of the peers and the others is cut for --rounds
rounds.

The languages of the four paths are made up and share no words, so paths that share a module pull
it apart as hard as they can. Peers refuse what others made of a module without them when it wrecks
their own held-out text: `refused` counts how often. With --closed the last so many peers, and those
that take their places, are each behind a router with real NAT, in a network namespace, the last of
several behind two, and nobody can call them; with --mbps a token bucket on each peer's cable limits
what leaves it, and modules have a million parameters. These need root, iproute2 and nftables. A
step takes at least --step-s seconds, most of which the processor waits, as it does for a GPU.
With --one-path all peers train one path of 30 M parameters, and no step is computed: it is waited
for, and a matrix is changed a little. Two cores are few for what is left to do, so let everything
be slower by one factor: lines, steps and rounds.

A join has *contributed* when its work is in a step of one of the two rounds that end after it has
begun to train; it *had time* for it when it was there that long, and not suspended. Speeds are of
the first and of the last tenth of the time. `share` is of the trained tokens, those for each module
of a path, in the final states, without what a killed life had not contributed and what the peers
that stay have on top: what a step missed, a leave or a move leaves behind and a fork throws away
are losses here. What processes that stay have of memory, threads, open files and disk is looked at
once a minute.

The held-out perplexity of the final states stands beside that of a calm run: the same peers
without a fault, until its states count as many tokens. Ctrl+C ends the churn early. Exit code 1
when a promise was broken: a peer ended by itself, the peers did not agree in the end, less than 93%
of the tokens are in the final states, or the perplexity is more than 3% above the calm one.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parts.common import Report, build_parser, cpu_seconds, ratio, scratch_folder
from parts.home_lines import can_make_homes, homes
from parts.lives import (
    Clock,
    Counts,
    Fault,
    greatest_wait_s,
    joins,
    of,
    rounds_without_step,
    schedule,
    tokens_per_s,
)
from parts.world import World, add_options
from support.wire.split_network import SplitNetwork, can_split, split_network

SCENES = ("churn", "calm", "split")
LEAST_SHARE = 0.93
MAX_RATIO = 1.03
# A peer that has not begun to train after so many rounds counts as one that does not.
PATIENCE_ROUNDS = 5
# Of a split: before it, and until a swarm that has not agreed is given up.
BEFORE_ROUNDS, HEALING_ROUNDS, AFTER_ROUNDS = 3, 20, 3


def options() -> Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--scene", choices=SCENES, default="churn", help="(churn)")
    parser.add_argument("--rounds", type=int, default=45, help="rounds of it (45)")
    parser.add_argument("--peers", type=int, default=8, help="peers at a time (8)")
    parser.add_argument("--closed", type=int, default=0, help="of these behind routers (0)")
    parser.add_argument("--mbps", type=float, help="what a line carries, Mbit/s (no limit)")
    parser.add_argument("--one-path", action="store_true", help="for all, of 30 M parameters")
    parser.add_argument("--inner-steps", type=int, default=0, help="of its round (0: the clock)")
    parser.add_argument("--elders", type=int, default=0, help="that nothing happens to (0)")
    parser.add_argument("--clocks-off-s", type=float, default=0.0, help="up to so much (0)")
    parser.add_argument("--no-calm", action="store_true", help="no calm run beside it")
    parser.add_argument("--bootstrap-dies", action="store_true", help="and another comes")
    add_options(parser, round_s=8.0, step_s=0.1)
    chosen = parser.parse_args()
    homes_needed = chosen.closed or chosen.mbps
    if homes_needed and not can_make_homes(with_nat=bool(chosen.closed)):
        parser.error("--closed and --mbps need root, iproute2 and nftables")
    if not 0 <= chosen.closed <= chosen.peers - chosen.elders:
        parser.error("--closed and --elders together: --peers at most")
    if chosen.scene == "split" and not can_split():
        parser.error("--scene split needs root and iproute2")
    return chosen


class SplitWorld(World):
    """A third of the peers is on the other side of a cable."""

    def __init__(self, folder: Path, chosen: Namespace, cable: SplitNetwork) -> None:
        super().__init__(folder, chosen)
        self.cable = cable

    def side(self, slot: int) -> int:
        """Return the side of a slot; the bootstrap node is on the larger one."""
        return int(slot >= 2 * self.chosen.peers / 3)

    def where(self, slot: int) -> tuple[list[str], str]:
        """Each peer is on its side."""
        side = self.side(slot)
        return self.cable.prefix(side), f"/ip4/{self.cable.addresses[side]}/tcp/0"

    def split(self, rounds: float) -> dict[str, Any]:
        """Cut the cable for some rounds, and wait until all agree again."""
        round_s = self.chosen.round_s
        self.sleep_until(time.monotonic() + BEFORE_ROUNDS * round_s)
        self.cable.cut()
        cut_s = time.time()
        self.say("cut")
        self.sleep_until(time.monotonic() + rounds * round_s)
        self.cable.mend()
        mended_s = time.time()
        self.say("mended")
        deadline = mended_s + HEALING_ROUNDS * round_s
        while not (self.is_at_rest() and self._has_met(mended_s)) and time.time() < deadline:
            self.watch()
            time.sleep(0.2)
        agreed_s = time.time() - mended_s
        self.say("agreed")
        self.sleep_until(time.monotonic() + AFTER_ROUNDS * round_s)
        sides: dict[str, set[str]] = defaultdict(set)
        for slot, peer in self.slots.items():
            steps = [e for e in peer.of("outer_step") if cut_s < e["time_s"] < mended_s]
            sides[("larger", "smaller")[self.side(slot)]] |= {e["digest"] for e in steps}
        return {
            "steps of the side alone": {side: len(found) for side, found in sides.items()},
            "agreed after, s": round(agreed_s, 1),
            "agreed after, rounds": round(agreed_s / round_s, 2),
        }

    def _has_met(self, since_s: float) -> bool:
        """Tell whether some group had members of both sides."""
        sides = {peer.peer_id: self.side(slot) for slot, peer in self.slots.items()}
        return any(
            len({sides.get(member) for member in event["group"]}) > 1
            for peer in self.slots.values()
            for event in peer.of("outer_step")
            if event["time_s"] > since_s
        )


@contextlib.contextmanager
def world_of(folder: Path, chosen: Namespace) -> Iterator[World]:
    """Give a world on loopback, one of homes, or one on both sides of a cable."""
    if chosen.scene == "split":
        with split_network() as cable:
            yield SplitWorld(folder, chosen, cable)
    elif chosen.closed or chosen.mbps:
        doubly = min(1, chosen.closed // 2)
        routers = [0] * (1 + chosen.peers - chosen.closed) + [1] * (chosen.closed - doubly)
        with homes(*routers, *[2] * doubly) as network:
            for site in range(1, chosen.peers + 1) if chosen.mbps else ():
                network.limit(site, chosen.mbps)
            yield World(folder, chosen, network)
    else:
        yield World(folder, chosen)


def live(
    folder: Path, chosen: Namespace, faults: Sequence[Fault], tokens: int = 0
) -> tuple[Counts, dict[str, Any]]:
    """Let a swarm live through the scene, or without a fault until it has trained so many tokens;
    returns what it came to."""
    found: dict[str, Any] = {}
    with world_of(folder, chosen) as world, world.swarm:
        world.begin(chosen.peers)
        if tokens:
            world.train_until(tokens, chosen.rounds)
        elif isinstance(world, SplitWorld):
            found |= world.split(chosen.rounds)
        else:
            try:
                world.churn(faults, chosen.rounds, bootstrap_dies=chosen.bootstrap_dies)
            except KeyboardInterrupt:
                world.churned_s = time.time()
                world.say("told to end early")
            found |= at_home(world) if not faults else {}
            world.be_quiet()
        world.settle()
    counts = world.count()
    found |= figures_of(world, counts)
    if faults:
        found |= rates_of(world)
    lives = [{**vars(life), "events": len(life.events)} for life in world.lives()]
    (folder / "lives.json").write_text(json.dumps(lives))
    (folder / "samples.json").write_text(json.dumps(world.growth.samples))
    return counts, found


def figures_of(world: World, counts: Counts) -> dict[str, Any]:
    """Return what is told of every run."""
    endings = Counter(world.endings.values())
    return {
        "faults": dict(sorted(world.done.items())),
        "lives": len(world.endings),
        "ended by themselves": endings["by itself"],
        "hung leaves": world.hung_leaves,
        "refused": world.refusals(),
        "exit codes": {str(code): times for code, times in sorted(world.exit_codes.items())},
        "agreed": counts.agreed,
        "versions": counts.versions,
        "forked": len(counts.forked),
        "outbid": counts.outbid,
        "tokens": dict(counts.tokens),
        "share": round(counts.share, 4),
        "perplexity": round(world.perplexity(counts.final), 4),
        **world.growth.told(),
    }


def rates_of(world: World) -> dict[str, Any]:
    """Return how joins, rounds, paths and speed went while peers came and went."""
    lives, grid, rounds = world.lives(), world.grid, world.plan.rounds
    modules_of = grid.modules_of_path
    offsets = {m: grid.level_offset(grid.level_of(m)) for m in grid.modules()}
    clock = Clock(world.plan.start_s, rounds.duration_s, offsets)
    step_s, patience_s = rounds.gather_limit_s + rounds.grace_limit_s, PATIENCE_ROUNDS
    patience_s = PATIENCE_ROUNDS * rounds.duration_s
    begin_s, end_s = world.began_s, world.churned_s
    came = joins(lives, modules_of, clock, patience_s=patience_s, step_s=step_s)
    (world.folder / "joins.json").write_text(json.dumps([asdict(join) for join in came]))
    had_time = [join for join in came if join.had_time]
    starts_s = sorted(join.start_s for join in came if join.start_s < math.inf)
    without, due = rounds_without_step(lives, clock, begin_s, end_s - step_s)
    _, wait_s = greatest_wait_s(lives, grid.path_count, begin_s, end_s)
    tenth_s = (end_s - begin_s) / 10
    found: dict[str, Any] = {
        "joins": len(came),
        "joins that had time": len(had_time),
        "of these contributed": ratio(sum(j.has_contributed for j in had_time), len(had_time)),
        "of these to all their modules": ratio(
            sum(j.is_everywhere for j in had_time), len(had_time)
        ),
        "joins that did not": ", ".join(j.name for j in had_time if not j.has_contributed) or None,
        "rounds of modules": due,
        "of these without a step": without,
        "greatest wait of a path, s": round(wait_s, 1),
    }
    if len(starts_s) > 1:
        hundredths = statistics.quantiles(starts_s, n=100, method="inclusive")
        found["s from start to training (median, 99 %)"] = [
            round(hundredths[n], 1) for n in (49, 98)
        ]
    for name, at_s in (("first", begin_s), ("last", end_s - tenth_s)):
        told = tokens_per_s(lives, world.tokens_per_step, at_s, at_s + tenth_s)
        found[f"tokens a second of a process, and since it trains, {name} tenth"] = [
            round(speed, 1) for speed in told
        ]
    return found


def at_home(world: World) -> dict[str, Any]:
    """Return how steps went where nothing happened: who was in them, when, and what that took."""
    lives, plan = world.lives(), world.plan
    steps = [e for e in of(lives, "outer_step") if e["time_s"] > world.began_s]
    rows = {(e["module"], e["round"]): e["rows"] for e in steps}
    slots = [*world.slots.values()]
    paths = [peer.of("training")[-1]["path"] for peer in slots if peer.of("training")]
    found: dict[str, Any] = {
        "s after the boundary (median, most)": [
            round(of_all([e["seconds_after_boundary"] for e in steps] or [0.0]), 2)
            for of_all in (statistics.median, max)
        ],
    }
    for module in world.grid.modules():
        of_module = [count for (name, _), count in rows.items() if name == module]
        trainers = sum(path in world.grid.paths_of_module(module) for path in paths)
        told = [round(statistics.fmean(of_module or [0]), 2), trainers]
        found[f"{module}: trainers in a step, of"] = told
    for peer in slots:
        inner = [e for e in peer.of("inner") if e["time_s"] > world.began_s]
        if len(inner) > 1:
            taken_s = inner[-1]["time_s"] - inner[0]["time_s"]
            share = sum(event["seconds"] for event in inner[1:]) / taken_s
            found[f"{peer.name}: time in inner steps, %"] = round(100 * share, 1)
        used_s = cpu_seconds(peer.popen.pid) - world.cpu_s[peer]
        ended = sum(event["time_s"] > world.began_s for event in peer.of("round"))
        found[f"{peer.name}: processor seconds a round"] = ratio(used_s, ended)
        reachable = peer.of("reachable")
        found[f"{peer.name}: is called"] = reachable[-1]["how"] if reachable else None
    if world.network is not None:
        seconds = time.time() - plan.start_s
        sent = [world.network.traffic(slot + 1)[1] for slot in world.slots]
        found["Mbit/s sent by a peer, most"] = round(8e-6 * max(sent) / seconds, 3)
    return found


def main() -> int:
    """Play the scene; returns the exit code."""
    chosen = options()
    told = ("rounds", "round_s", "step_s", "inner_steps", "peers", "closed", "mbps", "seed")
    report = Report(f"churn, {chosen.scene}", **{name: vars(chosen)[name] for name in told})
    with scratch_folder() as scratch:
        folder = chosen.out or scratch
        faults = schedule(chosen.peers, chosen.rounds, chosen.seed, chosen.elders)
        faults = faults if chosen.scene == "churn" else []
        counts, found = live(folder / chosen.scene, chosen, faults)
        report.add(chosen.scene, found)
        by_calm = 1.0
        if chosen.scene != "calm" and not chosen.no_calm:
            calm = Namespace(**{**vars(chosen), "scene": "calm"})
            _, beside = live(folder / "calm", calm, [], counts.tokens["final"])
            report.add("calm", beside)
            by_calm = ratio(found["perplexity"], beside["perplexity"])
            report.add(chosen.scene, {"perplexity, of the calm one": by_calm})
    # The state of one path counts the tokens of its middle replica.
    is_kept = chosen.scene == "split" or chosen.one_path or found["share"] >= LEAST_SHARE
    checks = {
        "a peer ended by itself": found["ended by themselves"] > 0,
        "the peers did not agree in the end": not found["agreed"],
        f"less than {LEAST_SHARE:.0%} of the tokens": not is_kept,
        f"perplexity above {MAX_RATIO} of the calm run": not by_calm <= MAX_RATIO,
    }
    for (module, version), digests in counts.forked.items():
        report.notes.append(f"forked: {module} version {version}, {len(digests)} states")
    return report.conclude(chosen, [name for name, is_broken in checks.items() if is_broken])


if __name__ == "__main__":
    sys.exit(main())
