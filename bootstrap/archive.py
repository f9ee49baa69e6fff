"""The archive of a run: dated copies of all its states, so that it can be exported when every peer
is gone.

    DIR/2026-11-22T16-30-00Z/   a run folder: what --state-dir takes
    DIR/latest                  a link to the newest

A copy appears whole or not at all. What has not changed since the copy before is linked, not
written again, so many copies of a quiet run cost little.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dipaco.dht.coverage import whole_scope
from dipaco.dht.view import SwarmView
from dipaco.modules.best_parameters import BestParameters, greatest_best_path_bytes
from dipaco.modules.errors import DipacoError, IntegrityError, NetworkError, StorageError
from dipaco.modules.files import atomic_write, sha256_of_file, storage_errors, sync_folder
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState, StateReference, read_state
from dipaco.peer.exchange.fetching import core_blobs
from dipaco.peer.node import Node
from dipaco.routing.run_folder import RunFolder

logger = logging.getLogger("dipaco.bootstrap.archive")

LATEST = "latest"
# After a copy that failed, and before the first.
RETRY_S = 60.0
_COPY = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ")
# Headers of states and bests, and the small files beside them.
_SPARE_BYTES = 2**20


class Archive:
    """The copies in `folder`: at most `copies`, of at most `most_bytes` together.

    The last good copy stays until the next is whole, so the budget must hold two.
    """

    def __init__(self, folder: Path, copies: int, most_bytes: float) -> None:
        self.folder = Path(folder)
        self._copies = copies
        self._most_bytes = most_bytes

    def dates(self) -> list[Path]:
        """Return the copies, the oldest first."""
        if not self.folder.is_dir():
            return []
        with storage_errors(self.folder):
            return sorted(path for path in self.folder.iterdir() if _COPY.fullmatch(path.name))

    def newest(self) -> RunFolder | None:
        """Return the newest copy."""
        dates = self.dates()
        return RunFolder(dates[-1]) if dates else None

    def stored(self, wanted: StateReference, grid: Grid) -> ModuleState | None:
        """Return a state of the newest copy, if it has it whole: nothing is fetched twice."""
        newest = self.newest()
        file = newest.states.find(wanted.digest) if newest else None
        if file is None:
            return None
        try:
            layout = grid.layout(wanted.module)
            return read_state(file, layout, wanted.digest, module=wanted.module)
        except (IntegrityError, StorageError) as error:
            logger.warning("archived state %s is fetched again: %s", wanted.digest[:12], error)
            return None

    def write(
        self,
        run: RunFolder,
        plan: RunPlan,
        grid: Grid,
        state: Callable[[str], ModuleState | None],
        best: Callable[[int], BestParameters | None],
        now_s: float,
    ) -> Path:
        """Write a copy of all that `state` and `best` give for modules and paths; return it.

        `run` has the manifest and the blobs. Raises NetworkError if a module has no state yet,
        StorageError if the disk or the budget is too small; nothing of the copy is left then.
        """
        self._make_room(grid)
        name = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime(now_s))
        target, staging = self.folder / name, self.folder / f".{name}.new"
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob(".*.new"):
                shutil.rmtree(left_over, ignore_errors=True)
        try:
            self._fill(RunFolder(staging), run, plan, grid, state, best)
            with storage_errors(self.folder):
                os.replace(staging, target)
                self._point_to(target)
                sync_folder(self.folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        for old in self.dates()[: -self._copies]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def _fill(
        self,
        copy: RunFolder,
        run: RunFolder,
        plan: RunPlan,
        grid: Grid,
        state: Callable[[str], ModuleState | None],
        best: Callable[[int], BestParameters | None],
    ) -> None:
        before = self.newest()
        atomic_write(copy.manifest_path, run.manifest_path.read_bytes())
        held_out = [shard.validation_sha256 for shard in run.shard_index(plan).paths]
        for sha256 in dict.fromkeys((*core_blobs(plan), *held_out, *_genesis(run, plan))):
            if run.blobs.has(sha256):
                source = before.blobs if before and before.blobs.has(sha256) else run.blobs
                _link(source.path(sha256), copy.blobs.path(sha256))
        for module in grid.modules():
            found = state(module)
            if found is None:
                raise NetworkError(f"no state of {module} is certified yet")
            file = before.states.find(found.digest) if before else None
            if file is None:
                copy.states.save(found)
                continue
            for part in (file, file.with_suffix(".json")):
                if part.is_file():
                    _link(part, copy.states.folder / module / part.name)
        bests = copy.best_parameters(grid)
        for path in range(grid.path_count):
            chosen = best(path)
            old = before.best_parameters(grid).file(path) if before else None
            if chosen is not None and not (old and _link_equal(old, chosen, bests.file(path))):
                bests.hold(chosen)

    def _make_room(self, grid: Grid) -> None:
        """Remove old copies for a new one. Raises StorageError if it fits beside none of them."""
        needed = copy_bytes(grid)
        dates = self.dates()
        while len(dates) > 1 and _bytes_of(dates) + needed > self._most_bytes:
            shutil.rmtree(dates.pop(0), ignore_errors=True)
        used = _bytes_of(dates)
        if used + needed > self._most_bytes:
            raise StorageError(
                f"the archive in {self.folder} may have {self._most_bytes / 1e9:.3g} GB; the last "
                f"copy has {used / 1e9:.3g} GB and the next needs up to {needed / 1e9:.3g} GB; "
                f"give a greater --archive-gb"
            )

    def _point_to(self, target: Path) -> None:
        link = self.folder / f".{LATEST}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self.folder / LATEST)


class Archivist:
    """Writes a copy of the swarm's states from time to time. Run by `dipaco-bootstrap serve`."""

    def __init__(self, archive: Archive, node: Node, say: Callable[[str], None]) -> None:
        self._archive = archive
        self._node = node
        self._say = say

    def run(self, period_s: float, stopping: threading.Event) -> None:
        """Archive every `period_s` until stopped; what fails is said, and tried again sooner."""
        wait_s = min(RETRY_S, period_s)
        while not stopping.wait(wait_s):
            try:
                copy = self.write()
            except DipacoError as error:
                self._say(f"archive: no copy this time: {error}")
                wait_s = min(RETRY_S, period_s)
            else:
                self._say(f"archive: all states in {copy}")
                wait_s = period_s

    def write(self) -> Path:
        """Read the swarm, fetch what has changed, and write a copy. Raises as `Archive.write`."""
        node, archive = self._node, self._archive
        now_s = node.clock.now()
        view = node.directory.read_view(node.plan, node.grid, now_s, whole_scope(node.grid))

        def state(module: str) -> ModuleState | None:
            def stored(wanted: StateReference) -> ModuleState | None:
                held = node.held.get(module)
                if held is not None and held.digest == wanted.digest:
                    return node.held.load(module)
                return archive.stored(wanted, node.grid)

            return node.fetcher.winning_state(module, view, stored=stored)

        return archive.write(
            node.run_folder, node.plan, node.grid, state, lambda path: self._best(path, view), now_s
        )

    def _best(self, path: int, view: SwarmView) -> BestParameters | None:
        """Return the best states of a path that can be had: those here before those there."""
        newest = self._archive.newest()
        places = [self._node.bests] + ([newest.best_parameters(self._node.grid)] if newest else [])
        kept: BestParameters | None = None
        for place in places:
            with contextlib.suppress(IntegrityError, StorageError):
                kept = kept or place.load(path)
        for claimed in view.bests.get(path, ()):
            if kept is not None and kept.sha256 == claimed.sha256:
                break
            try:
                return self._node.fetcher.best_path(path, claimed.sha256)
            except (NetworkError, IntegrityError) as error:
                logger.info("best states %s: %s", claimed.sha256[:12], error)
        return kept


def copy_bytes(grid: Grid) -> int:
    """Return how large a copy can be at most: parameters and momentum of all modules, the best
    parameters of all paths. Blobs are linked."""
    counts = grid.parameter_counts()
    return 8 * counts["total"] + grid.path_count * greatest_best_path_bytes(grid) + _SPARE_BYTES


def _genesis(run: RunFolder, plan: RunPlan) -> tuple[str, ...]:
    """Return the blobs that a successor's first states are."""
    if plan.blobs.genesis is None or not run.blobs.has(plan.blobs.genesis):
        return ()
    return tuple((run.genesis_index(plan) or {}).values())


def _link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`; a copy where that cannot be. Raises StorageError."""
    with storage_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _link_equal(old: Path, best: BestParameters, target: Path) -> bool:
    """Link a best-path file if it is this one; return whether it was."""
    if not old.is_file() or sha256_of_file(old) != best.sha256:
        return False
    _link(old, target)
    return True


def _bytes_of(folders: list[Path]) -> int:
    """Return what folders take on disk, a file with several names counted once."""
    found: dict[tuple[int, int], int] = {}
    for folder in folders:
        for file in folder.rglob("*"):
            with contextlib.suppress(OSError):
                status = file.lstat()
                found[status.st_dev, status.st_ino] = status.st_size
    return sum(found.values())
