"""What `three_phases.py` prints: a row for each phase, and every promise that was broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.common import Report

COLUMNS = ("phase", "paths", "rounds", "steps", "killed", "began", "after", "end")


@dataclass
class Phase:
    """One run of the chain, and what was seen of it."""

    name: str
    router: str
    grid: str
    paths: int
    run_id: str = ""
    folder: Path = Path()
    genesis: Path = Path()
    """A copy of the prepared run without states: what the phase begins with."""
    handed_over: Path | None = None
    """The same with the states that its successor took from the live swarm."""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of the whole chain."""

    phases: Sequence[Phase]
    alive: Sequence[str]
    """Names of the peers that were alive at the end."""
    started: Sequence[str]
    """Names of all peers, also of those that were killed."""
    dense_steps: int
    dense_perplexity: float
    """Of a dense model that was trained beside, with as many steps as a peer made."""
    round_s: float
    hidden_size: int
    base_steps: int
    seconds: float


def broken_promises(phases: Sequence[Phase]) -> list[str]:
    """Return what was not as it has to be, one line each."""
    found = []
    tokens = {phase.figures["tokens"] for phase in phases}
    if len(tokens) > 1:
        found.append(f"the phases were not scored on the same tokens: {sorted(tokens)}")
    dense, forked = (phase.figures for phase in phases[:2])
    if abs(forked["began_with_perplexity"] / dense["handed_over_perplexity"] - 1.0) > 1e-5:
        found.append("the paths of the grid did not begin as the dense model that was handed over")
    for phase in phases:
        figures = phase.figures
        if figures["missing_paths"]:
            found.append(f"{phase.name}: no state of paths {figures['missing_paths']}")
        if len(figures["steps_per_path"]) < phase.paths:
            found.append(f"{phase.name}: trained only {figures['steps_per_path']}")
        if left := figures["killed"]["left_over_processes"]:
            found.append(f"{phase.name}: {left} processes of the killed peer lived on")
    return found


def report_of(chain: Outcome) -> Report:
    """Return the table and the figures."""
    report = Report("three phases of one swarm: validation perplexity", COLUMNS)
    for phase in chain.phases:
        figures = phase.figures
        steps = figures["steps_per_path"].values()
        killed = figures["killed"]
        report.row(
            phase.name,
            phase.paths,
            figures["rounds"],
            f"{min(steps)}-{max(steps)}",
            killed["peer"],
            f"{figures['began_with_perplexity']:.2f}",
            f"{figures['perplexity']:.2f}",
            f"{given:.2f}" if (given := figures.get("handed_over_perplexity")) else "-",
        )
        if "moved_peers" in figures:
            report.notes.append(
                f"{phase.name}: {figures['moved_peers']} peers moved there by themselves and "
                f"trained {figures['moved_after_s']} s after it was served, in rounds of "
                f"{chain.round_s:g} s; paths scored by peers: {figures['scores_by_peers']}"
            )
    first = chain.phases[0].figures
    base = first["base_perplexity"]
    report.notes += [
        "rounds, steps (of the least and the most trained path, all replicas) and after: when "
        "dipaco-eval asked the live swarm; end: the modules that the next phase took, because "
        "training goes on while the operator scores and prepares; began: the same modules under "
        "the new routing",
        f"base model, before the swarm: {base:.2f}; {first['tokens']:,} tokens of "
        f"{first['documents']} documents, the first 32 of each excluded",
        f"dense model of one path's size, trained beside from the same base for "
        f"{chain.dense_steps} steps, as many as one peer made: {chain.dense_perplexity:.2f}",
        f"alive at the end: {', '.join(chain.alive)}; no peer was started twice, and a fresh "
        f"one took the place of each that was killed",
    ]
    report.figures = {
        "base_perplexity": base,
        "dense_perplexity": chain.dense_perplexity,
        "dense_steps": chain.dense_steps,
        "phases": [
            {
                "phase": phase.name,
                "run": phase.run_id,
                "router": phase.router,
                "paths_of_grid": phase.paths,
                **phase.figures,
            }
            for phase in chain.phases
        ],
        "peers_started": list(chain.started),
        "broken": broken_promises(chain.phases),
        "round_s": chain.round_s,
        "hidden_size": chain.hidden_size,
        "base_steps": chain.base_steps,
        "seconds": round(chain.seconds, 1),
    }
    report.notes += [f"BROKEN: {line}" for line in report.figures["broken"]]
    return report
