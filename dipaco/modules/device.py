"""What depends on the device and the process: which it is, number formats, threads, main memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import sys

import torch

from dipaco.base.errors import ConfigurationError

# Smaller arrays are no burden, and mapping them takes longer than using them.
LEAST_OWN_VALUES = 2**16
# Looked at at a time: it fits into a processor's cache.
LOOKED_AT_VALUES = 2**18
# Asked once, here: PyTorch 2.11 cannot compile the question, and each product would cut the graph.
_HAVE_AUTOCAST = frozenset(k for k in ("cpu", "cuda") if torch.amp.is_autocast_available(k))


def prepare_process(threads: int | None) -> None:
    """Set threads and memory up. Called first by every command that trains or scores."""
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)


def choose_device(name: str) -> tuple[torch.device, str]:
    """Return the device that `--device` means, and why it is that one.

    `auto` is the first GPU of CUDA or ROCm that computes, else the CPU. Raises ConfigurationError
    if this machine has no such device.
    """
    if name == "auto":
        return _first_that_computes()
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        count = torch.cuda.device_count()
        if not count:
            raise ConfigurationError(
                f"--device {name}: this PyTorch ({torch.__version__}) sees no GPU; use --device "
                "cpu, or install a build of PyTorch for it"
            )
        if device.index >= count:
            raise ConfigurationError(
                f"--device {name}: this machine has cuda:0 to cuda:{count - 1}; give one of these"
            )
        if reason := why_it_does_not_compute(device):
            raise ConfigurationError(f"--device {name}: {reason}; give another, or --device cpu")
    return device, "asked for by --device"


def _first_that_computes() -> tuple[torch.device, str]:
    passed_over: list[str] = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        reason = why_it_does_not_compute(device)
        if not reason:
            return device, "; ".join([f"{device_name(device)} is there", *passed_over])
        passed_over.append(f"{device} was passed over: {reason}")
    return torch.device("cpu"), "; ".join(passed_over) or "PyTorch sees no GPU"


def gpus_left(device: torch.device, name: str) -> int:
    """Return how many GPUs of this machine a process leaves idle that was not told which to take:
    `name` is that of `--device`."""
    if device.type == "cpu" or name != "auto":
        return 0
    return torch.cuda.device_count() - 1


def why_it_does_not_compute(device: torch.device) -> str:
    """Try a small product and return what is wrong, in a line; "" if nothing is.

    PyTorch lists cards that it has no kernels for, that are broken, full, or held by others.
    """
    try:
        ones = torch.ones(16, 16, device=device)
        (ones @ ones).sum().item()
    except RuntimeError as error:
        return f"{device_name(device)}: {str(error).splitlines()[0]}"
    return ""


def device_name(device: torch.device) -> str:
    """Name a device, for people."""
    if device.type == "cpu":
        return f"cpu x{torch.get_num_threads()}"
    return str(torch.cuda.get_device_name(device))


def free_and_total_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return how much of a GPU's memory nobody has, and how much there is; None for the CPU."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def permitted_share(device: torch.device) -> float | None:
    """Return how much of a GPU's memory its owner leaves to this process, as a share of all; None
    for the CPU."""
    if device.type != "cuda":
        return None
    # It has to be told which GPU, where `cuda` alone is the first.
    share: float = torch.cuda.get_per_process_memory_fraction(device.index or 0)
    return share


def number_format(device: torch.device) -> torch.dtype:
    """Return what the products of a pass are computed in: bf16, else fp16, where a GPU is made for
    it, otherwise fp32.

    PyTorch says that older cards support bf16 too, but they only emulate it, slower than fp32; so
    do cards before Volta with fp16.
    """
    if device.type == "cuda" and torch.version.hip:
        return torch.bfloat16
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 0):
            return torch.bfloat16
        if capability >= (7, 0):
            return torch.float16
    return torch.float32


def format_of_products(inputs: torch.Tensor) -> torch.dtype:
    """Return what products of `inputs` are computed in just now: autocast's format, else their
    own."""
    kind = inputs.device.type
    if kind in _HAVE_AUTOCAST and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return inputs.dtype


def training_format(device: torch.device, *, exact: bool) -> torch.dtype:
    """Return what training computes passes in: as `number_format`, and unless it has to be `exact`,
    bf16 on a CPU made for it."""
    if device.type == "cpu" and not exact and cpu_has_bf16():
        return torch.bfloat16
    return number_format(device)


def cpu_has_bf16() -> bool:
    """Tell whether this CPU has products in bf16, of AVX-512 or AMX, and PyTorch uses them."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def autocast_for(
    device: torch.device, dtype: torch.dtype | None = None
) -> contextlib.AbstractContextManager[object]:
    """Return the context of forward passes on a device, by default in its number format."""
    dtype = dtype or number_format(device)
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def sent(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tokens`, which are on the CPU, on the device; nobody waits until they are there."""
    if device.type == "cuda":
        tokens = tokens.pin_memory()
    return tokens.to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


class Fetched:
    """Numbers that come from a device to the CPU.

    Reading them waits for what was computed before `Fetched` was made; `Tensor.item` would wait for
    everything that the device was given since.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        device = numbers.device
        self._numbers, self._are_here = numbers, None
        if device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._are_here = torch.cuda.Event()
            self._are_here.record(torch.cuda.current_stream(device))

    def read(self) -> list[float]:
        """Return the numbers, once they are here."""
        if self._are_here is not None:
            self._are_here.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


def load_bitsandbytes() -> None:
    """Import bitsandbytes without its advice to install more, which would clutter our output.

    Called before its optimizers or its 4-bit matrices are used.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional
    import bitsandbytes.optim  # noqa: F401


logger = logging.getLogger(__name__)

# On a CPU, what the owner does at the machine comes first.
_DEFAULT_NICE = 10

# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_MAX_INT = 2**31 - 1
_TOP_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for later use; return whether it was told.

    Results do not change. The process stays as large as it once was, which a training process
    does anyway. Does nothing where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  absent in other C libraries
        mallopt = library.mallopt
    except (OSError, AttributeError):
        logger.debug("the C library has no mallopt; its own memory management stays as it is")
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = (
        (_M_MMAP_MAX, 0),
        # One heap: what peers send comes on many threads, and each would keep what it freed.
        (_M_ARENA_MAX, 1),
        (_M_TRIM_THRESHOLD, _MAX_INT),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
    )
    return all(mallopt(name, value) == 1 for name, value in settings)


def return_freed_memory() -> None:
    """Give what glibc keeps for later use back to the machine: a peer pauses, or a round
    is over."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def limit_memory(device: torch.device, vram_gb: float | None) -> None:
    """Let this process take no more of a GPU's memory for tensors than `vram_gb` (GiB).

    CUDA itself takes about half a GiB more. Raises ConfigurationError without a GPU.
    """
    if vram_gb is None:
        return
    if device.type != "cuda":
        raise ConfigurationError(f"--vram-gb {vram_gb:g} is for a GPU, not for {device}")
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, vram_gb * 2**30 / total), device)


def be_nice(nice: int | None, device: torch.device) -> int:
    """Let other programs go before what this thread computes, and threads that it starts.

    By default on the CPU only: a GPU has to be fed. Returns the niceness that holds.
    """
    wanted = nice if nice is not None else _DEFAULT_NICE if device.type == "cpu" else 0
    held = os.getpriority(os.PRIO_PROCESS, 0)
    if wanted > held:
        os.setpriority(os.PRIO_PROCESS, 0, wanted)
    return max(wanted, held)


def own_pages(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a flat tensor of zeros [count] on the CPU, in memory of its own.

    A C library keeps what is freed, in pieces that the next large array may not fit into. An array
    that is mapped goes back to the machine as a whole, and pages that nobody wrote take nothing.
    """
    if count < LEAST_OWN_VALUES:
        return torch.zeros(count, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, dtype.itemsize * count, flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A page of 4 KiB takes longer to get than to fill. Kernels without large ones refuse.
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype)


def all_finite(flat: torch.Tensor) -> bool:
    """Tell whether all numbers of a flat tensor are finite, in no more memory than a piece."""
    return all(
        math.isfinite(extreme.item())
        for piece in flat.split(LOOKED_AT_VALUES)
        if piece.numel()
        for extreme in torch.aminmax(piece)
    )
