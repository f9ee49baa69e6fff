"""How fast a card is, as measured. What its maker's data sheet says, and what a training token
costs, is in `modules/cards.py`."""

from __future__ import annotations

import time

import torch

from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.device import number_format, wait_for
from dipaco.protocol.config import ModelConfig
from parts.common import HERE

PATH_150M = load_run_config(HERE.parent / "examples" / "paper" / "RUN.toml").model
TINY_PATH = ModelConfig(
    vocabulary_size=320, block_count=2, hidden_size=64, head_count=2, sequence_length=64
)
MEASURED_S = 1.0


def product_tflops(device: torch.device) -> float:
    """Measure what a large matrix product reaches in the device's number format, TFLOP/s."""
    size = 8192 if device.type != "cpu" else 512
    dtype = number_format(device)
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _fastest_s(lambda: left @ right, device) / 1e12


def copy_gb_per_s(device: torch.device) -> float:
    """Measure a large copy within the device's memory, bytes read and written, GB/s."""
    count = 2**28 if device.type != "cpu" else 2**24
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * count / _fastest_s(lambda: target.copy_(source), device) / 1e9


def _fastest_s(work: object, device: torch.device) -> float:
    """Return the seconds of one call, in the best of three times a third of a second."""
    assert callable(work)

    def seconds(calls: int) -> float:
        wait_for(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        wait_for(device)
        return time.perf_counter() - started

    seconds(3)
    calls = max(1, int(MEASURED_S / seconds(3)))
    return min(seconds(calls) for _ in range(3)) / calls
