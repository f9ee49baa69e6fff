"""The best paths on disk: one file a path, `best/P00003.safetensors` in a run directory.

A peer keeps those of the paths that it trained and those that it holds a copy of; the simulator
writes the same folder, and the inference tools read it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from .best_path import (
    BestPath,
    best_path_file_name,
    path_of_file_name,
    read_best_path,
    read_best_path_summary,
    write_best_path,
)
from .errors import IntegrityError, StorageError
from .files import remove_stale_temporaries, sha256_of_file, storage_errors
from .grid import Grid
from .score import Score

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldBest:
    """A best path that lies in the folder."""

    path: int
    round_index: int
    score: Score
    sha256: str
    size_bytes: int


class BestPathStore:
    """One best path of every path at most, so disk use is bounded. Thread-safe; one writer.

    Nothing is created before something is held.
    """

    def __init__(self, directory: Path, grid: Grid) -> None:
        self.directory = Path(directory)
        self._grid = grid
        self._lock = threading.Lock()
        self._held: dict[int, HeldBest] = {}

    def load_from_disk(self) -> tuple[HeldBest, ...]:
        """Take up what an earlier life left; files that are none are reported and left alone."""
        if self.directory.is_dir():
            remove_stale_temporaries(self.directory)
            for file in sorted(self.directory.iterdir()):
                path = path_of_file_name(file.name)
                if path is None or path >= self._grid.path_count:
                    continue
                try:
                    self._register(file, path)
                except (IntegrityError, StorageError) as error:
                    logger.warning("best path on disk not used: %s", error)
        return self.all()

    def _register(self, file: Path, path: int) -> None:
        summary = read_best_path_summary(file)
        if summary.path != path:
            raise IntegrityError(f"{file} is of path {summary.path}")
        with storage_errors(self.directory):
            held = HeldBest(
                path,
                summary.round_index,
                summary.score,
                sha256_of_file(file),
                file.stat().st_size,
            )
        with self._lock:
            self._held[path] = held

    def hold(self, best: BestPath) -> HeldBest:
        """Write a best path in place of the one held of its path. Raises `StorageError`."""
        file = self.file(best.path)
        write_best_path(best, file)
        with storage_errors(self.directory):
            size_bytes = file.stat().st_size
        held = HeldBest(best.path, best.round_index, best.score, best.sha256, size_bytes)
        with self._lock:
            self._held[best.path] = held
        return held

    def drop(self, path: int) -> None:
        """Hold none of this path any more."""
        with self._lock:
            self._held.pop(path, None)
        with storage_errors(self.directory):
            self.file(path).unlink(missing_ok=True)

    def get(self, path: int) -> HeldBest | None:
        """Return what is held of a path."""
        with self._lock:
            return self._held.get(path)

    def all(self) -> tuple[HeldBest, ...]:
        """Return everything held, by path."""
        with self._lock:
            return tuple(self._held[path] for path in sorted(self._held))

    def load(self, path: int) -> BestPath | None:
        """Read the best of a path; None when there is none. Raises `IntegrityError`.

        Read from the file, not from what was registered: another process may have written it.
        """
        file = self.file(path)
        return read_best_path(file, self._grid, path=path) if file.is_file() else None

    def find(self, sha256: str) -> Path | None:
        """Return the file of the best path with this hash, for serving it."""
        held = next((held for held in self.all() if held.sha256 == sha256), None)
        return self.file(held.path) if held is not None else None

    def file(self, path: int) -> Path:
        """Return where the best of a path lies or would lie."""
        return self.directory / best_path_file_name(path)
