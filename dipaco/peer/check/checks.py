"""What the doctor says of what it found: one check a function, each with its remedy. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dipaco.base.errors import (
    AddressError,
    ClockError,
    ConfigurationError,
    DipacoError,
    StorageError,
    UnreachableError,
)
from dipaco.base.progress import shown_bytes
from dipaco.modules.hub_cache import is_hub_name
from dipaco.modules.memory import USABLE_SHARE

from .this_machine import Disk, Gpu, Memory, System, Versions

# Files and connections that a peer asks for.
OPEN_FILES = 16384
# A clock that is so far off is corrected. Beyond the second figure Hivemind does not join.
CLOCK_WARNING_S, CLOCK_LIMIT_S = 1.0, 3.0
# Main memory of a peer's programs beside all tensors: about, with two levels.
PROGRAMS_BYTES = 10**9


@dataclass(frozen=True)
class Check:
    """One line of the doctor."""

    name: str
    verdict: Literal["ok", "warning", "problem"]
    value: str
    remedy: str = ""
    exit_code: int = 0
    """Of a problem: what joining would end with."""


def ok(name: str, value: str, remedy: str = "") -> Check:
    """Nothing is wrong; a remedy may still be worth knowing."""
    return Check(name, "ok", value, remedy)


def warning(name: str, value: str, remedy: str) -> Check:
    """It works, though not as well as it could."""
    return Check(name, "warning", value, remedy)


def problem(
    name: str, value: str, remedy: str, error: type[DipacoError] = ConfigurationError
) -> Check:
    """It does not work; `error` is what a peer would end with."""
    return Check(name, "problem", value, remedy, error.exit_code)


def check_system(system: System) -> Check:
    """What kind of machine it is, and what that kind needs."""
    value = f"{system.name}, Linux {system.kernel}"
    if system.wsl == 1:
        return problem(
            "system",
            f"{value}, WSL1",
            "dipaco needs WSL2: wsl --set-version DISTRIBUTION 2 in PowerShell (docs/windows.md)",
        )
    if system.wsl == 2:
        return ok("system", f"{value}, WSL2", "docs/windows.md has what Windows needs")
    if system.notebook:
        where = "/content/drive/MyDrive/dipaco" if system.notebook == "Colab" else "/kaggle/working"
        return warning(
            "system",
            f"{system.notebook} notebook",
            "others cannot call it and it ends within hours; it takes part, and what it trained "
            f"stays if --cache-dir is kept, for example {where}",
        )
    if system.is_container:
        return ok(
            "system",
            f"{value}, in a container",
            "give it a published port and a volume for --cache-dir",
        )
    return ok("system", value)


def check_versions(versions: Versions) -> Check:
    """Whether everything that is installed fits together."""
    value = ", ".join(versions.shown)
    if not versions.unfit:
        return ok("versions", value)
    name, found, needed = versions.unfit[0]
    told = [f"{n} {f or 'is missing'}, but {w} is needed" for n, f, w in versions.unfit]
    reason = ""
    if name == "numpy" and found:
        reason = "with this one 8-bit codecs fail silently: "
    install = f"pip install '{name}{needed}'"
    if name in ("Python", "dipaco"):
        install = "make setup, or a new environment with a Python of that version"
    return problem("versions", "; ".join(told), reason + install)


def check_open_files(most: int) -> Check:
    """Whether a peer may open as many files and connections as it needs."""
    shown = "unlimited" if most >= 2**31 else f"{most:,}"
    if most >= OPEN_FILES:
        return ok("open files", shown)
    return warning(
        "open files",
        f"{shown}, a peer asks for {OPEN_FILES:,}",
        f"ulimit -n {OPEN_FILES} as root, or 'nofile' in /etc/security/limits.conf",
    )


def check_sharing(failure: DipacoError | None) -> Check:
    """Whether the processes of a peer can share memory."""
    if failure is None:
        return ok("shared memory", "usable")
    said, _, remedy = str(failure).partition("; ")
    return problem("shared memory", said, remedy, type(failure))


def check_ports(
    addresses: Sequence[str], taken: Sequence[DipacoError], *, peer_is_running: bool = False
) -> Check:
    """Whether a peer can listen where it is told to; `taken` are the errors of the attempts."""
    shown = ", ".join(addresses)
    if taken and peer_is_running:
        return warning("port", f"{shown}: in use", "by the running peer, it seems")
    if taken:
        return problem("port", shown, str(taken[0]), AddressError)
    if any(address.endswith("/tcp/0") for address in addresses):
        return ok(
            "port",
            "another free one at each start",
            "a router can forward only one that stays: --port 31337",
        )
    return ok("port", f"{shown}: free")


def check_neighbours(answers: Sequence[tuple[str, str]]) -> Check:
    """Whether the given addresses answer: each with an empty text, or why it does not."""
    silent = [(address, reason) for address, reason in answers if reason]
    value = f"{len(answers) - len(silent)} of {len(answers)} addresses answer"
    if not silent:
        return ok("neighbours", value)
    told = "; ".join(f"{address} ({reason})" for address, reason in silent)
    if len(silent) < len(answers):
        return warning("neighbours", f"{value}, not {told}", "leave it out if that does not change")
    return problem(
        "neighbours",
        f"nobody answers at {told}",
        "check the address with whoever gave it to you, your connection and your firewall",
        UnreachableError,
    )


def check_clock(offset_s: float, neighbours: int, system: System) -> Check:
    """How far this machine's clock is from the neighbours': `offset_s` is theirs minus ours."""
    others = f"{neighbours} neighbour{'s' if neighbours > 1 else ''}"
    side = "behind" if offset_s > 0 else "ahead of"
    value = f"{abs(offset_s):.1f} s {side} {others}"
    remedy = "set the clock: sudo timedatectl set-ntp true"
    if system.wsl:
        remedy = "it stops while Windows sleeps: sudo hwclock -s, or wsl --shutdown"
    elif system.is_container or system.notebook:
        remedy = "set the clock of the machine that runs the container"
    if abs(offset_s) > CLOCK_LIMIT_S:
        return problem("clock", f"{value}, at most {CLOCK_LIMIT_S:.0f} s", remedy, ClockError)
    if abs(offset_s) > CLOCK_WARNING_S:
        return warning("clock", f"{value}, corrected while it runs", remedy)
    return ok("clock", f"within {max(0.1, abs(offset_s)):.1f} s of {others}")


def check_reachability(
    addresses: Sequence[str], reachable: str, port: int, system: System
) -> Check:
    """Whether others could call this machine when they were asked to."""
    places = [address.partition("/p2p/")[0] for address in addresses]
    shown = ", ".join(dict.fromkeys(places)) or "it has no address"
    if reachable == "direct":
        return ok("reachable", f"others have called it: {shown}")
    shown_port = port or 31337
    remedy = (
        f"forward TCP port {shown_port} of the router to this machine and give --port {shown_port} "
        f"--announce-maddrs /ip4/ROUTER-ADDRESS/tcp/{shown_port}"
    )
    if system.wsl:
        remedy = (
            "Windows passes nothing on by itself: networkingMode=mirrored in .wslconfig, or "
            f"netsh interface portproxy (docs/windows.md); then {remedy}"
        )
    elif system.notebook:
        remedy = "notebooks cannot be called; nothing needs to be done"
    elif system.is_container:
        remedy = f"publish the port (-p {shown_port}:{shown_port}); then {remedy}"
    if reachable == "unknown":
        what = "nobody could try to call it"
    else:
        what = "others cannot call it; it takes part through its own calls"
    return warning("reachable", f"{what}: {shown}", remedy)


def check_line(needed_mbit_per_s: float) -> Check:
    """What the line has to carry."""
    return ok("line", f"a round takes {_shown_mbit(needed_mbit_per_s)} each way on average")


def check_base(name: str, size_bytes: int, *, is_in_hub_cache: bool) -> Check:
    """Where the frozen base of a run with adapters comes from."""
    if is_in_hub_cache:
        return ok("base", f"{name} is in the hub's cache, and is taken from there")
    return ok(
        "base",
        f"{shown_bytes(size_bytes)} of {name} are fetched once, from mirrors or other peers",
        f"hf download {name} spares them that" if is_hub_name(name) else "",
    )


def check_disk(
    disk: Disk,
    needed_bytes: int | None,
    here_bytes: int,
    system: System,
    limit_bytes: int | None = None,
) -> Check:
    """Whether everything that this run keeps fits; `here_bytes` lie there already."""
    able = f"{shown_bytes(max(0, disk.spare_bytes))} can be used"
    value = f"{able} at {disk.folder}"
    if needed_bytes is not None:
        value += f", this run takes up to {shown_bytes(needed_bytes)}"
    if here_bytes:
        value += f", {shown_bytes(here_bytes)} of it are there"
    if not disk.is_writable:
        return problem(
            "disk", f"{disk.folder} cannot be written", "give another --cache-dir", StorageError
        )
    if needed_bytes is not None and disk.spare_bytes + here_bytes < needed_bytes:
        return problem("disk", value, "free space, or give another --cache-dir", StorageError)
    if needed_bytes is not None and limit_bytes is not None and limit_bytes < needed_bytes:
        least = f"--max-disk-gb {math.ceil(needed_bytes / 1e7) / 100:g} or more"
        value = value.replace(able, f"{shown_bytes(limit_bytes)} may be used")
        return problem("disk", value, f"give {least}, or train another run", StorageError)
    if system.wsl and disk.file_system in ("9p", "drvfs"):
        return warning(
            "disk",
            f"{value}, a disk of Windows",
            "it is slow from here; give a --cache-dir in the home folder of Linux",
        )
    if disk.file_system in ("tmpfs", "ramfs"):
        return warning(
            "disk",
            f"{value}, in memory ({disk.file_system})",
            "nothing there survives a restart; give a --cache-dir on a disk",
        )
    return ok("disk", value)


FORMAT_NOTES = {
    "bf16": "",
    "fp16": "it has no bf16: losses are scaled so that small gradients count",
    "fp32": "it computes neither bf16 nor fp16 fast, so it trains at about half the speed",
}


def how_to_use_gpu(maker: str, torch_version: str, built_for: str) -> str:
    """Return what to type where a GPU of a maker is here and PyTorch does not compute on it.

    `built_for` is the maker whose GPUs this build of PyTorch was made for, "" for none.
    """
    shows = {"NVIDIA": "nvidia-smi", "AMD": "rocm-smi"}.get(maker, "")
    if built_for == maker and shows:
        return f"type {shows}: if it does not show the card, install its driver and start again"
    if maker == "AMD":
        return (
            "install PyTorch's build for ROCm, as pytorch.org says (Linux, Pip, ROCm), and type "
            f"{shows}, which has to show the card"
        )
    release = torch_version.partition("+")[0]
    return (
        f"PyTorch {torch_version} was not built for it: pip install --force-reinstall "
        f"torch=={release}" + (f"; then {shows} has to show the card" if shows else "")
    )


def check_gpu(
    gpu: Gpu | None,
    device: str,
    reason: str,
    torch_version: str,
    maker: str = "",
    built_for: str = "",
) -> Check:
    """Which device trains, and in which number format; `reason` says why it is that one.

    `maker` is whose GPU is here, whatever PyTorch thinks of it, and `built_for` is that of PyTorch.
    """
    if gpu is not None:
        free = f"{shown_bytes(gpu.free_bytes)} of {shown_bytes(gpu.total_bytes)} free"
        value = f"{gpu.name}, {free}, {gpu.number_format} ({reason})"
        return ok("device", value, FORMAT_NOTES[gpu.number_format])
    if device == "auto" and maker:
        return warning(
            "device",
            f"A GPU OF {maker} IS HERE AND PyTorch {torch_version} DOES NOT USE IT ({reason})",
            how_to_use_gpu(maker, torch_version, built_for),
        )
    value = f"the CPU: {reason}"
    return ok("device", value, "" if device == "cpu" else "it trains, slowly")


def check_compiler(gpu: Gpu, is_wanted: bool) -> Check:
    """Whether the model can be compiled for the GPU."""
    if not is_wanted:
        return ok("compiler", "the model is not compiled, as asked for")
    if not gpu.missing:
        return ok("compiler", "Triton, a C compiler and Python's headers are here")
    return warning(
        "compiler",
        f"missing: {', '.join(gpu.missing)}; the model trains without being compiled, slower",
        "sudo apt install gcc python3-dev; Triton comes with PyTorch for GPUs",
    )


@dataclass(frozen=True)
class MemoryNeed:
    """What training a path of this run takes."""

    path_parameters: int
    fixed_bytes: int
    """On the device: parameters, gradients, AdamW."""
    pass_bytes: int
    """On the device, for each sequence at once."""
    least_pass_bytes: int
    """The same for one sequence, where blocks are computed twice."""
    main_bytes: int
    """In main memory beside the device's, programs included."""
    batch: int

    def fitting(self, free_bytes: float) -> int:
        """Return how many sequences at once fit into so much device memory; 0: not one."""
        return max(0, min(self.batch, int((free_bytes - self.fixed_bytes) // self.pass_bytes)))


def check_device_memory(need: MemoryNeed, gpu: Gpu, micro_batch: int | None) -> Check:
    """Whether a path of this run fits on the GPU."""
    usable = USABLE_SHARE * gpu.free_bytes
    fits, wanted = need.fitting(usable), micro_batch or 1
    least = need.fixed_bytes + wanted * need.pass_bytes
    value = (
        f"a path of {need.path_parameters / 1e6:,.1f} M parameters takes {shown_bytes(least)} with "
        f"{wanted} of {need.batch} sequences at once, {shown_bytes(int(usable))} can be used"
    )
    if fits == 0 and need.fixed_bytes + need.least_pass_bytes <= usable:
        return warning(
            "GPU memory",
            f"{value}; blocks are computed twice, a third slower",
            "close other programs that use the GPU",
        )
    if fits == 0:
        return problem(
            "GPU memory",
            value,
            "close other programs that use the GPU, or try --optimizer adamw8bit or --device cpu",
        )
    if fits < wanted:
        return warning("GPU memory", value, f"--micro-batch-size {fits} fits")
    return ok("GPU memory", f"{value}; {fits} fit")


def check_main_memory(
    need: MemoryNeed, memory: Memory, gpu: Gpu | None, micro_batch: int | None, system: System
) -> Check:
    """Whether the rest fits into main memory, and without a GPU everything."""
    fits = need.fitting(memory.available - need.main_bytes)
    wanted = min(micro_batch or max(1, fits), need.batch)
    on_device = need.fixed_bytes + wanted * need.pass_bytes if gpu is None else 0
    needed = on_device + need.main_bytes
    value = (
        f"{shown_bytes(memory.available)} of {shown_bytes(memory.total)} free, this run takes "
        f"{shown_bytes(needed)}"
    )
    if gpu is None:
        value += f" with {wanted} sequences at once"
    if needed <= memory.available:
        return ok("memory", value)
    remedy = "close other programs"
    if system.wsl:
        gib = -(-needed // 2**30) + 2
        remedy = f"memory={gib}GB below [wsl2] in .wslconfig, then wsl --shutdown (docs/windows.md)"
    elif system.is_container:
        remedy = "give the container more memory (--memory)"
    if gpu is None and 0 < fits < wanted:
        return problem("memory", value, f"--micro-batch-size {fits} fits; or {remedy}")
    if gpu is None:
        remedy += "; --optimizer adamw8bit takes less"
    return problem("memory", value, remedy)


def check_cache_is_free(folder: Path, is_used: bool) -> tuple[Check, ...]:
    """Whether another peer works with the same cache folder; nothing is said when none does."""
    if not is_used:
        return ()
    remedy = "a second one needs its own --cache-dir and --port"
    return (warning("cache folder", f"a peer is running with {folder}", remedy),)


def _shown_mbit(rate: float) -> str:
    return f"{rate:,.0f} Mbit/s" if rate >= 10 else f"{rate:.2g} Mbit/s"
