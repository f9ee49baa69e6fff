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

    def look(self, members: Sequence[Member], **more: float) -> None:
        """Take a sample if one is due; `more` is what is known besides."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAMPLE_S
        found = [process for m in members for process in process_tree(m.popen.pid)]
        disk = [size for member in members for size in _sizes_below(member.cache)]
        self.samples.append(
            {
                "hours": now_s / 3600,
                "memory_mib": sum(process.proportional_mib for process in found),
                "processes": len(found),
                "threads": sum(_entries(process.pid, "task") for process in found),
                "open_files": sum(_entries(process.pid, "fd") for process in found),
                "disk_mib": sum(disk) / 2**20,
                "disk_files": len(disk),
                "load": os.getloadavg()[0],
                **more,
            }
        )

    def slopes_per_hour(self) -> dict[str, float]:
        """Return the slope of each figure an hour, the first one and the last; none of few."""
        behind = self.samples[int(WARM_UP * len(self.samples)) :]
        if len(behind) < 3:
            return {}
        hours = np.array([sample["hours"] for sample in behind])
        told = {}
        for name in behind[0]:
            if name != "hours":
                values = np.array([sample[name] for sample in behind])
                told[f"{name}_first"] = round(behind[0][name], 2)
                told[f"{name}_last"] = round(behind[-1][name], 2)
                told[f"{name}_per_hour"] = round(float(np.polyfit(hours, values, 1)[0]), 3)
        return told


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
