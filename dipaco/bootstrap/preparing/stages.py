"""What the stages of a preparation have in common: when one is done, and what it leaves."""

from __future__ import annotations

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel

from dipaco.base.blobs import BlobStore
from dipaco.base.files import atomic_write, canonical_json, json_object, storage_errors
from dipaco.bootstrap.prepare_output import Display
from dipaco.bootstrap.run_config import RunConfig
from dipaco.protocol.grid import Grid
from dipaco.routing.run_folder import RunFolder

from .predecessor import WORK_FOLDER, Predecessor
from .workers import Workers

# Raise it when a stage would give other results for the same inputs.
_STAGES_VERSION = 4
_MADE = "made.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is prepared, and how: a run, a run that continues another one (`before`), or one that is
    the run before with paths more, if its grid has more added paths."""

    config: RunConfig
    out: Path
    device: torch.device
    display: Display
    before: Predecessor | None = None
    workers: Workers = field(default_factory=Workers)
    """What tokenises, routes and scores."""
    operator_key: Path | None = None
    """The file of the operator's key. By default it is `operator.pem` in the run folder, which is
    made if it is missing, or in the folder of the run before."""
    start_in_s: float | None = None
    """Seconds from now until round 0 begins; by default it begins at once."""
    admission: Literal["open", "invitation"] | None = None
    """Whether everybody may join, or peers with an invitation. By default a successor has what the
    run before it has, and a new run is open."""
    replace: bool = False
    """Whether another run that the run folder holds is given up."""

    @property
    def work(self) -> Path:
        """Where the stages leave what is not part of the run."""
        return self.out / WORK_FOLDER

    @property
    def blobs(self) -> BlobStore:
        return RunFolder(self.out).blobs

    @property
    def grid(self) -> Grid:
        config = self.config
        return Grid(config.model, config.grid, config.rounds.level_offsets)

    @property
    def grown(self) -> Predecessor | None:
        """The run that paths are added to; None of any other run."""
        before = self.before
        is_grown = before and self.config.grid.added_paths > before.plan.grid.added_paths
        return before if is_grown else None


class Stage(ABC):
    """One stage of a preparation.

    What it makes lies in a folder named by the hash of its inputs, so nothing that was half made
    of other inputs is ever taken for its own; a file that is written there last says that it is
    done. Blobs that it names must still be there. A stage that is asked for its outputs is done
    first, and so are those that it depends on.
    """

    name: ClassVar[str]

    def __init__(self, job: Job, part: str = "") -> None:
        """`part` tells stages of one name apart."""
        self.job = job
        self.part = part

    @abstractmethod
    def inputs(self) -> Sequence[Any]:
        """Return everything that it depends on: plain values and configurations."""

    @abstractmethod
    def make(self) -> dict[str, Any]:
        """Make the outputs and return them as plain values. May be called after a kill at any
        instant. What `sha256` in the name of an output says is a blob."""

    def is_whole(self, outputs: dict[str, Any]) -> bool:
        """Tell whether everything that it made is still there."""
        blobs = [value for name, value in outputs.items() if name.endswith("sha256")]
        return all(self.job.blobs.has(sha256) for sha256 in blobs)

    def tidy(self) -> None:  # noqa: B027 - most have nothing
        """Remove what is no longer needed once it is done."""

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the inputs."""
        return inputs_hash(self.name, *self.inputs())

    @property
    def folder(self) -> Path:
        return self.job.work / f"{self.name}{self.part}" / self.hash[:16]

    @cached_property
    def outputs(self) -> dict[str, Any]:
        """What the stage has made; makes it, unless that is done."""
        outputs = read_made(self.folder)
        if outputs is None or not self.is_whole(outputs):
            with storage_errors(self.folder):
                if self.folder.is_symlink():  # to what is not there any more
                    self.folder.unlink()
                self.folder.mkdir(parents=True, exist_ok=True)
            outputs = self.make()
            if not self.folder.is_symlink():
                atomic_write(self.folder / _MADE, json.dumps(outputs, indent=1).encode())
        self.tidy()
        _remove_others(self.folder)
        return outputs

    @property
    def sha256(self) -> str:
        """The blob that it has made, if it makes one."""
        return str(self.outputs["sha256"])

    def do(self) -> None:
        """Run the stage, unless its outputs are there."""
        _ = self.outputs


def read_made(folder: Path) -> dict[str, Any] | None:
    """Return the outputs of a stage that is done, also in another run folder; else None."""
    return json_object(folder / _MADE)


def _remove_others(folder: Path) -> None:
    """Remove what a stage has made of other inputs."""
    with storage_errors(folder.parent):
        for other in folder.parent.iterdir():
            if other.name == folder.name:
                continue
            if other.is_symlink() or not other.is_dir():
                other.unlink()
            else:
                shutil.rmtree(other)


def inputs_hash(*inputs: Any) -> str:
    """Return the SHA-256 of plain values and configurations."""
    plain = [
        value.model_dump(mode="json") if isinstance(value, BaseModel) else value for value in inputs
    ]
    return hashlib.sha256(canonical_json([_STAGES_VERSION, plain])).hexdigest()
