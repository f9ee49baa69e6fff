"""What a peer says of its device: which it is, and once, how fast it trains there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dipaco.modules.cards import card_of, flops_per_token
from dipaco.modules.device import device_name
from dipaco.protocol.config import ModelConfig

# The first steps compile the model and find out how many sequences fit.
LEFT_OUT_STEPS = 3
MEASURED_S, LEAST_STEPS = 30.0, 5
# A path of 150 M parameters, eager and compiled: docs/results/gpu.md.
USUAL = {"H100": "a path of 150 M parameters reaches 28 to 40 % on an H100, a small one less"}


def device_line(device: torch.device, reason: str, idle_gpus: int) -> str:
    """Return whether the GPU trains, and why it is that device. `idle_gpus` are the others."""
    if device.type == "cpu":
        return f"this peer trains on the CPU ({device_name(device)}): {reason}"
    line = f"this peer trains on the GPU: {device_name(device)} ({device})"
    if idle_gpus:
        words = " ".join(f"{device.type}:{index}" for index in range(idle_gpus + 1))
        line += f"; {idle_gpus} more are idle here: --devices {words} starts a peer on each"
    return line


class FirstSpeed:
    """Tells once how fast a peer trains, beside what the maker of its card states where that is
    known. A listener of events."""

    def __init__(self, model: ModelConfig, device: str, say: Callable[[str], None]) -> None:
        self._model, self._device, self._say = model, device, say
        self._steps, self._tokens, self._seconds = 0, 0, 0.0

    def on_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Count an inner step."""
        if kind != "inner" or self._steps < 0:
            return
        self._steps += 1
        if self._steps <= LEFT_OUT_STEPS:
            return
        self._tokens += values["tokens"]
        self._seconds += values["seconds"]
        if self._seconds >= MEASURED_S and self._steps >= LEFT_OUT_STEPS + LEAST_STEPS:
            self._steps = -1
            self._say(speed_line(self._model, self._device, self._tokens / self._seconds))


def speed_line(model: ModelConfig, device: str, tokens_per_s: float) -> str:
    """Return how fast a model is trained on a device of that name."""
    line = f"it trains {tokens_per_s:,.0f} tokens a second on {device}"
    card = card_of(device)
    if card is None or model.adapters is not None:
        return line
    share = tokens_per_s * flops_per_token(model) / (card.tflops * 1e12)
    line += f", {share:.1%} of the {card.tflops:g} TFLOP/s that its maker states"
    usual = next((said for name, said in USUAL.items() if card is card_of(name)), "")
    return f"{line}; {usual}" if usual else line
