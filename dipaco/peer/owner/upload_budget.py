"""What may be sent in a month (`--max-upload-gb-month`).

A bucket that is filled again when the next month of this machine's calendar begins, and whose
level is kept on disk.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from dipaco.base.errors import StorageError
from dipaco.base.files import atomic_write

from .uplink import Uplink

# What was sent is written down so often: a machine without power forgets at most this.
SAVE_EVERY_S = 60.0
# What is being written when the peer ends is waited for so long.
END_LIMIT_S = 3.0


class UploadBudget:
    """What was sent this month; `uplink` counts since the start. One thread.

    Without a limit nothing is counted.
    """

    def __init__(
        self,
        folder: Path,
        uplink: Uplink,
        *,
        gb_month: float | None = None,
        now: Callable[[], datetime] = datetime.now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic, self._save_s = monotonic, monotonic()
        self._saving: threading.Thread | None = None
        self._file = folder / "upload.json"
        self._limit_gb = gb_month
        self._uplink, self._now = uplink, now
        self._month, self._sent_bytes = self._load()
        """Which month it is, and the bytes that were sent in it."""

    def reason(self) -> str:
        """Return why nothing more may be sent for now; empty while something is left.

        This waits for no disk: another thread writes down now and then what was sent.
        """
        if self._limit_gb is None:
            return ""
        self._count()
        is_saving = self._saving is not None and self._saving.is_alive()
        if self._monotonic() >= self._save_s and not is_saving:
            self._save_s = self._monotonic() + SAVE_EVERY_S
            self._saving = threading.Thread(target=self._save, name="upload budget", daemon=True)
            self._saving.start()
        self._uplink.serves = self._sent_bytes < self._limit_gb * 1e9
        if self._uplink.serves:
            return ""
        return (
            f"{self._limit_gb:g} GB were sent this month (--max-upload-gb-month), until the next "
            "month begins"
        )

    def count(self) -> None:
        """Write down what was sent, if there is a limit."""
        if self._limit_gb is not None:
            self._count()
            if self._saving is not None:
                self._saving.join(END_LIMIT_S)
            self._save()

    def _count(self) -> None:
        """Take in what was sent; another month begins at nothing."""
        sent, month = self._uplink.sent_bytes, f"{self._now():%Y-%m}"
        new, self._uplink.counted_bytes = sent - self._uplink.counted_bytes, sent
        before = self._sent_bytes if month == self._month else 0
        self._month, self._sent_bytes = month, before + new

    def _save(self) -> None:
        with contextlib.suppress(OSError, StorageError):
            atomic_write(self._file, f"{json.dumps([self._month, self._sent_bytes])}\n".encode())

    def _load(self) -> tuple[str, int]:
        """Return the name of the month that the file is about, and the bytes sent in it."""
        try:
            name, count = json.loads(self._file.read_bytes())
            return str(name), max(0, int(count))
        except (OSError, ValueError, OverflowError, TypeError):
            return "", 0
