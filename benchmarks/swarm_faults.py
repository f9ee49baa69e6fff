"""How a peer's decisions hold in thousands of faulty histories (`dipaco.simulator.swarm`).

    python benchmarks/swarm_faults.py --seeds 20000 --profile all --jobs 2 --json
    python benchmarks/swarm_faults.py --seeds 20000 --profile all --jobs 2 --protocol earlier
    python benchmarks/swarm_faults.py --seed 4711 --profile churn --trace

A seed is a whole history: who takes part, what goes wrong, and when. With --seeds it prints how
many were violated, by invariant, and the first seed of each; with --seed it lives through one, and
with --trace writes its log. The same seed gives the same history on any machine. With `--protocol
earlier` the members decide as they did before certificates (`parts/earlier_protocol.py`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dipaco.simulator.swarm.history import Result, run_history
from dipaco.simulator.swarm.invariants import INVARIANTS
from dipaco.simulator.swarm.scenario import PROFILES
from dipaco.simulator.swarm.trace import Trace
from parts.common import Report, build_parser
from parts.earlier_protocol import earlier_member, earlier_protocol

# Seeds that a process lives through before it reports.
CHUNK = 25
ALL = "all"


@dataclass
class Found:
    """What some seeds came to."""

    seeds: int = 0
    events: int = 0
    failed: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    """The first seed of each invariant: seed, profile, what did not hold."""
    faults: Counter[str] = field(default_factory=Counter)
    failed_with: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    failing: list[tuple[int, str, str]] = field(default_factory=list)
    """Every seed with a violation: seed, profile, the invariants."""

    def add(self, result: Result) -> None:
        """Count a history."""
        drawn, figures = result.scenario, result.figures
        self.seeds += 1
        self.events += result.events
        self.failed += bool(result.violations)
        for fault in drawn.faults or ("none",):
            self.faults[fault] += 1
            self.failed_with[fault] += bool(result.violations)
        names = {violation.invariant for violation in result.violations}
        if names:
            self.failing.append((drawn.seed, drawn.profile, ", ".join(sorted(names))))
        for name in names:
            self.violations[name] += 1
            what = next(v.what for v in result.violations if v.invariant == name)
            found = (drawn.seed, drawn.profile, what)
            self.first[name] = min(self.first.get(name, found), found)
        for name in ("commits", "forks", "adoptions", "trained_steps", "kept_steps"):
            self.sums[name] += getattr(figures, name)

    def merge(self, other: Found) -> None:
        """Add what another process found."""
        self.seeds += other.seeds
        self.events += other.events
        self.failed += other.failed
        for name in ("violations", "faults", "failed_with", "sums"):
            getattr(self, name).update(getattr(other, name))
        self.failing += other.failing
        for name, found in other.first.items():
            self.first[name] = min(self.first.get(name, found), found)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = build_parser(__doc__)
    made.add_argument("--seeds", type=int, default=200, help="histories (200)")
    made.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    made.add_argument("--seed", type=int, help="one history only")
    made.add_argument("--trace", action="store_true", help="print the log of --seed")
    made.add_argument("--every-turn", action="store_true", help="log inner steps and waits too")
    made.add_argument(
        "--profile",
        choices=(*PROFILES, ALL),
        default="mixed",
        help="what goes wrong; 'all' takes them in turn, one each seed (mixed)",
    )
    made.add_argument("--members", type=int, help="peers that train (2 to 10, drawn)")
    made.add_argument("--paths", type=int, help="paths of the grid (1 to 4, drawn)")
    made.add_argument("--rounds", type=int, help="rounds with faults (8 to 20, drawn)")
    made.add_argument(
        "--protocol",
        choices=("present", "earlier"),
        default="present",
        help="whose rules the members follow (present)",
    )
    made.add_argument("--jobs", type=int, default=1, help="processes (1)")
    return made


def live_one(
    seed: int,
    profile: str,
    protocol: str,
    sizes: dict[str, int | None],
    trace: Trace | None = None,
) -> Result:
    """Live through one seed, in this process."""
    if profile == ALL:
        profile = PROFILES[seed % len(PROFILES)]
    if protocol == "present":
        return run_history(seed, profile, trace=trace, **sizes)
    with earlier_protocol():
        return run_history(seed, profile, trace=trace, make_member=earlier_member, **sizes)


def live(
    first: int, count: int, profile: str, protocol: str, sizes: dict[str, int | None]
) -> Found:
    """Live through some seeds, in this process."""
    found = Found()
    for seed in range(first, first + count):
        found.add(live_one(seed, profile, protocol, sizes))
    return found


def live_all(options: argparse.Namespace, sizes: dict[str, int | None]) -> Found:
    """Live through all seeds, in as many processes as are asked for."""
    begin, end = options.first_seed, options.first_seed + options.seeds
    chunks = [(first, min(CHUNK, end - first)) for first in range(begin, end, CHUNK)]
    found = Found()
    given = (options.profile, options.protocol, sizes)
    if options.jobs == 1:
        for first, count in chunks:
            found.merge(live(first, count, *given))
        return found
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        running = [pool.submit(live, first, count, *given) for first, count in chunks]
        for future in running:
            found.merge(future.result())
    return found


def replay(options: argparse.Namespace, sizes: dict[str, int | None]) -> int:
    """Live through one seed; returns the exit code."""
    trace = Trace(keep=options.trace, quiet=not options.every_turn)
    result = live_one(options.seed, options.profile, options.protocol, sizes, trace)
    if options.trace:
        print("\n".join(result.trace.lines))
    print(f"{result.scenario}\n{result.figures}")
    for violation in result.violations:
        print(f"{violation.invariant} at {violation.time_s:.2f} s: {violation.what}")
    if not result.violations:
        print("no violation")
    return 1 if result.violations else 0


def main() -> int:
    """Run the benchmark; returns the exit code."""
    options = parser().parse_args()
    sizes: dict[str, int | None] = {
        name: getattr(options, name) for name in ("members", "paths", "rounds")
    }
    if options.seed is not None:
        return replay(options, sizes)
    begin_s = time.perf_counter()
    found = live_all(options, sizes)
    seconds = time.perf_counter() - begin_s
    report = Report(
        f"{found.seeds} histories with faults", ("invariant", "violated in", "first seed", "what")
    )
    for name in INVARIANTS:
        seed, _, what = found.first.get(name, ("", "", ""))
        report.row(name, found.violations[name], str(seed), what[:120])
    shares = ", ".join(
        f"{fault} {found.failed_with[fault]} of {count}"
        for fault, count in sorted(found.faults.items())
    )
    kept = found.sums["kept_steps"] / max(1, found.sums["trained_steps"])
    report.notes += [
        f"{found.failed} of {found.seeds} histories with a violation; by fault: {shares}",
        f"{found.events:,} events in {seconds:.1f} s, {found.events / seconds:,.0f} a second; "
        f"{found.sums['commits']:,} commits, {found.sums['forks']:,} versions forked, "
        f"{kept:.1%} of the trained steps in the final states or on top of them",
    ]
    report.figures = {
        "profile": options.profile,
        "protocol": options.protocol,
        "first_seed": options.first_seed,
        "seeds": found.seeds,
        "events": found.events,
        "seconds": round(seconds, 2),
        "events_per_s": round(found.events / seconds),
        "failed": found.failed,
        "violations": {name: found.violations[name] for name in INVARIANTS},
        "first": _first(found),
        "failing": found.failing,
        "faults": dict(sorted(found.faults.items())),
        "failed_with": dict(sorted(found.failed_with.items())),
        **found.sums,
    }
    report.print(options.json)
    return 1 if found.failed else 0


def _first(found: Found) -> dict[str, Any]:
    return {
        name: {"seed": seed, "profile": profile, "what": what}
        for name, (seed, profile, what) in sorted(found.first.items())
    }


if __name__ == "__main__":
    sys.exit(main())
