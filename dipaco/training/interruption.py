"""Ending a pass in its middle: on a slow machine a step takes longer than a stop may.

Between two blocks the interpreter runs, so this is also where a signal is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dipaco.modules.transformer import PathModel


class PassInterrupted(Exception):
    """A pass was ended because somebody wants the machine back; nothing was changed by it."""


def end_passes_when(is_wanted: Callable[[], bool], model: PathModel) -> None:
    """Let every pass of `model`, forward or backward, raise `PassInterrupted` at the next block
    once `is_wanted`."""

    def look(*_: Any) -> None:
        if is_wanted():
            raise PassInterrupted

    def look_in_backward(block: Any, given: Any, hidden: torch.Tensor) -> None:
        if hidden.requires_grad:
            hidden.register_hook(look)

    for block in model.model.layers:
        block.register_forward_pre_hook(look)
        block.register_forward_hook(look_in_backward)
