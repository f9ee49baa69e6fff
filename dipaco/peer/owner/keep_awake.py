"""The machine does not go to sleep by itself while a peer trains."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("dipaco.peer.owner.keep_awake")

# `cat` ends with its input, so the lock ends with this process, whatever ends that. What the owner
# asks for, and a lid that is closed, still put the machine to sleep: they would be under `sleep`.
INHIBIT = (
    "systemd-inhibit",
    "--what=idle",
    "--who=dipaco-peer",
    "--why=training (dipaco-peer pause lets it sleep)",
    "--mode=block",
    "cat",
)
END_LIMIT_S = 1.0


class KeepAwake:
    """A lock of systemd-logind against sleep, from the beginning of training to a pause or the end.

    A listener of events. Without such a lock the machine sleeps when it wants to.
    """

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None
        self._is_told = False

    def on_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Take the lock and give it back."""
        if kind == "training":
            self._take()
        elif kind == "inner":
            self._look()
        elif kind in ("paused", "leaving"):
            self.release()

    def _take(self) -> None:
        if self._holder is not None or self._is_told:
            return
        try:
            self._holder = subprocess.Popen(
                INHIBIT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # Ctrl+C in the terminal is for the peer.
                start_new_session=True,
            )
        except OSError as error:
            self._tell(error.strerror or str(error))

    def _look(self) -> None:
        """Say once that the lock was refused."""
        if self._holder is not None and self._holder.poll() is not None:
            said = b""
            # It closes the input first: what a killed one has started keeps the output open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = self._holder.communicate(timeout=END_LIMIT_S)[1]
            self.release()
            self._tell(said.decode(errors="replace").strip())

    def _tell(self, reason: str) -> None:
        self._is_told = True
        logger.debug(
            "nothing keeps this machine awake while it trains: systemd-inhibit: %s", reason
        )

    def release(self) -> None:
        """Let the machine sleep."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        for stream in (holder.stdin, holder.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            holder.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            holder.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                holder.wait(END_LIMIT_S)
