"""When a peer is to train nothing: its owner said so, the hour is wrong, the battery is in use, the
upload of the month or of the hour is used up, or the disk is full.

`dipaco-peer pause` and `resume` make and remove one file in the cache folder, and so do the
signals SIGUSR1 and SIGUSR2; a peer that starts looks at it too. Beside it the peer writes what it
does, which is what the commands wait for. The member decides what a pause means.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.base.files import atomic_write, spare_bytes

from .uplink import Uplink

logger = logging.getLogger("dipaco.peer.owner.pauses")

# Battery and clock are looked at so often; the file at every turn.
LOOK_EVERY_S = 5.0
DAY_MINUTES = 24 * 60
POWER_SUPPLIES = Path("/sys/class/power_supply")
# What an upload budget is counted by, and what names one of them.
UPLOAD_SPANS = {"month": "%Y-%m", "hour": "%Y-%m-%d %H"}
# What has to be free beside the reserve of the disk before a peer goes on.
GOES_ON_BYTES = 2**28
BY_COMMAND = "by dipaco-peer pause, until dipaco-peer resume"


@dataclass(frozen=True)
class Hours:
    """Hours of the day, in this machine's local time; they may span midnight."""

    text: str
    begin_minute: int
    end_minute: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read "22-7" or "22:30-7:15". Raises ConfigurationError."""
        found = re.fullmatch(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", text.strip())
        numbers = [int(part or 0) for part in found.groups()] if found else []
        if found and max(numbers[0], numbers[2]) <= 24 and max(numbers[1], numbers[3]) < 60:
            begin = (60 * numbers[0] + numbers[1]) % DAY_MINUTES
            end = (60 * numbers[2] + numbers[3]) % DAY_MINUTES
            if begin != end:
                return cls(text.strip(), begin, end)
        raise ConfigurationError(
            f"--hours '{text}' are not hours of a day; for example --hours 22-7 or 22:30-7:15"
        )

    def contain(self, minute: int) -> bool:
        """Tell whether a minute of the day is one of them; the end is not."""
        if self.begin_minute < self.end_minute:
            return self.begin_minute <= minute < self.end_minute
        return minute >= self.begin_minute or minute < self.end_minute


def is_on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Tell whether this machine runs on its battery: a battery is being emptied, and no line feeds
    it. Batteries of mice and headphones do not count."""
    is_emptied = False
    for supply in sorted(supplies.iterdir()) if supplies.is_dir() else ():
        kind, scope = _read(supply / "type"), _read(supply / "scope")
        if kind in ("Mains", "USB") and _read(supply / "online") == "1":
            return False
        if kind == "Battery" and scope != "Device":
            is_emptied |= _read(supply / "status") == "Discharging"
    return is_emptied


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
        self._counted = uplink.sent_bytes
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
        for span, (begun, before) in self._bytes.items():
            at = f"{now:{UPLOAD_SPANS[span]}}"
            self._bytes[span] = (at, (before if at == begun else 0) + sent - self._counted)
        if sent != self._counted or not self._file.exists():
            (month, month_bytes), (hour, hour_bytes) = self._bytes["month"], self._bytes["hour"]
            kept = {"month": month, "bytes": month_bytes, "hour": hour, "hour_bytes": hour_bytes}
            with contextlib.suppress(OSError, StorageError):
                atomic_write(self._file, f"{json.dumps(kept)}\n".encode())
        self._counted = sent

    def _load(self) -> dict[str, tuple[str, int]]:
        """Return for month and hour which one it was, and the bytes of it."""
        try:
            kept = json.loads(self._file.read_text())
            month = str(kept["month"]), max(0, int(kept["bytes"]))
            hour = str(kept.get("hour", "")), max(0, int(kept.get("hour_bytes", 0)))
            return {"month": month, "hour": hour}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {"month": ("", 0), "hour": ("", 0)}


class Pauses:
    """Says whether to train, and tells the commands what the peer does. One thread calls it."""

    def __init__(
        self,
        folder: Path,
        hours: Hours | None = None,
        *,
        on_battery: bool = False,
        budget: UploadBudget | None = None,
        supplies: Path = POWER_SUPPLIES,
        spare_bytes: Callable[[Path], int] = spare_bytes,
        now: Callable[[], datetime] = datetime.now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._hours = hours
        self._on_battery = on_battery
        self._supplies = supplies
        self._budget = budget
        self._spare_bytes, self._is_full = spare_bytes, False
        self._now, self._monotonic = now, monotonic
        self._looked_s = float("-inf")
        self._reason = ""
        self._wanted = self._told = ""

    def change(self) -> str | None:
        """Return the reason if it is another one than before; None when nothing has changed."""
        reason = self.reason()
        if reason == self._wanted:
            return None
        self._wanted = reason
        return reason

    def reason(self) -> str:
        """Return why nothing is to be trained; empty when something is."""
        if self._monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = self._monotonic()
            self._reason = self._look()
        return BY_COMMAND if pause_file(self._folder).exists() else self._reason

    def _look(self) -> str:
        # Counted also while something else is the reason.
        used_up = self._budget.reason() if self._budget is not None else ""
        now = self._now()
        if self._hours is not None and not self._hours.contain(60 * now.hour + now.minute):
            begin = self._hours.begin_minute
            return f"outside of --hours {self._hours.text}, until {begin // 60}:{begin % 60:02}"
        if self._on_battery and is_on_battery(self._supplies):
            return "on battery (--on-battery pause), until it is plugged in"
        return used_up or self._full_disk()

    def _full_disk(self) -> str:
        """Return that the reserve of the disk is in use; that ends when there is a bit more."""
        try:
            spare = self._spare_bytes(self._folder)
        except OSError:
            return ""
        self._is_full = spare < (GOES_ON_BYTES if self._is_full else 0)
        full = f"the disk of {self._folder} is nearly full, until space is freed"
        return full if self._is_full else ""

    def tell(self, state: str, path: int | None, why: str) -> None:
        """Write down what the peer does, for the commands; a full disk does not matter."""
        activity = state if path is None else f"{state} path {path}"
        activity += f": {why}" if why else ""
        if activity == self._told:
            return
        self._told = activity
        with contextlib.suppress(OSError, StorageError):
            atomic_write(activity_file(self._folder), f"{activity}\n".encode())

    def close(self) -> None:
        """The peer ends."""
        if self._budget is not None:
            self._budget.count()
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


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
