"""Training the cells, each resumable: a killed cell goes on from its last checkpoint."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from dipaco.base.files import atomic_write
from dipaco.routing.run_folder import RunFolder, link_run
from dipaco.simulator.dense import train_dense
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.settings import SimulatedPeer, SimulatorSettings

from parts.paper_table_cells import Cell, Size

Say = Callable[[str], None]

DENSE_FILE = "dense.safetensors"
_SAVE_EVERY_S = 120.0


@dataclass
class Diary:
    """What a cell has done so far, kept beside its checkpoint: losses, and time over all calls."""

    file: Path
    values: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    cpu_started: float = field(default_factory=time.process_time)

    def __post_init__(self) -> None:
        self.values = {"train_losses": [], "seconds": 0.0, "cpu_seconds": 0.0}
        if self.file.exists():
            self.values = json.loads(self.file.read_bytes())

    @property
    def losses(self) -> list[list[float]]:
        """Pairs of (inner steps of a path done, mean training loss since the pair before)."""
        return self.values["train_losses"]

    def cut(self, steps: int) -> None:
        """Forget what was noted after `steps`: it is trained again."""
        self.values["train_losses"] = [pair for pair in self.losses if pair[0] <= steps]

    def save(self) -> None:
        """Add the time since the last call and write."""
        now, cpu = time.monotonic(), time.process_time()
        self.values["seconds"] += now - self.started
        self.values["cpu_seconds"] += cpu - self.cpu_started
        self.started, self.cpu_started = now, cpu
        atomic_write(self.file, json.dumps(self.values).encode())


def train_dense_cell(run: RunFolder, size: Size, say: Say) -> Diary:
    """Train the dense model of a cell and keep its parameters in the run folder."""
    diary = Diary(run.path / "diary.json")
    losses: list[float] = []
    every = max(1, size.round_steps)

    def on_step(step: int, loss: float) -> None:
        losses.append(loss)
        if (step + 1) % every == 0:
            mean = sum(losses) / len(losses)
            losses.clear()
            diary.cut(step)
            diary.losses.append([step + 1, mean])
            diary.save()
            say(f"step {step + 1} of {size.steps}, training loss {mean:.3f}")

    result = train_dense(
        run,
        size.steps,
        micro_batch_size=size.batch_sequences,
        validation_sequences=0,
        on_step=on_step,
        checkpoint=run.path / "dense.pt",
        save_every_s=_SAVE_EVERY_S,
    )
    diary.save()
    atomic_write(run.path / DENSE_FILE, safetensors.torch.save(result.parameters))
    return diary


def train_swarm_cell(cell: Cell, run: RunFolder, half: Path, size: Size, say: Say) -> Diary:
    """Train all paths of a cell; leave their states in the run folder, and half-way in `half`.

    A cell that goes on from another's half is trained for the other half.
    """
    first = size.rounds // 2 if cell.half_of else 0
    kept = run.path / "checkpoint"
    swarm = ReferenceSwarm(
        run,
        peers=[
            SimulatedPeer(path, replica)
            for path in range(cell.path_count)
            for replica in range(cell.replicas)
        ],
        steps_per_round=size.round_steps,
        first_round=first,
        settings=SimulatorSettings(validation_sequences=0, folder=kept),
    )
    if swarm.next_round > first:
        say(f"going on after round {swarm.next_round}")
    diary = Diary(run.path / "diary.json")
    diary.cut(swarm.next_round * size.round_steps)
    while swarm.next_round < size.rounds:
        report = swarm.run_round()
        losses = [path.train_loss for path in report.paths if path.train_loss is not None]
        mean = sum(losses) / len(losses)
        diary.losses.append([swarm.next_round * size.round_steps, mean])
        say(
            f"round {swarm.next_round} of {size.rounds}, training loss {mean:.3f}, "
            f"{report.seconds:.0f} s"
        )
        if swarm.next_round == size.rounds // 2 and not cell.half_of:
            _save_states(swarm, link_run(run, half))
        if swarm.next_round == size.rounds:
            _save_states(swarm, run)
        diary.save()
    shutil.rmtree(kept, ignore_errors=True)
    return diary


def _save_states(swarm: ReferenceSwarm, run: RunFolder) -> None:
    for state in swarm.states.values():
        run.states.save(state)
