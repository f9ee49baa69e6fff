"""What depends on the device: number format of the passes, and running out of memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys

import torch


def autocast_for(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of forward passes: bf16 where CUDA computes with it, otherwise fp32.

    PyTorch says that older cards support bf16 too, but they only emulate it, slower than fp32.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory of the device or the machine ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU allocator has no exception class of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def release_memory(device: torch.device) -> None:
    """Give back what a failed pass held, so that a smaller one finds room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def load_bitsandbytes() -> None:
    """Import bitsandbytes without its advice to install more, which would end up among our lines.

    Called before its optimizers and codecs are used, and before averagers are forked.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional
    import bitsandbytes.optim  # noqa: F401


logger = logging.getLogger(__name__)

# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_GREATEST_INT = 2**31 - 1
_TOP_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for later use; return whether it was told.

    Results do not change. The process stays as large as it once was, which a training process
    does anyway. Called at the start of every command that trains or scores; does nothing where
    the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  absent in other C libraries
        mallopt = library.mallopt
    except (OSError, AttributeError):
        logger.debug("the C library has no mallopt; memory is managed as it likes")
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _GREATEST_INT),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
    )
    return all(mallopt(name, value) == 1 for name, value in settings)
