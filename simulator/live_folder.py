"""A simulation on disk: `live/` while it works there, `round-...` as a checkpoint of one in memory.

    swarm.json                  run, next round, peers, steps per round, optimizer
    anchors/L0.E0               module states, in the format of `dipaco.modules.state`
    workers/00000.safetensors   counters, local parameters and AdamW state of one worker

Files are replaced one by one, each atomically, and each says to which round and version it
belongs. So the folder can be read at any instant, and the simulation goes on from it bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipaco.modules.errors import ConfigurationError, IntegrityError
from dipaco.modules.files import atomic_write

if TYPE_CHECKING:
    from .reference import ReferenceSwarm

SIMULATION_FORMAT = "dipaco-simulation/2"


class LiveFolder:
    """One folder of this form."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.anchors = path / "anchors"
        self.workers = path / "workers"
        self._swarm_file = path / "swarm.json"

    @property
    def exists(self) -> bool:
        """Whether a simulation is in the folder."""
        return self._swarm_file.exists()

    def settings(self) -> dict[str, Any]:
        """Return what the folder says of its simulation. Raises IntegrityError."""
        try:
            settings = json.loads(self._swarm_file.read_bytes())
            if settings["format"] != SIMULATION_FORMAT:
                raise ValueError
            int(settings["next_round"])
        except (OSError, ValueError, KeyError, TypeError):
            raise IntegrityError(
                f"{self.path} is not a checkpoint of this version; remove it"
            ) from None
        return dict(settings)

    def check(self, swarm: ReferenceSwarm) -> int | None:
        """Return the round that the folder's simulation is in; None if the folder holds none.

        Raises ConfigurationError if it is another simulation than `swarm`, IntegrityError if the
        folder cannot be read.
        """
        if not self.exists:
            return None
        settings = self.settings()
        for name, value in _settings(swarm).items():
            if settings.get(name) != value:
                raise ConfigurationError(
                    f"the simulation in {self.path} has {name} {_short(settings.get(name))}, this "
                    f"one {_short(value)}; give the same arguments, or another --out"
                )
        return int(settings["next_round"])

    def save(self, swarm: ReferenceSwarm) -> None:
        """Note what is simulated here and which round comes next. Raises StorageError."""
        settings: Mapping[str, Any] = _settings(swarm) | {"next_round": swarm.next_round}
        atomic_write(self._swarm_file, json.dumps(settings, indent=1).encode())


def _settings(swarm: ReferenceSwarm) -> dict[str, Any]:
    """Return what must be the same when a simulation is resumed."""
    return {
        "format": SIMULATION_FORMAT,
        "run": swarm.plan.run_id,
        "steps_per_round": swarm.steps_per_round,
        "optimizer": swarm.optimizer,
        "peers": [[peer.path, peer.replica, peer.peer] for peer in swarm.peers],
    }


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
