"""Large arrays: memory of their own, and looks at them that take none.

A C library keeps what is freed, in pieces that the next large array may not fit into, and with
states it would keep several times what is alive. An array that is mapped goes back to the machine
as a whole, and pages of it that nobody has written take nothing.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

# Smaller arrays are no burden, and mapping them takes longer than using them.
LEAST_OWN_VALUES = 2**16
# Looked at at a time: it fits into a processor's cache.
LOOKED_AT_VALUES = 2**18


def own_pages(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a flat tensor of zeros [count] on the CPU, in memory of its own."""
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
