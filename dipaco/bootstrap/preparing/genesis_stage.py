"""The stage that makes the first states of a successor's modules (design 4.9, successor)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dipaco.base.files import canonical_json
from dipaco.modules.grow import Growth, check_genesis_index
from dipaco.modules.state import write_state

from .predecessor import Predecessor
from .score_stages import NearestPath
from .stages import Job, Stage


class GenesisStage(Stage):
    """Make the first state of every module of a successor, as blobs, and the index that names them.

    `nearest` are the old paths that paths which are added begin as.
    """

    name = "genesis"

    def __init__(self, job: Job, before: Predecessor, nearest: Sequence[NearestPath]) -> None:
        super().__init__(job)
        self._before, self._nearest = before, nearest

    def inputs(self) -> Sequence[Any]:
        copied = [nearest.path for nearest in self._nearest]
        return [self._before.digests, self._before.plan.grid, self.job.config.grid, copied]

    def is_whole(self, outputs: dict[str, Any]) -> bool:
        if not super().is_whole(outputs):
            return False
        index = json.loads(self.job.blobs.read(str(outputs["sha256"])))
        digests = check_genesis_index(index, self.job.grid)
        return all(self.job.blobs.has(digest) for digest in digests.values())

    def make(self) -> dict[str, Any]:
        job, digests = self.job, {}
        copied = tuple(nearest.path for nearest in self._nearest)
        growth, modules = Growth(self._before.grid, job.grid, copied), job.grid.modules()
        with job.display.stage("genesis") as progress:
            for number, state in enumerate(growth.states(self._before.load), 1):
                file = self.folder / "state"
                write_state(state, file)
                digests[state.module] = job.blobs.add_file(file, move=True)
                progress.update(number, len(modules), "modules")
        if given_up := growth.unused():
            shown = f"{', '.join(given_up[:6])}{' ...' if len(given_up) > 6 else ''}"
            job.display.say(
                f"{len(given_up)} modules of the old run are not taken over, because the new grid "
                f"has no place for them: {shown}"
            )
        return {"sha256": job.blobs.add_bytes(canonical_json(digests))}
