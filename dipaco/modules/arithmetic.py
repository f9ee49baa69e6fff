"""Whether this machine's arithmetic is the one on which digests rest (design 4.3, step)."""

from __future__ import annotations

import torch

from dipaco.base.errors import MachineError

# Of elementwise kernels a thread takes at least so many values.
_VALUES_OF_A_THREAD = 2**15


def check_arithmetic() -> None:
    """Keep small numbers in the threads that compute. Raises `MachineError` if that fails.

    A library that was linked with -ffast-math makes processors take denormal numbers for zero, in
    each thread that it touches; a step would then have another digest here.
    """
    torch.set_flush_denormal(False)
    small = torch.full((_VALUES_OF_A_THREAD * torch.get_num_threads(),), 1e-40)
    if not bool((small.mul(0.5) > 0).all()):
        raise MachineError(
            "a library makes this process treat small numbers as zero, so its steps would differ "
            "from those of other peers; run dipaco-peer in an environment of its own"
        )
