"""Whose documents say something of a module that a path has not trained lately.

    python benchmarks/model/foreign_states.py [--json] [--hidden-size 16] [--away 12]

A 2x2 grid whose four paths share no words trains in one process: some rounds all of it, then
path 0 is away. After each round the modules of path 0 are compared with their genesis states,
as a peer compares that takes path 0 up again: on the rows of path 0, and on those of the other path
through the module, beside the modules of path 0 and beside its own. A module that honest peers have
trained should look better than its genesis state; a peer refuses it from 1 nat on that it looks
worse. Told are nats a token.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from dipaco.modules.compose import load_path
from dipaco.modules.evaluate import LossSum, sum_losses
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.settings import SimulatedPeer
from parts.common import Report, build_parser, scratch_folder
from support.tiny_run import make_tiny_run

AWAY = 0
SEQUENCES = 8


class Scores:
    """Losses of paths put together of any states."""

    def __init__(self, folder: Path, hidden_size: int, steps: int) -> None:
        self.run = make_tiny_run(
            folder,
            modules_per_level=(2, 2),
            inner_steps=steps,
            documents_per_path=400,
            validation_documents_per_path=32,
            hidden_size=hidden_size,
            feed_forward_size=2 * hidden_size,
        )
        self.plan = self.run.plan()
        self.grid = self.run.grid(self.plan)
        self.genesis = {m: self.run.genesis_state(self.plan, m) for m in self.grid.modules()}
        self._model = PathModel(self.plan.model)

    def loss(self, path: int, rows_of: int, states: Mapping[str, ModuleState]) -> float:
        """Return the loss of some rows of one path under the modules of another, or its own."""
        load_path(self._model, self.grid, path, states)
        rows = torch.from_numpy(self.run.validation_tokens(self.plan, rows_of).astype("int64"))
        prefix = self.plan.routing.prefix_tokens
        return LossSum(*sum_losses(self._model, rows[:SEQUENCES], prefix)).loss or float("nan")

    def compare(self, module: str, states: Mapping[str, ModuleState]) -> dict[str, list[float]]:
        """Return the losses with a module and with its genesis state, on whose rows and where."""
        (other,) = set(self.grid.paths_of_module(module)) - {AWAY}
        untrained = {**states, module: self.genesis[module]}
        places = {"own": (AWAY, AWAY), "other, beside own": (AWAY, other), "other": (other, other)}
        return {
            name: [round(self.loss(*place, found), 3) for found in (states, untrained)]
            for name, place in places.items()
        }


def main() -> int:
    """Train, compare and print; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--hidden-size", type=int, default=16, help="of the model (16)")
    parser.add_argument("--steps", type=int, default=40, help="inner steps of a round (40)")
    parser.add_argument("--together", type=int, default=8, help="rounds of all paths (8)")
    parser.add_argument("--away", type=int, default=12, help="rounds without path 0 (12)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    columns = (
        "module",
        "rounds away",
        "own rows",
        "other's, beside own",
        "other's, beside its own",
    )
    report = Report("module and genesis state, nats a token", columns)
    report.figures = {"hidden_size": chosen.hidden_size, "rounds": []}
    with scratch_folder() as folder:
        scores = Scores(folder, chosen.hidden_size, chosen.steps)
        modules = scores.grid.modules()
        swarm = ReferenceSwarm(scores.run)
        for _ in range(chosen.together):
            swarm.run_round()
        for away in range(chosen.away + 1):
            if away == 1:
                staying = [SimulatedPeer(p) for p in range(scores.grid.path_count) if p != AWAY]
                states = {module: swarm.states[module] for module in modules}
                swarm = ReferenceSwarm(
                    scores.run, peers=staying, first_round=chosen.together, states=states
                )
            if away:
                swarm.run_round()
            held = {module: swarm.states[module] for module in modules}
            for module in scores.grid.modules_of_path(AWAY):
                found = scores.compare(module, held)
                report.figures["rounds"].append({"module": module, "away": away, **found})
                cells = (f"{ours:.2f}, {first:.2f}" for ours, first in found.values())
                report.row(module, away, *cells)
    report.print(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
