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
_INHIBIT = (
    "systemd-inhibit",
    "--what=idle",
    "--who=dipaco-peer",
    "--why=training (dipaco-peer pause lets it sleep)",
    "--mode=block",
    "cat",
)
_END_LIMIT_S = 1.0


class KeepAwake:
    """A lock of systemd-logind against sleep, from the beginning of training to a pause or the end.

    A listener of events. Without such a lock the machine sleeps when it wants to.
    """

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None

    def on_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Take the lock and give it back."""
        if kind == "training" and self._holder is None:
            self._take()
        elif kind in ("paused", "leaving"):
            self.release()

    def _take(self) -> None:
        try:
            self._holder = subprocess.Popen(
                _INHIBIT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl+C in the terminal is for the peer.
                start_new_session=True,
            )
        except OSError as error:
            logger.debug("nothing keeps this machine awake while it trains: %s", error)

    def release(self) -> None:
        """Let the machine sleep."""
        holder, self._holder = self._holder, None
        if holder is None or holder.stdin is None:
            return
        with contextlib.suppress(OSError):
            holder.stdin.close()
        try:
            holder.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            holder.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                holder.wait(_END_LIMIT_S)
