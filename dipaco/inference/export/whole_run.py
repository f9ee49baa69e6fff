"""Exporting a whole run: every path, what routes to them, and a model card.

README.md           the model card
plan.json           the plan of the run, as its operator signed it
paths/00000 ...     every path; modules that several have are hard links to one file
router/             what finds the path of a text, without dipaco
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dipaco.base.errors import StorageError
from dipaco.base.files import atomic_write, spare_bytes, storage_errors
from dipaco.base.progress import each, shown_bytes
from dipaco.modules.frozen_file import base_parameter_count
from dipaco.modules.layout import parameter_counts

from .export_folder import NOTE_FILE, check_replaceable, note_of
from .exporter import Exporter
from .model_card import model_card
from .router_files import write_router
from .tokenizer_files import json_bytes

# Bytes of a number; in q8_0, 32 of them share a scale of two bytes.
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "q8_0": 34 / 32}


def export_run(exporter: Exporter, out: Path, say: Callable[[str], None]) -> None:
    """Write every path of a run, what finds the path of a text, and a model card to `out`.

    What an earlier call wrote of the same states is kept.

    Raises ConfigurationError if there is anything else in the folder, StorageError if the disk is
    too small, before anything is written, and what `Exporter.write_path` raises.
    """
    source, plan = exporter.source, exporter.source.plan
    note = note_of(plan, "all")
    check_replaceable(out, note)
    _check_space(exporter, out, say)
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / NOTE_FILE, json_bytes(note))
    paths = range(source.grid.path_count)
    for path in each(paths, say, lambda path: f"writing path {path}"):
        if not exporter.write_path(path, out / _path_folder(path), shares=True):
            say(f"path {path} was there already")
    write_router(source, out / "router", exporter.form.base, [_path_folder(path) for path in paths])
    atomic_write(out / "plan.json", json_bytes(plan.model_dump(mode="json")))
    atomic_write(out / "README.md", model_card(source, exporter.form).encode())


def _path_folder(path: int) -> str:
    """Return where a path lies in an export of all paths."""
    return f"paths/{path:05d}"


def export_bytes(exporter: Exporter) -> int:
    """Return about how many bytes an export of all paths takes."""
    grid, form = exporter.source.grid, exporter.form
    counts, paths = parameter_counts(grid), grid.path_count
    if grid.model.adapters is not None:
        each = counts["path"] if form.is_adapter else base_parameter_count(grid.model)
        return int(_BYTES[form.dtype] * each * paths)
    stored = counts["total"] if form.format == "transformers" else counts["path"] * paths
    return int(_BYTES[form.dtype] * stored + _BYTES["float32"] * counts["path"])


def _check_space(exporter: Exporter, out: Path, say: Callable[[str], None]) -> None:
    """Say how large the export will be. Raises StorageError if the disk is too small for it."""
    there = {file.stat().st_ino: file.stat().st_size for file in out.rglob("*") if file.is_file()}
    needed = max(0, export_bytes(exporter) - sum(there.values()))
    with storage_errors(out):
        free = max(0, spare_bytes(out))
    say(
        f"{exporter.source.grid.path_count} paths as {exporter.form.dtype}: {shown_bytes(needed)} "
        f"to write, {shown_bytes(free)} free in {out}"
    )
    if needed > free:
        raise StorageError(
            f"disk too small: the export needs {shown_bytes(needed)}, and {out} has "
            f"{shown_bytes(free)} free; "
            f"give another --out, --dtype bfloat16 for half of it, or --path P for one path"
        )
