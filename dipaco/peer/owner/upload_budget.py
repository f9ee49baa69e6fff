"""What may be sent in a month and in an hour (`--max-upload-gb-month`, `--max-upload-gb-hour`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from dipaco.base.errors import StorageError
from dipaco.base.files import atomic_write

from .uplink import Uplink

# What an upload budget is counted by, and what names one of them.
UPLOAD_SPANS = {"month": "%Y-%m", "hour": "%Y-%m-%d %H"}


class UploadBudget:
    """What was sent this month and this hour, kept on disk; `uplink` counts since the start.

    Months and hours are those of this machine's calendar and clock. One thread.
    """

    def __init__(
        self,
        folder: Path,
        uplink: Uplink,
        *,
        gb_month: float | None = None,
        gb_hour: float | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._file = folder / "upload.json"
        self._limits_gb = {"month": gb_month, "hour": gb_hour}
        self._uplink, self._now = uplink, now
        self._bytes = self._load()

    def reason(self) -> str:
        """Return why nothing more is to be sent for now; empty while something is left."""
        self.count()
        reason = ""
        for span, limit_gb in self._limits_gb.items():
            if limit_gb is not None and self._bytes[span][1] >= limit_gb * 1e9 and not reason:
                reason = (
                    f"{limit_gb:g} GB were sent this {span} (--max-upload-gb-{span}), until the "
                    f"next {span} begins"
                )
        self._uplink.serves = not reason
        return reason

    def count(self) -> None:
        """Write down what was sent; another month or hour begins at nothing."""
        sent, now = self._uplink.sent_bytes, self._now()
        new = sent - self._uplink.counted_bytes
        for span, (begun, before) in self._bytes.items():
            at = f"{now:{UPLOAD_SPANS[span]}}"
            self._bytes[span] = (at, (before if at == begun else 0) + new)
        if new or not self._file.exists():
            (month, month_bytes), (hour, hour_bytes) = self._bytes["month"], self._bytes["hour"]
            kept = {"month": month, "bytes": month_bytes, "hour": hour, "hour_bytes": hour_bytes}
            with contextlib.suppress(OSError, StorageError):
                atomic_write(self._file, f"{json.dumps(kept)}\n".encode())
        self._uplink.counted_bytes = sent

    def _load(self) -> dict[str, tuple[str, int]]:
        """Return for month and hour which one it was, and the bytes of it."""
        try:
            kept = json.loads(self._file.read_text())
            month = str(kept["month"]), max(0, int(kept["bytes"]))
            hour = str(kept.get("hour", "")), max(0, int(kept.get("hour_bytes", 0)))
            return {"month": month, "hour": hour}
        except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError):
            return {"month": ("", 0), "hour": ("", 0)}
