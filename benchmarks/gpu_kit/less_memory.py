"""Part c: what saves memory costs: fp16 with scaling, AdamW in 8 bits, blocks computed twice.

Each stands beside the path in the card's own format, first eager, which no compilation delays, then
compiled. As many sequences are at once everywhere, so that the memory can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dipaco.training import inner
from dipaco.training.inner import InnerLoop
from gpu_kit.common import Part, begin
from gpu_kit.paper_path import path_figures, path_loop

BATCH = AT_ONCE = 32


@contextmanager
def in_format(dtype: torch.dtype) -> Iterator[None]:
    """Have loops that are made meanwhile train in a number format, whatever the device is for."""
    chosen = inner.training_format
    inner.training_format = lambda device, exact: dtype
    try:
        yield
    finally:
        inner.training_format = chosen


def in_fp16(part: Part, make: Callable[..., InnerLoop]) -> InnerLoop:
    """Return a loop in fp16; on a CPU, which has no products in it, one whose loss is scaled."""
    if part.device.type == "cpu":
        loop = make()
        loop._scaler = torch.amp.GradScaler("cpu", enabled=True)
        return loop
    with in_format(torch.float16):
        return make()


def main() -> int:
    part = begin("less memory", __doc__)
    batch, seconds = (4, 0.5) if part.rehearses else (BATCH, 4.0)
    for compiled in (False, True):

        def make(compiled: bool = compiled, **options: Any) -> InnerLoop:
            at_once = min(batch, AT_ONCE)
            return path_loop(part, batch, compiled=compiled, micro_batch_size=at_once, **options)

        def recomputing(make: Callable[..., InnerLoop] = make) -> InnerLoop:
            loop = make()
            loop.model.recomputes = True
            return loop

        ways: dict[str, Callable[[], InnerLoop]] = {
            "as it is": make,
            "blocks computed twice": recomputing,
            "fp16 with scaling": lambda make=make: in_fp16(part, make),
            "AdamW in 8 bits": lambda make=make: make(optimizer="adamw8bit"),
        }
        for name, way in ways.items():
            measure = f"{name}, {'compiled' if compiled else 'eager'}"
            with part.measuring(measure):
                part.note(measure, path_figures(part, way(), batch, seconds))
    return part.conclude()


if __name__ == "__main__":
    sys.exit(main())
