"""What a peer reports about itself: one typed stream of events, to the log file and the display."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from dipaco.base.errors import StorageError
from dipaco.base.files import ends_within_a_line

logger = logging.getLogger("dipaco.peer.reporting.event_log")

Listener = Callable[[str, dict[str, Any]], None]


class EventLog:
    """Sends each event to the listeners and, as a JSON line, to a file. Thread-safe.

    An event has a kind (`claimed`, `outer_step`, `carry_on`, ...; listed in docs/monitoring.md) and
    plain values; in the file a number that is none, such as the loss of a path that has diverged,
    is null. A full disk stops the file, not the peer.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._file: TextIO | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                is_cut_off = ends_within_a_line(path)
                self._file = path.open("a", encoding="utf-8")
                if is_cut_off:
                    self._file.write("\n")
            except OSError as error:
                raise StorageError(
                    f"--log-json {path}: {error.strerror}; give a writable path"
                ) from None

    def add_listener(self, listener: Listener) -> None:
        """Call `listener(kind, values)` for every later event, on the thread that emits it."""
        self._listeners.append(listener)

    def emit(self, kind: str, **values: Any) -> None:
        """Record one event."""
        with self._lock:
            if self._file is not None:
                record = {"event": kind, "time_s": round(time.time(), 3), **values}
                try:
                    self._file.write(json.dumps(_strict(record), allow_nan=False) + "\n")
                    self._file.flush()
                except OSError as error:
                    logger.warning("the event log stopped: %s", error.strerror)
                    self._file = None
        for listener in self._listeners:
            listener(kind, values)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _strict(value: Any) -> Any:
    """Return a value without numbers that JSON does not have (RFC 8259, section 6)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return value
