"""Exporting a whole run: every path, what routes to them, and a model card.

README.md           the model card, with the figures
plan.json           the plan of the run, as its operator signed it
paths/00000 ...     every path, a folder for transformers
modules/            parameters that several paths have in common (hard links)
router/             router.safetensors, base/, routing.json, how to route

Of a run with adapters a path is a folder for PEFT (or a file for llama.cpp), the base is not
written, and router/route.py finds the adapter for a text without dipaco.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dipaco.base.errors import StorageError
from dipaco.base.files import atomic_write, storage_errors
from dipaco.base.progress import each
from dipaco.inference.sources import StateSource
from dipaco.modules.frozen_file import base_parameter_count
from dipaco.modules.layout import parameter_counts
from dipaco.protocol.grid import Grid
from dipaco.routing.routers.kinds import load_router
from dipaco.routing.tokens.tokenizer import is_json

from .adapter_exporter import AdapterExporter, open_exporter
from .form import ExportForm
from .model_card import CardNotes, model_card
from .path_exporter import (
    PROVENANCE_FILE,
    PROVENANCE_FORMAT,
    Exporter,
    check_replaceable,
    read_provenance,
)
from .router_readme import (
    RUN_TOKENIZER,
    adapter_router_readme,
    router_readme,
    routing_figures,
)
from .standalone_router import write_standalone_router
from .tokenizer_files import json_bytes

# This much of the disk is left free: filling it to the last byte would harm others.
_SPARE_BYTES = 2**26
_OF_CHATS = """
This run learned from chats. A chat is routed by the first turn of the user alone: `text` is that
turn, without the words of the chat template.
"""


def export_all(
    source: StateSource,
    out: Path,
    form: ExportForm,
    *,
    notes: CardNotes,
    evaluation: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write every path of a run, its router and a model card to the folder `out`.

    Modules that paths have in common are stored once. What an earlier call wrote of the same
    states is kept.

    Raises StorageError if the disk is too small, before anything is written, and what
    `assemble_path` raises if a module has no state.
    """
    plan, grid = source.plan, source.grid
    check_replaceable(out, {"format": PROVENANCE_FORMAT, "run": plan.run_id, "paths": "all"})
    check_space(source, out, form, say=say)
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    marker = {"format": PROVENANCE_FORMAT, "run": plan.run_id, "name": plan.name, "paths": "all"}
    atomic_write(out / PROVENANCE_FILE, json_bytes(marker))
    base, share_in = notes.base_model, out / "modules"
    exporter = open_exporter(source, form, base=base, share_in=share_in)

    def card(path: int | None = None) -> str:
        return model_card(
            source,
            notes,
            form,
            path=path,
            rounding=exporter.rounding,
            evaluation=evaluation,
        )

    for path in each(range(grid.path_count), say, lambda path: f"writing path {path}"):
        is_new = exporter.write_path(path, path_folder(out, path), card)
        if not is_new:
            say(f"path {path} was there already")
    if isinstance(exporter, Exporter):
        exporter.remove_unused_modules()
    _write_router(source, out / "router", exporter)
    atomic_write(out / "plan.json", json_bytes(plan.model_dump(mode="json")))
    atomic_write(out / "README.md", card().encode())


def path_folder(out: Path, path: int) -> Path:
    """Return where a path lies in an export of all."""
    return out / "paths" / f"{path:05d}"


def export_bytes(
    grid: Grid,
    dtype: torch.dtype,
    *,
    shared: bool,
    whole: bool = True,
    paths: int | None = None,
) -> int:
    """Return about how many bytes an export of `paths` paths (all) takes, with the base model if
    paths are `whole`, not adapters alone."""
    counts = parameter_counts(grid)
    count = grid.path_count if paths is None else paths
    if not whole:
        return dtype.itemsize * counts["path"] * count
    if grid.model.adapters is not None:
        return (dtype.itemsize * count + 4) * base_parameter_count(grid.model)
    stored = counts["shared"] + counts["private"] * count if shared else counts["path"] * count
    return dtype.itemsize * stored + 4 * counts["path"]


def check_space(
    source: StateSource,
    out: Path,
    form: ExportForm,
    *,
    say: Callable[[str], None],
) -> None:
    """Say how large the export will be. Raises StorageError if the disk is too small for it."""
    grid, dtype, whole = source.grid, form.dtype, not form.adapters_alone
    shared = form.gguf is None and grid.model.adapters is None
    there = 0
    for path in range(grid.path_count):
        found = read_provenance(path_folder(out, path)) or {}
        there += (found.get("run"), found.get("dtype")) == (source.plan.run_id, form.dtype_name)
    needed = export_bytes(grid, dtype, shared=shared, whole=whole, paths=grid.path_count - there)
    free = _free_bytes(out)
    is_merged = whole and grid.model.adapters is not None
    count = base_parameter_count(grid.model) if is_merged else parameter_counts(grid)["path"]
    each = dtype.itemsize * count
    say(
        f"{grid.path_count} paths of {_size(each)} as {form.dtype_name}"
        f"{', shared modules stored once' if shared else ''}"
        f"{f', {there} of them already there' if there else ''}: {_size(needed)} to write, "
        f"{_size(free)} free in {out}"
    )
    if needed + _SPARE_BYTES > free:
        raise StorageError(
            f"disk too small: the export needs {_size(needed)}, and {out} has {_size(free)} free; "
            f"give another --out, --dtype bfloat16 for half of it, or --path P for one path"
        )


def _free_bytes(folder: Path) -> int:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    with storage_errors(existing):
        return shutil.disk_usage(existing).free


def _write_router(source: StateSource, folder: Path, exporter: Exporter | AdapterExporter) -> None:
    """Write what finds the path of a text, with figures on how evenly it did so."""
    plan, data = source.plan, source.blob(source.plan.blobs.router)
    router = load_router(data)
    note = _OF_CHATS if source.shard_index().marked else ""
    atomic_write(folder / "router.safetensors", data)
    atomic_write(folder / "routing.json", json_bytes(routing_figures(source.shard_index())))
    if isinstance(exporter, AdapterExporter):
        names = [path_folder(Path(), path).as_posix() for path in range(source.grid.path_count)]
        is_alone = write_standalone_router(router, plan, folder, exporter.base, names)
        readme = adapter_router_readme(router, plan.routing.prefix_tokens, is_alone)
        atomic_write(folder / "README.md", (readme + note).encode())
        return
    exporter.write_base(folder / "base")
    tokenizer = source.blob(source.plan.blobs.tokenizer)
    if is_json(tokenizer):
        atomic_write(folder / RUN_TOKENIZER, tokenizer)
    readme = router_readme(router, plan.routing.prefix_tokens, renumbered=is_json(tokenizer))
    atomic_write(folder / "README.md", (readme + note).encode())


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
