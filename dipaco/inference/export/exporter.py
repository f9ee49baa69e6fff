"""Writing paths of a run for other tools, in one form (`ExportForm`).

The steps are the same for a whole path and for adapters, whatever the form: the states of the
path's modules are loaded, made into tensors with the names of a checkpoint, and written. Beside
them stand the files that the tool needs, a model card, and a note of what everything was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from dipaco.base.files import link_or_copy
from dipaco.inference.sources import StateSource, assemble_path, path_states
from dipaco.modules.llama import WEIGHTS_FILE
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer

from .adapter_gguf import adapter_modelfile, write_adapter_gguf
from .adapter_peft import write_peft
from .checkpoint import (
    GENERATION_FILE,
    checkpoint_files,
    save_tensors,
    without_padding,
    write_index,
)
from .export_folder import note_of, read_note, whole_folder
from .form import ExportForm
from .model_card import model_card
from .path_gguf import GGUF_TYPES, check_gguf, gguf_name, modelfile, write_gguf
from .rounding import Rounding, RoundingMeter
from .tokenizer_files import ends_unsaid_by_base, generation_settings, json_bytes


class Exporter:
    """Writes paths of one source in one form, one in memory at a time.

    Raises ConfigurationError if llama.cpp cannot do what a GGUF would ask of it.
    """

    def __init__(self, source: StateSource, form: ExportForm) -> None:
        plan = self._plan = source.plan
        self.source, self.form = source, form
        self.tokenizer = source.blob(plan.blobs.tokenizer)
        self.dtype: torch.dtype = getattr(torch, "float32" if form.format == "gguf" else form.dtype)
        adapters = plan.model.adapters
        self._alpha = 0.0 if adapters is None else adapters.scale * adapters.rank
        self._model: PathModel | None = None
        self._shards: dict[tuple[str, str], Path] = {}
        """The file of each module and digest of the paths written so far."""
        if form.format == "gguf":
            check_gguf(plan.model, None if self.form.is_adapter else self.tokenizer)

    def write_path(self, path: int, folder: Path, *, shares: bool = False) -> bool:
        """Write a path to `folder`; False if the same export of it lies there already.

        An older export of the same path is replaced. If it `shares`, each module is a file of its
        own, and one that was written for another path is a hard link to that (a copy, where there
        are none).

        Raises ConfigurationError if there is anything else in the folder, and what `path_states`
        raises.
        """
        states = path_states(self.source, path)
        digests = {module: state.digest for module, state in states.items()}
        note = note_of(self._plan, path, form=asdict(self.form), states=digests)
        is_new = read_note(folder) != note
        if is_new:
            with whole_folder(folder, note) as staging:
                rounding = self._write_weights(path, states, staging, shares)
                card = model_card(self.source, self.form, path=path, rounding=rounding)
                (staging / "README.md").write_text(card, encoding="utf-8")
        for number, key in enumerate(digests.items(), start=1):
            file = folder / _shard_name(number, len(digests))
            if file.is_file():  # one that lay there already may be of an export of this path alone
                self._shards[key] = file
        self.source.forget(path)
        return is_new

    def _write_weights(
        self, path: int, states: Mapping[str, ModuleState], folder: Path, shares: bool
    ) -> Rounding | None:
        """Write a path's tensors, and the small files that a tool wants beside them; return what
        was lost, if adapters were merged."""
        tensors: dict[str, torch.Tensor] = {}
        for state in states.values():
            tensors |= state.layout.views(state.parameters)
        if self.form.format == "gguf":
            self._write_gguf(path, tensors, folder)
            return None
        if self.form.format == "peft":
            assert self.form.base is not None
            write_peft(tensors, self._alpha, self.form.base, folder, self.dtype)
            if ends_unsaid_by_base(self.tokenizer):
                settings = json_bytes(generation_settings(self.tokenizer))
                (folder / GENERATION_FILE).write_bytes(settings)
            return None
        for name, content in checkpoint_files(self._plan.model, self.tokenizer, self.dtype).items():
            (folder / name).write_bytes(content)
        if self._plan.model.adapters is not None:
            return self._write_merged(path, folder)
        if shares:
            self._write_shards(states, folder)
        else:
            self._save(tensors.items(), folder / WEIGHTS_FILE)
        return None

    def _write_gguf(self, path: int, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write a file for llama.cpp, and one for Ollama that says how to use it."""
        model, stored = self._plan.model, GGUF_TYPES[self.form.dtype]
        file = folder / gguf_name(self._plan.name, path, stored)
        name = file.stem
        if self.form.is_adapter:
            write_adapter_gguf(tensors, self._alpha, model, file, stored=stored, name=name)
            content = adapter_modelfile(file.name)
        else:
            write_gguf(tensors.items(), model, self.tokenizer, file, stored=stored, name=name)
            template = read_tokenizer(self.tokenizer).chat_template
            content = modelfile(file.name, model.context, template is not None)
        (folder / "Modelfile").write_text(content, encoding="utf-8")

    def _write_merged(self, path: int, folder: Path) -> Rounding:
        """Write base and adapters as one checkpoint; sums are made in fp32, one at a time."""
        self._model = assemble_path(self.source, path, model=self._model)
        assert self._model.base is not None
        meter = RoundingMeter(self._model.base.weights, self.dtype)
        self._save(meter.passing(self._model.iterate_whole()), folder / WEIGHTS_FILE)
        return meter.rounding()

    def _write_shards(self, states: Mapping[str, ModuleState], folder: Path) -> None:
        """Write each module of a path as a shard of a checkpoint, or link one that is there."""
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for number, (module, state) in enumerate(states.items(), start=1):
            tensors = state.layout.views(state.parameters)
            shard = _shard_name(number, len(states))
            if (there := self._shards.get((module, state.digest))) is not None:
                link_or_copy(there, folder / shard)
            else:
                self._save(tensors.items(), folder / shard)
            for name, tensor in tensors.items():
                weight_map[name] = shard
                stored = without_padding(name, tensor, self._plan.model)
                total_bytes += self.dtype.itemsize * stored.numel()
        write_index(folder, weight_map, total_bytes)

    def _save(self, tensors: Iterable[tuple[str, torch.Tensor]], file: Path) -> None:
        model = self._plan.model
        kept = ((name, without_padding(name, tensor, model)) for name, tensor in tensors)
        save_tensors(kept, file, self.dtype)


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"
