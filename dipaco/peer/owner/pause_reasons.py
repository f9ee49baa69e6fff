"""Reasons not to train: the hour, the battery, a program that runs, a full disk.

Each is asked again and again, and returns the reason, or "" while there is none.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import spare_bytes, text_of

Reason = Callable[[], str]

_DAY_MINUTES = 24 * 60
_POWER_SUPPLIES = Path("/sys/class/power_supply")
_PROCESSES = Path("/proc")
# Bytes that have to be free beside the reserve of the disk before a peer goes on.
_GOES_ON_BYTES = 2**28
# How long a peer that starts waits for a look that may take long.
_FIRST_LOOK_S = 2.0


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
            begin = (60 * numbers[0] + numbers[1]) % _DAY_MINUTES
            end = (60 * numbers[2] + numbers[3]) % _DAY_MINUTES
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


def is_on_battery(supplies: Path = _POWER_SUPPLIES) -> bool:
    """Tell whether this machine runs on its battery: a battery is being emptied, and no line feeds
    it. Batteries of mice and headphones do not count."""
    is_emptied = False
    for supply in sorted(supplies.iterdir()) if supplies.is_dir() else ():
        kind, scope = text_of(supply / "type"), text_of(supply / "scope")
        if kind in ("Mains", "USB") and text_of(supply / "online") == "1":
            return False
        if kind == "Battery" and scope != "Device":
            is_emptied |= text_of(supply / "status") == "Discharging"
    return is_emptied


def outside_of(hours: Hours, now: Callable[[], datetime] = datetime.now) -> Reason:
    """Return the reason to pause outside of these hours."""
    begin = f"{hours.begin_minute // 60}:{hours.begin_minute % 60:02}"

    def reason() -> str:
        moment = now()
        is_one = hours.contain(60 * moment.hour + moment.minute)
        return "" if is_one else f"outside of --hours {hours.text}, until {begin}"

    return reason


def on_battery(supplies: Path = _POWER_SUPPLIES) -> Reason:
    """Return the reason to pause while the machine runs on its battery."""
    said = "on battery (--on-battery pause), until it is plugged in"
    return lambda: said if is_on_battery(supplies) else ""


def programs_of(text: str) -> tuple[str, ...]:
    """Return the names in "steam,obs". Raises ConfigurationError."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or "/" in text:
        raise ConfigurationError(
            f"--pause-while '{text}' must be names of programs; for example --pause-while steam,obs"
        )
    return names


def while_running(names: tuple[str, ...], processes: Path = _PROCESSES) -> Reason:
    """Return the reason to pause while a program of one of these names runs."""

    def reason() -> str:
        running = running_programs(processes)
        found = next((name for name in names if name.lower() in running), None)
        return f"{found} runs (--pause-while), until it ends" if found else ""

    return reason


def running_programs(processes: Path = _PROCESSES) -> frozenset[str]:
    """Return the names of the programs that run, in lower case.

    Each has the kernel's name, which has at most 15 characters, and that of its file, also of
    Windows. This program and the processes that it has forked do not count.
    """
    found = set()
    own = text_of(processes / str(os.getpid()) / "cmdline")
    for process in processes.iterdir():
        cmdline = text_of(process / "cmdline")
        if not process.name.isdigit() or (own and cmdline == own):
            continue
        # 4711 (Web Content) S 1 ...; one that has ended and was not fetched is a Z.
        name, _, state = text_of(process / "stat").partition("(")[2].rpartition(")")
        if name and not state.startswith(" Z"):
            file = cmdline.partition("\0")[0]
            found |= {name.lower(), re.split(r"[/\\]", file)[-1].lower()}
    return frozenset(found)


class Aside:
    """A reason that is looked for on another thread, because looking may take long.

    Reading the command of a process waits while that process moves its memory. Until a look has
    ended, the result of the one before it counts. The first look is waited for, but only for a
    moment.
    """

    def __init__(self, reason: Reason, first_limit_s: float = _FIRST_LOOK_S) -> None:
        self._reason, self._found = reason, ""
        self._looking = threading.Thread()
        self._look()
        self._looking.join(first_limit_s)

    def __call__(self) -> str:
        if not self._looking.is_alive():
            self._look()
        return self._found

    def _look(self) -> None:
        self._looking = threading.Thread(target=self._find, name="pause-reason", daemon=True)
        self._looking.start()

    def _find(self) -> None:
        self._found = self._reason()


class FullDisk:
    """The reason that the reserve of a folder's disk is in use; it ends when there is a bit more.

    `tell` is called each time it begins.
    """

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None] = lambda said: None,
        spare_bytes: Callable[[Path], int] = spare_bytes,
    ) -> None:
        self._folder, self._tell = folder, tell
        self._spare_bytes, self._is_full = spare_bytes, False

    def __call__(self) -> str:
        try:
            spare = self._spare_bytes(self._folder)
        except OSError:
            return ""
        was_full, self._is_full = self._is_full, spare < (_GOES_ON_BYTES if self._is_full else 0)
        said = f"the disk of {self._folder} is nearly full, until space is freed"
        if self._is_full and not was_full:
            self._tell(said)
        return said if self._is_full else ""
