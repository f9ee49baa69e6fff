"""A simulation on disk, `checkpoint/` of its output folder.

    swarm.json                  run, next round, peers, steps per round, optimizer
    anchors/L0.E0               module states, in the format of `dipaco.modules.state`
    workers/00000.safetensors   counters, local parameters and AdamW state of one worker
    workers/00000.lost.L0.E0    what the encoding of its last contribution to a module lost

Files are replaced one by one, each atomically, and each names its round and version. So the folder
can be read at any instant, and a simulation continues from it bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.base.files import atomic_write

SIMULATION_FORMAT = "dipaco-simulation/3"
_METADATA = "worker"
_TENSOR = "tensor"


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

    def check(self, identity: Mapping[str, Any]) -> int | None:
        """Return the round that the folder's simulation is in; None if the folder holds none.

        Raises ConfigurationError if it is another simulation than `identity` says, IntegrityError
        if the folder cannot be read.
        """
        if not self.exists:
            return None
        settings = self.settings()
        for name, value in identity.items():
            if settings.get(name) != value:
                raise ConfigurationError(
                    f"the simulation in {self.path} has {name} {_short(settings.get(name))}, this "
                    f"one {_short(value)}; give the same arguments, or another --out"
                )
        return int(settings["next_round"])

    def save(self, identity: Mapping[str, Any], next_round: int) -> None:
        """Note what is simulated here and which round comes next. Raises StorageError."""
        settings = {"format": SIMULATION_FORMAT, **identity, "next_round": next_round}
        atomic_write(self._swarm_file, json.dumps(settings, indent=1).encode())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def worker_file(folder: Path, number: int) -> Path:
    """Return the file of the worker with this number."""
    return folder / f"{number:05d}.safetensors"


def lost_file(folder: Path, number: int, module: str) -> Path:
    """Return the file of what the encoding of a worker's last contribution lost."""
    return folder / f"{number:05d}.lost.{module}"


def write_worker(
    file: Path,
    notes: Mapping[str, Any],
    local: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any] | None,
) -> None:
    """Write a worker: plain `notes`, flat local parameters by module, `InnerLoop.state_dict`.

    Raises StorageError on a full disk.
    """
    tensors = {f"local/{module}": flat for module, flat in local.items()}
    structure = _taken_apart(optimizer, tensors, "optimizer")
    metadata = json.dumps({"notes": notes, "optimizer": structure})
    atomic_write(file, safetensors.torch.save(tensors, metadata={_METADATA: metadata}))


def write_lost(file: Path, lost: torch.Tensor) -> None:
    """Write what the encoding of a contribution lost. Raises StorageError."""
    atomic_write(file, safetensors.torch.save({"lost": lost}))


def read_lost(file: Path) -> torch.Tensor:
    """Read what `write_lost` wrote. Raises IntegrityError for a broken file."""
    try:
        return safetensors.torch.load(file.read_bytes())["lost"]
    except (OSError, safetensors.SafetensorError, KeyError) as error:
        raise IntegrityError(f"{file} is broken: {error}; remove it") from None


def read_notes(file: Path) -> dict[str, Any]:
    """Return the notes of a worker. Raises IntegrityError for a broken file."""
    with _opened(file) as (_, metadata):
        return dict(metadata["notes"])


def read_local(file: Path, module: str) -> torch.Tensor | None:
    """Return the local parameters of one module, flat fp32; None if the file has none of it.

    Raises IntegrityError for a broken file.
    """
    name = f"local/{module}"
    with _opened(file) as (handle, _):
        return handle.get_tensor(name) if name in set(handle.keys()) else None


def read_luggage(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """Return all local parameters and the AdamW state. Raises IntegrityError for a broken file."""
    with _opened(file) as (handle, metadata):
        local = {
            name.removeprefix("local/"): handle.get_tensor(name)
            for name in handle.keys()  # noqa: SIM118 - it is no mapping
            if name.startswith("local/")
        }
        return local, _put_together(metadata["optimizer"], handle)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    try:
        with safetensors.safe_open(file, framework="pt", device="cpu") as handle:
            yield handle, json.loads(handle.metadata()[_METADATA])
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{file} is broken ({type(error).__name__}: {error}); remove its checkpoint to start "
            f"from the saved module states with fresh optimizer states"
        ) from None


def _taken_apart(value: Any, tensors: dict[str, torch.Tensor], name: str) -> Any:
    """Move the tensors in `value` to `tensors` and return the rest as plain JSON."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        # As pairs, because the keys of AdamW's state are numbers.
        return {
            "mapping": [
                [key, _taken_apart(item, tensors, f"{name}/{key}")] for key, item in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        return [_taken_apart(item, tensors, f"{name}/{i}") for i, item in enumerate(value)]
    return value


def _put_together(value: Any, handle: Any) -> Any:
    if isinstance(value, list):
        return [_put_together(item, handle) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return handle.get_tensor(value[_TENSOR])
    return {key: _put_together(item, handle) for key, item in value["mapping"]}
