"""A step of adapters over SmolLM2-135M, beside PEFT: `python -m rivals.adapters ours|peft ...`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_kit.adapters import RANK, RATE
from gpu_kit.common import random_batch
from gpu_kit.nano import plain_step
from parts.common import Report

from dipaco.modules.adapters import initial_adapters
from dipaco.modules.device import prepare_process
from dipaco.modules.frozen_base import FrozenBase
from dipaco.modules.llama import iterate_llama_parameters, read_llama_config
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import AdaptersConfig, InnerConfig, ModelConfig, parse_config
from dipaco.training.inner import InnerLoop
from rivals.packages import installed
from rivals.turns import Stopwatch, Worker, add_memory, add_speed, side_by_side, take_turns

LENGTH, SEQUENCES = 256, 4
"""Of `examples/smollm2`."""
FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")

Step = Callable[[int], object]


def compare(report: Report, checkpoint: Path, number_format: str, rivals: Path, turns: int) -> None:
    """Add what a step takes, a turn each, and the memory."""
    words = ("--checkpoint", str(checkpoint), "--format", number_format)
    packages = [installed("peft", rivals)]
    pairs = side_by_side(
        Worker("rivals.adapters", "ours", *words),
        Worker("rivals.adapters", "peft", *words, packages=packages),
        turns,
    )
    title = f"adapters, {number_format}"
    add_speed(report, title, pairs, "steps")
    add_memory(report, title, pairs)
    report.figures[title] = pairs


def our_step(checkpoint: Path, number_format: str) -> tuple[Step, ModelConfig]:
    """Return the step of a peer's inner loop; in fp32 as with fixed steps, which are exact."""
    prepare_process(None)
    stored = {**read_llama_config(checkpoint), "sequence_length": LENGTH}
    model = parse_config(ModelConfig, stored, str(checkpoint))
    adapters = AdaptersConfig(rank=RANK, base_format=number_format)
    weights = {
        name: values.to(FORMATS[number_format])
        for name, values in iterate_llama_parameters(checkpoint, model)
    }
    adapted = model.model_copy(update={"adapters": adapters})
    path = PathModel(adapted, FrozenBase(weights, number_format))
    with torch.no_grad():
        for name, values in initial_adapters(adapted, 0).items():
            path.get_parameter(name).copy_(values)
    inner = InnerConfig(
        optimizer="adamw", batch_sequences=SEQUENCES, learning_rate=RATE, weight_decay=0.0
    )
    loop = InnerLoop(path.train(), inner, CPU, exact=number_format == "float32")
    return lambda number: loop.step(random_batch(model, SEQUENCES, number), number), model


def peft_step(checkpoint: Path, number_format: str) -> tuple[Step, ModelConfig]:
    """Return a step of PEFT in a plain loop. Its own adapters are fp32, as ours."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    stored = {**read_llama_config(checkpoint), "sequence_length": LENGTH}
    model = parse_config(ModelConfig, stored, str(checkpoint))
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=FORMATS[number_format])
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(base, lora).train()
    losses: list[torch.Tensor] = []

    def loss_of(tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = adapted(input_ids=tokens, labels=tokens, use_cache=False).loss
        losses[:] = [loss.detach()]
        return loss

    step = plain_step(loss_of, adapted, CPU, SEQUENCES, rate=RATE, exact=number_format == "float32")

    def take(number: int) -> float:
        step(random_batch(model, SEQUENCES, number))
        return float(losses[0])

    return take, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=("ours", "peft"))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--format", choices=tuple(FORMATS), required=True)
    chosen = parser.parse_args()
    make = our_step if chosen.program == "ours" else peft_step
    step, _ = make(chosen.checkpoint, chosen.format)
    losses: list[object] = []
    number = 0

    def turn(_: str) -> dict[str, Any]:
        nonlocal number
        watch = Stopwatch()
        losses.append(step(number))
        number += 1
        return {**watch.figures("steps", 1), "losses": losses}

    take_turns(turn)


if __name__ == "__main__":
    main()
