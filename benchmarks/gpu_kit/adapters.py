"""Part e: adapters over frozen bases of public shapes, beside PEFT on the same batches.

Bases have random weights: speed and memory do not depend on what they say. Both compute blocks
twice and have the same rank, optimizer and number of sequences at once. Where there is no PEFT,
it is left out, and that is said. Then PyTorch may have as much memory as a smaller card has, and
trains the largest base that `dipaco-bootstrap plan` names for that card. At last a matrix is
quantised on the card and on the CPU.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dipaco.modules.adapters import initial_adapters
from dipaco.modules.frozen_base import FrozenBase, Nf4Weight
from dipaco.modules.frozen_file import base_parameter_count, split_parameter_count
from dipaco.modules.layout import parameter_shapes
from dipaco.modules.llama import llama_config
from dipaco.modules.transformer import PathModel
from dipaco.peer.check.needs import GPU_GIB, greatest_bases
from dipaco.protocol.config import (
    AdaptersConfig,
    ContributionsConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    RoundsConfig,
)
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
    found = {
        (name, base_format): beside_peft(part, name, shape, base_format)
        for name, shape in shapes.items()
        for base_format in ("nf4", "bf16")
    }
    smaller_cards(part, TINY if part.rehearses else ONE_BILLION)
    with part.measuring("nf4 on both devices"):
        part.note("nf4 on both devices", quantised_on_both(part))
    # Last, because compilation takes longest.
    for (name, base_format), speeds in found.items():
        speeds |= measured(part, f"{name}, {base_format}", ("ours, compiled",), shapes[name])
        ratios(part, f"{name}, {base_format}", speeds)
    return part.conclude()


def beside_peft(part: Part, name: str, shape: ModelConfig, base_format: str) -> dict[str, float]:
    """Measure one base in one format, eager; returns tokens a second."""
    ways = ["ours, eager"]
    if importlib.util.find_spec("peft"):
        ways.append("PEFT")
    else:
        print("  PEFT: left out, it is not installed", flush=True)
    speeds = measured(part, f"{name}, {base_format}", ways, shape)
    ratios(part, f"{name}, {base_format}", speeds)
    return speeds


def measured(part: Part, base: str, ways: Sequence[str], shape: ModelConfig) -> dict[str, float]:
    """Measure steps over a base, named with its format, in each way; returns tokens a second."""
    weights = random_weights(shape)
    adapters = AdaptersConfig(rank=RANK, base_format=base.rpartition(" ")[2])
    model = shape.model_copy(update={"adapters": adapters})
    speeds = {}
    for way in ways:
        with part.measuring(f"{base}, {way}"):
            if way == "PEFT":
                step = peft_step(part, model, weights)
            else:
                step = our_step(part, model, weights, compiled=way.endswith("compiled"))
            seconds = 1.0 if part.rehearses else 4.0
            found = timed_steps(step, part.device, BATCH * shape.sequence_length, seconds)
            part.note(f"{base}, {way}", found)
            speeds[way] = found["tokens_per_s"]
            del step
    return speeds


def ratios(part: Part, base: str, speeds: Mapping[str, float]) -> None:
    """Note how fast our ways are beside PEFT."""
    if "PEFT" in speeds:
        ours = {way: speed / speeds["PEFT"] for way, speed in speeds.items() if way != "PEFT"}
        part.note(f"{base}, beside PEFT", ours)


def smaller_cards(part: Part, shape: ModelConfig) -> None:
    """Train the largest base like `shape` that is named for each size of a card and format."""
    # Of each card the base that takes least time to make first.
    for base_format in ("bf16", "nf4"):
        for gib in (min(GPU_GIB), max(GPU_GIB)):
            title = f"largest base, {gib} GiB, {base_format}"
            with part.measuring(title):
                part.note(title, largest_base(part, shape, base_format, gib))


def largest_base(part: Part, shape: ModelConfig, base_format: str, gib: int) -> dict[str, Any]:
    """Take steps of one sequence over the largest base of a card; returns what memory it took."""
    adapters = AdaptersConfig(rank=RANK, base_format=base_format)
    run = PlannedRun(shape.model_copy(update={"adapters": adapters}))
    parameters = base_parameter_count(shape)
    if not part.rehearses:
        parameters = greatest_bases(run)[base_format][gib]
    like = enlarged(shape, parameters)
    model = like.model_copy(update={"adapters": adapters})
    total = 0
    if not part.rehearses:
        total = torch.cuda.get_device_properties(part.device).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, part.device)
        torch.cuda.reset_peak_memory_stats(part.device)
    try:
        step = our_step(part, model, random_weights(like), compiled=False, batch=1)
        found = timed_steps(step, part.device, like.sequence_length, 1.0)
        if total:
            reserved = torch.cuda.max_memory_reserved(part.device)
            found["peak_reserved_gib"] = reserved / 2**30
    finally:
        if total:
            torch.cuda.set_per_process_memory_fraction(1.0, part.device)
    return {"parameters": base_parameter_count(like), **found}


@dataclass(frozen=True)
class PlannedRun:
    """What the greatest bases follow from."""

    model: ModelConfig
    grid: GridConfig = field(default_factory=lambda: GridConfig(modules_per_level=(2, 2)))
    inner: InnerConfig = field(default_factory=lambda: InnerConfig(optimizer="adamw"))
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    contributions: ContributionsConfig = field(default_factory=ContributionsConfig)


def enlarged(shape: ModelConfig, parameters: int) -> ModelConfig:
    """Return the largest model in about the proportions of `shape` with at most so many parameters.

    Heads have a size that attention has kernels for; the number of blocks takes what is left.
    """
    scale = (parameters / base_parameter_count(shape)) ** (1 / 3)
    unit = 8 * shape.head_count
    hidden = max(unit, round(scale * shape.hidden_size / unit) * unit)
    wide = shape.model_copy(
        update={
            "hidden_size": hidden,
            "feed_forward_size": hidden * shape.feed_forward // shape.hidden_size,
        }
    )
    in_blocks, outside = split_parameter_count(wide)
    blocks = int((parameters - outside) // (in_blocks // wide.block_count))
    return wide.model_copy(update={"block_count": max(1, blocks)})


def quantised_on_both(part: Part) -> dict[str, Any]:
    """Quantise a matrix on the device and on the CPU; returns how many numbers differ."""
    generator = torch.Generator().manual_seed(1)
    weight = (0.02 * torch.randn(1024, 1024, generator=generator)).bfloat16()
    here, there = Nf4Weight.of(weight), Nf4Weight.of(weight.to(part.device))
    codes = (here.packed != there.packed.cpu()).float().mean().item()
    apart = (here.to(torch.float32) - there.to(torch.float32).cpu()).abs()
    return {
        "bytes_that_differ": codes,
        "numbers_that_differ": (apart > 0).float().mean().item(),
        "greatest_difference": apart.max().item(),
        "error_of_nf4": (here.to(torch.float32) - weight.float()).abs().mean().item(),
    }


def random_weights(shape: ModelConfig) -> dict[str, torch.Tensor]:
    """Return a base's tensors on the CPU. All are views of one pool, so that they take no time."""
    shapes = parameter_shapes(shape)
    largest = max(torch.Size(each).numel() for each in shapes.values())
    generator = torch.Generator().manual_seed(0)
    pool = (0.02 * torch.randn(largest, generator=generator)).bfloat16()
    if torch.cuda.is_available():
        # It travels many times.
        pool = pool.pin_memory()
    return {
        name: torch.ones(each) if len(each) < 2 else pool[: torch.Size(each).numel()].view(each)
        for name, each in shapes.items()
    }


def our_step(
    part: Part,
    model: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    compiled: bool,
    batch: int = BATCH,
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
        InnerConfig(optimizer="adamw", batch_sequences=batch, learning_rate=RATE, weight_decay=0.0),
        part.device,
        micro_batch_size=batch,
        compile_model=compiled,
        exact=False,
    )
    return lambda number: loop.step(random_batch(model, batch, number), number)


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
