"""How a peer's decisions hold in thousands of faulty histories (`dipaco.simulator.swarm`).

    python benchmarks/swarm_faults.py --seeds 2000 --profile all --jobs 2 --log scan.jsonl
    python benchmarks/swarm_faults.py --seed 4711 --profile churn --trace

A seed is a whole history: who takes part, what goes wrong, and when. With --seeds it prints a table
by profile beside the bars of the design, and the first seeds in which something did not hold that
has to hold in each; with --seed it lives through one, and with --trace writes its log. The same
seed gives the same history on any machine. --log gets one line a history.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.common import Report, build_parser
from support.insiders.histories import run_faulty

from dipaco.simulator.swarm.history import Result
from dipaco.simulator.swarm.invariants import INVARIANTS
from dipaco.simulator.swarm.scenario import PROFILES

# Seeds that a process lives through before it reports.
CHUNK = 5
# What a history makes lives as long as it does: looking for cycles as often as Python does by
# itself takes a fifth of the time.
COLLECTED = (100_000, 50, 100)
ALL = "all"
# Bars (design 4.11, pure machine): the least share of work kept, the greatest of versions forked.
LEAST_KEPT = {
    "calm": 0.99,
    "churn": 0.99,
    "suspend": 0.99,
    "nat": 0.99,
    "all_nat": 0.99,
    "nat_churn": 0.99,
    "fixed": 0.99,
    "loss": 0.95,
    "split": 0.88,
    "mixed": 0.88,
}
MAX_FORKED = 0.003
SPLITTING = ("split", "mixed")
FIRST_SEEDS = 4
COLUMNS = (
    "profile",
    "seeds",
    "failed",
    "kept",
    "bar",
    "lost",
    "gone",
    "forked",
    "outbid",
    "copies short",
    "wait",
)
COSTS = ("tells", "requests", "kB")


@dataclass
class Found:
    """What the histories of a profile came to."""

    seeds: int = 0
    failed: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    """The greatest wait of a path in each history, in rounds."""
    violated: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """By invariant: seeds, and what did not hold."""

    def add(self, lived: dict[str, Any]) -> None:
        """Count a history."""
        self.seeds += 1
        self.failed += bool(lived["violations"])
        figures = Counter(lived["figures"])
        self.waits.append(figures.pop("greatest wait", 0) / 100)
        self.sums.update(figures)
        for name, what in lived["violations"].items():
            self.violated.setdefault(name, []).append((lived["seed"], what))

    def share(self, part: str, *of: str) -> float:
        """Return what share one figure is of the sum of others."""
        whole = sum(self.sums[name] for name in of)
        return self.sums[part] / whole if whole else 0.0

    @property
    def kept(self) -> float:
        """Share of the work that is in the winning chains or on top, of all that was not gone."""
        whole = self.sums["trained"] - self.sums["gone"]
        return 1.0 - self.sums["lost"] / whole if whole else 1.0

    @property
    def forked(self) -> float:
        """Share of the versions of which there were two."""
        return self.share("forked", "versions")

    def misses(self, profile: str) -> list[str]:
        """Return which bars this profile missed."""
        found = [f"{name} in {len(seeds)}" for name, seeds in sorted(self.violated.items())]
        if self.kept < LEAST_KEPT.get(profile, 0.0):
            found.append("kept")
        if profile not in SPLITTING and self.forked > MAX_FORKED:
            found.append("forked")
        return found


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = build_parser(__doc__)
    made.add_argument("--seeds", type=int, default=140, help="histories (140)")
    made.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    made.add_argument("--seed", type=int, help="one history only")
    made.add_argument("--trace", action="store_true", help="print the log of --seed")
    made.add_argument(
        "--profile",
        choices=(*PROFILES, ALL),
        default=ALL,
        help="what goes wrong; 'all' takes them in turn, one each seed (all)",
    )
    made.add_argument("--members", type=int, help="peers that train (2 to 10, drawn)")
    made.add_argument("--rounds", type=int, help="rounds with faults (8 to 20, drawn)")
    made.add_argument("--jobs", type=int, default=1, help="processes (1)")
    made.add_argument("--log", type=Path, help="a file that gets a line a history")
    return made


def live_one(
    seed: int, profile: str, sizes: dict[str, int | None], log: list[str] | None = None
) -> Result:
    """Live through one seed, in this process."""
    if profile == ALL:
        profile = PROFILES[seed % len(PROFILES)]
    members, rounds = sizes["members"], sizes["rounds"]
    return run_faulty(seed, profile, members=members, rounds=rounds, log=log)


def live(seeds: list[int], profile: str, sizes: dict[str, int | None]) -> list[dict[str, Any]]:
    """Live through some seeds, in this process."""
    gc.set_threshold(*COLLECTED)
    return [_lived(live_one(seed, profile, sizes)) for seed in seeds]


def _lived(result: Result) -> dict[str, Any]:
    violations: dict[str, str] = {}
    for violation in result.violations:
        violations.setdefault(violation.invariant, f"{violation.time_s:.0f} s: {violation.what}")
    drawn = result.scenario
    return {
        "seed": drawn.seed,
        "profile": drawn.profile,
        "faults": drawn.faults,
        "figures": dict(result.figures),
        "violations": violations,
    }


def live_all(options: argparse.Namespace, sizes: dict[str, int | None]) -> Iterator[dict[str, Any]]:
    """Live through all seeds, in as many processes as are asked for."""
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    chunks = [seeds[begin : begin + CHUNK] for begin in range(0, len(seeds), CHUNK)]
    if options.jobs == 1:
        for chunk in chunks:
            yield from live(chunk, options.profile, sizes)
        return
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        running = [pool.submit(live, chunk, options.profile, sizes) for chunk in chunks]
        for future in concurrent.futures.as_completed(running):
            yield from future.result()


def replay(options: argparse.Namespace, sizes: dict[str, int | None]) -> int:
    """Live through one seed; returns the exit code."""
    log: list[str] | None = [] if options.trace else None
    result = live_one(options.seed, options.profile, sizes, log)
    if log is not None:
        print("\n".join(log))
    print(f"{result.scenario}\n{dict(result.figures)}")
    for violation in result.violations:
        print(f"{violation.invariant} at {violation.time_s:.2f} s: {violation.what}")
    return 1 if result.violations else 0


def main() -> int:
    """Run the benchmark; returns the exit code."""
    options = parser().parse_args()
    sizes: dict[str, int | None] = {"members": options.members, "rounds": options.rounds}
    if options.seed is not None:
        return replay(options, sizes)
    begin_s = time.perf_counter()
    found: dict[str, Found] = {}
    log = options.log.open("a", buffering=1) if options.log is not None else None
    for lived in live_all(options, sizes):
        found.setdefault(lived["profile"], Found()).add(lived)
        if log is not None:
            print(json.dumps(lived), file=log)
    seconds = time.perf_counter() - begin_s
    report = _report(options.seeds, found, seconds)
    misses = [f"{name}: {', '.join(m)}" for name in found if (m := found[name].misses(name))]
    return report.conclude(misses, options.json)


def _report(seeds: int, found: dict[str, Found], seconds: float) -> Report:
    report = Report(
        f"{seeds} histories with faults; kept, lost and gone of the trained tokens; greatest wait "
        "of a path in rounds, in the mean and at most; messages, requests and kB a peer and round",
        (*COLUMNS, *COSTS),
    )
    for profile in [name for name in PROFILES if name in found]:
        one, bar = found[profile], LEAST_KEPT.get(profile)
        rounds = max(1, one.sums["peer rounds"])
        report.row(
            profile,
            one.seeds,
            one.failed,
            f"{one.kept:.2%}",
            "-" if bar is None else f"{bar:.0%}",
            f"{one.share('lost', 'trained'):.2%}",
            f"{one.share('gone', 'trained'):.2%}",
            f"{one.forked:.2%}",
            f"{one.share('outbid', 'versions'):.2%}",
            f"{one.share('copies missing', 'copy samples'):.1%}",
            f"{sum(one.waits) / max(1, one.seeds):.1f}, {max(one.waits, default=0.0):.1f}",
            *(f"{one.sums[name] / rounds:.0f}" for name in ("tells", "requests")),
            f"{one.sums['bytes'] / rounds / 1000:.0f}",
        )
        report.figures[profile] = {
            "seeds": one.seeds,
            "failed": one.failed,
            "kept": round(one.kept, 5),
            "forked": round(one.forked, 5),
            "greatest wait": max(one.waits, default=0.0),
            **one.sums,
        }
    for name in INVARIANTS:
        first = sorted(
            (seed, profile, what)
            for profile in found
            for seed, what in found[profile].violated.get(name, ())
        )
        report.notes += [
            f"{name}: seed {seed} of {profile}: {what[:300]}"
            for seed, profile, what in first[:FIRST_SEEDS]
        ]
    events = sum(one.sums["events"] for one in found.values())
    report.notes.append(
        f"{seconds:.0f} s, {seeds / seconds:.1f} histories and {events / seconds:,.0f} events a "
        "second"
    )
    return report


if __name__ == "__main__":
    sys.exit(main())
