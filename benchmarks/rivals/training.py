"""One machine trains one model: our inner loop, transformers' Trainer, a GPT in a plain loop."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_kit.common import random_batch
from gpu_kit.nano import NanoGPT, plain_step
from parts.common import Report

from dipaco.modules.device import prepare_process
from dipaco.modules.llama import llama_config
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import InnerConfig, ModelConfig
from dipaco.training.inner import InnerLoop
from rivals.packages import installed
from rivals.turns import (
    Figures,
    Stopwatch,
    Turns,
    Worker,
    add_memory,
    add_speed,
    side_by_side,
    take_turns,
)

MODEL = ModelConfig(
    vocabulary_size=2048,
    block_count=8,
    hidden_size=256,
    head_count=4,
    feed_forward_size=704,
    sequence_length=256,
)
SEQUENCES, STEPS_OF_A_TURN = 8, 2
TOKENS = SEQUENCES * MODEL.sequence_length * STEPS_OF_A_TURN
CPU = torch.device("cpu")
THEIRS = {"trainer": "Trainer", "nano": "plain loop"}


def compare(report: Report, number_format: str, rivals: Path, turns: int) -> None:
    """Add tokens a second and memory beside each of them."""
    words = ("--format", number_format)
    for program, name in THEIRS.items():
        packages = [installed("trainer", rivals)] if program == "trainer" else []
        pairs = side_by_side(
            Worker("rivals.training", "ours", *words),
            Worker("rivals.training", program, *words, packages=packages),
            turns,
        )
        title = f"training, {number_format}, {name}"
        add_speed(report, title, pairs, "tokens")
        add_memory(report, title, pairs)
        report.figures[title] = pairs


def in_a_loop(step: Callable[[torch.Tensor, int], object]) -> None:
    """Take turns of some steps."""
    number = 0

    def turn(_: str) -> Figures:
        nonlocal number
        watch = Stopwatch()
        for _ in range(STEPS_OF_A_TURN):
            step(random_batch(MODEL, SEQUENCES, number), number)
            number += 1
        return watch.figures("tokens", TOKENS)

    take_turns(turn)


def ours(exact: bool) -> None:
    """Train as a peer does, with AdamW as the others."""
    prepare_process(None)
    model = PathModel(MODEL)
    initialise(model, 0)
    inner = InnerConfig(optimizer="adamw", batch_sequences=SEQUENCES)
    in_a_loop(InnerLoop(model.train(), inner, CPU, exact=exact).step)


def nano(exact: bool) -> None:
    """Train a GPT of about as many parameters as people do by hand."""
    model = NanoGPT(MODEL).train()
    step = plain_step(model, model, CPU, SEQUENCES, exact=exact)
    in_a_loop(lambda batch, _: step(batch))


def trainer(exact: bool) -> None:
    """Train a Llama of the same shape with transformers' Trainer."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    turns = Turns()

    class Pausing(TrainerCallback):
        """Ends a turn after some steps, and waits for the next."""

        def __init__(self) -> None:
            turns.next()
            self._watch = Stopwatch()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % STEPS_OF_A_TURN == 0:
                turns.answer(self._watch.figures("tokens", TOKENS))
                turns.next()
                self._watch = Stopwatch()

    class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 2**20

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            (row,) = random_batch(MODEL, 1, index)
            return {"input_ids": row, "labels": row}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=not exact,
            per_device_train_batch_size=SEQUENCES,
            max_steps=2**16,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = LlamaForCausalLM(LlamaConfig(**llama_config(MODEL, torch.float32)))
        Trainer(model, arguments, train_dataset=Batches(), callbacks=[Pausing()]).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=("ours", *THEIRS))
    parser.add_argument("--format", choices=("float32", "bf16"), required=True)
    chosen = parser.parse_args()
    {"ours": ours, "nano": nano, "trainer": trainer}[chosen.program](chosen.format == "float32")


if __name__ == "__main__":
    main()
