"""How a peer's decisions hold in thousands of faulty histories (`dipaco.simulator.swarm`).

    python benchmarks/swarm_faults.py --seeds 20000 --profile all --jobs 2 --log scan.jsonl --json
    python benchmarks/swarm_faults.py --seeds 20000 --profile all --jobs 2 --protocol earlier
    python benchmarks/parts/compiled.py benchmarks/swarm_faults.py --seeds 20000 --profile all
    python benchmarks/swarm_faults.py --seed 4711 --profile churn --trace

A seed is a whole history: who takes part, what goes wrong, and when. With --seeds it prints how
many were violated, by invariant, and the first seed of each; with --seed it lives through one, and
with --trace writes its log. The same seed gives the same history on any machine. With --log a scan
that was interrupted goes on where it ended, as long as rules and simulator are the same;
`parts/compiled.py` makes it faster. With `--protocol earlier` the members decide as they did before
certificates (`parts/earlier_protocol.py`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dipaco.simulator.swarm.history import Result, run_history
from dipaco.simulator.swarm.invariants import INVARIANTS
from dipaco.simulator.swarm.scenario import PROFILES
from dipaco.simulator.swarm.trace import Trace
from parts.common import Report, build_parser
from parts.earlier_protocol import earlier_member, earlier_protocol
from parts.scan_log import Lived, ScanLog, digests

# Seeds that a process lives through before it reports.
CHUNK = 25
# What a history makes lives as long as it does: looking for cycles as often as Python does by
# itself takes a fifth of the time.
COLLECTED = (100_000, 50, 100)
ALL = "all"
SUMS = ("commits", "forks", "adoptions", "trained_steps", "kept_steps")


@dataclass
class Found:
    """What some seeds came to."""

    seeds: int = 0
    events: int = 0
    events_now: int = 0
    """Without those of histories that stood in the log."""
    failed: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    """The first seed of each invariant: seed, profile, what did not hold."""
    faults: Counter[str] = field(default_factory=Counter)
    failed_with: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    failing: list[tuple[int, str, str]] = field(default_factory=list)
    """Every seed with a violation: seed, profile, the invariants."""

    def add(self, lived: Lived) -> None:
        """Count a history."""
        self.seeds += 1
        self.events += lived.events
        self.failed += bool(lived.violations)
        for fault in lived.faults or ("none",):
            self.faults[fault] += 1
            self.failed_with[fault] += bool(lived.violations)
        if lived.violations:
            names = sorted(name for name, _ in lived.violations)
            self.failing.append((lived.seed, lived.profile, ", ".join(names)))
        for name, what in lived.violations:
            self.violations[name] += 1
            found = (lived.seed, lived.profile, what)
            self.first[name] = min(self.first.get(name, found), found)
        self.sums.update(lived.sums)


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
    made.add_argument("--log", type=Path, help="a file with a line a history; goes on from it")
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
    seeds: list[int], profile: str, protocol: str, sizes: dict[str, int | None]
) -> list[Lived]:
    """Live through some seeds, in this process."""
    gc.set_threshold(*COLLECTED)
    return [_lived(live_one(seed, profile, protocol, sizes)) for seed in seeds]


def _lived(result: Result) -> Lived:
    drawn, violations = result.scenario, {}
    for violation in result.violations:
        violations.setdefault(violation.invariant, violation.what)
    return Lived(
        drawn.seed,
        drawn.profile,
        list(drawn.faults),
        result.events,
        {name: getattr(result.figures, name) for name in SUMS},
        list(violations.items()),
    )


def live_all(options: argparse.Namespace, sizes: dict[str, int | None]) -> Found:
    """Live through all seeds, in as many processes as are asked for."""
    asked = range(options.first_seed, options.first_seed + options.seeds)
    given = {"profile": options.profile, "protocol": options.protocol, **sizes}
    log = ScanLog(options.log, given) if options.log is not None else None
    before = {seed: one for seed, one in log.lived.items() if seed in asked} if log else {}
    found = Found()
    for one in before.values():
        found.add(one)
    for some in _live_rest([seed for seed in asked if seed not in before], options, sizes):
        if log is not None:
            log.add(some)
        for one in some:
            found.add(one)
            found.events_now += one.events
    return found


def _live_rest(
    seeds: list[int], options: argparse.Namespace, sizes: dict[str, int | None]
) -> Iterator[list[Lived]]:
    chunks = [seeds[begin : begin + CHUNK] for begin in range(0, len(seeds), CHUNK)]
    given = (options.profile, options.protocol, sizes)
    if options.jobs == 1:
        for chunk in chunks:
            yield live(chunk, *given)
        return
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        running = [pool.submit(live, chunk, *given) for chunk in chunks]
        for future in concurrent.futures.as_completed(running):
            yield future.result()


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
        f"{found.events_now:,} events in {seconds:.1f} s, {found.events_now / seconds:,.0f} a "
        f"second; "
        f"{found.sums['commits']:,} commits, {found.sums['forks']:,} versions forked, "
        f"{kept:.1%} of the trained steps in the final states or on top of them",
    ]
    report.figures = {
        "profile": options.profile,
        "protocol": options.protocol,
        **digests(),
        "first_seed": options.first_seed,
        "seeds": found.seeds,
        "events": found.events,
        "seconds": round(seconds, 2),
        "events_per_s": round(found.events_now / seconds),
        "failed": found.failed,
        "violations": {name: found.violations[name] for name in INVARIANTS},
        "first": _first(found),
        "failing": sorted(found.failing),
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
