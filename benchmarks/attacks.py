"""What one insider can do to a swarm: each attack in many histories, beside swarms at peace.

    python benchmarks/attacks.py --seeds 100 --jobs 2 --log attacks.jsonl
    python benchmarks/attacks.py --seed 4711 --attacks 5 --trace

A seed is a swarm: of 4 to 8 peers that train one path, or of 8 to 12 on 2x2 modules; by the clock,
and a quarter with fixed steps. One of them is the insider; with `none` it attacks nobody. What each
attack does is in `tests/support/insiders`. Told are

* forged: states with bytes of the insider's choice that an honest peer held (0 is wanted);
* kept: work of honest peers that is in the winning chain or on top of it;
* victim: steps that left out the peer that the insider chose;
* forked: versions of a module of which honest peers took two;
* no step: rounds of honest peers that ended without a step;
* wait: the greatest wait of a path, in rounds, in the mean over histories and at most;
* failed: histories in which something did not hold that has to (`swarm_faults.py`).

--log gets one line a history.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.common import Report, build_parser
from support.insiders.histories import ATTACKS, run_attacked

CHUNK = 5
LEAST_KEPT = 0.95
NO_STEP = "rounds without a step"
COLUMNS = ("attack", "seeds", "failed", "forged", "kept", "victim", "forked", "no step", "wait")


@dataclass(frozen=True)
class Sizes:
    """What is not drawn."""

    members: int | None
    rounds: int | None


@dataclass
class Found:
    """What the histories of an attack came to."""

    seeds: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Histories by what did not hold in them."""
    sums: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    least_kept: tuple[float, int] = (2.0, -1)
    """Of a history, and its seed."""

    def add(self, lived: dict[str, Any]) -> None:
        """Count a history."""
        figures = Counter(lived["figures"])
        self.seeds += 1
        self.failed.update(list(lived["violations"]))
        self.failed["histories"] += bool(lived["violations"])
        self.waits.append(figures.pop("greatest wait", 0) / 100)
        self.sums.update(figures)
        self.least_kept = min(self.least_kept, (kept(figures), lived["seed"]))

    def share(self, part: str, *of: str) -> float:
        """Return what share one figure is of the sum of others."""
        whole = sum(self.sums[name] for name in of)
        return self.sums[part] / whole if whole else 0.0


def kept(figures: Counter[str]) -> float:
    """Return the share of honest work that was kept."""
    whole = figures["trained"] - figures["gone"]
    return 1.0 - figures["lost"] / whole if whole else 1.0


def live(attack: str, seeds: list[int], sizes: Sizes) -> list[dict[str, Any]]:
    """Live through some seeds, in this process."""
    found = []
    for seed in seeds:
        result = run_attacked(seed, attack, members=sizes.members, rounds=sizes.rounds)
        violations = {one.invariant: one.what for one in result.violations}
        found.append(
            {
                "attack": attack,
                "seed": seed,
                "grid": result.scenario.grid,
                "members": result.scenario.members,
                "inner_steps": result.scenario.inner_steps,
                "figures": dict(result.figures),
                "violations": violations,
            }
        )
    return found


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = build_parser(__doc__)
    made.add_argument("--seeds", type=int, default=20, help="histories of each attack (20)")
    made.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    made.add_argument("--seed", type=int, help="one history only")
    made.add_argument("--trace", action="store_true", help="print the log of --seed")
    made.add_argument(
        "--attacks",
        default=",".join(ATTACKS),
        help=f"which, with commas between (all: {', '.join(ATTACKS)})",
    )
    made.add_argument("--members", type=int, help="peers that train (drawn)")
    made.add_argument("--rounds", type=int, help="rounds (10 to 14, drawn)")
    made.add_argument("--jobs", type=int, default=1, help="processes (1)")
    made.add_argument("--log", type=Path, help="a file that gets a line a history")
    return made


def main() -> int:
    """Run the benchmark; returns the exit code."""
    options = parser().parse_args()
    attacks = options.attacks.split(",")
    sizes = Sizes(options.members, options.rounds)
    if options.seed is not None:
        return replay(options.seed, attacks[0], sizes, trace=options.trace)
    begin_s = time.perf_counter()
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    chunks = [seeds[begin : begin + CHUNK] for begin in range(0, len(seeds), CHUNK)]
    found = {attack: Found() for attack in attacks}
    log = options.log.open("a", buffering=1) if options.log is not None else None
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        running = [pool.submit(live, attack, c, sizes) for attack in attacks for c in chunks]
        for future in concurrent.futures.as_completed(running):
            for lived in future.result():
                found[lived["attack"]].add(lived)
                if log is not None:
                    print(json.dumps(lived), file=log)
    report = _report(found, time.perf_counter() - begin_s)
    misses = [f"{attack}: forged" for attack, one in found.items() if one.sums["forged"]]
    misses += [f"{attack}: kept" for attack, one in found.items() if kept(one.sums) < LEAST_KEPT]
    return report.conclude(misses, options.json)


def replay(seed: int, attack: str, sizes: Sizes, *, trace: bool) -> int:
    """Live through one seed; returns the exit code."""
    log: list[str] | None = [] if trace else None
    result = run_attacked(seed, attack, members=sizes.members, rounds=sizes.rounds, log=log)
    print("\n".join(log or []))
    print(f"{result.scenario}\n{dict(result.figures)}")
    for violation in result.violations:
        print(f"{violation.invariant} at {violation.time_s:.2f} s: {violation.what}")
    return 1 if result.violations else 0


def _report(found: dict[str, Found], seconds: float) -> Report:
    report = Report("Attacks of one insider, in the simulator", COLUMNS)
    for attack, one in found.items():
        report.row(
            attack,
            one.seeds,
            one.failed["histories"],
            one.sums["forged"],
            f"{kept(one.sums):.1%}",
            f"{one.share('victims left out', 'steps of victims'):.1%}",
            f"{one.share('forked', 'versions'):.1%}",
            f"{one.share(NO_STEP, NO_STEP, 'rounds with a step'):.1%}",
            f"{sum(one.waits) / max(1, len(one.waits)):.1f}, {max(one.waits, default=0.0):.1f}",
        )
        share, seed = one.least_kept
        what = ", ".join(f"{name} in {n}" for name, n in sorted(one.failed.items()) if n)
        report.notes.append(f"{attack}: least kept {share:.1%}, seed {seed}; {what or 'all held'}")
        report.figures[attack] = {**one.sums, "seeds": one.seeds, "failed": dict(one.failed)}
    report.notes.append(f"{seconds:.0f} s")
    return report


if __name__ == "__main__":
    sys.exit(main())
