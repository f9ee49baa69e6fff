"""The GGUF files of paths, written from a run's newest states for llama.cpp's servers.

One thread uses all of this, because a source belongs to one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from dipaco.inference.export.adapter_gguf import write_adapter_gguf
from dipaco.inference.export.path_gguf import GGUF_TYPES, check_gguf, write_gguf
from dipaco.inference.sources import StateSource, path_states
from dipaco.modules.state import ModuleState
from dipaco.protocol.config import ModelConfig

# Bytes of a number in each form; in q8_0, 32 of them share a scale.
_BYTES: Final = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}
# Memory of a process of llama.cpp, and of what it computes in.
_SERVER_BYTES: Final = 64 * 2**20


@dataclass(frozen=True)
class PathStates:
    """Which states a path was put together from, as a client is shown them."""

    digests: tuple[str, ...]
    """The digests of its modules' states."""
    modules: tuple[Mapping[str, Any], ...]
    """The name of each module, and the version and digest of its state."""

    @property
    def short(self) -> str:
        """Twelve digits that name these states."""
        return "".join(digest[: max(1, 12 // len(self.digests))] for digest in self.digests)[:12]


@dataclass(frozen=True)
class PathFile:
    """A path on disk, as llama.cpp opens it."""

    path: int
    number: int
    """The number of this file among those that were written."""
    states: PathStates
    model: Path
    adapter: Path | None
    """In a run with adapters, the path's adapter for the `model`, which all paths share."""

    def remove(self) -> None:
        """Remove what only this path has."""
        (self.adapter or self.model).unlink(missing_ok=True)


@dataclass(frozen=True)
class Looked:
    """What a look for newer states found."""

    changed: frozenset[int]
    """Paths that have other states now."""
    troubles: tuple[str, ...]
    """Why what is served may be old, a line each."""


class GgufFiles:
    """Writes paths to `folder`, with matrices as `dtype`, a key of `GGUF_TYPES`.

    Raises ConfigurationError if llama.cpp cannot compute the run's model or cut its texts.
    """

    def __init__(self, source: StateSource, dtype: str, folder: Path) -> None:
        self._source = source
        self._stored = GGUF_TYPES[dtype]
        self._folder = folder
        self._tokenizer = source.blob(source.plan.blobs.tokenizer)
        # A server allows a text as many tokens as its file says, and no more.
        self._model = source.model.model_copy(update={"context_length": None})
        self._base: Path | None = None
        self._written = 0
        check_gguf(self._model, self._tokenizer)

    def write(self, path: int) -> PathFile:
        """Write the newest states of a path. Raises what `path_states` does, and StorageError."""
        try:
            states = path_states(self._source, path)
            tensors = {
                name: view
                for state in states.values()
                for name, view in state.layout.views(state.parameters).items()
            }
            self._written += 1
            file = self._folder / f"path-{path}-{self._written}.gguf"
            adapters = self._model.adapters
            if adapters is None:
                self._write_whole(tensors.items(), file)
                return PathFile(path, self._written, _shown(states), file, None)
            base = self._write_base()
            alpha, stored = adapters.scale * adapters.rank, self._stored
            write_adapter_gguf(tensors, alpha, self._model, file, stored=stored, name=file.stem)
            return PathFile(path, self._written, _shown(states), base, file)
        finally:
            self._source.drop_states()

    def look_again(self, served: Mapping[int, PathStates]) -> Looked:
        """Look for newer states of what is served. Raises nothing: what is there is served on."""
        try:
            self._source.look_again()
            changed = {p for p, own in served.items() if self._source.digests(p) != own.digests}
            return Looked(frozenset(changed), self._source.troubles())
        except Exception as error:
            line = f"the states could not be looked at again: {error}"
            return Looked(frozenset(), (line,))
        finally:
            self._source.drop_states()

    def _write_base(self) -> Path:
        """Return the file of the base, written when it is first needed."""
        if self._base is None:
            file = self._folder / "base.gguf"
            self._write_whole(self._source.base_model(torch.device("cpu")).iterate_whole(), file)
            self._base = file
        return self._base

    def _write_whole(self, tensors: Iterable[tuple[str, torch.Tensor]], file: Path) -> None:
        write_gguf(
            tensors,
            self._model,
            self._tokenizer,
            file,
            stored=self._stored,
            name=file.stem,
        )


def _shown(states: Mapping[str, ModuleState]) -> PathStates:
    def shown() -> Iterator[Mapping[str, Any]]:
        for module, state in states.items():
            yield {"module": module, "version": state.version, "digest": state.digest}

    return PathStates(tuple(state.digest for state in states.values()), tuple(shown()))


def server_bytes(model: ModelConfig, parameters: int, dtype: str, slots: int) -> int:
    """Return about how much memory a path's server takes for so many parameters of its own."""
    stored = GGUF_TYPES[dtype]
    each = 4 if stored == "f32" else 2
    cached = 2 * model.block_count * model.kv_heads * model.width_of_head * model.sequence_length
    return int(_BYTES[stored] * parameters) + each * cached * slots + _SERVER_BYTES
