"""Reading a run's status from the DHT, and then that of the run that continues it."""

from __future__ import annotations

import time
from typing import Any

from dipaco.dht.directory import Directory
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.protocol.admission import Gate
from dipaco.protocol.coverage import whole_scope
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import Identity
from dipaco.protocol.manifest import SignedManifest, newest_run

from .summary import status_of


class RunReader:
    """Reads one run after the other: the successor once nobody is left in a run. One thread."""

    def __init__(self, dht: GuardedDHT, identity: Identity, manifest: SignedManifest) -> None:
        """`manifest` is that of the first run."""
        self._dht, self._identity = dht, identity
        self._open(manifest)

    def _open(self, manifest: SignedManifest) -> None:
        self._manifest, gate = manifest, Gate.of(manifest)
        self._directory = Directory(self._dht, self._identity, manifest.plan.run_id, gate)
        self._directory.manifest = manifest
        plan = manifest.plan
        self._directory.serve(Grid(plan.model, plan.grid, plan.rounds.level_offsets))

    def read(self) -> dict[str, Any]:
        """Read everything once and return the status. Raises `NetworkError`."""
        manifest, directory = self._manifest, self._directory
        plan = manifest.plan
        grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
        view = directory.read_view(plan, grid, time.time(), whole_scope(grid))
        newest = newest_run(manifest, directory.list_manifests())
        successor = newest if newest.plan.run_id != plan.run_id else None
        assert directory.gate is not None
        status = status_of(view, manifest, grid, successor=successor, gate=directory.gate)
        if status["finished"]:
            self._open(newest)
        return status
