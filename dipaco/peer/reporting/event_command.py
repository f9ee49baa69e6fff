"""`--on-event COMMAND`: a command of the owner's that hears what becomes of the peer."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dipaco.base.errors import ConfigurationError, printable

logger = logging.getLogger("dipaco.peer.reporting.event_command")

# A command that takes longer is ended. One runs at a time, and so many wait; more are dropped.
COMMAND_LIMIT_S = 10.0
MAX_WAITING = 8
# A peer that ends waits so long for the last ones; leaving as a whole has ten seconds.
CLOSE_LIMIT_S = 3.0
# What is killed is gone at once, if it is gone at all.
KILL_LIMIT_S = 0.5


def words_of(command: str) -> list[str]:
    """Return the words of a command line. Raises ConfigurationError if it cannot be run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigurationError(f"--on-event '{command}': {error}; close the quotes") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigurationError(
            f"--on-event '{command}': there is no such program; for example --on-event notify-send"
        )
    return words


class EventCommand:
    """Runs a command for `joined`, `left`, `error`, `disk` and `update`; a listener of events.

    The word and a line of text follow the command's own words. No shell reads them. What the
    command prints goes where the peer prints, and whatever it does, the peer goes on.
    """

    def __init__(self, command: str, limit_s: float = COMMAND_LIMIT_S) -> None:
        """Raises ConfigurationError if it cannot be run."""
        self._words, self._limit_s = words_of(command), limit_s
        self._waiting: queue.Queue[tuple[str, str]] = queue.Queue(MAX_WAITING)
        self._ends_s = float("inf")
        self._is_closing = threading.Event()
        self._run = ""
        # Started with the first word: the processes of the DHT are forked before that.
        self._thread = threading.Thread(target=self._work, name="on-event", daemon=True)
        self._lock = threading.Lock()

    def on_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Tell of an event if it is one of these. From any thread."""
        if kind == "run":
            self._run = f"run '{values['plan']['name']}' ({values['run']})"
        if (said := _SAID.get(kind)) is not None:
            word, text = said
            self.tell(word, text(values, self._run))

    def ends_with(self, error: Exception) -> None:
        """Tell that the peer ends. An error may begin with a flag: not so the text, which programs
        such as notify-send would take for one of theirs."""
        self.tell("error", f"the peer ends: {str(error) or type(error).__name__}")

    def tell(self, word: str, text: str) -> None:
        """Have the command run, soon. From any thread."""
        try:
            self._waiting.put_nowait((word, printable(" ".join(text.split()))))
        except queue.Full:
            logger.warning("--on-event: %d wait already, so it is not told: %s", MAX_WAITING, text)
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """Let what waits be told, in bounded time, and end a command that runs even then."""
        self._ends_s = time.monotonic() + CLOSE_LIMIT_S
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_LIMIT_S + 1.0)

    def _work(self) -> None:
        while not self._is_closing.is_set() or not self._waiting.empty():
            with contextlib.suppress(queue.Empty):
                self._call(*self._waiting.get(timeout=0.1))

    def _call(self, word: str, text: str) -> None:
        until_s = time.monotonic() + self._limit_s
        # A name of the swarm may have letters that the locale has not.
        told = text.encode(sys.getfilesystemencoding(), "replace")
        try:
            called = subprocess.Popen(
                [*self._words, word, told], stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            logger.warning("--on-event %s: %s", self._words[0], error.strerror)
            return
        while called.poll() is None and time.monotonic() < min(until_s, self._ends_s):
            time.sleep(0.02)
        if called.poll() is None:
            outcome = "was ended"
            try:
                os.killpg(called.pid, signal.SIGKILL)
                called.wait(KILL_LIMIT_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                outcome = f"cannot be ended: {error}"  # That of another user, as with sudo.
            logger.warning("--on-event %s: it took too long and %s", self._words[0], outcome)
        elif called.returncode:
            logger.warning("--on-event %s: exit code %d", self._words[0], called.returncode)


_SAID: dict[str, tuple[str, Callable[[Mapping[str, Any], str], str]]] = {
    "run": ("joined", lambda values, run: f"joined {run}"),
    "leaving": ("left", lambda values, run: f"left {run}"),
    "disk": ("disk", lambda values, run: str(values["what"])),
    "update": ("update", lambda values, run: str(values["what"])),
}
