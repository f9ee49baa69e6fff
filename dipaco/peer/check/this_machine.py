"""What this machine is and has: system, versions, limits, memory, disk, GPU.

Files are read below `root`, so that tests can make up machines. What Windows, containers and
notebooks need stands in docs/windows.md and examples/deploy/README.md; nothing here repeats it.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dipaco.base.files import text_of

from .checks import Check, ok, problem, warning

# What the versions line shows; all requirements are checked.
SHOWN_PACKAGES = ("torch", "hivemind", "numpy")
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


def check_system(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Check:
    """Say what kind of machine this is, and where a page tells what that kind needs."""
    kernel = text_of(root / "proc/version")
    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', text_of(root / "etc/os-release"), re.M)
    words = kernel.split()
    value = (
        f"{named[1] if named else platform.system()}, "
        f"Linux {words[2] if len(words) > 2 else platform.release()}"
    )
    marks = ("docker", "containerd", "kubepods", "libpod", "lxc")
    if re.search(r"-Microsoft\b", kernel):  # "Linux version 4.4.0-19041-Microsoft" is imitated.
        remedy = "dipaco needs WSL2: wsl --set-version DISTRIBUTION 2 in PowerShell"
        return problem("system", f"{value}, WSL1", f"{remedy} (docs/windows.md)")
    if "microsoft" in kernel.lower():
        return ok("system", f"{value}, WSL2", "docs/windows.md has what Windows needs")
    if any(name.startswith(("COLAB_", "KAGGLE_KERNEL_RUN_TYPE")) for name in environment):
        return warning(
            "system",
            f"{value}, a notebook",
            "it ends within hours; what it trained stays if --cache-dir is on a drive that is kept "
            "(examples/deploy/README.md)",
        )
    if (
        (root / ".dockerenv").exists()
        or (root / "run/.containerenv").exists()
        or any(mark in text_of(root / "proc/1/cgroup") for mark in marks)
    ):
        needs = "a published port and a volume for --cache-dir (examples/deploy/README.md)"
        return ok("system", f"{value}, in a container", f"give it {needs}")
    return ok("system", value)


def check_versions() -> Check:
    """Compare what is installed with what this version of dipaco was made for."""
    found_python = platform.python_version()
    try:
        shown = [f"dipaco {version('dipaco')}", f"Python {found_python}"]
        needed = [Requirement(line) for line in requires("dipaco") or ()]
        python = metadata("dipaco")["Requires-Python"] or ""
    except PackageNotFoundError:
        return problem("versions", "dipaco is not installed", "pip install dipaco")
    if not SpecifierSet(python).contains(found_python, prereleases=True):
        remedy = "make a new environment with a Python of that version"
        return problem("versions", f"Python {found_python}, but {python} is needed", remedy)
    unfit = []
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
            unfit.append((requirement, found or "is missing"))
    if not unfit:
        return ok("versions", ", ".join(shown))
    told = [f"{r.name} {found}, but {r.specifier} is needed" for r, found in unfit]
    wanted = " ".join(f"'{r.name}{r.specifier}'" for r, _ in unfit)
    return problem("versions", "; ".join(told), f"pip install {wanted}")


def open_many_files() -> int:
    """Let this process have as many files and connections as it may, up to `OPEN_FILES`; return
    how many it has then. A peer begins with it."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return wanted


def check_open_files() -> Check:
    """Say whether a peer may open as many files and connections as it needs."""
    found = open_many_files()
    if found >= OPEN_FILES:
        return ok("open files", f"{found:,}")
    return warning(
        "open files",
        f"{found:,}, a peer asks for {OPEN_FILES:,}",
        f"ulimit -n {OPEN_FILES} as root, or 'nofile' in /etc/security/limits.conf",
    )


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
    """Return whose GPU is here, NVIDIA or AMD, whatever PyTorch thinks of it; "" for none."""
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


def check_compiler(is_wanted: bool) -> Check:
    """Say whether the model can be compiled for the GPU: Triton, a C compiler, Python's headers."""
    if not is_wanted:
        return ok("compiler", "the model is not compiled, as asked for")
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    found = {
        "Triton": find_spec("triton") is not None,
        "a C compiler": any(shutil.which(name) for name in compilers),
        "Python's headers": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    missing = [name for name, is_here in found.items() if not is_here]
    if not missing:
        return ok("compiler", f"{', '.join(found)} are here")
    return warning(
        "compiler",
        f"missing: {', '.join(missing)}; the model trains without being compiled, slower",
        "sudo apt install gcc python3-dev; Triton comes with PyTorch for GPUs",
    )
