"""What a peer costs, and whether all is trained, in swarms of up to ten thousand peers.

    python benchmarks/swarm_scale.py --members 300 --grid 11x11 --hours 1 --rows cost-by-members

The real decisions of every peer (`dipaco.protocol.member`) in the simulated network
(`dipaco.simulator.swarm`), with Poisson churn: a peer lives ten rounds in the mean, then crashes or
leaves, and a new one with a new identity and an empty disk takes its place. Rounds follow the
clock. Figures per peer and round leave out the first round of the run and of a peer.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Sequence

from parts.common import Report, build_parser

from dipaco.simulator.swarm.engine import Engine
from dipaco.simulator.swarm.invariants import Invariants
from dipaco.simulator.swarm.machine import Machine
from dipaco.simulator.swarm.network import Link
from dipaco.simulator.swarm.scenario import small_plan
from dipaco.simulator.swarm.world import START_S, World

# Newcomers for each bootstrap node; these keep copies, serve shards and stay.
MEMBERS_PER_BOOT = 600
# After a peer is gone its place is taken within so many seconds.
MAX_PAUSE_S, LEAVING_S = 30.0, 60.0
RECORDS = ("written", "read")
VERBS = ("views", "tell", "ask", "get", "put", "state", "shard")
BEGIN_S = time.perf_counter()


class Swarm:
    """A large swarm while it lasts."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._engine = engine = Engine(options.seed, START_S - options.round_s)
        plan = small_plan(options.grid, duration_s=options.round_s)
        self.world = World(plan, engine)
        self.watch = Invariants(self.world)
        self.born = self.rounds_done = 0
        self.ends: Counter[str] = Counter()
        self.spent: dict[str, list[float]] = defaultdict(list)
        """By what was spent: of every peer and round."""
        self._last: dict[str, Counter[str]] = {}

    def begin(self) -> None:
        """Start the bootstrap nodes, then everybody else within one round."""
        options, engine, world = self._options, self._engine, self.world
        for number in range(max(1, math.ceil(options.members / MEMBERS_PER_BOOT))):
            link = Link(
                latency_s=0.02, jitter_s=0.005, uplink_bytes_s=1.25e8, downlink_bytes_s=1.25e8
            )
            boot = Machine(world, f"boot{number}", link, trains=False)
            for path in range(world.grid.path_count):
                boot.store.shards.add(path)
            engine.after(0.0, boot.start)
        for _ in range(options.members):
            engine.after(engine.between(1.0, options.round_s), self._be_born)
        engine.at(START_S + options.round_s, self._end_round)

    def _be_born(self) -> None:
        engine, options = self._engine, self._options
        link = Link(
            latency_s=engine.between(0.01, 0.08),
            jitter_s=engine.between(0.0, 0.02),
            uplink_bytes_s=engine.between(1e6, 2e7),
            downlink_bytes_s=engine.between(5e6, 5e7),
            can_be_called=not engine.chance(options.undialable),
        )
        machine = Machine(
            self.world,
            f"p{self.born:05}",
            link,
            step_s=engine.between(4.0, 12.0),
            clock_error_s=engine.between(-0.3, 0.3),
        )
        self.born += 1
        machine.start()
        if options.life_rounds > 0:
            life_s = engine.random.expovariate(1.0 / (options.life_rounds * options.round_s))
            engine.after(life_s, self._end, machine)

    def _end(self, machine: Machine) -> None:
        engine = self._engine
        if engine.chance(0.3):
            machine.ask_to_leave()
            self.ends["left"] += 1
        else:
            machine.crash(hangs=engine.chance(0.5), empty_disk=True)
            self.ends["crashed"] += 1
        engine.after(LEAVING_S, self._forget, machine)
        engine.after(engine.between(1.0, MAX_PAUSE_S), self._be_born)

    def _forget(self, machine: Machine) -> None:
        """Free the memory of one that will not come back."""
        machine.crash(hangs=True, empty_disk=True)
        del machine.member
        self._last.pop(machine.peer, None)

    def _end_round(self) -> None:
        """Note what every peer that lived through the round has spent in it."""
        options, engine = self._options, self._engine
        engine.after(options.round_s, self._end_round)
        self.rounds_done += 1
        before, self._last = self._last, {}
        for machine in self.world.machines.values():
            if machine.is_alive and machine.trains:
                now = self._last[machine.peer] = _spent(machine)
                if machine.peer in before and self.rounds_done > 1:
                    for name in now:
                        self.spent[name].append(now[name] - before[machine.peer][name])
        if options.verbose:
            print(
                f"round {self.rounds_done}: {len(self.watch.last_rounds)} paths, "
                f"{time.perf_counter() - BEGIN_S:.0f} s, "
                f"{_memory_mb():.0f} MB, {dict(self.watch.figures)}",
                file=sys.stderr,
                flush=True,
            )

    def run(self) -> bool:
        """Live on, for the simulated hours or as long as is allowed; tells whether it was all."""
        options, engine = self._options, self._engine
        end_s = START_S + options.hours * 3600.0 + 1.0
        while engine.now_s < end_s:
            engine.run(min(end_s, engine.now_s + options.round_s / 10))
            if options.limit_s and time.perf_counter() - BEGIN_S > options.limit_s:
                return False
        return True


def _spent(machine: Machine) -> Counter[str]:
    """Return what a machine has asked and moved so far."""
    traffic, found = machine.link.traffic, Counter({"events": machine.handled})
    for verb in VERBS:
        found[f"requests {verb}"] = traffic.requests[verb]
        found[f"sent {verb}"] = traffic.sent[verb]
        found[f"received {verb}"] = traffic.received[verb]
    found.update({f"records {kind}": traffic.records[kind] for kind in RECORDS})
    for kind in ("requests", "sent", "received"):
        found[f"{kind} all"] = sum(found[f"{kind} {verb}"] for verb in VERBS)
    return found


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _shares(values: Sequence[float]) -> list[float]:
    """Return mean, 99th percentile and maximum."""
    ordered = sorted(values) or [0.0]
    place = min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)
    return [round(sum(ordered) / len(ordered), 1), ordered[place], ordered[-1]]


def options() -> Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--members", type=int, default=20, help="peers that train (20)")
    parser.add_argument("--grid", default="4x4", help="modules of each level (4x4)")
    parser.add_argument("--hours", type=float, default=0.25, help="of simulated time (0.25)")
    parser.add_argument("--round-s", type=float, default=300.0, help="seconds of a round (300)")
    parser.add_argument(
        "--life-rounds", type=float, default=10.0, help="mean life of a peer; 0 for no churn (10)"
    )
    parser.add_argument("--undialable", type=float, default=0.2, help="share of the peers (0.2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=0.0, help="end after so long (never)")
    parser.add_argument("--verbose", action="store_true", help="a line each round, on stderr")
    chosen = parser.parse_args()
    chosen.grid = tuple(map(int, chosen.grid.split("x")))
    return chosen


def main() -> int:
    """Run the benchmark; returns the exit code."""
    chosen = options()
    # Nearly all that is made lives long: looking for circles in it again and again takes longest.
    gc.set_threshold(200_000, 50, 50)
    swarm = Swarm(chosen)
    swarm.begin()
    is_whole = swarm.run()
    return _report(chosen, swarm, is_whole).conclude(chosen)


def _report(chosen: Namespace, swarm: Swarm, is_whole: bool) -> Report:
    seconds, watch, world = time.perf_counter() - BEGIN_S, swarm.watch, swarm.world
    watch.end()
    figures, paths = watch.figures, world.grid.path_count
    grid = "x".join(map(str, chosen.grid))
    report = Report("what a peer costs, by size", seed=chosen.seed, hours=chosen.hours)
    of = f"{chosen.members} peers, {grid}"
    for name, values in sorted(swarm.spent.items()):
        if any(values):
            report.add(of, {f"{name} (mean, 99 %, most)": _shares(values)})
    lately = world.plan.rounds.dwell_rounds + 1
    handled = sum(machine.handled for machine in world.machines.values())
    whole = max(1, figures["trained"] - figures["gone"])
    report.add(
        of,
        {
            "rounds": swarm.rounds_done,
            "ended early": not is_whole or None,
            "paths trained": len(watch.last_rounds),
            "paths": paths,
            f"paths trained in the last {lately} rounds": sum(
                last >= swarm.rounds_done - lately for last in watch.last_rounds.values()
            ),
            "peers born, crashed, left": [swarm.born, swarm.ends["crashed"], swarm.ends["left"]],
            "versions": figures["versions"],
            "forked": figures["forked"],
            "outbid": figures["outbid"],
            "kept, %": round(100 * (1 - figures["lost"] / whole), 2),
            "gone, %": round(100 * figures["gone"] / max(1, figures["trained"]), 2),
            "events": handled,
            "seconds": round(seconds, 1),
            "MB of the simulator": round(_memory_mb()),
        },
    )
    report.notes += [
        f"{v.invariant} at {v.time_s:.0f} s: {v.what[:400]}" for v in watch.violations[:10]
    ]
    return report


if __name__ == "__main__":
    sys.exit(main())
