"""Whether a run fits this machine: disk, device, memory.

`--check` shows it, and joining asks it before anything is claimed, so both give the same answer.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.base.files import file_system_of, spare_bytes
from dipaco.base.kept_files import MAX_CONTRIBUTIONS_BYTES
from dipaco.base.progress import shown_bytes
from dipaco.modules.device import choose_device, limit_memory
from dipaco.modules.layout import parameter_counts
from dipaco.modules.memory import USABLE_SHARE, least_pass_bytes
from dipaco.peer.exchange.fetching import shard_bytes
from dipaco.peer.peer_settings import PeerSettings
from dipaco.protocol.plan import RunPlan, ShardIndex

from . import needs
from .checks import Check, failed, ok, problem, warning
from .this_machine import (
    Gpu,
    Memory,
    how_to_use_gpu,
    look_at_device,
    look_at_memory,
    look_for_gpu_hardware,
)

# Main memory of a peer's programs besides all tensors, roughly, with two levels.
PROGRAMS_BYTES = 10**9
_FORMAT_NOTES = {
    "bf16": "",
    "fp16": "it has no bf16: losses are scaled so that small gradients count",
    "fp32": "it computes neither bf16 nor fp16 fast, so it trains at about half the speed",
}


@dataclass(frozen=True)
class MemoryNeed:
    """What training a path of a run takes."""

    path_parameters: int
    fixed_bytes: int
    """Bytes on the device: parameters, gradients, AdamW."""
    pass_bytes: int
    """Bytes on the device for each sequence of a batch."""
    least_pass_bytes: int
    """The same for one sequence, where blocks are computed twice."""
    main_bytes: int
    """Bytes of main memory besides those of the device, programs included."""
    batch: int

    def fitting(self, free_bytes: float) -> int:
        """Return how many sequences fit into so much device memory at once; 0 if not even one
        does."""
        return max(0, min(self.batch, int((free_bytes - self.fixed_bytes) // self.pass_bytes)))


def fitting_batch(
    settings: PeerSettings,
    plan: RunPlan,
    shards: ShardIndex,
    folder: Path | None = None,
) -> int | None:
    """Return how many sequences a peer has on the device at once; None: the trainer finds out.

    Raises what `--check` calls a problem, so that nothing is claimed that does not fit. Called when
    the peer's programs run already, and the run has its `folder`.
    """
    for check in machine_checks(settings, plan, shards, folder, programs_bytes=0):
        if check.error is not None:
            raise check.error
    gpu, _ = look_at_device(settings.device)
    if gpu is not None:
        return None
    need = memory_need(plan, settings, None, 0)
    # Never fewer than one: others may have taken memory since it was looked at.
    return max(1, need.fitting(look_at_memory().available - need.main_bytes))


def contributions_limit(settings: PeerSettings, plan: RunPlan, shards: ShardIndex) -> int:
    """Return how many bytes contributions may take, so that all is within `--max-disk-gb`."""
    if settings.max_disk_gb is None:
        return MAX_CONTRIBUTIONS_BYTES
    needed = _disk_need(settings, plan, shards)
    others = sum(needed.values()) - needed["contributions"]
    return min(MAX_CONTRIBUTIONS_BYTES, int(settings.max_disk_gb * 1e9) - others)


def machine_checks(
    settings: PeerSettings,
    plan: RunPlan | None,
    shards: ShardIndex | None,
    folder: Path | None = None,
    programs_bytes: int = PROGRAMS_BYTES,
) -> Iterator[Check]:
    """Yield what the machine has, beside what the run takes where that is known."""
    yield check_disk(settings, plan, shards, folder)
    try:
        device, _ = choose_device(settings.device)
        gpu, reason = look_at_device(settings.device)
    except ConfigurationError as error:
        yield failed("device", error)
        return
    try:
        limit_memory(device, settings.vram_gb)
    except ConfigurationError as error:
        yield failed("flags", error)
    if gpu is not None and settings.vram_gb is not None:
        gpu = replace(gpu, free_bytes=min(gpu.free_bytes, int(settings.vram_gb * 2**30)))
    yield check_device(gpu, settings.device, reason)
    if plan is None:
        return
    need = memory_need(plan, settings, gpu, programs_bytes)
    if gpu is not None:
        yield check_gpu_memory(need, gpu)
    yield check_main_memory(need, look_at_memory(), on_cpu=gpu is None)


# -- disk


def check_disk(
    settings: PeerSettings,
    plan: RunPlan | None,
    shards: ShardIndex | None,
    run_folder: Path | None = None,
    root: Path = Path("/"),
) -> Check:
    """Say whether everything that a run keeps fits where the cache folder is, or would be."""
    folder = settings.cache_folder
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        remedy = "give another --cache-dir"
        return problem("disk", f"{folder} cannot be written", remedy, StorageError)
    spare = max(0, spare_bytes(there))
    limit = None if settings.max_disk_gb is None else int(settings.max_disk_gb * 1e9)
    if limit is None:
        value = f"{shown_bytes(spare)} can be used at {folder}"
    else:
        value = f"{shown_bytes(min(limit, spare))} may be used at {folder}"
    if plan is not None:
        needed = sum(_disk_need(settings, plan, shards).values())
        here = _bytes_in(run_folder or folder / plan.run_id)
        value += f", this run takes up to {shown_bytes(needed)}"
        if here:
            value += f", {shown_bytes(here)} of it are there"
        if spare + here < needed:
            return problem("disk", value, "free space, or give another --cache-dir", StorageError)
        if limit is not None and limit < needed:
            least = f"--max-disk-gb {math.ceil(needed / 1e7) / 100:g} or more"
            return problem("disk", value, f"give {least}, or train another run", StorageError)
    file_system = file_system_of(there.resolve(), root)
    if file_system in ("tmpfs", "ramfs"):
        remedy = "nothing there survives a restart; give a --cache-dir on a disk"
        return warning("disk", f"{value}, in memory ({file_system})", remedy)
    if file_system in ("9p", "drvfs"):
        remedy = "it is slow from here; give a --cache-dir in the home folder of Linux"
        return warning("disk", f"{value}, a disk of Windows", remedy)
    return ok("disk", value)


def _bytes_in(folder: Path) -> int:
    """Return how many bytes are in a folder already; files may come and go meanwhile."""
    found = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size if file.is_file() else 0
    return found


def _disk_need(settings: PeerSettings, plan: RunPlan, shards: ShardIndex | None) -> dict[str, int]:
    """Return what a run takes of the disk. Without `--path` the largest shard is meant."""
    sizes = [0]
    if shards is not None:
        files = shard_bytes(shards, plan.model)
        sizes += [
            files[shard.train_sha256] + files[shard.validation_sha256]
            for shard in shards.paths
            if settings.path in (None, shard.path)
        ]
    return needs.disk_bytes(plan, needs.grid_of(plan), max(sizes))


# -- device and memory


def check_device(gpu: Gpu | None, device: str, reason: str) -> Check:
    """Say which device trains, and in which number format; `reason` says why it is that one."""
    if gpu is not None:
        free = f"{shown_bytes(gpu.free_bytes)} of {shown_bytes(gpu.total_bytes)} free"
        value = f"{gpu.name}, {free}, {gpu.number_format} ({reason})"
        return ok("device", value, _FORMAT_NOTES[gpu.number_format])
    if device == "auto" and (maker := look_for_gpu_hardware()):
        value = f"THIS MACHINE HAS AN {maker} GPU THAT IS NOT USED ({reason})"
        return warning("device", value, how_to_use_gpu(maker))
    return ok("device", f"the CPU: {reason}", "" if device == "cpu" else "it trains, slowly")


def memory_need(
    plan: RunPlan, settings: PeerSettings, gpu: Gpu | None, programs_bytes: int = PROGRAMS_BYTES
) -> MemoryNeed:
    """Return what training a path takes with these settings, on the GPU or on the CPU."""
    grid = needs.grid_of(plan)
    count = parameter_counts(grid)["path"]
    in_16_bits = gpu is not None and gpu.number_format != "fp32"
    on_device = needs.device_bytes(plan, count, settings.optimizer, in_16_bits=in_16_bits)
    one_pass = on_device.pop(needs.ONE_PASS)
    return MemoryNeed(
        path_parameters=count,
        fixed_bytes=sum(on_device.values()),
        pass_bytes=one_pass,
        least_pass_bytes=least_pass_bytes(plan.model, in_16_bits=in_16_bits),
        main_bytes=sum(needs.main_memory_bytes(plan, grid, count).values()) + programs_bytes,
        batch=plan.inner.batch_sequences,
    )


def check_gpu_memory(need: MemoryNeed, gpu: Gpu) -> Check:
    """Say whether a path of this run fits on the GPU."""
    usable = USABLE_SHARE * gpu.free_bytes
    fits, close = need.fitting(usable), "close other programs that use the GPU"
    value = (
        f"a path of {need.path_parameters / 1e6:,.1f} M parameters takes "
        f"{shown_bytes(need.fixed_bytes + need.pass_bytes)} with 1 of {need.batch} sequences at "
        f"once, {shown_bytes(int(usable))} can be used"
    )
    if fits:
        return ok("GPU memory", f"{value}; {fits} fit")
    if need.fixed_bytes + need.least_pass_bytes <= usable:
        value += "; blocks are computed twice, a third slower"
        return warning("GPU memory", value, close)
    return problem("GPU memory", value, f"{close}, or try --optimizer adamw8bit or --device cpu")


def check_main_memory(need: MemoryNeed, memory: Memory, *, on_cpu: bool) -> Check:
    """Say whether the rest fits into main memory, and without a GPU everything."""
    sequences = max(1, need.fitting(memory.available - need.main_bytes))
    needed = need.main_bytes
    needed += need.fixed_bytes + sequences * need.pass_bytes if on_cpu else 0
    value = (
        f"{shown_bytes(memory.available)} of {shown_bytes(memory.total)} free, this run takes "
        f"{shown_bytes(needed)}"
        + f" with {sequences} sequence{'s' * (sequences != 1)} at once"
        * on_cpu
    )
    if needed <= memory.available:
        return ok("memory", value)
    remedy = "close other programs, or give a virtual machine or container more (docs/windows.md)"
    return problem("memory", value, remedy + "; --optimizer adamw8bit takes less" * on_cpu)
