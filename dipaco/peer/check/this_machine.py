"""What this machine is and has: system, versions, memory, disk, limits, GPU. Only looks.

Files are read below `root` and variables from `environment`, so that tests can make up machines.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dipaco.base.files import file_system_of, spare_bytes

# What the versions line shows; all requirements are checked.
SHOWN_PACKAGES = ("torch", "hivemind", "numpy")


@dataclass(frozen=True)
class System:
    """What kind of machine this is; remedies differ with it."""

    name: str
    kernel: str
    wsl: int = 0
    """1 or 2 in the Windows Subsystem for Linux."""
    is_container: bool = False
    notebook: str = ""
    """"Colab" or "Kaggle"."""


@dataclass(frozen=True)
class Versions:
    """What is installed, and what of it does not fit."""

    shown: tuple[str, ...]
    unfit: tuple[tuple[str, str, str], ...] = ()
    """Name, installed version ("" if there is none), and the versions that are needed."""


@dataclass(frozen=True)
class Memory:
    """Main memory, in bytes, as a container may use it."""

    total: int
    available: int


@dataclass(frozen=True)
class Disk:
    """Where the cache folder lies."""

    folder: Path
    spare_bytes: int
    """Free, without the reserve that is never used."""
    file_system: str
    is_writable: bool


@dataclass(frozen=True)
class Gpu:
    """A GPU, and how much of its memory other programs leave."""

    name: str
    free_bytes: int
    total_bytes: int
    number_format: str
    """Of passes: bf16, fp16 or fp32."""
    missing: tuple[str, ...] | None = ()
    """What compiling the model needs and is not installed; None: it is not compiled here."""


def look_at_system(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> System:
    """Tell what kind of machine this is."""
    environment = os.environ if environment is None else environment
    kernel = _text(root / "proc/version")
    wsl = 0
    if "microsoft" in kernel.lower():
        # The kernel of WSL1 is imitated: "Linux version 4.4.0-19041-Microsoft".
        wsl = 1 if re.search(r"-Microsoft\b", kernel) else 2
    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', _text(root / "etc/os-release"), re.M)
    notebook = ""
    if any(name.startswith("COLAB_") for name in environment):
        notebook = "Colab"
    elif "KAGGLE_KERNEL_RUN_TYPE" in environment:
        notebook = "Kaggle"
    marks = ("docker", "containerd", "kubepods", "libpod", "lxc")
    is_container = (
        (root / ".dockerenv").exists()
        or (root / "run/.containerenv").exists()
        or any(mark in _text(root / "proc/1/cgroup") for mark in marks)
    )
    words = kernel.split()
    return System(
        name=named[1] if named else platform.system(),
        kernel=words[2] if len(words) > 2 else platform.release(),
        wsl=wsl,
        is_container=is_container and not notebook,
        notebook=notebook,
    )


def look_at_versions() -> Versions:
    """Compare what is installed with what this version of dipaco was made for."""
    shown = [f"Python {platform.python_version()}"]
    unfit = []
    try:
        shown.insert(0, f"dipaco {version('dipaco')}")
        needed = [Requirement(line) for line in requires("dipaco") or ()]
        python = metadata("dipaco")["Requires-Python"] or ""
    except PackageNotFoundError:
        return Versions(tuple(shown), (("dipaco", "", "an installation with pip"),))
    if not SpecifierSet(python).contains(platform.python_version(), prereleases=True):
        unfit.append(("Python", platform.python_version(), python))
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = ""
        if requirement.name in SHOWN_PACKAGES:
            shown.append(f"{requirement.name} {found}")
        if not found or not requirement.specifier.contains(found, prereleases=True):
            unfit.append((requirement.name, found, str(requirement.specifier)))
    return Versions(tuple(shown), tuple(unfit))


def look_at_memory(root: Path = Path("/")) -> Memory:
    """Return the main memory, within the limit of the container if there is one."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), re.M)
    sizes = {name: 1024 * int(count) for name, count in lines}
    total = sizes.get("MemTotal", 0)
    available = sizes.get("MemAvailable", total)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit = _text(root / "sys/fs/cgroup" / limit_file).strip()
        used = _text(root / "sys/fs/cgroup" / used_file).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < total:
            total = int(limit)
            available = min(available, max(0, int(limit) - int(used)))
    return Memory(total, available)


def look_at_disk(folder: Path, root: Path = Path("/")) -> Disk:
    """Return what is free where a folder is, or would be made."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return Disk(
        folder,
        spare_bytes(existing),
        file_system_of(existing.resolve(), root),
        os.access(existing, os.W_OK | os.X_OK) and existing.is_dir(),
    )


def used_bytes(folder: Path) -> int:
    """Return how much lies in a folder already."""
    found = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size if file.is_file() else 0
    return found


def look_at_open_files() -> int:
    """Return how many files a process may have open, if it asks for as many as it may."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**31 if most == resource.RLIM_INFINITY else most


def look_for_gpu_hardware(root: Path = Path("/"), kind: str | None = None) -> str:
    """Return whose GPU is here, NVIDIA, AMD or Apple, whatever PyTorch thinks of it; "" for none.

    `kind` is of this machine: "Linux x86_64".
    """
    signs = (
        ("NVIDIA", "dev/nvidia0"),
        ("NVIDIA", "usr/lib/wsl/lib/libcuda.so.1"),
        ("AMD", "dev/kfd"),
    )
    if (kind or f"{platform.system()} {platform.machine()}") == "Darwin arm64":
        return "Apple"
    return next((maker for maker, name in signs if (root / name).exists()), "")


def torch_is_built_for() -> str:
    """Return whose GPUs this build of PyTorch was made for, NVIDIA, AMD or Apple; "" for none."""
    import torch

    if torch.version.hip:
        return "AMD"
    if torch.version.cuda:
        return "NVIDIA"
    return "Apple" if torch.backends.mps.is_built() else ""


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
    missing = missing_for_compiler() if device.type == "cuda" else None
    return Gpu(devices.device_name(device), *sizes, shown, missing), reason


def missing_for_compiler() -> tuple[str, ...]:
    """Return what of Triton, a C compiler and Python's headers, with which it compiles for a GPU,
    is not installed."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    found = {
        "Triton": find_spec("triton") is not None,
        "a C compiler": any(shutil.which(name) for name in compilers),
        "Python's headers": headers.exists(),
    }
    return tuple(name for name, is_here in found.items() if not is_here)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
