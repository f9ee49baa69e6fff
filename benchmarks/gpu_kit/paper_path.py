"""Part b: the path of examples/paper, tokens a second and MFU, beside other people's loops.

Batches are the paper's, of 512 sequences; how many are on the device at once is found by the loop
itself. Beside it stand a loop in the manner of nanoGPT, transformers' Llama with the same
parameters, and what a large matrix product and a large copy reach on this card. MFU counts as
`parts.cards.flops_per_token` does, against the card's dense peak in 16 bits. At the end a profile
of a compiled step says where its time goes.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from parts.cards import card_of, copy_gb_per_s, flops_per_token, product_tflops

from dipaco.modules.device import device_name
from dipaco.modules.llama import llama_config
from dipaco.modules.memory import AtOnce
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import InnerConfig
from dipaco.training.inner import InnerLoop
from gpu_kit.common import Part, begin, random_batch, timed_steps
from gpu_kit.nano import NanoGPT, plain_step
from gpu_kit.profiled import profiled

BATCH = 512
OTHERS_AT_ONCE = 32


def main() -> int:
    part = begin("paper path", __doc__)
    batch, seconds = (4, 1.0) if part.rehearses else (BATCH, 8.0)
    with part.measuring("ceilings"):
        ceilings = {
            "product_tflops": product_tflops(part.device),
            "copy_gb_per_s": copy_gb_per_s(part.device),
        }
        part.note("ceilings", ceilings)
    with part.measuring("path, compiled"):
        loop = path_loop(part, batch, compiled=True)
        part.note("path, compiled", path_figures(part, loop, batch, seconds))
        watched = random_batch(part.model, batch, 0)
        part.note("profile of a compiled step", profiled(partial(loop.step, watched, 9)))
        del loop
    with part.measuring("nanoGPT, compiled"):
        part.note("nanoGPT, compiled", nano_figures(part, batch, seconds))
    with part.measuring("path, eager"):
        loop = path_loop(part, batch, compiled=False)
        part.note("path, eager", path_figures(part, loop, batch, seconds))
        del loop
    with part.measuring("transformers, compiled"):
        part.note("transformers, compiled", llama_figures(part, batch, seconds, compiled=True))
    with part.measuring("transformers, eager"):
        part.note("transformers, eager", llama_figures(part, batch, seconds, compiled=False))
    return part.conclude()


def path_loop(part: Part, batch: int, *, compiled: bool, **options: Any) -> InnerLoop:
    """Return a loop over a new path."""
    model = PathModel(part.model)
    initialise(model, 0)
    config = InnerConfig(optimizer="adamw", batch_sequences=batch)
    return InnerLoop(
        model.to(part.device).train(),
        config,
        part.device,
        compile_model=compiled,
        exact=False,
        **options,
    )


def path_figures(part: Part, loop: InnerLoop, batch: int, seconds: float) -> dict[str, Any]:
    """Measure the inner loop; says how many sequences it found to fit at once."""
    found = timed_steps(
        lambda number: loop.step(random_batch(part.model, batch, number), number),
        part.device,
        batch * part.model.sequence_length,
        seconds,
    )
    found |= utilisation(part, found["tokens_per_s"], flops_per_token(part.model))
    return {**found, "at_once": loop.micro_batch_size, "format": str(loop.dtype)[6:]}


def nano_figures(part: Part, batch: int, seconds: float) -> dict[str, Any]:
    """Measure the loop in the manner of nanoGPT."""
    model = NanoGPT(part.model).to(part.device)
    flops = flops_per_token(part.model, model.multiplied_parameters())
    return others_figures(part, model, torch.compile(model), batch, seconds, flops)


def llama_figures(part: Part, batch: int, seconds: float, *, compiled: bool) -> dict[str, Any]:
    """Measure transformers' Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama_config(part.model, torch.float32))
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).to(part.device).train()
    forward = torch.compile(model) if compiled else model

    def loss_of(tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    return others_figures(part, model, loss_of, batch, seconds, flops_per_token(part.model))


def others_figures(
    part: Part, model: torch.nn.Module, loss_of: Any, batch: int, seconds: float, flops: float
) -> dict[str, Any]:
    """Measure a plain loop, with half the sequences at once as often as memory runs out."""

    def figures(at_once: int) -> dict[str, Any]:
        step = plain_step(loss_of, model, part.device, at_once)
        return timed_steps(
            lambda number: step(random_batch(part.model, batch, number)),
            part.device,
            batch * part.model.sequence_length,
            seconds,
        )

    tried = AtOnce(min(batch, OTHERS_AT_ONCE), part.device, "the plain loop")
    found = tried.attempt(figures, part.model.sequence_length)
    return {**found, **utilisation(part, found["tokens_per_s"], flops), "at_once": tried.count}


def utilisation(part: Part, tokens_per_s: float, flops: float) -> dict[str, float]:
    """Return TFLOP/s, and the share of the card's peak where that is known."""
    tflops = tokens_per_s * flops / 1e12
    card = card_of(device_name(part.device)) if part.device.type == "cuda" else None
    return {"tflops": tflops, **({"mfu": tflops / card.tflops} if card else {})}


if __name__ == "__main__":
    sys.exit(main())
