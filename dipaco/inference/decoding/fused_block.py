"""A transformer block in few calls, in PyTorch and in NumPy.

Query, key and value are one map and gate and up another, and gains of norms are in the maps behind
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from dipaco.modules.adapters import LORA_A, LORA_B
from dipaco.modules.transformer import Block, Embedding, Projection, RMSNorm
from dipaco.protocol.config import ModelConfig

from .low_rank import BlockAdapters, LowRank


class FusedBlock:
    """A transformer block in four maps.

    Numbers that are rotated together stand together in a head, where training has them half a head
    apart: then they are a complex number. Queries and keys are in the same order, so it changes no
    product of theirs.
    """

    def __init__(self, block: Block, config: ModelConfig, dtype: torch.dtype) -> None:
        own, mlp = block.self_attn, block.mlp
        self._heads, self._kv_heads, self._width = own.heads, own.kv_heads, own.width
        half = own.width // 2
        pairs = torch.arange(own.width).view(2, half).T.flatten()
        turned = torch.cat([pairs + own.width * head for head in range(own.heads + own.kv_heads)])
        order = torch.cat([turned, torch.arange(own.kv_heads * own.width) + len(turned)])
        parts = [own.q_proj, own.k_proj, own.v_proj]
        self._inputs = Map(parts, block.input_layernorm, order, dtype=dtype)
        self.output = Map([own.o_proj], dtype=dtype)
        parts = [mlp.gate_proj, mlp.up_proj]
        self._gate_and_up = Map(parts, block.post_attention_layernorm, dtype=dtype)
        self._down = Map([mlp.down_proj], dtype=dtype)
        self._gains: torch.Tensor | None = None
        if own.has_norms:
            counts = torch.tensor([own.heads, own.kv_heads])
            gains = torch.stack([own.q_norm.weight[pairs], own.k_norm.weight[pairs]])
            self._gains = gains.repeat_interleave(counts.to(gains.device), 0)
            self._epsilon = config.norm_epsilon

    def low_rank(self, tensors: Mapping[str, torch.Tensor], scale: float) -> BlockAdapters:
        """Return the adapters of this block, named from its own part on (`mlp.up_proj.lora_A...`),
        as they are added to its maps."""

        def of(target: Map, *names: str) -> LowRank:
            inner, outer = (
                [tensors[f"{name}.{factor}.weight"] for name in names]
                for factor in (LORA_A, LORA_B)
            )
            return target.low_rank(inner, outer, scale)

        attention = [f"self_attn.{letter}_proj" for letter in "qkv"]
        return BlockAdapters(
            of(self._inputs, *attention),
            of(self.output, "self_attn.o_proj"),
            of(self._gate_and_up, "mlp.gate_proj", "mlp.up_proj"),
            of(self._down, "mlp.down_proj"),
        )

    def attended(
        self, normed: torch.Tensor, rotation: torch.Tensor, added: BlockAdapters
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [B, T, heads, D], and keys and values together, of [B, T, H]; rotated."""
        pairs = (self._heads + 2 * self._kv_heads, self._width // 2, 2)
        mapped = self._inputs(normed, added.inputs).view(*normed.shape[:2], *pairs)
        turned = mapped[:, :, : self._heads + self._kv_heads]
        if self._gains is not None:
            heads = F.rms_norm(turned.flatten(3), (self._width,), None, self._epsilon)
            turned.copy_((heads * self._gains).view(turned.shape))
        torch.view_as_complex(turned).mul_(rotation)
        mapped = mapped.flatten(3)
        return mapped[:, :, : self._heads], mapped[:, :, self._heads :]

    def few_attended(
        self, normed: np.ndarray, rotation: np.ndarray, added: BlockAdapters
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `attended`, of [B, 1, H]: [B, heads, D]."""
        mapped = self._inputs.few(normed, added.inputs).reshape(len(normed), -1, self._width)
        turned = mapped[:, : self._heads + self._kv_heads]
        if self._gains is not None:
            mean = (turned * turned).mean(axis=-1, keepdims=True)
            turned *= self._gains.numpy() / np.sqrt(mean + np.float32(self._epsilon))
        turned.view(np.complex64)[:] *= rotation
        return mapped[:, : self._heads], mapped[:, self._heads :]

    def few_fed_forward(self, normed: np.ndarray, added: BlockAdapters) -> np.ndarray:
        """As `fed_forward`."""
        both = self._gate_and_up.few(normed, added.gate_and_up)
        gate, up = both[:, :, : both.shape[2] // 2], both[:, :, both.shape[2] // 2 :]
        return self._down.few(gate / (1 + np.exp(-gate)) * up, added.down)

    def fed_forward(self, normed: torch.Tensor, added: BlockAdapters) -> torch.Tensor:
        """SwiGLU: [B, T, H] to [B, T, H]."""
        gate, up = self._gate_and_up(normed, added.gate_and_up).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up, added.down)


def _full_weight(part: Projection | Embedding) -> torch.Tensor:
    """Return the matrix of a part, an adapter included, fp32."""
    if isinstance(part, Projection):
        return part.full_weight()
    return part.weight.detach().float()


class Map:
    """Linear maps of one input as a single one, with the gain of the norm in front of them.

    :param order: which output stands where; outputs of a part stay together
    :param dtype: how the weight is stored. In 16 bits it is the weight as it was trained, and the
        gain is applied to the inputs
    """

    def __init__(
        self,
        parts: Sequence[Projection | Embedding],
        norm: RMSNorm | None = None,
        order: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        weight = torch.cat([_full_weight(part) for part in parts])
        biases = [bias for part in parts if (bias := getattr(part, "bias", None)) is not None]
        self._bias = torch.cat(biases).detach() if biases else None
        self._order = None if order is None else order.to(weight.device)
        if self._order is not None:
            weight = weight[self._order]
            self._bias = None if self._bias is None else self._bias[self._order]
        self._gain: torch.Tensor | None = None
        if norm is not None:
            self._gain = norm.weight.detach() * math.sqrt(weight.shape[1])
        self._is_gain_in_weight = dtype == torch.float32
        if self._gain is not None and self._is_gain_in_weight:
            weight = weight * self._gain
        self._weight = weight.T.to(dtype).contiguous()
        self.is_array = weight.device.type == "cpu" and dtype == torch.float32
        self._array = self._weight.numpy() if self.is_array else np.empty(0)

    def low_rank(
        self, inner: Sequence[torch.Tensor], outer: Sequence[torch.Tensor], scale: float
    ) -> LowRank:
        """Return what adapters of the parts add: A [r, in] and B [out, r] of each of them."""
        device, first = self._weight.device, 0
        a = torch.cat([one.to(device) for one in inner])
        if self._gain is not None and self._is_gain_in_weight:
            a = a * self._gain
        mapped = []
        for b in outer:
            last = first + len(b)
            rows = slice(None) if self._order is None else self._order[first:last] - first
            mapped.append((b.to(device)[rows] * scale).T.contiguous())
            first = last
        return LowRank(a.T.contiguous(), tuple(mapped))

    def __call__(self, inputs: torch.Tensor, added: LowRank | None = None) -> torch.Tensor:
        """Map [B, T, inputs] to [B, T, outputs]."""
        if self._is_gain_in_weight:
            mapped = inputs @ self._weight
        else:
            inputs = inputs if self._gain is None else inputs * self._gain
            mapped = (inputs.to(self._weight.dtype) @ self._weight).float()
        if self._bias is not None:
            mapped.add_(self._bias)
        if added is not None:
            added.add(inputs, mapped)
        return mapped

    def few(self, inputs: np.ndarray, added: LowRank | None = None) -> np.ndarray:
        """Map [B, 1, inputs] on the CPU, row by row."""
        mapped: np.ndarray = inputs @ self._array
        if self._bias is not None:
            mapped = mapped + self._bias.numpy()
        if added is not None:
            added.add(inputs, mapped)
        return mapped


def normed(hidden: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Return RMSNorm without its gain and divided by the root of the width, which are in the map
    behind it; `floor` is the root of epsilon times the width."""
    return hidden / torch.hypot(torch.linalg.vector_norm(hidden, dim=-1, keepdim=True), floor)


def few_normed(hidden: np.ndarray, floor: float) -> np.ndarray:
    """Return `normed` in NumPy; `floor` is epsilon times the width."""
    normed: np.ndarray = hidden / np.sqrt(hidden @ hidden.swapaxes(1, 2) + np.float32(floor))
    return normed
