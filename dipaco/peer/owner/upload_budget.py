"""What may be sent in a month (`--max-upload-gb-month`).

A bucket that is filled again when the next month of this machine's calendar begins, and whose
level is kept on disk.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from dipaco.base.errors import StorageError
from dipaco.base.files import atomic_write

from .uplink import Uplink


class UploadBudget:
    """What was sent this month; `uplink` counts since the start. `save` is for any thread, the rest
    for one."""

    def __init__(
        self,
        folder: Path,
        uplink: Uplink,
        gb_month: float,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._file, self._limit_gb = folder / "upload.json", gb_month
        self._uplink, self._now = uplink, now
        self._sent = self._load()
        """Which month it is, and the bytes that were sent in it."""

    def reason(self) -> str:
        """Return why nothing more may be sent for now; empty while something is left."""
        self._uplink.serves = self._count() < self._limit_gb * 1e9
        if self._uplink.serves:
            return ""
        return (
            f"{self._limit_gb:g} GB were sent this month (--max-upload-gb-month), until the next "
            "month begins"
        )

    def save(self) -> None:
        """Write down what was counted; a full disk does not matter."""
        with contextlib.suppress(OSError, StorageError):
            atomic_write(self._file, f"{json.dumps(self._sent)}\n".encode())

    def close(self) -> None:
        """Write down what was sent until the end."""
        self._count()
        self.save()

    def _count(self) -> int:
        """Take in what was sent, and return it; another month begins at nothing."""
        sent, month = self._uplink.sent_bytes, f"{self._now():%Y-%m}"
        new, self._uplink.counted_bytes = sent - self._uplink.counted_bytes, sent
        before = self._sent[1] if month == self._sent[0] else 0
        self._sent = month, before + new
        return self._sent[1]

    def _load(self) -> tuple[str, int]:
        """Return the name of the month that the file is about, and the bytes sent in it."""
        try:
            name, count = json.loads(self._file.read_bytes())
            return str(name), max(0, int(count))
        except (OSError, ValueError, OverflowError, TypeError):
            return "", 0
