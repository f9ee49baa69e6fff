"""What may be sent in a month and in an hour (`--max-upload-gb-month`, `--max-upload-gb-hour`).

A bucket that is filled again when the next month or hour of this machine's calendar begins, and
whose level is kept on disk.
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

# By what a month and an hour are told apart.
UPLOAD_SPANS = {"month": "%Y-%m", "hour": "%Y-%m-%d %H"}
# What was sent is written down so often: a machine without power forgets at most this.
SAVE_EVERY_S = 60.0
# What is being written when the peer ends is waited for so long.
END_LIMIT_S = 3.0


class UploadBudget:
    """What was sent this month and this hour; `uplink` counts since the start. One thread.

    Without a limit nothing is counted.
    """

    def __init__(
        self,
        folder: Path,
        uplink: Uplink,
        *,
        gb_month: float | None = None,
        gb_hour: float | None = None,
        now: Callable[[], datetime] = datetime.now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic, self._save_s = monotonic, monotonic()
        self._saving: threading.Thread | None = None
        self._file = folder / "upload.json"
        self._limits_gb = {"month": gb_month, "hour": gb_hour}
        self._uplink, self._now = uplink, now
        self._sent = {span: self._load(span) for span in UPLOAD_SPANS}
        """Which month and hour it is, and the bytes that were sent in it."""

    def reason(self) -> str:
        """Return why nothing more may be sent for now; empty while something is left.

        This waits for no disk: another thread writes down now and then what was sent.
        """
        if not self._has_limit:
            return ""
        self._count()
        is_saving = self._saving is not None and self._saving.is_alive()
        if self._monotonic() >= self._save_s and not is_saving:
            self._save_s = self._monotonic() + SAVE_EVERY_S
            self._saving = threading.Thread(target=self._save, name="upload budget", daemon=True)
            self._saving.start()
        reasons = [
            f"{limit_gb:g} GB were sent this {span} (--max-upload-gb-{span}), until the next "
            f"{span} begins"
            for span, limit_gb in self._limits_gb.items()
            if limit_gb is not None and self._sent[span][1] >= limit_gb * 1e9
        ]
        self._uplink.serves = not reasons
        return reasons[0] if reasons else ""

    def count(self) -> None:
        """Write down what was sent, if there is a limit."""
        if self._has_limit:
            self._count()
            if self._saving is not None:
                self._saving.join(END_LIMIT_S)
            self._save()

    @property
    def _has_limit(self) -> bool:
        return any(limit_gb is not None for limit_gb in self._limits_gb.values())

    def _count(self) -> None:
        """Take in what was sent; another month or hour begins at nothing."""
        sent, now = self._uplink.sent_bytes, self._now()
        new, self._uplink.counted_bytes = sent - self._uplink.counted_bytes, sent
        for span, (begun, before) in self._sent.items():
            name = f"{now:{UPLOAD_SPANS[span]}}"
            self._sent[span] = name, (before if name == begun else 0) + new

    def _save(self) -> None:
        with contextlib.suppress(OSError, StorageError):
            atomic_write(self._file, f"{json.dumps(self._sent)}\n".encode())

    def _load(self, span: str) -> tuple[str, int]:
        """Return the name of the month or hour that the file is about, and the bytes sent in it."""
        try:
            name, count = json.loads(self._file.read_bytes())[span]
            return str(name), max(0, int(count))
        except (OSError, ValueError, OverflowError, KeyError, TypeError):
            return "", 0
