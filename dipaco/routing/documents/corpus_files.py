"""Which files a pattern names. A file whose content is not here is refused, never passed over."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dipaco.base.errors import CorpusError
from dipaco.base.files import missing_content

from .rows import form_of


def matched_files(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that names and patterns mean, in sorted order, each once.

    Raises CorpusError if one of them matches nothing, or a file that is not here.
    """
    found: dict[tuple[int, int], Path] = {}
    for pattern in patterns:
        matches = [Path(pattern)] if os.path.lexists(pattern) else _matches(pattern)
        for path in [*matches, *_dead_links_on_the_way(pattern)]:
            if (reason := missing_content(path)) is not None:
                raise CorpusError(f"{path} {reason}, or name only files that are there")
        files = [path for path in matches if path.is_file()]
        for folder in (path for path in matches if path.is_dir()):
            if str(folder) == pattern or form_of(folder.name) is not None:
                raise CorpusError(
                    f"'{pattern}' names the folder {folder}; name the files in it, for example "
                    f"'{str(folder).rstrip('/')}/**/*.jsonl.gz'"
                )
        if not files:
            folder = Path(pattern).parent
            present = sorted(p.name for p in folder.glob("*") if p.is_file())[:8]
            if not folder.exists():
                holds = f"there is no folder {folder}"
            else:
                holds = f"{folder} holds {', '.join(present) or 'no files'}"
            raise CorpusError(
                f"no file matches '{pattern}'; {holds}. Names in a RUN.toml are relative to its "
                "folder"
            )
        for path in files:
            found.setdefault(identity_of(path), path)
    return list(found.values())


def identity_of(path: Path) -> tuple[int, int]:
    """Return what is equal for two names of one file."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _matches(pattern: str) -> list[Path]:
    return [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]


def _dead_links_on_the_way(pattern: str) -> Iterator[Path]:
    """Yield links to folders that do not exist, in which the pattern would look for files."""
    for parent in Path(pattern).parents:
        if not glob.has_magic(str(parent)):
            return
        for path in map(Path, glob.iglob(str(parent), recursive=True)):
            # What has an ending is a file, which does not matter here.
            if not re.search(r"\.\w+$", path.name) and path.is_symlink() and not path.exists():
                yield path
