"""Rows of a data set of the Hugging Face Hub, of a folder like one, or of `save_to_disk`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import fsspec

from dipaco.base.errors import CorpusError, StorageError
from dipaco.base.files import missing_content, set_by

from .rows import Row, TextUnit, form_of, rows_of

# What `save_to_disk` of a data set writes, and of one with several splits.
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"


def hub_rows(
    hub: str,
    configuration: str | None,
    revision: str | None,
    split: str,
    fields: Collection[str],
    unit: TextUnit,
) -> Iterator[Row]:
    """Yield the rows of a split, of which `fields` are read.

    Raises CorpusError, and whatever `datasets` raises.
    """
    if (saved := _saved_folder(Path(hub), split)) is not None:
        names = [str(path) for path in sorted(saved.glob("*.arrow"))]
    else:
        # Slow to import, and only preparation reads the Hub.
        import datasets

        # What it would say is in the error that follows.
        datasets.logging.set_verbosity(logging.CRITICAL)
        try:
            builder = datasets.load_dataset_builder(hub, configuration, revision=revision)
        except OSError as error:
            cache, at = Path(datasets.config.HF_DATASETS_CACHE), Path(str(error.filename or "-"))
            if not (cache.is_relative_to(at) or at.is_relative_to(cache)):
                raise
            raise StorageError(
                f"cannot use {at}: {error.strerror}; the cache of data sets is to be "
                f"{cache}{set_by(cache)}, give another folder with HF_HOME"
            ) from None
        files = builder.config.data_files or {}
        names = [str(name) for name in files.get(split, ())]
        if not names or not all(map(form_of, names)):
            # Other forms, and splits that only `datasets` understands.
            rows: Any = datasets.load_dataset(
                hub, configuration, split=split, revision=revision, streaming=True
            )
            yield from rows
            return
    for name in names:
        path = Path(name)
        if (reason := missing_content(path)) is not None:
            raise CorpusError(f"{path} {reason}")
        yield from rows_of(name, fsspec.open(name, "rb").open, fields, unit)


def _saved_folder(folder: Path, split: str) -> Path | None:
    """Return the folder with a split that `save_to_disk` has written, None if it has not."""
    if (folder / _SAVED_SPLITS).is_file() and (folder / split / _SAVED).is_file():
        return folder / split
    if not (folder / _SAVED).is_file():
        return None
    if split != "train":
        raise CorpusError(
            f"{folder} holds one data set without splits, not '{split}'; leave the split out"
        )
    return folder
