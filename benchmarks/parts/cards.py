"""How fast a card is, measured and by its data sheet, and what a training token costs."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.device import number_format, wait_for
from dipaco.modules.layout import parameter_counts
from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.grid import Grid
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


@dataclass(frozen=True)
class Card:
    """A card: dense products in 16 bits summed in fp32, TFLOP/s; memory, GB/s and GB."""

    tflops: float
    gb_per_s: float
    memory_gb: float


# Products are in bf16, on T4 and V100 in fp16. The first name that is a word of the card's counts.
CARDS = {
    "B200": Card(2250.0, 8000.0, 180.0),
    "H200 NVL": Card(835.0, 4800.0, 141.0),
    "H200": Card(989.0, 4800.0, 141.0),
    "H100 NVL": Card(835.0, 3900.0, 94.0),
    "H100 PCIe": Card(756.0, 2000.0, 80.0),
    "H100": Card(989.0, 3350.0, 80.0),
    "A100": Card(312.0, 2039.0, 80.0),
    "L40S": Card(362.0, 864.0, 48.0),
    "L40": Card(181.0, 864.0, 48.0),
    "L4": Card(121.0, 300.0, 24.0),
    "A10": Card(125.0, 600.0, 24.0),
    "V100": Card(125.0, 900.0, 32.0),
    "T4": Card(65.0, 320.0, 16.0),
    "RTX 5090": Card(209.5, 1792.0, 32.0),
    "RTX 4090 D": Card(147.0, 1008.0, 24.0),
    "RTX 4090": Card(165.0, 1008.0, 24.0),
    "RTX 3090": Card(71.0, 936.0, 24.0),
    "RTX 3060 Ti": Card(32.4, 448.0, 8.0),
    "RTX 3060": Card(25.5, 360.0, 12.0),
}


# What makes another card of one with the same name: slower, faster, or a part of it.
OTHER_CARDS = re.compile(r"\b(Ti|SUPER|D|Laptop|Max-Q|MIG)\b")


def card_of(name: str) -> Card | None:
    """Return what is known of a card by its name."""
    for word, card in CARDS.items():
        rest, count = re.subn(rf"\b{word}\b", "", name)
        if count:
            return None if OTHER_CARDS.search(rest) else card
    return None


def path_parameters(model: ModelConfig) -> int:
    """Return the parameters of a path."""
    return parameter_counts(Grid(model, GridConfig(modules_per_level=(1,))))["path"]


def flops_per_token(model: ModelConfig, parameters: int | None = None) -> float:
    """Return the FLOPs of one training token, forward and backward, without recomputation.

    Six for each parameter of a matrix product, and 12 x blocks x width x length for attention. The
    embedding is looked up and not multiplied; tied to the head it counts once, as the head.
    """
    embedding = model.vocabulary_size * model.hidden_size
    multiplied = parameters or path_parameters(model) - (0 if model.tied_embedding else embedding)
    attention = 12 * model.block_count * model.hidden_size * model.sequence_length
    return float(6 * multiplied + attention)
