"""When a peer trains nothing: because its owner said so, or for one of the `reasons`.

`dipaco-peer pause` and `resume` make and remove one file in the cache folder, and so do the signals
SIGUSR1 and SIGUSR2; a peer also looks at it when it starts. Beside it the peer writes what it does,
for which the commands wait. The member decides what a pause means.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from dipaco.base.errors import StorageError
from dipaco.base.files import note

from .pause_reasons import Reason

logger = logging.getLogger("dipaco.peer.owner.pauses")

# Seconds between two looks at the reasons; the file is looked at in every turn.
_LOOK_EVERY_S = 5.0
BY_COMMAND = "by dipaco-peer pause, until dipaco-peer resume"


class Pauses:
    """Says whether to train, and tells the commands what the peer does. One thread calls it."""

    def __init__(
        self,
        folder: Path,
        reasons: Sequence[Reason] = (),
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reasons` beside the file of `dipaco-peer pause`; the first that there is counts."""
        self._folder, self._reasons = folder, reasons
        self._monotonic = monotonic
        self._looked_s = float("-inf")
        self._reason = ""
        self._wanted = self._told = ""

    def change(self) -> str | None:
        """Return the reason if it differs from the one before; None when nothing has changed."""
        reason = self.reason()
        if reason == self._wanted:
            return None
        self._wanted = reason
        return reason

    def reason(self) -> str:
        """Return why nothing is to be trained; empty when something is."""
        if self._monotonic() - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = self._monotonic()
            # All reasons are asked, because some count the calls, and some begin a look whose
            # result the next call gives.
            self._reason = next(filter(None, [reason() for reason in self._reasons]), "")
        return BY_COMMAND if pause_file(self._folder).exists() else self._reason

    def tell(self, state: str, path: int | None, why: str) -> None:
        """Write down what the peer does, for the commands; a full disk does not matter."""
        activity = state if path is None else f"{state} path {path}"
        activity += f": {why}" if why else ""
        if activity == self._told:
            return
        self._told = activity
        with contextlib.suppress(OSError):
            note(activity_file(self._folder), f"{activity}\n")

    def close(self) -> None:
        """Remove the note of what the peer does, because it ends."""
        with contextlib.suppress(OSError):
            activity_file(self._folder).unlink(missing_ok=True)


def pause_file(folder: Path) -> Path:
    """Return the file that means: train nothing."""
    return folder / "paused"


def activity_file(folder: Path) -> Path:
    """Return the file that says what the peer does."""
    return folder / "activity"


def ask_to_pause(folder: Path) -> None:
    """Let the peer of a cache folder train nothing. Raises StorageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pause_file(folder).touch()
    except OSError as error:
        raise StorageError(f"{pause_file(folder)}: {error.strerror}") from None


def ask_to_resume(folder: Path) -> None:
    """Let the peer of a cache folder train again. Raises StorageError."""
    try:
        pause_file(folder).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{pause_file(folder)}: {error.strerror}") from None


def install_pause_signals(folder: Path) -> None:
    """SIGUSR1 pauses, SIGUSR2 resumes. Called before anything is forked."""
    process = os.getpid()

    def act(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            return
        try:
            (ask_to_pause if number == signal.SIGUSR1 else ask_to_resume)(folder)
        except StorageError as error:
            logger.warning("%s", error)

    signal.signal(signal.SIGUSR1, act)
    signal.signal(signal.SIGUSR2, act)
