"""Writing a path as a folder that `transformers` loads: an ordinary small Llama or Qwen.

A folder appears whole or not at all, and notes in `dipaco.json` what it was made of, so an export
that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch

from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.base.files import atomic_write, link_or_copy, storage_errors
from dipaco.inference.sources import StateSource, assemble_path, path_states
from dipaco.modules.llama import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, llama_config
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import EMBEDDING, HEAD, PathModel
from dipaco.protocol.config import ModelConfig
from dipaco.protocol.plan import RunPlan
from dipaco.routing.tokens.tokenizer import Tokenizer

from .adapter_peft import Rounding, RoundingMeter
from .form import ExportForm, name_of
from .path_gguf import check_gguf, gguf_name, modelfile, write_gguf
from .tokenizer_files import (
    file_rows,
    generation_settings,
    json_bytes,
    special_numbers,
    tokenizer_files,
)

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
GENERATION_FILE = "generation_config.json"
PROVENANCE_FILE = "dipaco.json"
PROVENANCE_FORMAT = "dipaco-export/1"

Readme = Callable[[int], str]


class Exporter:
    """Writes paths of one source, all in the same way, one in memory at a time.

    Adapters are merged into their base (`AdapterExporter` writes them by themselves).
    With `share_in`, a folder, parameters of a module that several paths have are stored there once
    and hard-linked into their folders; a GGUF is one file in any case. The base is no GGUF.
    Raises ConfigurationError if the run's tokenizer cannot be written in this form with its ids.
    """

    def __init__(
        self, source: StateSource, form: ExportForm, *, share_in: Path | None = None
    ) -> None:
        self.source = source
        self._form = form
        self._is_merged = source.plan.model.adapters is not None
        self.rounding: Rounding | None = None
        """What storing the last path lost, if adapters were merged into it."""
        self._share_in = share_in if form.gguf is None and not self._is_merged else None
        self._linked: set[str] = set()
        self._model: PathModel | None = None
        tokenizer = source.blob(source.plan.blobs.tokenizer)
        self._rows = file_rows(tokenizer, source.plan.model.vocabulary_size)
        self._files = checkpoint_files(
            source.plan.model, tokenizer, form.dtype, form.exact_tokenizer
        )
        self._tokenizer = tokenizer
        if form.gguf is not None:
            check_gguf(source.plan.model, tokenizer)

    def write_path(self, path: int, folder: Path, readme: Readme | None = None) -> bool:
        """Write a path to `folder`; False if the same export of it lies there already.

        An older export of the same path is replaced, and of the same one the README. Raises
        ConfigurationError if there is anything else in the folder, and what `assemble_path` raises.
        """
        states = path_states(self.source, path)
        provenance = self._provenance(path, states)
        self._linked |= {self._shared_file(state) for state in states.values()}

        def fill(staging: Path) -> None:
            if self._form.gguf is not None:
                self._write_gguf(path, staging, self._form.gguf)
                return
            if self._share_in is not None:
                self._link_modules(states, staging)
            else:
                self._save_whole(path, staging)
            for name, content in self._files.items():
                (staging / name).write_bytes(content)

        is_new = write_export(folder, provenance, fill, readme and (lambda: readme(path)))
        self.source.forget(path)
        return is_new

    def write_base(self, folder: Path, readme: str | None = None) -> bool:
        """Write the base model, whose features the router sees: always in fp32, and with what the
        run added to its tokenizer, so that a document has the tokens that it had in the run."""
        plan = self.source.plan
        provenance = {
            "format": PROVENANCE_FORMAT,
            "run": plan.run_id,
            "base": plan.blobs.base,
            "dtype": "float32",
            "tokenizer": "exact" if self._form.exact_tokenizer else "sentencepiece",
        }
        if read_provenance(folder) == provenance:
            return False
        check_replaceable(folder, {"format": PROVENANCE_FORMAT, "run": plan.run_id})
        model = self.source.base_model(torch.device("cpu"))
        with whole_folder(folder) as staging:
            rows = file_rows(self._tokenizer, plan.model.vocabulary_size, as_in_run=True)
            save_parameters(model.iterate_whole(), staging, torch.float32, rows=rows)
            files = checkpoint_files(
                plan.model,
                self._tokenizer,
                torch.float32,
                self._form.exact_tokenizer,
                as_in_run=True,
            )
            for name, content in files.items():
                (staging / name).write_bytes(content)
            write_notes(staging, provenance, readme)
        return True

    def remove_unused_modules(self) -> None:
        """Remove shared files that no path of this object has: of older states."""
        if self._share_in is not None and self._share_in.is_dir():
            with storage_errors(self._share_in):
                for file in self._share_in.glob("*.safetensors"):
                    if file.name not in self._linked:
                        file.unlink()

    def _provenance(self, path: int, states: Mapping[str, ModuleState]) -> dict[str, Any]:
        """Return what a folder of this path is made of."""
        return path_provenance(
            self.source.plan,
            path,
            states,
            dtype=self._form.dtype_name,
            tokenizer="exact" if self._form.exact_tokenizer else "sentencepiece",
            **({"gguf": self._form.gguf} if self._form.gguf else {}),
        )

    def _write_gguf(self, path: int, folder: Path, gguf: str) -> None:
        plan = self.source.plan
        self._model = assemble_path(self.source, path, model=self._model)
        self.source.forget(path)
        file = folder / gguf_name(plan.name, path, gguf)
        parameters = dict(self._model.named_parameters())
        write_gguf(parameters, plan.model, self._tokenizer, file, stored=gguf, name=file.stem)
        template = Tokenizer(self._tokenizer).chat_template
        content = modelfile(file.name, plan.model.context, template is not None)
        (folder / "Modelfile").write_text(content, encoding="utf-8")

    def _link_modules(self, states: Mapping[str, ModuleState], folder: Path) -> None:
        """Write a path's modules as shards of a checkpoint, each stored once for all paths."""
        weight_map: dict[str, str] = {}
        for index, state in enumerate(states.values()):
            shard = f"model-{index + 1:05d}-of-{len(states):05d}.safetensors"
            self._link(state, folder, shard)
            weight_map |= dict.fromkeys(state.layout.names, shard)
        rows = self.source.plan.model.vocabulary_size
        cut = 0 if self._rows is None else rows - len(self._rows)
        names = [name for state in states.values() for name in state.layout.names]
        cut *= sum(name in (EMBEDDING, HEAD) for name in names)
        values = sum(state.layout.size for state in states.values())
        total = self._form.dtype.itemsize * (values - cut * self.source.plan.model.hidden_size)
        index_content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index_content)

    def _shared_file(self, state: ModuleState) -> str:
        """Return the name under which a module's parameters are stored for all paths."""
        return f"{state.module}-{state.digest[:16]}-{self._form.dtype_name}.safetensors"

    def _link(self, state: ModuleState, folder: Path, shard: str) -> None:
        assert self._share_in is not None
        parameters = state.layout.views(state.parameters)
        if len(self.source.grid.paths_of_module(state.module)) == 1:
            self._save(parameters.items(), folder, shard)
            return
        stored = self._share_in / self._shared_file(state)
        with storage_errors(self._share_in):
            self._share_in.mkdir(parents=True, exist_ok=True)
            if not stored.is_file():
                partial = f".{stored.name}.tmp"
                self._save(parameters.items(), self._share_in, partial)
                os.replace(self._share_in / partial, stored)
        link_or_copy(stored, folder / shard)

    def _save(
        self, parameters: Iterable[tuple[str, torch.Tensor]], folder: Path, name: str = WEIGHTS_FILE
    ) -> None:
        save_parameters(parameters, folder, self._form.dtype, name, rows=self._rows)

    def _save_whole(self, path: int, folder: Path) -> None:
        self._model = assemble_path(self.source, path, model=self._model)
        parameters, base = self._model.iterate_whole(), self._model.base
        if base is None:
            self._save(parameters, folder)
            return
        meter = RoundingMeter(base.weights, self._form.dtype)
        self._save(meter.passing(parameters), folder)
        self.rounding = meter.rounding()


def write_export(
    folder: Path,
    provenance: Mapping[str, Any],
    fill: Callable[[Path], None],
    readme: Callable[[], str] | None,
) -> bool:
    """Let `fill` write what `provenance` says into `folder`, with a note of it; False if that lies
    there already, of which only the README is then written again.

    An older export of the same path is replaced. Raises ConfigurationError if there is anything
    else in the folder.
    """
    if read_provenance(folder) == provenance:
        if readme is not None:
            atomic_write(folder / "README.md", readme().encode())
        return False
    check_replaceable(folder, {key: provenance[key] for key in ("format", "run", "path")})
    with whole_folder(folder) as staging:
        fill(staging)
        write_notes(staging, provenance, readme() if readme else None)
    return True


def write_notes(folder: Path, provenance: Mapping[str, Any], readme: str | None) -> None:
    """Write what a folder is made of, and its README."""
    if readme is not None:
        (folder / "README.md").write_text(readme, encoding="utf-8")
    write_json(folder / PROVENANCE_FILE, provenance)


def checkpoint_files(
    model: ModelConfig,
    tokenizer: bytes,
    dtype: torch.dtype,
    exact_tokenizer: bool = True,
    *,
    as_in_run: bool = False,
) -> dict[str, bytes]:
    """Return the small files of a checkpoint, by name: configuration and tokenizer.

    Those of an imported base say what its own said, unless `as_in_run`. Raises ConfigurationError
    as `tokenizer_json` does, unless `exact_tokenizer` is off.
    """
    rows = file_rows(tokenizer, model.vocabulary_size, as_in_run=as_in_run)
    size = model.vocabulary_size if rows is None else len(rows)
    special = special_numbers(tokenizer, as_in_run=as_in_run)
    config = {**llama_config(model, dtype), "vocab_size": size, **special}
    return {
        CONFIG_FILE: json_bytes(config),
        GENERATION_FILE: json_bytes(generation_settings(tokenizer, as_in_run=as_in_run)),
        **tokenizer_files(tokenizer, model.context, exact_tokenizer, as_in_run=as_in_run),
    }


def save_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    dtype: torch.dtype,
    name: str = WEIGHTS_FILE,
    rows: torch.Tensor | None = None,
) -> None:
    """Write named parameters as a safetensors file: the same ones give the same bytes.

    `rows` are the tokens of the run in the order of the tokenizer's file, if that is another.

    Raises ConfigurationError if a parameter is too large for `dtype`, StorageError if the disk is
    full.
    """
    stored = {}
    for key, parameter in parameters:
        if rows is not None and key in (EMBEDDING, HEAD):
            parameter = parameter[rows]
        # Always a copy: parameters of a module are views of one tensor.
        converted = parameter.detach().to("cpu", dtype, copy=True).contiguous()
        if not bool(torch.isfinite(converted).all()):
            raise ConfigurationError(
                f"'{key}' has numbers that {name_of(dtype)} cannot hold; export with "
                f"--dtype bfloat16"
            )
        stored[key] = converted
    with storage_errors(folder):
        try:
            safetensors.torch.save_file(stored, folder / name, metadata={"format": "pt"})
            # Some versions of safetensors write for the owner alone.
            (folder / name).chmod(folder.stat().st_mode & 0o666)
        except safetensors.SafetensorError as error:
            raise StorageError(
                f"cannot write {folder / name}: {error}; free space, or give another --out"
            ) from None


def path_provenance(
    plan: RunPlan, path: int, states: Mapping[str, ModuleState], **how: str
) -> dict[str, Any]:
    """Return what the folder of a path is made of, and `how` it is written."""
    return {
        "format": PROVENANCE_FORMAT,
        "run": plan.run_id,
        "name": plan.name,
        "path": path,
        **how,
        "states": {module: state.digest for module, state in states.items()},
    }


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """Return what a folder says it was made of; None if it is no export."""
    try:
        found = json.loads((folder / PROVENANCE_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def check_replaceable(folder: Path, expected: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless `folder` is missing, empty, or an export of the same."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigurationError(f"--out {folder} is a file; give the name of a new folder")
    if not any(folder.iterdir()):
        return
    found = read_provenance(folder)
    if found is None:
        raise ConfigurationError(
            f"--out {folder} is not empty, and is no export of ours; give a new folder"
        )
    for key, value in expected.items():
        if found.get(key) != value:
            raise ConfigurationError(
                f"--out {folder} holds an export of {key} {found.get(key)!r}, not {value!r}; "
                f"give a new folder"
            )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to fill that becomes `folder` when the body ends well, and vanishes if not.

    What was there before is replaced. Raises ConfigurationError if that is the present folder.
    """
    folder = folder.resolve()  # a link to a folder stays, and what it leads to is replaced
    if folder == Path.cwd():
        raise ConfigurationError(
            f"--out {folder} is the present folder, and cannot be replaced; give one in it"
        )
    parent = folder.parent
    staging, previous = (parent / f".{folder.name}.{suffix}" for suffix in ("new", "old"))
    with storage_errors(parent):
        for left_over in (staging, previous):
            shutil.rmtree(left_over, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            yield staging
            if folder.exists():
                os.replace(folder, previous)
            os.replace(staging, folder)
            shutil.rmtree(previous, ignore_errors=True)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON for people and programs."""
    file.write_bytes(json_bytes(content))
