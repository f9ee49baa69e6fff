"""Numbers for golden values: the same bits on every machine."""

import numpy as np
import torch


def square_roots(count):
    """Return the square roots of 1 to `count`, flat fp32, rounded as IEEE 754 says.

    `torch.sqrt` is MKL's where there is one, which rounds the last bit as the processor's vector
    instructions have it.
    """
    return torch.from_numpy(np.sqrt(np.arange(1, count + 1, dtype=np.float32)))
