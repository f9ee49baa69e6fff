"""A peer's states on disk: the last good one of each module and the one before it.

After all peers of a run were gone, the first to come back serves from here (design 4.6, copies).
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from dipaco.base.errors import IntegrityError, StorageError
from dipaco.base.kept_files import KEPT_STATES, KeptFiles, SavedState
from dipaco.protocol.chain.steps import Head

from .layout import ModuleLayout
from .state import ModuleState, StateSummary, read_state, read_state_summary, write_state

logger = logging.getLogger(__name__)

# Another peer of this machine may remove a state just before this one writes down that it has it.
_MAX_WRITES = 4


class StateStore:
    """The states among the files in a folder. Thread-safe; several processes may use one folder.

    :param owner: the peer that saves states here; what other peers of this machine have saved is
        found, and stays
    """

    def __init__(self, folder: Path, owner: str = "") -> None:
        self.folder, self._owner = Path(folder), owner
        self.kept = KeptFiles(self.folder)
        self.kept.index.fill = self._take_up

    def __reduce__(self) -> tuple[type[StateStore], tuple[Path, str]]:
        """Another process opens it anew."""
        return StateStore, (self.folder, self._owner)

    def _take_up(self, made: sqlite3.Connection) -> None:
        """Put the states that lie in the folder into an index that has just been made: nobody's,
        the last two versions of each module, and after which step they are nobody knows."""
        found: dict[str, list[tuple[int, str, int]]] = {}
        for file in self.folder.glob("??/[!.]*"):
            with contextlib.suppress(IntegrityError, StorageError, OSError):
                summary = read_state_summary(file)
                state = summary.version, file.name, file.stat().st_size
                found.setdefault(summary.module, []).append(state)
        for module, states in found.items():
            for version, digest, size_bytes in sorted(states)[-KEPT_STATES:]:
                made.execute(
                    "INSERT INTO files VALUES (?, 'state', ?, 0, '', ?, 0)",
                    (digest, module, size_bytes),
                )
                made.execute(
                    "INSERT INTO states(owner, module, digest, version, bytes)"
                    " VALUES ('', ?, ?, ?, ?)",
                    (module, digest, version, size_bytes),
                )

    def save(self, state: ModuleState, head: Head | None = None) -> Path:
        """Write a state as the last good one, keep the one before, and return its file.

        `head` says which step it is after. Saving the newest again writes nothing. Raises
        `StorageError`.
        """
        module, digest = state.module, state.digest
        place = () if head is None else (head.step, head.weight, head.round_index)
        saved = SavedState(digest, state.version, state.byte_size, *place)
        path = self.kept.path(digest)
        if self.kept.saved_states(module, self._owner)[:1] == [saved] and path.is_file():
            return path
        for _ in range(_MAX_WRITES):
            if self.kept.save_state(self._owner, module, saved):
                return path
            write_state(state, path)
        raise StorageError(
            f"{path} was removed while it was written; find out what removes files there"
        )

    def lay_down(self, state: ModuleState) -> None:
        """Let a state that is not to be saved lie in a file without a name.

        It takes no memory that way, and the file ends with the process. Raises `StorageError`.
        """
        file = self.kept.path(state.digest).with_name(f".{state.digest}.tmp")
        try:
            write_state(state, file)
            state.rest_on(read_state(file, state.layout, state.digest))
        finally:
            file.unlink(missing_ok=True)

    def load_latest(self, module: str, layout: ModuleLayout) -> ModuleState | None:
        """Return the newest state of `module` that is undamaged, or None.

        Damaged files are reported in one warning, and left to the peer whose folder it is.
        """
        damaged = []
        found = None
        for saved in self.kept.saved_states(module):
            path = self.kept.path(saved.digest)
            if not path.is_file():
                continue
            try:
                found = read_state(path, layout, saved.digest, module=module)
                break
            except (IntegrityError, StorageError) as error:
                damaged.append(f"{path.name[:16]}: {error}")
        if damaged:
            instead = f"version {found.version} is used" if found else "there is no other"
            logger.warning("damaged state of %s (%s); %s", module, "; ".join(damaged), instead)
        return found

    def load(self, module: str, layout: ModuleLayout, digest: str) -> ModuleState:
        """Return the state of `module` with this digest. Raises `IntegrityError` if it is not here,
        or damaged."""
        return read_state(self.kept.require(digest), layout, digest, module=module)

    def remove(self, module: str) -> None:
        """Forget the states of a module that this peer has saved."""
        self.kept.forget_states(self._owner, module)

    def heads(self, module: str) -> list[Head]:
        """Return what is known of the states of a module that this peer has saved, the newest
        first; those of which the step is not known are left out."""
        return [
            _head(module, saved)
            for saved in self.kept.saved_states(module, self._owner)
            if saved.step
        ]

    def digest_after(self, module: str, step: str) -> str | None:
        """Return the digest of the state after a step, if a peer of this machine has saved it."""
        saved = self.kept.saved_states(module)
        return next((state.digest for state in saved if state.step == step), None)

    def digests(self, module: str) -> tuple[str, ...]:
        """Return the digests of a module's states that are here, the newest first."""
        saved = dict.fromkeys(state.digest for state in self.kept.saved_states(module))
        return tuple(digest for digest in saved if self.kept.has(digest))

    def newest_digest(self, module: str) -> str | None:
        """Return the digest of the newest state of a module; None if there is none."""
        return next(iter(self.digests(module)), None)

    def find(self, digest: str) -> Path | None:
        """Return the file of the state with this digest, for serving it."""
        return self.kept.path(digest) if self.kept.has(digest) else None

    def summaries(self, module: str) -> Sequence[StateSummary]:
        """Return what the headers of a module's states say, the newest first.

        Unreadable ones are left out.
        """
        found = []
        for digest in self.digests(module):
            with contextlib.suppress(IntegrityError, StorageError, OSError):
                found.append(read_state_summary(self.kept.path(digest)))
        return found


def _head(module: str, saved: SavedState) -> Head:
    step, weight, round_index = saved.step or "", saved.weight or 0, saved.round_index or 0
    return Head(module, step, saved.version, weight, round_index, saved.digest, saved.size_bytes)
