"""What depends on the device: number format of the passes, and running out of memory."""

from __future__ import annotations

import contextlib
import gc

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
