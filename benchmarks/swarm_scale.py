"""What a peer costs, and whether all is trained, in swarms of up to ten thousand peers.

    python benchmarks/swarm_scale.py --members 1000 --paths 4096 --hours 1 --json

The real decisions of every peer (`dipaco.peer.member`) in the simulated network
(`dipaco.simulator.swarm`), with Poisson churn: a peer lives ten rounds in the mean, then crashes or
leaves, and a new one with a new identity and an empty disk takes its place. Rounds follow the
clock. Sizes of records, certificates and lists are those of real ones; a state has --state-mb.
Every invariant is watched as in `swarm_faults.py`; what does not hold is counted, and nothing ends.
Figures per peer and round leave out the first round of the run and the first and last of a peer.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dipaco.peer.member.actions import Action, Commit
from dipaco.peer.member.events import Event
from dipaco.simulator.swarm.engine import Engine
from dipaco.simulator.swarm.history import real_member
from dipaco.simulator.swarm.invariants import Invariants
from dipaco.simulator.swarm.machine import Machine
from dipaco.simulator.swarm.network import Link
from dipaco.simulator.swarm.scenario import small_plan
from dipaco.simulator.swarm.trace import Trace
from dipaco.simulator.swarm.work import SimulatedState, contents_by_peer, counts_of
from dipaco.simulator.swarm.world import START_S, Body, World
from parts.common import Report, build_parser

VIEWS = "views"
# Newcomers for each bootstrap node; these keep copies, serve shards and stay.
MEMBERS_PER_BOOT = 600
# After a peer is gone its place is taken within so many seconds.
GREATEST_PAUSE_S = 30.0
LEAVING_S = 60.0


class Gone:
    """In the place of the member of a machine that will not come back."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Nothing happens to it any more."""
        raise AssertionError(f"{event.kind} for a member that is gone")


class Watch:
    """The invariants, and what was committed.

    It has them and is none of them: from a compiled class nothing can be derived.
    """

    def __init__(self, world: World) -> None:
        self.invariants = Invariants(world, coverage=False, stops=False)
        self._world = world
        self.committed_rounds: set[tuple[str, int]] = set()
        self.last_rounds: dict[int, int] = {}
        """Path to the last round in which its work was committed."""
        self.group_sizes: list[int] = []
        self._seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.invariants, name)

    def committed(self, machine: Body, action: Commit, state: SimulatedState) -> None:
        """A machine carries out a commit."""
        self.invariants.committed(machine, action, state)
        statement = state.statement
        if statement is None or state.reference.digest in self._seen:
            return
        self._seen.add(state.reference.digest)
        self.committed_rounds.add((action.module, action.round_index))
        self.group_sizes.append(len(statement.table))
        for row in statement.table:
            self.last_rounds[row.path] = max(self.last_rounds.get(row.path, -1), action.round_index)

    def work(self) -> tuple[int, int, int]:
        """Return the steps that were trained, those in the final states, and those on top."""
        trained = merged = on_top = 0
        machines = self._world.machines
        for module in self._world.grid.modules():
            final = self.invariants._final(module)
            of_peers = contents_by_peer(final.content) if final is not None else {}
            for peer in [p for p, m in self.invariants._stays if m == module]:
                machine = machines[peer]
                machine.count_steps()
                for stay in self.invariants._stays[peer, module]:
                    trained += (machine.steps if stay.end is None else stay.end) - stay.begin
                merged += _length(of_peers.get(peer, {}), peer)
                work = machine.works.get(module)
                if work is not None:
                    # Against the final state: what the own anchor has and that state has not.
                    have = _length(work.shift, peer) + _length(work.anchor.content, peer)
                    on_top += max(0, have - _length(of_peers.get(peer, {}), peer))
        return trained, merged, on_top


def _length(content: Any, peer: str) -> int:
    return sum((end - begin) * count for begin, end, count in counts_of(content, peer))


@dataclass
class Spent:
    """What a peer had asked and moved at the end of a round."""

    requests: dict[str, int]
    bytes: dict[str, float]


class Swarm:
    """A large swarm while it lasts."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self._engine = engine = Engine(options.seed, START_S - options.round_s)
        plan = small_plan(
            _levels(options.paths), duration_s=options.round_s, matchmaking_s=options.matchmaking_s
        )
        self.world = World(
            plan, engine, real_member, Trace(), state_bytes=int(options.state_mb * 1e6)
        )
        self.watch = Watch(self.world)
        self.world.watch = self.watch
        self.born = 0
        self.ends: Counter[str] = Counter()
        self.handled = 0
        self.spent: dict[str, list[float]] = defaultdict(list)
        """By kind, and "requests" or "bytes": of every peer and round."""
        self._last: dict[str, Spent] = {}
        self.rounds_done = 0

    def begin(self) -> None:
        """Start the bootstrap nodes, then everybody else within one round."""
        options, engine, world = self._options, self._engine, self.world
        for number in range(max(1, math.ceil(options.members / MEMBERS_PER_BOOT))):
            link = Link(latency_s=0.02, jitter_s=0.005, uplink=1.25e8, downlink=1.25e8)
            boot = Machine(world, f"boot{number}", link, step_s=1.0, trains=False)
            for path in range(world.grid.path_count):
                boot.have_shard(path)
            engine.after(0.0, boot.start)
        for _ in range(options.members):
            engine.after(engine.between(1.0, options.round_s), self._be_born)
        engine.at(START_S + options.round_s, self._end_round)

    def _be_born(self) -> None:
        engine, options = self._engine, self._options
        link = Link(
            latency_s=engine.between(0.01, 0.08),
            jitter_s=engine.between(0.0, 0.02),
            uplink=engine.between(1e6, 2e7),
            downlink=engine.between(5e6, 5e7),
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
        self.watch.invariants.faulty_s = engine.now_s
        if engine.chance(0.3):
            machine.ask_to_leave()
            self.ends["left"] += 1
        else:
            machine.crash(hangs=engine.chance(0.5), empty_disk=True)
            self.ends["crashed"] += 1
        engine.after(LEAVING_S, self._forget, machine)
        engine.after(engine.between(1.0, GREATEST_PAUSE_S), self._be_born)

    def _forget(self, machine: Machine) -> None:
        """Free the memory of one that will not come back."""
        machine.crash(hangs=True, empty_disk=True)
        machine.forget()
        machine.member = Gone()
        self._last.pop(machine.peer, None)

    def _end_round(self) -> None:
        """Note what every peer that lived through the round has spent in it."""
        options, engine = self._options, self._engine
        engine.after(options.round_s, self._end_round)
        self.rounds_done += 1
        before, self._last = self._last, {}
        for machine in self.world.machines.values():
            if not machine.is_alive or not machine.trains:
                continue
            traffic = machine.link.traffic
            now = Spent(
                {**traffic.requests_by, VIEWS: traffic.view_requests},
                {**traffic.bytes_by, VIEWS: traffic.view_bytes},
            )
            self._last[machine.peer] = now
            if machine.peer in before and self.rounds_done > 1:
                self._note(before[machine.peer], now)
        if options.verbose:
            self._say()

    def _note(self, before: Spent, now: Spent) -> None:
        total_requests = total_bytes = 0.0
        for kind in (VIEWS, "meetings", "reduces", "certificates", "states", "questions"):
            requests = now.requests.get(kind, 0) - before.requests.get(kind, 0)
            size = now.bytes.get(kind, 0.0) - before.bytes.get(kind, 0.0)
            self.spent[f"requests {kind}"].append(requests)
            self.spent[f"bytes {kind}"].append(size)
            total_requests += requests
            total_bytes += size
        self.spent["requests all"].append(total_requests)
        self.spent["bytes all"].append(total_bytes)

    def _say(self) -> None:
        watch, world = self.watch, self.world
        print(
            f"round {self.rounds_done}: {len(watch.last_rounds)} of {world.grid.path_count} paths, "
            f"{len(watch.committed_rounds)} module rounds, {watch.figures.forks} forks, "
            f"{self._engine.happened:,} callbacks, {len(watch.violations)} violations, "
            f"{time.perf_counter() - BEGIN_S:.0f} s, {_memory_mb():.0f} MB",
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


def _levels(paths: int) -> tuple[int, ...]:
    """Return a grid of two levels, as square as can be."""
    first = next(n for n in range(math.isqrt(paths), 0, -1) if paths % n == 0)
    return (paths,) if first == 1 else (first, paths // first)


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _shares(values: Sequence[float]) -> dict[str, float]:
    """Return mean, 99th percentile and maximum."""
    if not values:
        return {"mean": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(values)
    place = min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)
    return {"mean": sum(ordered) / len(ordered), "p99": ordered[place], "max": ordered[-1]}


BEGIN_S = time.perf_counter()


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--members", type=int, default=20, help="peers that train (20)")
    parser.add_argument("--paths", type=int, default=16, help="paths of the grid (16)")
    parser.add_argument("--hours", type=float, default=0.25, help="of simulated time (0.25)")
    parser.add_argument("--round-s", type=float, default=300.0, help="seconds of a round (300)")
    parser.add_argument("--matchmaking-s", type=float, default=5.0, help="of a meeting (5)")
    parser.add_argument(
        "--life-rounds", type=float, default=10.0, help="mean life of a peer; 0 for no churn (10)"
    )
    parser.add_argument("--undialable", type=float, default=0.2, help="share of the peers (0.2)")
    parser.add_argument("--state-mb", type=float, default=2.0, help="size of a state (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=0.0, help="end after so long (never)")
    parser.add_argument("--verbose", action="store_true", help="a line each round, on stderr")
    options = parser.parse_args()
    # Nearly all that is made lives long: looking for circles in it again and again takes longest.
    gc.set_threshold(200_000, 50, 50)
    swarm = Swarm(options)
    swarm.begin()
    is_whole = swarm.run()
    _report(options, swarm, is_whole).print(options.json)
    return 0


def _report(options: Any, swarm: Swarm, is_whole: bool) -> Report:
    seconds = time.perf_counter() - BEGIN_S
    watch, world = swarm.watch, swarm.world
    rounds = swarm.rounds_done
    modules = len(world.grid.modules())
    trained, merged, on_top = watch.work()
    dwell = world.plan.rounds.dwell_rounds
    lately = sum(last >= rounds - dwell - 1 for last in watch.last_rounds.values())
    handled = sum(machine.handled for machine in world.machines.values())
    sizes = watch.group_sizes or [0]
    broken = Counter(violation.invariant for violation in watch.violations)
    report = Report(
        f"{options.members} peers, {options.paths} paths, {rounds} rounds",
        ("per peer and round", "requests: mean", "p99", "max", "kB: mean", "p99", "max"),
    )
    costs: dict[str, Any] = {}
    for kind in ("all", VIEWS, "meetings", "reduces", "certificates", "states", "questions"):
        requests = _shares(swarm.spent[f"requests {kind}"])
        size = _shares(swarm.spent[f"bytes {kind}"])
        costs[kind] = {
            "requests": {name: round(value, 1) for name, value in requests.items()},
            "bytes": {name: round(value) for name, value in size.items()},
        }
        report.row(
            kind,
            *(f"{value:.0f}" for value in requests.values()),
            *(f"{value / 1000:.0f}" for value in size.values()),
        )
    report.notes += [
        "" if is_whole else f"ended early, after {rounds} rounds: --limit-s",
        f"{len(watch.last_rounds)} of {options.paths} paths trained and committed, {lately} "
        f"of them in the last {dwell + 1} rounds",
        f"{len(watch.committed_rounds)} commits in {modules} modules and {rounds} rounds "
        f"({len(watch.committed_rounds) / max(1, modules * rounds):.2f} each), groups of "
        f"{sum(sizes) / len(sizes):.0f} in the mean, {max(sizes)} at most; {watch.figures.forks} "
        "versions forked",
        f"{merged / max(1, trained):.1%} of {trained:,} trained steps in the final states, "
        f"{on_top / max(1, trained):.1%} on top of them",
        f"{swarm.born} peers born, {swarm.ends['crashed']} crashed, {swarm.ends['left']} left",
        f"{len(watch.violations)} times an invariant did not hold: {dict(broken)}",
        f"{seconds:.0f} s, {handled:,} events, {handled / seconds:,.0f} a second, "
        f"{_memory_mb():.0f} MB",
    ]
    report.notes = [note for note in report.notes if note]
    report.figures = {
        "members": options.members,
        "paths": options.paths,
        "rounds": rounds,
        "whole": is_whole,
        "state_bytes": world.state_bytes,
        "paths_committed": len(watch.last_rounds),
        "paths_committed_lately": lately,
        "module_rounds_committed": len(watch.committed_rounds),
        "module_rounds": modules * rounds,
        "greatest_group": max(sizes),
        "forks": watch.figures.forks,
        "adoptions": watch.figures.adoptions,
        "trained_steps": trained,
        "merged_steps": merged,
        "unmerged_steps": on_top,
        "born": swarm.born,
        "ends": dict(swarm.ends),
        "violations": dict(broken),
        "first_violations": [
            f"{v.invariant} at {v.time_s - START_S:.0f} s: {v.what[:1000]}"
            for invariant in broken
            for v in [v for v in watch.violations if v.invariant == invariant][:10]
        ],
        "costs": costs,
        "seconds": round(seconds, 1),
        "events": handled,
        "events_per_s": round(handled / seconds),
        "memory_mb": round(_memory_mb()),
    }
    return report


if __name__ == "__main__":
    sys.exit(main())
