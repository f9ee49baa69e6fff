"""A path that gives tokens: few calls for each token, and a cache of fixed size.

What a token costs beside reading the weights is the number of calls. So query, key and value are
one map and gate and up another, gains of norms are in the maps behind them, positions are looked
up, and nothing is allocated that can stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from dipaco.modules.config import ModelConfig
from dipaco.modules.frozen_file import base_parameter_count
from dipaco.modules.grid import parameter_shapes
from dipaco.modules.transformer import (
    AdaptedProjection,
    Block,
    Embedding,
    PathModel,
    Projection,
    RMSNorm,
    rotary_frequencies,
)

# Positions whose logits are computed at once when a text is scored.
_SCORED_AT_ONCE = 128
# On a CPU, NumPy gives so few texts a token in less time than PyTorch: its calls cost less.
_FEW_TEXTS = 4


class Decoder:
    """A path and the texts in its `slots`, each at a position of its own.

    Nothing can be loaded into it, and the model that it is made of can be dropped. Used by one
    thread at a time.
    """

    @torch.no_grad()
    def __init__(self, model: PathModel, slots: int) -> None:
        self.config = config = model.config
        self.lengths = [0] * slots
        """Tokens that are stored of each text; 0 in a free slot."""
        # Of a frozen base there is one copy, however many paths stand on it.
        kept: dict[str, _Fused] = {} if model.base is None else model.base.derived
        self._embedding = _kept(kept, "embedding", lambda: _embedding(model.model.embed_tokens))[0]
        self._device = device = self._embedding.device
        root = math.sqrt(config.hidden_size)
        self._floor = torch.tensor(root * math.sqrt(config.norm_epsilon), device=device)
        self._blocks = [
            _FusedBlock(block, config, kept, f"block {number}")  # type: ignore[arg-type]
            for number, block in enumerate(model.model.layers)
        ]
        head = model.lm_head or model.model.embed_tokens
        self._head = _Map([head], kept, "head", model.model.norm)
        # Keys, then values, of each block.
        shape = (slots, 2 * config.kv_heads, config.sequence_length, config.width_of_head)
        self._stored = [torch.zeros(shape, device=device) for _ in self._blocks]
        places = torch.arange(config.sequence_length, device=device, dtype=torch.float32)
        angles = places[:, None, None] * rotary_frequencies(config, device)
        self._rotation = torch.polar(torch.ones_like(angles), angles)

    def read(
        self, slot: int, tokens: Sequence[int], *, every: bool = False
    ) -> Iterator[torch.Tensor]:
        """Put a text into a slot and yield the logits of what comes next, fp32 [n, V] on the CPU:
        after its last token, or after `every` one, some at a time."""
        count = len(tokens)
        places = torch.arange(count, device=self._device)[None]
        hidden = self._run([tokens], places, slot, count, None)
        self.lengths[slot] = count
        for start in range(0, count, _SCORED_AT_ONCE) if every else (count - 1,):
            yield self._logits(hidden[:, start : start + _SCORED_AT_ONCE])[0]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Add a token to each of the first slots; return the logits of what comes next, fp32
        [slots, V] on the CPU. A token in a free slot is anything."""
        lengths = self.lengths[: len(tokens)]
        if self._device.type == "cpu" and len(tokens) <= _FEW_TEXTS:
            with np.errstate(over="ignore"):  # of exp in a gate that is shut
                logits = torch.from_numpy(self._few(np.array(tokens), np.array(lengths)))
        else:
            places = torch.tensor(lengths, device=self._device)[:, None]
            used, mask = max(lengths) + 1, None
            if min(lengths) + 1 < used:
                unseen = torch.arange(used, device=self._device) > places
                mask = torch.zeros(unseen.shape, device=self._device)
                mask = mask.masked_fill_(unseen, -torch.inf)[:, None, None]
            logits = self._logits(self._run([[token] for token in tokens], places, 0, used, mask))
        for slot, length in enumerate(lengths):
            self.lengths[slot] += length > 0
        return logits[:, 0]

    def copy(self, slot: int, length: int) -> list[torch.Tensor]:
        """Return the first tokens of a text as they are stored, for `paste`."""
        return [stored[slot, :, :length].clone() for stored in self._stored]

    def paste(self, slot: int, text: list[torch.Tensor]) -> None:
        """Put what `copy` returned into a slot."""
        self.lengths[slot] = text[0].shape[1]
        for stored, own in zip(self._stored, text, strict=True):
            stored[slot, :, : own.shape[1]] = own

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.lengths[slot] = 0

    @torch.inference_mode()
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(_normed(hidden, self._floor)).float().cpu()

    @torch.inference_mode()
    def _run(
        self,
        tokens: Sequence[Sequence[int]],
        places: torch.Tensor,
        slot: int,
        used: int,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the outputs [B, T, H] of tokens [B, T] at `places`, in the slots from `slot` on,
        of whose positions the first ones are `used`."""
        last = slot + len(tokens)
        rows = torch.arange(slot, last, device=self._device)[:, None]
        rotation = self._rotation[places]
        hidden = F.embedding(torch.tensor(tokens, device=self._device), self._embedding)
        for block, stored in zip(self._blocks, self._stored, strict=True):
            queries, new = block.attended(_normed(hidden, self._floor), rotation)
            stored[rows, :, places] = new
            hidden = hidden + block.output(_attention(queries, stored[slot:last, :, :used], mask))
            hidden = hidden + block.fed_forward(_normed(hidden, self._floor))
        return hidden

    def _few(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the logits [B, 1, V] of a step of a few slots: what `_run` does, in NumPy."""
        count, used = len(tokens), int(places.max()) + 1
        rows, kv_heads = np.arange(count), self.config.kv_heads
        rotation, floor = self._rotation.numpy()[places], float(self._floor) ** 2
        scale = np.float32(self.config.width_of_head**-0.5)
        unseen = (np.arange(used) > places[:, None])[:, None, None] if count > 1 else None
        hidden = self._embedding.numpy()[tokens[:, None]]
        for block, tensor in zip(self._blocks, self._stored, strict=True):
            stored = tensor.numpy()
            queries, new = block.few_attended(_few_normed(hidden, floor), rotation)
            stored[rows, :, places] = new
            keys, values = stored[:count, :kv_heads, :used], stored[:count, kv_heads:, :used]
            scores = queries.reshape(count, kv_heads, -1, new.shape[2]) @ keys.swapaxes(2, 3)
            scores *= scale
            if unseen is not None:
                scores[np.broadcast_to(unseen, scores.shape)] = -np.inf
            np.exp(scores - scores.max(axis=-1, keepdims=True), out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            hidden += block.output.few((scores @ values).reshape(count, 1, -1))
            hidden += block.few_fed_forward(_few_normed(hidden, floor))
        return self._head.few(_few_normed(hidden, floor))


class _FusedBlock:
    """A transformer block in four maps.

    Numbers that are rotated together stand together in a head, where training has them half a head
    apart: then they are a complex number. Queries and keys are in the same order, so it changes no
    product of theirs.
    """

    def __init__(
        self, block: Block, config: ModelConfig, kept: dict[str, _Fused], name: str
    ) -> None:
        own, mlp = block.self_attn, block.mlp
        self._heads, self._kv_heads, self._width = own.heads, own.kv_heads, own.width
        half = own.width // 2
        pairs = torch.arange(own.width).view(2, half).T.flatten()
        turned = torch.cat([pairs + own.width * head for head in range(own.heads + own.kv_heads)])
        order = torch.cat([turned, torch.arange(own.kv_heads * own.width) + len(turned)])
        parts = [own.q_proj, own.k_proj, own.v_proj]
        self._inputs = _Map(parts, kept, f"{name} inputs", block.input_layernorm, order)
        self.output = _Map([own.o_proj], kept, f"{name} output")
        parts, norm = [mlp.gate_proj, mlp.up_proj], block.post_attention_layernorm
        self._gate_and_up = _Map(parts, kept, f"{name} gate and up", norm)
        self._down = _Map([mlp.down_proj], kept, f"{name} down")
        self._gains: torch.Tensor | None = None
        if own.has_norms:
            counts = torch.tensor([own.heads, own.kv_heads])
            gains = torch.stack([own.q_norm.weight[pairs], own.k_norm.weight[pairs]])
            self._gains = gains.repeat_interleave(counts.to(gains.device), 0)
            self._epsilon = config.norm_epsilon

    def attended(
        self, normed: torch.Tensor, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [B, T, heads, D], and keys and values together, of [B, T, H]; rotated."""
        pairs = (self._heads + 2 * self._kv_heads, self._width // 2, 2)
        mapped = self._inputs(normed).view(*normed.shape[:2], *pairs)
        turned = mapped[:, :, : self._heads + self._kv_heads]
        if self._gains is not None:
            heads = F.rms_norm(turned.flatten(3), (self._width,), None, self._epsilon)
            turned.copy_((heads * self._gains).view(turned.shape))
        torch.view_as_complex(turned).mul_(rotation)
        mapped = mapped.flatten(3)
        return mapped[:, :, : self._heads], mapped[:, :, self._heads :]

    def few_attended(
        self, normed: np.ndarray, rotation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `attended`, of [B, 1, H]: [B, heads, D]."""
        mapped = self._inputs.few(normed).reshape(len(normed), -1, self._width)
        turned = mapped[:, : self._heads + self._kv_heads]
        if self._gains is not None:
            mean = (turned * turned).mean(axis=-1, keepdims=True)
            turned *= self._gains.numpy() / np.sqrt(mean + np.float32(self._epsilon))
        turned.view(np.complex64)[:] *= rotation
        return mapped[:, : self._heads], mapped[:, self._heads :]

    def few_fed_forward(self, normed: np.ndarray) -> np.ndarray:
        """As `fed_forward`."""
        both = self._gate_and_up.few(normed)
        gate, up = both[:, :, : both.shape[2] // 2], both[:, :, both.shape[2] // 2 :]
        return self._down.few(gate / (1 + np.exp(-gate)) * up)

    def fed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        """SwiGLU: [B, T, H] to [B, T, H]."""
        gate, up = self._gate_and_up(normed).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)


_Fused = tuple[torch.Tensor, torch.Tensor | None]
"""A weight [inputs, outputs] and a bias [outputs]."""


def _kept(kept: dict[str, _Fused], name: str, make: Callable[[], _Fused]) -> _Fused:
    """Return what is kept under a name, made if it is not there."""
    if name not in kept:
        kept[name] = make()
    return kept[name]


def _embedding(part: Embedding) -> _Fused:
    return part.weight.detach().float(), None


def _fused(
    parts: Sequence[Projection | Embedding], norm: RMSNorm | None, order: torch.Tensor | None
) -> _Fused:
    """Return maps of one input as a single one; a frozen one without its adapter."""
    weight = torch.cat([part.weight.to(torch.float32).detach() for part in parts])
    biases = [bias for part in parts if (bias := getattr(part, "bias", None)) is not None]
    bias = torch.cat(biases).detach() if biases else None
    if order is not None:
        order = order.to(weight.device)
        weight, bias = weight[order], None if bias is None else bias[order]
    if norm is not None:
        weight = weight * _gain(norm)
    return weight.T.contiguous(), bias


def _gain(norm: RMSNorm) -> torch.Tensor:
    return norm.weight.detach() * math.sqrt(len(norm.weight))


def _fused_adapters(
    parts: Sequence[Projection | Embedding], norm: RMSNorm | None, order: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the adapters of some maps of one input as one, [inputs, ranks] and [ranks, outputs];
    None without adapters."""
    adapted = [part for part in parts if isinstance(part, AdaptedProjection)]
    if not adapted:
        return None
    down = torch.cat([part.lora_A.weight.detach() for part in adapted])
    up = torch.block_diag(*(part.scale * part.lora_B.weight.detach() for part in adapted))
    if order is not None:
        up = up[order.to(up.device)]
    if norm is not None:
        down = down * _gain(norm)
    return down.T.contiguous(), up.T.contiguous()


class _Map:
    """Linear maps of one input as a single one, with the gain of the norm in front of them.

    :param kept: where the maps are under `name`, for all paths on one base
    :param order: which output stands where
    """

    def __init__(
        self,
        parts: Sequence[Projection | Embedding],
        kept: dict[str, _Fused],
        name: str,
        norm: RMSNorm | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self._weight, self._bias = _kept(kept, name, lambda: _fused(parts, norm, order))
        self._adapters = _fused_adapters(parts, norm, order)
        on_cpu = self._weight.device.type == "cpu"
        self._array = self._weight.numpy() if on_cpu else np.empty(0)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [B, T, inputs] to [B, T, outputs]."""
        mapped = inputs @ self._weight
        if self._adapters is not None:
            down, up = self._adapters
            mapped += (inputs @ down) @ up
        return mapped if self._bias is None else mapped.add_(self._bias)

    def few(self, inputs: np.ndarray) -> np.ndarray:
        """Map [B, 1, inputs] on the CPU, row by row."""
        mapped: np.ndarray = inputs @ self._array
        if self._adapters is not None:
            down, up = self._adapters
            mapped += (inputs @ down.numpy()) @ up.numpy()
        return mapped if self._bias is None else mapped + self._bias.numpy()


def _normed(hidden: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Return RMSNorm without its gain and divided by the root of the width, which are in the map
    behind it; `floor` is the root of epsilon times the width."""
    return hidden / torch.hypot(torch.linalg.vector_norm(hidden, dim=-1, keepdim=True), floor)


def _few_normed(hidden: np.ndarray, floor: float) -> np.ndarray:
    """Return `_normed` in NumPy; `floor` is epsilon times the width."""
    normed: np.ndarray = hidden / np.sqrt(hidden @ hidden.swapaxes(1, 2) + np.float32(floor))
    return normed


def _attention(
    queries: torch.Tensor, stored: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return [B, T, heads * D] for queries [B, T, heads, D] of keys and values [B, 2 kv, n, D]."""
    batch, length, heads, width = queries.shape
    keys, values = stored.chunk(2, dim=1)
    if length == 1:
        # Heads that share a key head are its queries: nothing is copied.
        queries = queries.view(batch, keys.shape[1], -1, width)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return mixed.reshape(batch, 1, heads * width)
    mixed = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, is_causal=True, enable_gqa=heads != keys.shape[1]
    )
    return mixed.transpose(1, 2).reshape(batch, length, heads * width)


def decoder_bytes(model: ModelConfig, slots: int) -> tuple[int, int]:
    """Return what a `Decoder` takes, 4 bytes a number: its own part, which are its caches and its
    maps or adapters; and the base's, which all decoders over a frozen base have together.

    Where the head is the embedding, it has a map of its own.
    """
    cached = model.kv_heads * model.sequence_length * model.width_of_head
    caches = 4 * 2 * slots * model.block_count * cached
    head = model.vocabulary_size * model.hidden_size * model.tied_embedding
    whole = 4 * (base_parameter_count(model) + head)
    if model.adapters is None:
        return caches + whole, 0
    # Query, key and value together have three times the rank.
    adapters = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    return caches + 4 * 3 * adapters, whole
