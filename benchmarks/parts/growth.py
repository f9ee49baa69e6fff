"""What grows in processes that stay: memory, threads, open files, disk; least-squares slopes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.swarms.swarm import Member

from .common import process_tree

SAMPLE_S = 60.0
WARM_UP = 0.25
"""Part of the samples that slopes leave out: imports, caches and buffers fill in it."""


class Growth:
    """Samples of all members together, one a minute."""

    def __init__(self) -> None:
        self.samples: list[dict[str, float]] = []
        self._next_s = 0.0

    def look(self, members: Sequence[Member]) -> None:
        """Take a sample if one is due."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAMPLE_S
        found = [process for m in members for process in process_tree(m.popen.pid)]
        disk = [size for member in members for size in _sizes_below(member.cache)]
        self.samples.append({
            "hours": now_s / 3600,
            "memory, MiB": sum(process.proportional_mib for process in found),
            "processes": len(found),
            "threads": sum(_entries(process.pid, "task") for process in found),
            "open files": sum(_entries(process.pid, "fd") for process in found),
            "disk, MiB": sum(disk) / 2**20,
            "files": len(disk),
            "load": os.getloadavg()[0],
        })  # fmt: skip

    def told(self) -> dict[str, list[float]]:
        """Return each figure at first and at last, and its slope an hour; none of few samples."""
        behind = self.samples[int(WARM_UP * len(self.samples)) :]
        if len(behind) < 3:
            return {}
        found = {}
        hours = np.array([sample["hours"] for sample in behind])
        for name in (name for name in behind[0] if name != "hours"):
            values = np.array([sample[name] for sample in behind])
            slope = float(np.polyfit(hours, values, 1)[0])
            ends = (float(values[0]), float(values[-1]), slope)
            found[f"{name} (first, last, more an hour)"] = [round(value, 2) for value in ends]
        return found


def _entries(pid: int, what: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{what}"))
    except OSError:
        return 0


def _sizes_below(folder: Path) -> list[int]:
    sizes = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except OSError:
            continue
    return sizes
