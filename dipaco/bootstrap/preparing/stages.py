"""Stages of preparation that are skipped when they are already done for the same inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dipaco.base.blobs import BlobStore
from dipaco.base.files import atomic_write, canonical_json
from dipaco.routing.documents.corpus import CorpusConfig, Part, corpus_files

# Raise it when a stage would give other results for the same inputs.
_STAGES_VERSION = 3


def inputs_hash(*inputs: Any) -> str:
    """Return the SHA-256 of what a stage depends on: plain values and configurations."""
    plain = [
        value.model_dump(mode="json") if isinstance(value, BaseModel) else value for value in inputs
    ]
    return hashlib.sha256(canonical_json([_STAGES_VERSION, plain])).hexdigest()


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any], table: str = "") -> list[str]:
    """Return the keys of nested settings whose values differ, as `outer.momentum`."""
    found = []
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differing_keys(before, after, f"{table}{key}.")
        elif before != after:
            found.append(f"{table}{key}")
    return found


def corpus_fingerprint(config: CorpusConfig) -> str:
    """Return a hash that changes when the documents may have changed.

    Of files it is name, size and time of change: reading a large corpus only to hash it would take
    as long as the work that is to be saved. Raises CorpusError if a file is missing.
    """
    files: list[list[Any]] = []
    names: list[tuple[str, Path]]
    if config.hub:
        # A name of the Hub is no folder here, and gives none.
        names = [("hub", path) for path in sorted(Path(config.hub).rglob("*")) if path.is_file()]
    else:
        parts: tuple[Part, Part] = ("train", "validation")
        names = [(part, path) for part in parts for path in corpus_files(config, part)]
    for part, path in names:
        found = path.stat()
        files.append([part, path.name, found.st_size, found.st_mtime_ns])
    return inputs_hash(config.model_dump(mode="json", exclude={"train", "validation"}), files)


class StageMarkers:
    """Remembers for each stage the hash of its inputs and the blobs that it made."""

    def __init__(self, folder: Path, blobs: BlobStore) -> None:
        self._folder = folder
        self._blobs = blobs
        folder.mkdir(parents=True, exist_ok=True)

    def stage(
        self,
        name: str,
        inputs: str,
        make: Callable[[], dict[str, Any]],
        is_whole: Callable[[dict[str, Any]], bool] = lambda outputs: True,
    ) -> dict[str, Any]:
        """Return the outputs of a stage, which are made and noted if they are not there."""
        found = self.done(name, inputs)
        if found is not None and is_whole(found):
            return found
        outputs = make()
        self.mark(name, inputs, outputs)
        return outputs

    def done(self, stage: str, inputs: str) -> dict[str, Any] | None:
        """Return the outputs of a stage that is done for these inputs, else None.

        Outputs whose name ends in `sha256` are blobs, and must still be in the store.
        """
        marker = read_marker(self._path(stage))
        if marker is None:
            return None
        try:
            if marker["inputs"] != inputs:
                return None
            outputs: dict[str, Any] = marker["outputs"]
            blobs = [value for name, value in outputs.items() if name.endswith("sha256")]
        except (KeyError, TypeError, AttributeError):
            return None
        return outputs if all(self._blobs.has(sha256) for sha256 in blobs) else None

    def mark(self, stage: str, inputs: str, outputs: dict[str, Any]) -> None:
        """Note that a stage is done."""
        marker = {"inputs": inputs, "outputs": outputs}
        atomic_write(self._path(stage), json.dumps(marker, indent=2).encode())

    def _path(self, stage: str) -> Path:
        return self._folder / f"{stage}.json"


def read_marker(file: Path) -> dict[str, Any] | None:
    """Return a stage's marker, also of another run folder; None when it cannot be read."""
    try:
        marker = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None
