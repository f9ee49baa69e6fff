"""Keeping freed memory in the process, because training on a CPU frees and takes it all the time.

glibc gives every large block back to the kernel when a tensor dies and asks for a new one for the
next, whose pages the kernel has to clear again: an eighth of the processor time of a small model's
step on a quiet machine, up to half on a busy one. Measured by `benchmarks/allocator.py`.
"""

from __future__ import annotations

import ctypes
import logging
import sys

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
