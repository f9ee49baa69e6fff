"""The operations of a training step, and the least time that they take on a card.

A micro-batch goes through the inner loop with tensors that have shapes and no memory, and every
operation is written down: FLOPs, bytes read and written. On a card an operation takes at least the
longer of FLOPs over its peak and bytes over its bandwidth (`CARDS`). *Eager*, each
operation reads and writes memory. *Fused*, what lies between two products does once, which is what
a compiler can reach at most. Nothing overlaps, and no kernel is as fast as its card, so a measured
step takes longer than either. Optimizer and clipping come once in a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dipaco.modules import transformer
from dipaco.modules.layout import parameter_counts
from dipaco.modules.memory import head_bytes, pass_bytes
from dipaco.modules.transformer import GPU_BYTES_A_LOGIT, LOGITS_AT_ONCE_ON_GPU, PathModel
from dipaco.protocol.config import GridConfig, InnerConfig, ModelConfig
from dipaco.protocol.grid import Grid
from dipaco.training.inner import InnerLoop

BATCH = 512
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
# AdamW reads a parameter, its gradient and two moments and writes three of them; clipping reads the
# gradient for its norm, and reads and writes it. Bytes of fp32.
OPTIMIZER_BYTES = 28 + 12
KINDS = ("products", "attention", "head", "between", "weights", "optimizer")


@dataclass(frozen=True)
class Card:
    """What a data sheet says: dense products in 16 bits, TFLOP/s; memory, GB/s and GB."""

    tflops: float
    gb_per_s: float
    memory_gb: float


# Products are in bf16, on the T4 in fp16.
CARDS = {
    "H200": Card(989.0, 4800.0, 141.0),
    "H100": Card(989.0, 3350.0, 80.0),
    "A100": Card(312.0, 2039.0, 80.0),
    "L4": Card(121.0, 300.0, 24.0),
    "T4": Card(65.0, 320.0, 16.0),
    "RTX 4090": Card(165.0, 1008.0, 24.0),
    "RTX 3090": Card(71.0, 936.0, 24.0),
    "RTX 3060": Card(25.5, 360.0, 12.0),
}


@dataclass
class Operation:
    """One kernel, or what lies between two products: what it computes and moves."""

    kind: str
    flops: float = 0.0
    bytes: float = 0.0

    def seconds(self, card: Card) -> float:
        """Return the least time on a card."""
        return max(self.flops / card.tflops / 1e12, self.bytes / card.gb_per_s / 1e9)


@dataclass
class Work:
    """What a micro-batch costs."""

    eager: list[Operation] = field(default_factory=list)
    fused: list[Operation] = field(default_factory=list)
    wide_bytes: float = 0.0
    """Of what is between products when fused: bytes in fp32."""


class Writing(TorchDispatchMode):
    """Writes down what every operation reads and writes."""

    def __init__(self, model: ModelConfig, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._vocabulary = model.vocabulary_size
        self._weights = {shape for p in parameters for shape in (p.shape, p.shape[::-1])}
        self._work = Work()
        # Between two products: what is read there, and what was made there.
        self._section = 0
        self._made: dict[int, int] = {}
        self._read: dict[int, set[int]] = defaultdict(set)
        self._sizes: dict[int, tuple[str, int, bool]] = {}
        # A storage that is let go could come again as another.
        self._kept: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        places = {_place(tensor) for tensor in given}
        writes = func._schema.is_mutable
        if made and (writes or any(_place(tensor) not in places for tensor in made)):
            self._write_down(func.overloadpacket.__name__, given, made)
        return result

    def _write_down(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        moved = float(sum(_bytes(tensor) for tensor in (*given, *made)))
        for tensor in (*given, *made):
            self._sizes[_place(tensor)] = (
                self._kind([tensor]),
                _bytes(tensor),
                tensor.dtype == torch.float32,
            )
            self._kept.append(tensor.untyped_storage())
        kind = self._kind([*given, *made])
        if name in PRODUCTS:
            left, right = given[-2:]
            flops = 2.0 * left.numel() * right.shape[-1]
            kind = kind if kind == "head" else "products"
        elif "scaled_dot_product" in name:
            kind, flops = "attention", self._attention_flops(given, "backward" in name)
        else:
            self._work.eager.append(Operation(kind, bytes=moved))
            for tensor in given:
                self._read[_place(tensor)].add(self._section)
            for tensor in made:
                self._made.setdefault(_place(tensor), self._section)
            return
        operation = Operation(kind, flops, moved)
        self._work.eager.append(operation)
        self._work.fused.append(operation)
        self._section += 1
        for tensor in given:
            self._read[_place(tensor)].add(-1)
        for tensor in made:
            self._made.setdefault(_place(tensor), -1)

    def _attention_flops(self, given: list[torch.Tensor], backward: bool) -> float:
        """Return those of causal attention: two products forward, five backward, half of each."""
        queries = next(tensor for tensor in given if tensor.ndim == 4)
        return (5 if backward else 2) * float(queries.numel()) * queries.shape[2]

    def _kind(self, tensors: list[torch.Tensor]) -> str:
        if any(self._vocabulary in tensor.shape for tensor in tensors):
            return "head"
        shapes = [tensor.shape for tensor in tensors if tensor.numel() > 1]
        return "weights" if shapes and all(s in self._weights for s in shapes) else "between"

    def work(self) -> Work:
        """Return what was written down; what is between two products moves what comes and goes."""
        for place, (kind, size, is_wide) in self._sizes.items():
            made_in, read_in = self._made.get(place), self._read[place]
            sections = {section for section in read_in if section >= 0 and section != made_in}
            written = made_in is not None and made_in >= 0 and bool(read_in - {made_in})
            moved = size * (len(sections) + written)
            if moved:
                self._work.fused.append(Operation(kind, bytes=float(moved)))
                self._work.wide_bytes += moved * is_wide * (kind == "between")
        return self._work


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; one that is spread out is read as it lies in memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def work_of(model: ModelConfig, sequences: int) -> Work:
    """Return what a micro-batch costs, when it is not the first of its batch."""
    with FakeTensorMode():
        path = PathModel(model)
        config = InnerConfig(optimizer="adamw", batch_sequences=sequences)
        loop = InnerLoop(path, config, torch.device("cpu"), exact=False)
        # As a GPU computes; its causal attention writes no scores either.
        loop.dtype = torch.bfloat16
        tokens = torch.ones(sequences, model.sequence_length, dtype=torch.int64)
        for parameter in path.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loop._forget_gradients = lambda: None  # type: ignore[method-assign]
        with (
            mock.patch.object(transformer, "LOGITS_AT_ONCE", LOGITS_AT_ONCE_ON_GPU),
            Writing(model, path.parameters()) as writing,
        ):
            loop._backward([tokens], tokens.numel())
    return writing.work()


def seconds_per_token(
    operations: Iterable[Operation], card: Card, tokens: int, batch_tokens: int, parameters: int
) -> dict[str, float]:
    """Return the least seconds of a token, by what they are for; an optimizer step comes once in
    `batch_tokens`."""
    found = dict.fromkeys(KINDS, 0.0)
    for operation in operations:
        found[operation.kind] += operation.seconds(card) / tokens
    found["optimizer"] = OPTIMIZER_BYTES * parameters / card.gb_per_s / 1e9 / batch_tokens
    return found


def fitting(model: ModelConfig, card: Card, parameters: int) -> int:
    """Return how many sequences fit on a card beside parameters, gradients and AdamW."""
    memory = card.memory_gb * 1e9
    at_once = max(LOGITS_AT_ONCE_ON_GPU, int(memory / GPU_BYTES_A_LOGIT))
    free = 0.9 * memory - 16 * parameters - head_bytes(model, BATCH, at_once)
    return max(1, min(BATCH, int(free // pass_bytes(model))))


def path_parameters(model: ModelConfig) -> int:
    """Return the parameters of a path."""
    return parameter_counts(Grid(model, GridConfig(modules_per_level=(1,))))["path"]


def flops_per_token(model: ModelConfig) -> float:
    """Return the FLOPs of one training token, forward and backward, without recomputation.

    Six for each parameter of a matrix product, and 12 x blocks x width x length for attention. The
    embedding is looked up and not multiplied; tied to the head it counts once, as the head.
    """
    embedding = 0 if model.tied_embedding else model.vocabulary_size * model.hidden_size
    attention = 12 * model.block_count * model.hidden_size * model.sequence_length
    return float(6 * (path_parameters(model) - embedding) + attention)
