"""Part e: adapters over frozen bases of public shapes, beside PEFT on the same batches.

Bases have random weights: speed and memory do not depend on what they say. Both compute blocks
twice and have the same rank, optimizer and number of sequences at once. Where there is no PEFT,
it is left out, and that is said.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dipaco.modules.adapters import initial_adapters
from dipaco.modules.config import AdaptersConfig, InnerConfig, ModelConfig
from dipaco.modules.frozen_base import FrozenBase
from dipaco.modules.grid import parameter_shapes
from dipaco.modules.llama import llama_config
from dipaco.modules.transformer import PathModel
from dipaco.training.inner import InnerLoop
from gpu_kit.common import Part, begin, random_batch, timed_steps
from gpu_kit.nano import plain_step

ONE_BILLION = ModelConfig(
    vocabulary_size=128_256,
    block_count=16,
    hidden_size=2048,
    head_count=32,
    kv_head_count=8,
    feed_forward_size=8192,
    sequence_length=1024,
    rope_theta=500_000.0,
)
SEVEN_BILLION = ModelConfig(
    vocabulary_size=32_000,
    block_count=32,
    hidden_size=4096,
    head_count=32,
    feed_forward_size=11_008,
    sequence_length=1024,
    tied_embedding=False,
)
TINY = ModelConfig(
    vocabulary_size=320, block_count=2, hidden_size=64, head_count=2, sequence_length=64
)
BATCH, RANK, RATE = 8, 16, 1e-3


def main() -> int:
    part = begin("adapters", __doc__)
    shapes = {"tiny": TINY} if part.rehearses else {"7 B": SEVEN_BILLION, "1 B": ONE_BILLION}
    seconds = 1.0 if part.rehearses else 6.0
    for name, shape in shapes.items():
        for base_format in ("nf4", "bf16"):
            measure(part, name, shape, base_format, seconds)
    return part.conclude()


def measure(part: Part, name: str, shape: ModelConfig, base_format: str, seconds: float) -> None:
    """Measure one base in one format: ours eager and compiled, and PEFT."""
    weights = random_weights(shape)
    adapters = AdaptersConfig(rank=RANK, base_format=base_format)
    model = shape.model_copy(update={"adapters": adapters})
    found: dict[str, dict[str, Any]] = {}
    ways: dict[str, Callable[[], Any]] = {
        "ours, eager": lambda: our_step(part, model, weights, compiled=False),
        "ours, compiled": lambda: our_step(part, model, weights, compiled=True),
    }
    if importlib.util.find_spec("peft"):
        ways["PEFT"] = lambda: peft_step(part, model, weights)
    else:
        print("  PEFT: left out, it is not installed", flush=True)
    for way, make in ways.items():
        title = f"{name}, {base_format}, {way}"
        with part.measuring(title):
            step = make()
            tokens = BATCH * shape.sequence_length
            found[way] = timed_steps(step, part.device, tokens, seconds)
            part.note(title, found[way])
            del step
    if "PEFT" in found:
        ratios = {
            way: found[way]["tokens_per_s"] / found["PEFT"]["tokens_per_s"]
            for way in found
            if way != "PEFT"
        }
        part.note(f"{name}, {base_format}, beside PEFT", ratios)


def random_weights(shape: ModelConfig) -> dict[str, torch.Tensor]:
    """Return a base's tensors on the CPU. All are views of one pool, so that they take no time."""
    shapes = parameter_shapes(shape)
    largest = max(torch.Size(each).numel() for each in shapes.values())
    generator = torch.Generator().manual_seed(0)
    pool = (0.02 * torch.randn(largest, generator=generator)).bfloat16()
    return {
        name: torch.ones(each) if len(each) < 2 else pool[: torch.Size(each).numel()].view(each)
        for name, each in shapes.items()
    }


def our_step(
    part: Part, model: ModelConfig, weights: Mapping[str, torch.Tensor], *, compiled: bool
) -> Any:
    """Return a step of the inner loop as a peer takes it."""
    assert model.adapters is not None
    path = PathModel(model, FrozenBase(weights, model.adapters.base_format, part.device))
    with torch.no_grad():
        for name, values in initial_adapters(model, 0).items():
            path.get_parameter(name).copy_(values)
    path.recomputes = True
    loop = InnerLoop(
        path.to(part.device).train(),
        InnerConfig(optimizer="adamw", batch_sequences=BATCH, learning_rate=RATE, weight_decay=0.0),
        part.device,
        micro_batch_size=BATCH,
        compile_model=compiled,
        exact=False,
    )
    return lambda number: loop.step(random_batch(model, BATCH, number), number)


def peft_step(part: Part, model: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Any:
    """Return a step of PEFT's adapters over transformers' Llama, in a plain loop."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    assert model.adapters is not None
    config = LlamaConfig(**llama_config(model.without_adapters, torch.bfloat16))
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        base = LlamaForCausalLM(config)
    place(base, weights, part.device, in_four_bits=model.adapters.base_format == "nf4")
    base.model.rotary_emb = type(base.model.rotary_emb)(config).to(part.device)
    base.tie_weights()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(base, lora)
    adapted.enable_input_require_grads()
    adapted.train()

    def loss_of(tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = adapted(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    step = plain_step(loss_of, adapted, part.device, BATCH, rate=RATE)
    return lambda number: step(random_batch(model, BATCH, number))


def place(
    base: Any, weights: Mapping[str, torch.Tensor], device: torch.device, *, in_four_bits: bool
) -> None:
    """Give transformers' model its weights, products of blocks in NF4 as it would load them."""
    for name, weight in weights.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = base.get_submodule(owner_name)
        if in_four_bits and ".layers." in name and weight.ndim == 2:
            base.set_submodule(owner_name, in_nf4(weight, device))
        else:
            placed = weight.to(device, torch.bfloat16)
            setattr(owner, leaf, torch.nn.Parameter(placed, requires_grad=False))


def in_nf4(weight: torch.Tensor, device: torch.device) -> torch.nn.Module:
    """Return a linear map in NF4, its scales quantised too."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    outputs, inputs = weight.shape
    linear = Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, device="meta")
    linear.weight = Params4bit(
        weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    return linear.to(device)


if __name__ == "__main__":
    sys.exit(main())
