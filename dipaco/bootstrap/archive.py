"""The archive of a run: dated copies of all its states, so that it can be exported when every peer
is gone.

    DIR/2026-11-22T16-30-00Z/   a run folder: what --state-dir takes
    DIR/latest                  a link to the newest

A copy appears whole or not at all. What has not changed since the copy before is linked, not
written again, so many copies of a quiet run cost little.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dipaco.base.errors import DipacoError, IntegrityError, NetworkError, StorageError
from dipaco.base.files import atomic_write, link_or_copy, storage_errors, sync_folder
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState, read_state
from dipaco.peer.keeping.path_files import PathFiles
from dipaco.peer.keeping.winning_states import WinningStates
from dipaco.peer.node.node import Node
from dipaco.protocol.chain import Head
from dipaco.protocol.coverage import whole_scope
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan
from dipaco.routing.run_folder import RunFolder

logger = logging.getLogger("dipaco.bootstrap.archive")

LATEST = "latest"
# After a copy that failed, and before the first.
RETRY_S = 60.0
_COPY = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ")


class Archive:
    """The copies in `folder`, at most `copies`: the last good one stays until the next is whole."""

    def __init__(self, folder: Path, copies: int) -> None:
        self.folder = Path(folder)
        self._copies = copies

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

    def stored(self, module: str, digest: str, grid: Grid) -> ModuleState | None:
        """Return a state of the newest copy, if it has it whole: nothing is fetched twice."""
        newest = self.newest()
        file = newest.states.find(digest) if newest else None
        if file is None:
            return None
        try:
            return read_state(file, layout_of(grid, module), digest, module=module)
        except (IntegrityError, StorageError) as error:
            logger.warning("archived state %s is fetched again: %s", digest[:12], error)
            return None

    def write(
        self,
        run: RunFolder,
        plan: RunPlan,
        grid: Grid,
        state: Callable[[str], ModuleState | None],
        now_s: float,
    ) -> Path:
        """Write a copy of what `state` gives for every module; return it.

        `run` has the manifest and the blobs. Raises NetworkError if a module has no state yet,
        StorageError if the disk is too small; nothing of the copy is left then.
        """
        name = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime(now_s))
        target, staging = self.folder / name, self.folder / f".{name}.new"
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob(".*.new"):
                shutil.rmtree(left_over, ignore_errors=True)
        try:
            self._fill(RunFolder(staging), run, plan, grid, state)
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
    ) -> None:
        before = self.newest()
        atomic_write(copy.manifest_path, run.manifest_path.read_bytes())
        training = {shard.train_sha256 for shard in run.shard_index(plan).paths}
        for sha256 in set(run.blob_names(plan)) - training:
            if run.blobs.has(sha256):
                source = before.blobs if before and before.blobs.has(sha256) else run.blobs
                link_or_copy(source.path(sha256), copy.blobs.path(sha256))
        for module in grid.modules():
            found = state(module)
            if found is None:
                raise NetworkError(f"no peer serves a state of {module} yet")
            file = before.states.find(found.digest) if before else None
            if file is None:
                copy.states.save(found)
                continue
            for part in (file, file.with_suffix(".json")):
                if part.is_file():
                    link_or_copy(part, copy.states.folder / module / part.name)

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
        winning = WinningStates(node, PathFiles(node))

        def stored(head: Head) -> ModuleState | None:
            return archive.stored(head.module, head.digest, node.grid)

        def state(module: str) -> ModuleState | None:
            return winning.state(module, view, stored=stored)

        return archive.write(node.run_folder, node.plan, node.grid, state, now_s)
