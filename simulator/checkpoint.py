"""Checkpoints of a simulation: a resumed one goes on bit for bit as if it had never stopped.

    checkpoint/round-00000012/
        swarm.json          run, next round, peers, steps per round, optimizer
        anchors/L0.E0       module states, in the format of `dipaco.modules.state`
        worker-00000.pt     local parameters, AdamW state and counters of one worker

A checkpoint is written beside the last one and takes its place by a rename, so there is always a
complete one, whenever the process is killed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from dipaco.modules.errors import ConfigurationError, IntegrityError
from dipaco.modules.files import atomic_file, atomic_write, storage_errors, sync_directory
from dipaco.modules.grid import Grid
from dipaco.modules.state import ModuleState, read_state, write_state
from dipaco.routing.run_directory import RunDirectory

from .reference import ReferenceSwarm

CHECKPOINT_FORMAT = "dipaco-simulation/1"


class CheckpointDirectory:
    """The checkpoints of one simulation: `checkpoint/` of its output directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        found = sorted(path for path in self.directory.glob("round-*") if path.suffix != ".partial")
        return found[-1] if found else None

    def save(self, swarm: ReferenceSwarm) -> Path:
        """Write a checkpoint and remove the older ones. Raises StorageError on a full disk."""
        final = self.directory / f"round-{swarm.next_round:08d}"
        partial = final.with_suffix(".partial")
        with storage_errors(self.directory):
            for old in (partial, final):
                shutil.rmtree(old, ignore_errors=True)
            (partial / "anchors").mkdir(parents=True)
            self._write(swarm, partial)
            os.replace(partial, final)
            sync_directory(self.directory)
        for old in self.directory.glob("round-*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def _write(self, swarm: ReferenceSwarm, directory: Path) -> None:
        for module, state in swarm.states.items():
            write_state(state, directory / "anchors" / module)
        for number, worker in enumerate(swarm.workers):
            with atomic_file(directory / f"worker-{number:05d}.pt") as file:
                torch.save(worker.checkpoint(), file)
        settings = _settings(swarm) | {"next_round": swarm.next_round}
        atomic_write(directory / "swarm.json", json.dumps(settings, indent=1).encode())

    def anchors(self, checkpoint: Path, grid: Grid) -> dict[str, ModuleState]:
        """Return the module states of a checkpoint. Raises IntegrityError for a broken one."""
        return {
            module: read_state(checkpoint / "anchors" / module, grid.layout(module), module=module)
            for module in grid.modules()
        }

    def restore(self, checkpoint: Path, swarm: ReferenceSwarm) -> None:
        """Put a new swarm, made with the checkpoint's `anchors`, where the old one stopped.

        Raises ConfigurationError if the two were not made for the same simulation,
        IntegrityError if a file is broken.
        """
        settings = self.settings(checkpoint)
        for name, value in _settings(swarm).items():
            if settings.get(name) != value:
                raise ConfigurationError(
                    f"the simulation in {checkpoint} has {name} {settings.get(name)!r}, this one "
                    f"{value!r}; give the same arguments, or another --out"
                )
        for number, worker in enumerate(swarm.workers):
            file = checkpoint / f"worker-{number:05d}.pt"
            try:
                worker.restore(torch.load(file, map_location="cpu", weights_only=True))
            except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
                raise IntegrityError(
                    f"{file} is broken ({type(error).__name__}); remove {checkpoint} to start "
                    f"from the saved module states with fresh AdamW states"
                ) from None
        swarm.next_round = int(settings["next_round"])

    def settings(self, checkpoint: Path) -> dict[str, Any]:
        """Return what a checkpoint says of its simulation. Raises IntegrityError."""
        try:
            settings = json.loads((checkpoint / "swarm.json").read_bytes())
            if settings["format"] != CHECKPOINT_FORMAT:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError):
            raise IntegrityError(
                f"{checkpoint} is not a checkpoint of this version; remove it"
            ) from None
        return dict(settings)


def _settings(swarm: ReferenceSwarm) -> dict[str, Any]:
    """Return what must be the same when a simulation is resumed."""
    return {
        "format": CHECKPOINT_FORMAT,
        "run": swarm.plan.run_id,
        "steps_per_round": swarm.steps_per_round,
        "optimizer": swarm.optimizer,
        "peers": [[peer.path, peer.replica, peer.peer] for peer in swarm.peers],
    }


def link_run(run: RunDirectory, output: Path) -> RunDirectory:
    """Make `output` a run directory of the same run: its manifest, and links to its blobs.

    Blobs are hard-linked, or copied where the file system cannot. Does nothing if `output` is the
    run directory itself. Raises ConfigurationError if it holds another run.
    """
    if output.resolve() == run.path.resolve():
        return run
    linked = RunDirectory(output)
    if linked.manifest_path.exists() and linked.plan().run_id != run.plan().run_id:
        raise ConfigurationError(f"--out {output} holds another run; give an empty directory")
    for sha256 in _blob_names(run):
        _link_or_copy(run.blobs.require(sha256), linked.blobs.path(sha256))
    atomic_write(linked.manifest_path, run.manifest_path.read_bytes())
    return linked


def _blob_names(run: RunDirectory) -> tuple[str, ...]:
    """Return the SHA-256 of every blob of a run."""
    plan = run.plan()
    names = [value for value in plan.blobs.model_dump().values() if value is not None]
    for shard in run.shard_index(plan).paths:
        names += [shard.train_sha256, shard.validation_sha256]
    if plan.blobs.genesis is not None:
        names += json.loads(run.blobs.read(plan.blobs.genesis)).values()
    return tuple(dict.fromkeys(names))


def _link_or_copy(source: Path, target: Path) -> None:
    if target.exists():
        return
    with storage_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            with source.open("rb") as reader, atomic_file(target) as writer:
                shutil.copyfileobj(reader, writer)
