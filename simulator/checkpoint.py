"""Checkpoints of a simulation: a resumed one continues bit for bit as if it had never stopped.

    checkpoint/round-00000012/      of a simulation in memory, written every few rounds
    checkpoint/live/                of a simulation on disk, which works there

Both are a `LiveFolder`, so a simulation may switch between memory and disk when it is resumed. A
checkpoint is written beside the last one and then renamed, so a complete one exists at any instant.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dipaco.modules.errors import ConfigurationError, IntegrityError
from dipaco.modules.files import atomic_write, link_or_copy, storage_errors, sync_folder
from dipaco.modules.grid import Grid
from dipaco.modules.state import ModuleState, read_state, write_state
from dipaco.routing.run_folder import RunFolder

from .live_folder import (
    LiveFolder,
    lost_file,
    read_lost,
    read_luggage,
    read_notes,
    worker_file,
    write_lost,
    write_worker,
)
from .reference import ReferenceSwarm
from .storage import Luggage

_LIVE, _PARTIAL = "live", ".partial"


class CheckpointFolder:
    """The checkpoints of one simulation: `checkpoint/` of its output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def live(self) -> Path:
        """Where a simulation that keeps its workers on disk works."""
        return self.folder / _LIVE

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, or None. Raises IntegrityError."""
        found = {
            path: int(LiveFolder(path).settings()["next_round"])
            for path in (*self._snapshots(), self.live)
            if LiveFolder(path).exists
        }
        return max(found, key=lambda path: found[path]) if found else None

    def save(self, swarm: ReferenceSwarm) -> Path:
        """Write a checkpoint and remove the older ones. Raises StorageError on a full disk."""
        final = self.folder / f"round-{swarm.next_round:08d}"
        partial = final.with_suffix(_PARTIAL)
        with storage_errors(self.folder):
            for old in (partial, final):
                shutil.rmtree(old, ignore_errors=True)
            self._write(swarm, LiveFolder(partial))
            os.replace(partial, final)
            sync_folder(self.folder)
        for old in (*self.folder.glob("round-*"), self.live):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def _write(self, swarm: ReferenceSwarm, target: LiveFolder) -> None:
        for worker in swarm.workers:
            notes, luggage = worker.checkpoint()
            optimizer = luggage.optimizer
            assert optimizer is None or isinstance(optimizer, dict)
            file = worker_file(target.workers, worker.number)
            write_worker(file, notes, luggage.local, optimizer)
            for module in worker.modules:
                lost = swarm.shelf.lost(worker.number, module)
                if lost is not None:
                    write_lost(lost_file(target.workers, worker.number, module), lost)
        for module, state in swarm.states.items():
            write_state(state, target.anchors / module)
        target.save(swarm.identity, swarm.next_round)

    def anchors(self, checkpoint: Path, grid: Grid) -> dict[str, ModuleState]:
        """Return the module states of a checkpoint; a module without one has its genesis state.

        Raises IntegrityError for a broken one.
        """
        folder = LiveFolder(checkpoint).anchors
        return {
            module: read_state(folder / module, grid.layout(module), module=module)
            for module in grid.modules()
            if (folder / module).exists()
        }

    def restore(self, checkpoint: Path, swarm: ReferenceSwarm) -> None:
        """Put a new swarm, made with the checkpoint's `anchors`, where the old one stopped.

        Raises ConfigurationError if the two were not made for the same simulation,
        IntegrityError if a file is broken.
        """
        folder = LiveFolder(checkpoint)
        next_round = folder.check(swarm.identity)
        if next_round is None:
            raise IntegrityError(f"{checkpoint} is not a checkpoint of this version; remove it")
        for worker in swarm.workers:
            file = worker_file(folder.workers, worker.number)
            if file.exists():
                worker.restore(read_notes(file), Luggage(*read_luggage(file)))
            for module in worker.modules:
                file = lost_file(folder.workers, worker.number, module)
                if file.exists():
                    swarm.shelf.keep_lost(worker.number, module, read_lost(file))
        swarm.go_on_in(next_round)

    def open_live(self) -> Path:
        """Return the folder for a simulation that keeps its workers on disk.

        The newest checkpoint becomes that folder, if it is one of a simulation in memory.
        """
        latest = self.latest()
        if latest is not None and latest != self.live:
            with storage_errors(self.folder):
                shutil.rmtree(self.live, ignore_errors=True)
                os.replace(latest, self.live)
        for old in self.folder.glob("round-*"):
            shutil.rmtree(old, ignore_errors=True)
        return self.live

    def _snapshots(self) -> list[Path]:
        return [path for path in self.folder.glob("round-*") if path.suffix != _PARTIAL]


def link_run(run: RunFolder, output: Path) -> RunFolder:
    """Make `output` a run folder of the same run: its manifest, and links to its blobs.

    Blobs are hard-linked, or copied where the file system cannot. Does nothing if `output` is the
    run folder itself. Raises ConfigurationError if it holds another run.
    """
    if output.resolve() == run.path.resolve():
        return run
    linked = RunFolder(output)
    if linked.manifest_path.exists() and linked.plan().run_id != run.plan().run_id:
        raise ConfigurationError(f"--out {output} holds another run; give an empty folder")
    for sha256 in run.blob_names(run.plan()):
        link_or_copy(run.blobs.require(sha256), linked.blobs.path(sha256))
    atomic_write(linked.manifest_path, run.manifest_path.read_bytes())
    return linked
