"""The folder of an export: it appears whole or not at all, and `dipaco.json` in it notes what it
was made of, so that an export that was stopped continues, and nothing else is ever replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import json_object, storage_errors
from dipaco.protocol.plan import RunPlan

from .tokenizer_files import json_bytes

NOTE_FILE = "dipaco.json"
_FORMAT = "dipaco-export/2"
# What must be equal where a folder replaces another.
_IDENTITY = ("format", "run", "part")


def note_of(plan: RunPlan, part: int | str, **content: Any) -> dict[str, Any]:
    """Return a note of what the folder of a `part` of a run (a path, "all", "base") is made of."""
    return {"format": _FORMAT, "run": plan.run_id, "name": plan.name, "part": part, **content}


def read_note(folder: Path) -> dict[str, Any] | None:
    """Return what a folder says it was made of; None if it is no export."""
    return json_object(folder / NOTE_FILE)


def check_replaceable(folder: Path, note: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless `folder` is missing, empty, or an export of the same part."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigurationError(f"--out {folder} is a file; give the name of a new folder")
    if not any(folder.iterdir()):
        return
    found = read_note(folder)
    if found is None:
        raise ConfigurationError(
            f"--out {folder} is not empty, and is no export of ours; give a new folder"
        )
    for key in _IDENTITY:
        if found.get(key) != note[key]:
            raise ConfigurationError(
                f"--out {folder} holds an export of {key} {found.get(key)!r}, not {note[key]!r}; "
                f"give a new folder"
            )


@contextmanager
def whole_folder(folder: Path, note: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `folder` when the body ends well, and vanishes otherwise.

    An older export of the same part is replaced. Raises ConfigurationError if there is anything
    else in the folder, or if it is the present one.
    """
    check_replaceable(folder, note)
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
            (staging / NOTE_FILE).write_bytes(json_bytes(note))
            if folder.exists():
                os.replace(folder, previous)
            os.replace(staging, folder)
            shutil.rmtree(previous, ignore_errors=True)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
