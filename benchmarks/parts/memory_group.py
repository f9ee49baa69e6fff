"""A limit of the kernel's for the memory of some processes (a control group). Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path("/sys/fs/cgroup")
# Takes memory until somebody is killed. It is small, so the kernel does not choose it.
_PRESS = """
import sys, time
taken, until = [], time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    taken.append(b"x" * 2**18)
    time.sleep(0.01)
"""
PRESS_S = 20.0


class MemoryGroup:
    """Processes that have only so much memory together. A context manager.

    Both kinds of control groups are understood: those of version 2, and the one for memory of
    version 1.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._folder = _parent() / f"dipaco-{os.getpid()}"
        self._is_new = (_parent() / "cgroup.controllers").exists()

    @staticmethod
    def is_possible() -> bool:
        """Tell whether groups can be made here."""
        parent = _parent()
        controllers = parent / "cgroup.controllers"
        is_ours = os.geteuid() == 0 and os.access(parent, os.W_OK) and parent.is_mount()
        return is_ours and (not controllers.exists() or "memory" in controllers.read_text())

    def __enter__(self) -> Self:
        if self._is_new:
            (_parent() / "cgroup.subtree_control").write_text("+memory")
        self._folder.mkdir()
        for pid in self._pids:
            self._take_in(pid)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        until_s = time.monotonic() + PRESS_S
        while self._folder.exists():
            with contextlib.suppress(OSError):  # Who is about to end is in it still.
                for pid in (self._folder / "cgroup.procs").read_text().split():
                    (_parent() / "cgroup.procs").write_text(pid)
                self._folder.rmdir()
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self._folder} is not empty")
            time.sleep(0.05)

    def leave(self, more_bytes: int) -> None:
        """Let them have so much more than they have."""
        used = "memory.current" if self._is_new else "memory.usage_in_bytes"
        limit = "memory.max" if self._is_new else "memory.limit_in_bytes"
        most = int((self._folder / used).read_text()) + more_bytes
        (self._folder / limit).write_text(str(most))

    def press(self) -> None:
        """Take what is left, until one of them is killed, or for some seconds."""
        popen = subprocess.Popen([sys.executable, "-c", _PRESS, str(PRESS_S)])
        try:
            self._take_in(popen.pid)
            until_s = time.monotonic() + PRESS_S
            while all(map(_lives, self._pids)) and time.monotonic() < until_s:
                time.sleep(0.05)
        finally:
            popen.kill()
            popen.wait()

    def _take_in(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _parent() -> Path:
    return ROOT if (ROOT / "cgroup.controllers").exists() else ROOT / "memory"
