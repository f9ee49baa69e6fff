"""A peer's states on disk: the last good one of each module and the one before it.

Each state has a JSON file beside it for people to read. After all peers of a run were gone, the
first to come back serves from here (design 4.6, copies).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dipaco.base.blobs import SharedContent
from dipaco.base.errors import IntegrityError, StorageError
from dipaco.base.files import (
    TEMPORARY_SUFFIX,
    atomic_file,
    atomic_write,
    remove_stale_temporaries,
    storage_errors,
)
from dipaco.protocol.grid import module_name_is_valid

from .layout import ModuleLayout
from .state import (
    ModuleState,
    StateSummary,
    read_state,
    read_state_summary,
    write_state,
)

logger = logging.getLogger(__name__)

# The last one, and the one before it in case that the last was damaged when power failed. An
# optimizer's state belongs to a path: that of this path and of the one before a move.
KEPT_STATES = 2
KEPT_OPTIMIZERS = 2

_STATE_FILE = re.compile(r"(\d{10})-([0-9a-f]{64})\.safetensors")
_OPTIMIZER_FILE = re.compile(r"(\d{10})-path-(\d+)\.pt")


class _Entry(NamedTuple):
    """A file of the store; later saves have greater sequence numbers."""

    sequence: int
    digest: str
    path: Path


class StateStore:
    """`folder/<module>/<sequence>-<digest>.safetensors`; one process writes, others may read."""

    def __init__(self, folder: Path, shared: SharedContent | None = None) -> None:
        """Open the folder; states that other peers of this machine have `shared` are not written
        again."""
        self.folder = Path(folder)
        self.shared = shared
        self._optimizers = self.folder / "optimizers"
        self._unsaved = self.folder / "unsaved"
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        for subfolder in (*self._module_folders(), self._optimizers, self._unsaved):
            remove_stale_temporaries(subfolder)

    def save(self, state: ModuleState) -> Path:
        """Write a state as the last good one, keep the one before, and return its file.

        Saving the newest again does nothing. Raises `StorageError`.
        """
        entries = self._entries(state.module)
        if entries and entries[0].digest == state.digest:
            return entries[0].path
        sequence = entries[0].sequence + 1 if entries else 1
        path = self.folder / state.module / f"{sequence:010d}-{state.digest}.safetensors"
        if self.shared is None or not self.shared.take(state.digest, path):
            write_state(state, path)
            if self.shared is not None:
                self.shared.give(state.digest, path)
        atomic_write(path.with_suffix(".json"), _description(state))
        self._prune(state.module)
        if self.shared is not None:
            self.shared.prune()
        return path

    def lay_down(self, state: ModuleState) -> None:
        """Let a state that is not to be saved lie in a file without a name.

        It takes no memory that way, and the file ends with the process. Raises `StorageError`.
        """
        file = self._unsaved / f".{state.digest}{TEMPORARY_SUFFIX}"
        try:
            write_state(state, file)
            state.rest_on(read_state(file, state.layout, state.digest))
        finally:
            file.unlink(missing_ok=True)

    def load_latest(
        self, module: str, layout: ModuleLayout, *, set_aside: bool = True
    ) -> ModuleState | None:
        """Return the newest state of `module` that is undamaged, or None.

        Damaged files are reported in one warning and set aside as `*.bad`, so that the next save
        does not take them for the last good one. A reader leaves them (`set_aside`).
        """
        damaged = []
        found = None
        for entry in self._entries(module):
            try:
                found = read_state(entry.path, layout, entry.digest, module=module)
                break
            except (IntegrityError, StorageError) as error:
                damaged.append(f"{entry.path.name}: {error}")
                if set_aside:
                    self.set_aside(entry.path, entry.digest)
        if damaged:
            instead = f"version {found.version} is used" if found else "there is no other"
            logger.warning("damaged state of %s (%s); %s", module, "; ".join(damaged), instead)
        return found

    def set_aside(self, file: Path, digest: str) -> None:
        """Keep a damaged file of a state under another name, so that the state can be saved."""
        if self.shared is not None:
            self.shared.forget(digest)
        with contextlib.suppress(OSError):
            file.replace(file.with_suffix(".bad"))

    def load(self, module: str, layout: ModuleLayout, digest: str) -> ModuleState:
        """Return the state of `module` with this digest. Raises `IntegrityError` if it is not here,
        or damaged."""
        for entry in self._entries(module):
            if entry.digest == digest:
                return read_state(entry.path, layout, digest, module=module)
        raise IntegrityError(f"{self.folder} has no state {digest[:16]} of {module}")

    def remove(self, module: str) -> None:
        """Delete all states of a module."""
        with storage_errors(self.folder):
            for entry in self._entries(module):
                entry.path.with_suffix(".json").unlink(missing_ok=True)
                entry.path.unlink(missing_ok=True)

    def newest_digest(self, module: str) -> str | None:
        """Return the digest of the newest state of a module, as its file is named; None of none."""
        entries = self._entries(module)
        return entries[0].digest if entries else None

    def digests(self, module: str) -> tuple[str, ...]:
        """Return the digests of a module's states, as the files are named, the newest first."""
        return tuple(entry.digest for entry in self._entries(module))

    def find(self, digest: str) -> Path | None:
        """Return the file of the state with this digest, for serving it."""
        for folder in self._module_folders():
            for entry in self._entries(folder.name):
                if entry.digest == digest:
                    return entry.path
        return None

    def summaries(self, module: str) -> Sequence[StateSummary]:
        """Return what the headers of a module's states say, the newest first.

        Unreadable ones are left out.
        """
        found = []
        for entry in self._entries(module):
            with contextlib.suppress(IntegrityError, StorageError, OSError):
                found.append(read_state_summary(entry.path))
        return found

    def write_optimizer(self, path: int, state: Mapping[str, Any]) -> Callable[[], None]:
        """Write the optimizer state of `path`, tensor by tensor, so that it may change afterwards.

        The returned function waits for the disk, and makes it the one that is kept; only the
        latest few paths have one. Both raise `StorageError`.
        """
        entries = self._optimizer_entries()
        sequence = entries[0][0] + 1 if entries else 1
        file = self._optimizers / f"{sequence:010d}-path-{path}.pt"
        with contextlib.ExitStack() as stack:
            torch.save(dict(state), stack.enter_context(atomic_file(file)))
            written = stack.pop_all()

        def keep() -> None:
            written.close()
            older = [entry for entry in entries if entry[1] == path]
            others = [entry for entry in entries if entry[1] != path]
            for _, _, old in older + others[KEPT_OPTIMIZERS - 1 :]:
                old.unlink(missing_ok=True)

        return keep

    def load_optimizer(self, path: int) -> dict[str, Any] | None:
        """Return the kept state of `path`, or None; a damaged file is logged and removed."""
        for _, owner, file in self._optimizer_entries():
            if owner != path:
                continue
            try:
                loaded = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises whatever the damage makes it stumble over
                logger.warning("damaged optimizer state %s; starting afresh", file.name)
                logger.debug("it cannot be read: %s", error)
                file.unlink(missing_ok=True)
                continue
            if isinstance(loaded, dict):
                return loaded
        return None

    def _module_folders(self) -> Sequence[Path]:
        with storage_errors(self.folder):
            return sorted(
                folder
                for folder in self.folder.iterdir()
                if folder.is_dir() and module_name_is_valid(folder.name)
            )

    def _entries(self, module: str) -> Sequence[_Entry]:
        """Return the states of a module, the newest first."""
        entries = [
            _Entry(int(match[1]), match[2], file)
            for file, match in _matching(self.folder / module, _STATE_FILE)
        ]
        return sorted(entries, reverse=True)

    def _optimizer_entries(self) -> Sequence[tuple[int, int, Path]]:
        """Return (sequence, path, file), the newest first."""
        return sorted(
            (
                (int(match[1]), int(match[2]), file)
                for file, match in _matching(self._optimizers, _OPTIMIZER_FILE)
            ),
            reverse=True,
        )

    def _prune(self, module: str) -> None:
        """Delete all but the last good states of a module, and files of none."""
        kept = {entry.path.stem for entry in self._entries(module)[:KEPT_STATES]}
        for file in (self.folder / module).iterdir():
            if file.suffix in (".safetensors", ".json", ".bad") and file.stem not in kept:
                file.unlink(missing_ok=True)


def _matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    if not folder.is_dir():
        return
    for file in folder.iterdir():
        if match := pattern.fullmatch(file.name):
            yield file, match


def _description(state: ModuleState) -> bytes:
    """Return what a person wants to know of a state, as JSON."""
    content = {
        "module": state.module,
        "version": state.version,
        "digest": state.digest,
        "tokens": state.tokens,
        "progress": {
            str(path): {
                "tokens": entry.tokens,
                "last_round": entry.last_round,
                "usual": entry.usual,
            }
            for path, entry in state.progress.items()
        },
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return (json.dumps(content, indent=2) + "\n").encode()
