"""Part g: memory that runs out in each form, on the device itself, and what becomes of the work.

The device is given a limit, so that PyTorch's own allocator refuses. Each form must end as the
documents say: with fewer sequences at once and the same loss, with blocks computed twice, or with
one line that names a remedy. A CPU has no such limit, so in a rehearsal the model refuses instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from dipaco.base.errors import ConfigurationError
from dipaco.modules import transformer
from dipaco.modules.memory import head_bytes, pass_bytes, release_memory
from dipaco.modules.transformer import PathModel, initialise, logits_at_once
from dipaco.protocol.config import ModelConfig
from dipaco.training.inner import InnerLoop
from dipaco.training.scoring import scoring_at_once, sum_losses
from gpu_kit.common import Part, begin, random_batch
from gpu_kit.paper_path import path_loop

BATCH = 16


@contextmanager
def limit(
    part: Part, model: PathModel, more_bytes: float, rows: int, computed_twice: int
) -> Iterator[None]:
    """Let this process take so much more of the device's memory, and no more, for a while.

    In a rehearsal, let the model take so many rows at once instead, or so many where blocks are
    computed twice.
    """
    release_memory(part.device)
    if part.rehearses:
        computed = model.hidden_states

        def refusing(tokens: torch.Tensor, *others: Any) -> torch.Tensor:
            if len(tokens) > (computed_twice if model.recomputes else rows):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return computed(tokens, *others)

        model.hidden_states = refusing  # type: ignore[method-assign]
        try:
            yield
        finally:
            model.hidden_states = computed  # type: ignore[method-assign]
        return
    total = torch.cuda.get_device_properties(part.device).total_memory
    held = torch.cuda.memory_reserved(part.device)
    torch.cuda.set_per_process_memory_fraction((held + more_bytes) / total, part.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, part.device)


# A piece of logits as large as elsewhere would be larger than what the blocks hold.
SMALL_PIECES = {"GPU_BYTES_A_LOGIT": 2**16, "LOGITS_AT_ONCE_ON_GPU": 2**22}


def main() -> int:
    part = begin("out of memory", __doc__)
    with mock.patch.multiple(transformer, **SMALL_PIECES):
        measure(part)
    return part.conclude()


def measure(part: Part) -> None:
    """Let memory run out in each form."""
    batch = random_batch(part.model, BATCH, 0)
    each = pass_bytes(part.model, in_16_bits=part.device.type != "cpu")
    head = head_bytes(part.model, BATCH, logits_at_once(part.device))
    reference = made(part, compiled=False, at_once=1)
    expected = reference.step(batch, 0)
    del reference
    for compiled in (False, True):
        name = f"training, {'compiled' if compiled else 'eager'}"
        with part.measuring(name):
            loop = made(part, compiled=compiled, at_once=BATCH)
            if compiled:
                # What the compiler takes is not the device's.
                loop.step(batch, 0)
                loop = made(part, compiled=True, at_once=BATCH)
            # The gradients and a third of the batch.
            with limit(part, loop.model, gradient_bytes(loop) + head + each * BATCH / 3, 5, 5):
                loss = loop.step(batch, 0)
            survived(part, name, loop, loss, expected)
    with part.measuring("blocks computed twice"):
        loop = made(part, compiled=False, at_once=BATCH)
        with limit(part, loop.model, gradient_bytes(loop) + head + each / 2, 0, BATCH):
            loss = loop.step(batch, 0)
        assert loop.model.recomputes, "blocks were not computed twice"
        survived(part, "blocks computed twice", loop, loss, expected)
    with part.measuring("not even one sequence"):
        loop = made(part, compiled=False, at_once=BATCH)
        with limit(part, loop.model, gradient_bytes(loop) / 8, 0, 0):
            refused(part, "not even one sequence", lambda: loop.step(batch, 0))
    with part.measuring("scoring"):
        model = PathModel(part.model)
        initialise(model, 0)
        model.to(part.device).eval()
        nll, targets = sum_losses(model, batch, 0, scoring_at_once(part.device, 1))
        at_once = scoring_at_once(part.device, BATCH)
        with limit(part, model, head + scored_bytes(part.model) / 3, 5, 5):
            limited, _ = sum_losses(model, batch, 0, at_once)
        figures = {"loss": limited / targets, "expected": nll / targets, "at_once": at_once.count}
        part.note("scoring", figures)
        assert abs(limited - nll) < 0.01 * nll


def made(part: Part, *, compiled: bool, at_once: int) -> InnerLoop:
    """Return a loop over a new path, the same each time."""
    return path_loop(part, BATCH, compiled=compiled, micro_batch_size=at_once)


def scored_bytes(model: ModelConfig) -> int:
    """Return about what is held at the widest place of a block that nobody goes back through."""
    return BATCH * model.sequence_length * (12 * model.hidden_size + 6 * model.feed_forward)


def gradient_bytes(loop: InnerLoop) -> int:
    """Return what gradients and AdamW take, which come with the first step."""
    return 3 * 4 * sum(p.numel() for p in loop.model.parameters())


def survived(part: Part, name: str, loop: InnerLoop, loss: float, expected: float) -> None:
    """Keep how many sequences were at once in the end, and hold the loss to what it should be."""
    figures: dict[str, Any] = {"at_once": loop.micro_batch_size, "loss": loss, "expected": expected}
    part.note(name, figures)
    assert abs(loss - expected) < 0.02, "the loss is another one"
    assert loop.model.recomputes or loop.micro_batch_size < BATCH, "memory did not run out"


def refused(part: Part, name: str, work: Callable[[], object]) -> None:
    """Hold a form that cannot be survived to one line for people."""
    try:
        work()
    except ConfigurationError as error:
        line = str(error)
        part.note(name, {"said": line})
        assert "\n" not in line
        return
    raise AssertionError("memory did not run out")


if __name__ == "__main__":
    sys.exit(main())
