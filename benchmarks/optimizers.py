"""Held-out loss by inner optimizer, inner rate and outer step, dense and as paths.

    python benchmarks/optimizers.py RUN_DIR --optimizer muon --rates 3e-3,6e-3 --dense 200
    python benchmarks/optimizers.py RUN_DIR --rates 4e-3 --outer 1.0/0,0.8/0.5 --steps 6 \\
        --rounds 10,40
    python benchmarks/optimizers.py RUN_DIR --optimizer muon --rates 6e-3 --base 12e-3 --dense 200

RUN_DIR is a prepared run. Its router and shards are used as they are. Without --base its base model
too; with it a base of --base-steps is trained from scratch by the same optimizer, at that rate.
A seed adds to the plan's: other batches, and with --base another base. The reference trains, in one
process; codec and the rest are the plan's. One line of JSON for each figure, appended to --log, and
none is made twice. `chosen_by` is the loss of every second held-out sequence, by which a rate is
chosen; `loss` that of the others, which is told. Nats a token.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dipaco.modules.compose import load_path
from dipaco.modules.evaluate import LossSum, sum_losses
from dipaco.modules.inner import InnerLoop
from dipaco.modules.plan import RunPlan
from dipaco.modules.transformer import PathModel, initialise
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_files import even_sample
from dipaco.simulator.dense import MixedBatches
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.settings import SimulatorSettings

BASE_WARMUP_STEPS, BASE_BATCH_SEQUENCES = 20, 16


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a prepared run")
    parser.add_argument("--log", type=Path, required=True, help="where figures are appended")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--rates", type=numbers, default=(4e-3,), help="inner peak rates")
    parser.add_argument("--seeds", type=numbers, default=(0,), help="added to the plan's (0)")
    parser.add_argument("--base", type=float, help="peak rate of a base of its own")
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument("--dense", type=int, default=0, metavar="STEPS", help="a dense model")
    parser.add_argument("--outer", help="RATE/MOMENTUM,...: train the paths")
    parser.add_argument("--steps", type=int, default=20, help="inner steps of a round (20)")
    parser.add_argument("--rounds", type=numbers, default=(10,), help="scored after these (10)")
    parser.add_argument("--held-out", type=int, default=400, help="sequences a path (400)")
    parser.add_argument("--no-root", action="store_true", help="no root of the paths")
    return parser.parse_args()


def numbers(text: str) -> tuple[float, ...]:
    """Read "1,2e-3"."""
    return tuple(float(part) for part in text.split(","))


class Variant(RunFolder):
    """A run folder with another inner or outer step, seed or base model."""

    def __init__(self, chosen: argparse.Namespace, rate: float, seed: int) -> None:
        super().__init__(chosen.run)
        plan = super().plan()
        inner = {"optimizer": chosen.optimizer, "learning_rate": rate}
        self.changed = plan.model_copy(
            update={"inner": plan.inner.model_copy(update=inner), "seed": plan.seed + seed}
        )
        self.held_out: int = chosen.held_out
        self.trained_base: PathModel | None = None

    def plan(self) -> RunPlan:
        """Return the plan as it is changed."""
        return self.changed

    def base_model(self, plan: RunPlan) -> PathModel:
        """Return the base model, the run's or its own."""
        model = PathModel(plan.model).eval()
        model.load_state_dict(self.base_parameters(plan))
        return model

    def base_parameters(self, plan: RunPlan) -> dict[str, torch.Tensor]:
        """Return the parameters of that."""
        if self.trained_base is None:
            return super().base_parameters(plan)
        return {name: p.detach().clone() for name, p in self.trained_base.named_parameters()}

    def train_base(self, rate: float, steps: int, file: Path) -> None:
        """Train a base of its own from scratch, or read the one that is in `file` already."""
        plan, model = self.changed, PathModel(self.changed.model)
        self.trained_base = model.eval()
        if file.exists():
            model.load_state_dict(torch.load(file, weights_only=True))
            return
        inner = plan.inner.model_copy(
            update={
                "learning_rate": rate,
                "warmup_steps": BASE_WARMUP_STEPS,
                "batch_sequences": BASE_BATCH_SEQUENCES,
            }
        )
        initialise(model, plan.seed)
        # Batches that no path sees: of another seed.
        other = plan.model_copy(update={"inner": inner, "seed": plan.seed + 1000})
        _train(model, inner, MixedBatches(self, other), steps)
        torch.save(model.eval().state_dict(), file)

    def halves(self, path: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the held-out sequences of a path by which is chosen, and those that are told."""
        rows = even_sample(self.validation_tokens(self.changed, path), self.held_out)
        return rows[0::2], rows[1::2]

    def scores(self, models: Iterator[tuple[int, PathModel]]) -> dict[str, float]:
        """Return the losses of every path's model on its sequences."""
        prefix = self.changed.routing.prefix_tokens
        sums = [
            [LossSum(*sum_losses(model, rows, prefix)) for rows in self.halves(path)]
            for path, model in models
        ]
        losses = [LossSum.total(half).loss for half in zip(*sums, strict=True)]
        return {
            name: round(float(loss or math.nan), 4)
            for name, loss in zip(("chosen_by", "loss"), losses, strict=True)
        }


def _train(model: PathModel, inner: Any, batches: MixedBatches, steps: int) -> None:
    loop = InnerLoop(model.train(), inner, torch.device("cpu"))
    for step in range(steps):
        loop.step(batches.batch(step), step)


class Log:
    """The figures so far."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self._known = {json.dumps(json.loads(line)["of"], sort_keys=True) for line in lines}

    def has(self, of: dict[str, Any]) -> bool:
        """Tell whether a figure was made."""
        return json.dumps(of, sort_keys=True) in self._known

    def add(self, of: dict[str, Any], figures: dict[str, float]) -> None:
        """Append one."""
        line = json.dumps({"of": of, **figures, "cpu_s": round(time.process_time(), 1)})
        print(line, flush=True)
        with self._file.open("a") as file:
            file.write(line + "\n")


def measure(chosen: argparse.Namespace, log: Log, rate: float, seed: int) -> None:
    """Train and score what was asked for at one rate and seed."""
    of: dict[str, Any] = {
        "run": chosen.run.name,
        "optimizer": chosen.optimizer,
        "rate": rate,
        "seed": seed,
        "base": chosen.base,
        "held_out": chosen.held_out,
    }
    outers = [tuple(map(float, o.split("/"))) for o in (chosen.outer or "").split(",") if o]
    cells = [
        {**of, "outer": list(outer), "root": not chosen.no_root, "steps": chosen.steps, "round": n}
        for outer in outers
        for n in map(int, chosen.rounds)
    ]
    if chosen.dense or not outers:
        cells.append({**of, "dense": chosen.dense})
    if all(log.has(cell) for cell in cells):
        return
    run = Variant(chosen, rate, seed)
    if chosen.base:
        name = f"base-{chosen.optimizer}-{chosen.base}-{chosen.base_steps}-{seed}.pt"
        run.train_base(chosen.base, chosen.base_steps, chosen.log.with_name(name))
    plan = run.plan()
    paths = range(run.grid(plan).path_count)
    if (chosen.dense or not outers) and not log.has(cells[-1]):
        model = run.base_model(plan)
        _train(model, plan.inner, MixedBatches(run, plan), chosen.dense)
        model.eval()
        log.add(cells[-1], run.scores((path, model) for path in paths))
    for outer in outers:
        mine = [c for c in cells if c.get("outer") == list(outer) and not log.has(c)]
        if mine:
            train_paths(run, log, outer, chosen.steps, mine)


def train_paths(
    run: Variant, log: Log, outer: tuple[float, ...], steps: int, cells: list[dict[str, Any]]
) -> None:
    """Train all paths with an outer step, and score them after the rounds of `cells`."""
    kept = run.changed
    update = {
        "learning_rate": outer[0], "momentum": outer[1], "sqrt_paths_rescaling": cells[0]["root"],
    }  # fmt: skip
    run.changed = kept.model_copy(update={"outer": kept.outer.model_copy(update=update)})
    silent = SimulatorSettings(validation_sequences=0)
    swarm = ReferenceSwarm(run, steps_per_round=steps, settings=silent)
    grid, model = swarm.grid, PathModel(run.changed.model).eval()

    def models() -> Iterator[tuple[int, PathModel]]:
        for path in range(grid.path_count):
            own = {module: swarm.states[module] for module in grid.modules_of_path(path)}
            load_path(model, grid, path, own)
            yield path, model

    for cell in cells:
        while swarm.next_round < cell["round"]:
            swarm.run_round()
        log.add(cell, run.scores(models()))
    run.changed = kept


def main() -> int:
    """Measure; returns the exit code."""
    chosen = options()
    torch.set_num_threads(1)
    log = Log(chosen.log)
    for seed in map(int, chosen.seeds):
        for rate in chosen.rates:
            measure(chosen, log, rate, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
