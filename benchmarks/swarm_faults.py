"""How a peer's decisions hold in thousands of drawn histories (`dipaco.simulator.swarm`).

    python benchmarks/swarm_faults.py --seeds 2000 --profile all --jobs 2 --log scan.jsonl
    python benchmarks/swarm_faults.py --seeds 100 --attack all --jobs 2
    python benchmarks/swarm_faults.py --seed 4711 --profile churn --trace

A seed is a whole history: who takes part, what goes wrong, and when. A profile says what can go
wrong; with --attack one of the members is an insider that attacks (`tests/support/insiders`), and
`none` attacks nobody. With --seeds it tells the shares of each beside the bars of the design, and
the first seeds in which something did not hold that has to hold in each; with --seed it lives
through one, and with --trace writes its log. The same seed gives the same history on any machine.
--log gets one line a history.

* kept, lost, gone: of the trained tokens. Lost is what living peers had; gone what was nowhere yet
  when a peer crashed, left or moved. Kept is what was not lost, of what was not gone.
* forked: versions of a module of which two steps were taken; outbid: of these, one step has all
  rows of the other, so no work is lost.
* forged: states with bytes of the insider's choice that an honest peer held; left out: steps
  without the peer that the insider chose.
* wait: the greatest wait of a path, in rounds, in the mean over histories and at most.
"""

from __future__ import annotations

import concurrent.futures
import gc
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from parts.common import Report, build_parser
from support.insiders.histories import ATTACKS, run_attacked, run_faulty

from dipaco.simulator.swarm.invariants import INVARIANTS
from dipaco.simulator.swarm.one_history import Result
from dipaco.simulator.swarm.scenario import PROFILES

# Seeds that a process lives through before it reports.
CHUNK = 5
# What a history makes lives as long as it does: looking for cycles as often as Python does by
# itself takes a fifth of the time.
COLLECTED = (100_000, 50, 100)
ALL = "all"
# Bars (design 4.11, pure machine): the least share of work kept, the greatest of versions forked.
LEAST_KEPT = {
    **dict.fromkeys(("calm", "churn", "suspend", "nat", "all_nat", "nat_churn", "fixed"), 0.99),
    "loss": 0.95,
    "split": 0.88,
    "mixed": 0.88,
}
LEAST_KEPT_OF_ATTACKS = 0.95
MAX_FORKED = 0.003
SPLITTING = ("split", "mixed")
FIRST_SEEDS = 4


@dataclass
class Found:
    """What the histories of a profile or an attack came to."""

    seeds: int = 0
    failed: int = 0
    least_kept: float = 1.0
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
        self.least_kept = min(self.least_kept, kept(figures))
        self.sums.update(figures)
        for name, what in lived["violations"].items():
            self.violated.setdefault(name, []).append((lived["seed"], what))

    def percent(self, part: str, *of: str) -> float:
        """Return what share one figure is of the sum of others."""
        whole = sum(self.sums[name] for name in of)
        return round(100 * self.sums[part] / whole, 2) if whole else 0.0

    def misses(self, name: str, *, is_attack: bool) -> list[str]:
        """Return which bars were missed."""
        found = [f"{what} in {len(seeds)}" for what, seeds in sorted(self.violated.items())]
        bar, is_forked = LEAST_KEPT.get(name, 0.0), False
        if is_attack:
            found, bar = [], LEAST_KEPT_OF_ATTACKS
        elif name not in SPLITTING:
            is_forked = self.percent("forked", "versions") > 100 * MAX_FORKED
        missed = {"kept": kept(self.sums) < bar, "forked": is_forked, "forged": self.sums["forged"]}
        return [*found, *(what for what, is_missed in missed.items() if is_missed)]

    def figures(self, name: str, *, is_attack: bool) -> dict[str, Any]:
        """Return what is told."""
        rounds = max(1, self.sums["peer rounds"])
        bar = LEAST_KEPT_OF_ATTACKS if is_attack else LEAST_KEPT.get(name)
        without = "rounds without a step"
        told = {
            "histories": self.seeds,
            "failed": self.failed,
            "kept, %": round(100 * kept(self.sums), 2),
            "bar, %": bar and round(100 * bar),
            "least kept, %": round(100 * self.least_kept, 2),
            "gone, %": self.percent("gone", "trained"),
            "forked, %": self.percent("forked", "versions"),
            "outbid, %": self.percent("outbid", "versions"),
            "without a step, %": self.percent(without, without, "rounds with a step"),
            "wait": [round(sum(self.waits) / self.seeds, 1), round(max(self.waits), 1)],
            "messages, requests and kB of a peer and round": [
                round(self.sums["tells"] / rounds),
                round(self.sums["requests"] / rounds),
                round(self.sums["bytes"] / rounds / 1000),
            ],
        }
        if is_attack:
            told["forged"] = self.sums["forged"]
            told["left out, %"] = self.percent("victims left out", "steps of victims")
        return told


def kept(figures: Counter[str]) -> float:
    """Return the share of the work that is in the winning chains or on top, of what is not gone."""
    whole = figures["trained"] - figures["gone"]
    return 1.0 - figures["lost"] / whole if whole else 1.0


def parser() -> ArgumentParser:
    """Return the command's parser."""
    made = build_parser(__doc__)
    made.add_argument("--seeds", type=int, default=140, help="histories, of each attack (140)")
    made.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    made.add_argument("--seed", type=int, help="one history only")
    made.add_argument("--trace", action="store_true", help="print the log of --seed")
    made.add_argument(
        "--profile",
        choices=(*PROFILES, ALL),
        default=ALL,
        help="what goes wrong; 'all' takes them in turn, one each seed (all)",
    )
    made.add_argument("--attack", choices=(*ATTACKS, ALL), help="of one insider, or all of them")
    made.add_argument("--members", type=int, help="peers that train (drawn)")
    made.add_argument("--rounds", type=int, help="rounds with faults (drawn)")
    made.add_argument("--jobs", type=int, default=1, help="processes (1)")
    made.add_argument("--log", type=Path, help="a file that gets a line a history")
    return made


def live_one(options: Namespace, seed: int, attack: str, log: list[str] | None = None) -> Result:
    """Live through one seed, in this process."""
    sizes = {"members": options.members, "rounds": options.rounds}
    if attack:
        return run_attacked(seed, attack, **sizes, log=log)
    profile = PROFILES[seed % len(PROFILES)] if options.profile == ALL else options.profile
    return run_faulty(seed, profile, **sizes, log=log)


def live(options: Namespace, attack: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Live through some seeds, in this process."""
    gc.set_threshold(*COLLECTED)
    return [_lived(live_one(options, seed, attack), attack) for seed in seeds]


def _lived(result: Result, attack: str) -> dict[str, Any]:
    violations: dict[str, str] = {}
    for violation in result.violations:
        violations.setdefault(violation.invariant, f"{violation.time_s:.0f} s: {violation.what}")
    drawn = result.scenario
    return {
        "seed": drawn.seed,
        "of": attack or drawn.profile,
        "faults": drawn.faults,
        "figures": dict(result.figures),
        "violations": violations,
    }


def live_all(options: Namespace, attacks: list[str]) -> Iterator[dict[str, Any]]:
    """Live through all seeds, in as many processes as are asked for."""
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    chunks = [seeds[begin : begin + CHUNK] for begin in range(0, len(seeds), CHUNK)]
    parts = [partial(live, options, attack, chunk) for attack in attacks for chunk in chunks]
    if options.jobs == 1:
        for part in parts:
            yield from part()
        return
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(part) for part in parts]):
            yield from future.result()


def replay(options: Namespace, attack: str) -> int:
    """Live through one seed; returns the exit code."""
    log: list[str] | None = [] if options.trace else None
    result = live_one(options, options.seed, attack, log)
    print("\n".join(log or []))
    print(f"{result.scenario}\n{dict(result.figures)}")
    for violation in result.violations:
        print(f"{violation.invariant} at {violation.time_s:.2f} s: {violation.what}")
    return 1 if result.violations else 0


def main() -> int:
    """Run the benchmark; returns the exit code."""
    options = parser().parse_args()
    attacks = list(ATTACKS) if options.attack == ALL else [options.attack or ""]
    if options.seed is not None:
        return replay(options, attacks[0])
    report = Report("drawn histories", seed=f"{options.first_seed} and {options.seeds - 1} more")
    log = options.log.open("a", buffering=1) if options.log is not None else None
    found: dict[str, Found] = {}
    for lived in live_all(options, attacks):
        found.setdefault(lived["of"], Found()).add(lived)
        if log is not None:
            print(json.dumps(lived), file=log)
    is_attack, misses = bool(options.attack), []
    for name in (n for n in (*PROFILES, *ATTACKS) if n in found):
        report.add(name, found[name].figures(name, is_attack=is_attack))
        if missed := found[name].misses(name, is_attack=is_attack):
            misses.append(f"{name}: {', '.join(missed)}")
    for invariant in INVARIANTS:
        first = sorted((s, n, w) for n in found for s, w in found[n].violated.get(invariant, ()))
        for seed, name, what in first[:FIRST_SEEDS]:
            report.notes.append(f"{invariant}: seed {seed} of {name}: {what[:300]}")
    return report.conclude(options, misses)


if __name__ == "__main__":
    sys.exit(main())
