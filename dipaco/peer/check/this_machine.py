"""What this machine is and has: system, versions, limits, memory, disk, GPU.

Files are read below `root`, so that tests can make up machines. What Windows, containers and
notebooks need stands in docs/windows.md and examples/deploy/README.md; nothing here repeats it.
"""

from __future__ import annotations

import platform
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from dipaco.base.files import text_of

from .checks import Check, ok, problem

_SHOWN_PACKAGES = ("dipaco", "torch", "hivemind", "numpy")
# Files and connections that a peer asks for.
OPEN_FILES = 16384


@dataclass(frozen=True)
class Memory:
    """Main memory in bytes, as this process may use it."""

    total: int
    available: int


@dataclass(frozen=True)
class Gpu:
    """A GPU, and how much of its memory other programs leave."""

    name: str
    free_bytes: int
    total_bytes: int
    number_format: str
    """The number format of passes: bf16, fp16 or fp32."""


def check_system(root: Path = Path("/")) -> Check:
    """Say what kind of machine this is."""
    kernel = text_of(root / "proc/version")
    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', text_of(root / "etc/os-release"), re.M)
    words = kernel.split()
    value = (
        f"{named[1] if named else platform.system()}, "
        f"Linux {words[2] if len(words) > 2 else platform.release()}"
    )
    if re.search(r"-Microsoft\b", kernel):  # "Linux version 4.4.0-19041-Microsoft" is imitated.
        remedy = "dipaco needs WSL2: wsl --set-version DISTRIBUTION 2 in PowerShell"
        return problem("system", f"{value}, WSL1", f"{remedy} (docs/windows.md)")
    return ok("system", value)


def check_versions() -> Check:
    """Say which versions are installed, for reports of bugs."""
    shown = (f"{package} {version(package)}" for package in _SHOWN_PACKAGES)
    return ok("versions", f"Python {platform.python_version()}, {', '.join(shown)}")


def open_many_files() -> None:
    """Let this process have as many files and connections as it may, up to `OPEN_FILES`."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def look_at_memory(root: Path = Path("/")) -> Memory:
    """Return the main memory, within the least limit of this process's control groups: those of a
    container, a systemd unit or a job of Slurm."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", text_of(root / "proc/meminfo"), re.M)
    sizes = {name: 1024 * int(count) for name, count in lines}
    total = sizes.get("MemTotal", 0)
    available = sizes.get("MemAvailable", total)
    for limit, used in _group_limits(root):
        if limit < total:
            total = limit
        available = min(available, max(0, limit - used))
    return Memory(total, available)


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of memory of this process's control group and of all above it."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be the host's, of which nothing but the root is there.
        group = mount / path.lstrip("/")
        for place in (group, *(above for above in group.parents if above.is_relative_to(mount))):
            limit, used = (text_of(place / name) for name in names)
            if limit.isdigit() and used.isdigit():
                yield int(limit), int(used)


def look_for_gpu_hardware(root: Path = Path("/")) -> str:
    """Return the maker of the GPU in this machine, NVIDIA or AMD, whether or not PyTorch can use
    it; "" if there is none."""
    signs = (
        ("NVIDIA", "dev/nvidia0"),
        ("NVIDIA", "usr/lib/wsl/lib/libcuda.so.1"),
        ("AMD", "dev/kfd"),
    )
    return next((maker for maker, name in signs if (root / name).exists()), "")


def how_to_use_gpu(maker: str) -> str:
    """Return what to type where a GPU of a maker is here and PyTorch does not compute on it."""
    import torch

    shows = {"NVIDIA": "nvidia-smi", "AMD": "rocm-smi"}[maker]
    built_for = "AMD" if torch.version.hip else "NVIDIA" if torch.version.cuda else ""
    if built_for == maker:
        return f"type {shows}: if it does not show the card, install its driver and start again"
    build = f"PyTorch {torch.__version__} was not built for it"
    if maker == "AMD":
        build += ": install its build for ROCm, as pytorch.org says (Linux, Pip, ROCm)"
    else:
        release = torch.__version__.partition("+")[0]
        build += f": pip install --force-reinstall torch=={release}"
    return f"{build}; then {shows} has to show the card"


def look_at_device(name: str) -> tuple[Gpu | None, str]:
    """Return the GPU that `--device` means, None for the CPU, and why it is that one.

    Uses CUDA, so nothing may be forked afterwards. Raises ConfigurationError, as `choose_device`.
    """
    import torch

    from dipaco.modules import device as devices

    device, reason = devices.choose_device(name)
    if device.type == "cpu" and devices.cpu_has_bf16():
        reason += "; it has bf16"
    sizes = devices.free_and_total_bytes(device)
    if sizes is None:
        return None, reason
    formats = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    shown = formats.get(devices.number_format(device), "fp32")
    return Gpu(devices.device_name(device), *sizes, shown), reason
