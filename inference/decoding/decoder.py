"""A path that gives tokens: few calls for each token, and a cache of fixed size.

What a token costs beside reading the weights is the number of calls. So query, key and value are
one map and gate and up another, gains of norms are in the maps behind them, positions are looked
up, and nothing is allocated that can stay.

Each text may have low-rank adapters of its own: then the weights are those of a base, are read once
for all texts, and what its adapters add is computed for each text beside them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dipaco.modules.adapters import LORA_A, LORA_B
from dipaco.modules.config import PAD_TOKEN, ModelConfig
from dipaco.modules.transformer import (
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

    :param dtype: how the weights lie in memory; activations are fp32 in any case
    """

    @torch.no_grad()
    def __init__(self, model: PathModel, slots: int, dtype: torch.dtype = torch.float32) -> None:
        self.config = config = model.config
        self.lengths = [0] * slots
        """Tokens that are stored of each text; 0 in a free slot."""
        self.adapters: list[PathAdapters | None] = [None] * slots
        """What is added for the text in each slot: for all texts, or for none."""
        self._together: dict[tuple[bool, bool], _Together] = {}
        self._embedding = model.model.embed_tokens.weight.detach().float()
        self._device = device = self._embedding.device
        root = math.sqrt(config.hidden_size)
        self._floor = torch.tensor(root * math.sqrt(config.norm_epsilon), device=device)
        blocks: Any = model.model.layers
        self._blocks = [_FusedBlock(block, config, dtype) for block in blocks]
        head = model.lm_head or model.model.embed_tokens
        self._head = _Map([head], model.model.norm, dtype=dtype)
        # Keys, then values, of each block.
        shape = (slots, 2 * config.kv_heads, config.sequence_length, config.width_of_head)
        self._stored = [torch.zeros(shape, device=device) for _ in self._blocks]
        places = torch.arange(config.sequence_length, device=device, dtype=torch.float32)
        angles = places[:, None, None] * rotary_frequencies(config, device)
        self._rotation = torch.polar(torch.ones_like(angles), angles)

    @property
    def free_slots(self) -> int:
        """How many texts more can be taken."""
        return self.lengths.count(0)

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

    def step(self, tokens: Sequence[int | None]) -> torch.Tensor:
        """Add a token to each of the first slots; return the logits of what comes next, fp32
        [slots, V] on the CPU. None leaves a slot as it is; its logits mean nothing."""
        # What is computed for a slot that is left alone lies where its next token will.
        last = self.config.sequence_length - 1
        lengths = [min(length, last) for length in self.lengths[: len(tokens)]]
        given = [PAD_TOKEN if token is None else token for token in tokens]
        used = 1 + max(n for n, token in zip(lengths, tokens, strict=True) if token is not None)
        if self._is_few(len(tokens)):
            with np.errstate(over="ignore"):  # of exp in a gate that is shut
                logits = torch.from_numpy(self._few(np.array(given), np.array(lengths), used))
        else:
            places = torch.tensor(lengths, device=self._device)[:, None]
            mask = None
            if min(lengths) + 1 < used:
                unseen = torch.arange(used, device=self._device) > places
                mask = torch.zeros(unseen.shape, device=self._device)
                mask = mask.masked_fill_(unseen, -torch.inf)[:, None, None]
            logits = self._logits(self._run([[token] for token in given], places, 0, used, mask))
        for slot, token in enumerate(tokens):
            self.lengths[slot] += token is not None
        return logits[:, 0]

    def path_adapters(self, tensors: Mapping[str, torch.Tensor], scale: float) -> PathAdapters:
        """Return adapters, named as in the model, as this decoder adds them; those of a block that
        `tensors` lack are missing."""
        return {
            number: block.low_rank(own, scale)
            for number, block in enumerate(self._blocks)
            if (own := _of_block(tensors, number))
        }

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
        self.lengths[slot], self.adapters[slot] = 0, None

    def _is_few(self, texts: int) -> bool:
        return self._device.type == "cpu" and texts <= _FEW_TEXTS and self._head.is_array

    def _added(self, first: int, last: int, as_arrays: bool) -> PathAdapters:
        """Return what adapters add to the texts in some slots, as NumPy's arrays or not.

        It is put together when it changes: when a text comes or goes.
        """
        # A prompt that is read between two steps does not undo what the steps have.
        key, wanted = (as_arrays, last - first > 1), self.adapters[first:last]
        known = self._together.get(key)
        if known is None or not known.is_of(wanted):
            known = self._together[key] = _Together(wanted, _stacked(wanted, as_arrays))
        return known.adapters

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
        added = self._added(slot, last, as_arrays=False)
        for number, (block, stored) in enumerate(zip(self._blocks, self._stored, strict=True)):
            own = added.get(number, _NOTHING)
            queries, new = block.attended(_normed(hidden, self._floor), rotation, own)
            stored[rows, :, places] = new
            mixed = _attention(queries, stored[slot:last, :, :used], mask)
            hidden = hidden + block.output(mixed, own.output)
            hidden = hidden + block.fed_forward(_normed(hidden, self._floor), own)
        return hidden

    def _few(self, tokens: np.ndarray, places: np.ndarray, used: int) -> np.ndarray:
        """Return the logits [B, 1, V] of a step of a few slots: what `_run` does, in NumPy."""
        count, kv_heads = len(tokens), self.config.kv_heads
        rows, added = np.arange(count), self._added(0, count, as_arrays=True)
        rotation, floor = self._rotation.numpy()[places], float(self._floor) ** 2
        scale = np.float32(self.config.width_of_head**-0.5)
        unseen = (np.arange(used) > places[:, None])[:, None, None] if count > 1 else None
        hidden = self._embedding.numpy()[tokens[:, None]]
        for number, (block, tensor) in enumerate(zip(self._blocks, self._stored, strict=True)):
            stored, own = tensor.numpy(), added.get(number, _NOTHING)
            queries, new = block.few_attended(_few_normed(hidden, floor), rotation, own)
            stored[rows, :, places] = new
            keys, values = stored[:count, :kv_heads, :used], stored[:count, kv_heads:, :used]
            scores = queries.reshape(count, kv_heads, -1, new.shape[2]) @ keys.swapaxes(2, 3)
            scores *= scale
            if unseen is not None:
                scores[np.broadcast_to(unseen, scores.shape)] = -np.inf
            np.exp(scores - scores.max(axis=-1, keepdims=True), out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed = (scores @ values).reshape(count, 1, -1)
            hidden += block.output.few(mixed, own.output)
            hidden += block.few_fed_forward(_few_normed(hidden, floor), own)
        return self._head.few(_few_normed(hidden, floor))


class _FusedBlock:
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
        self._inputs = _Map(parts, block.input_layernorm, order, dtype=dtype)
        self.output = _Map([own.o_proj], dtype=dtype)
        parts = [mlp.gate_proj, mlp.up_proj]
        self._gate_and_up = _Map(parts, block.post_attention_layernorm, dtype=dtype)
        self._down = _Map([mlp.down_proj], dtype=dtype)
        self._gains: torch.Tensor | None = None
        if own.has_norms:
            counts = torch.tensor([own.heads, own.kv_heads])
            gains = torch.stack([own.q_norm.weight[pairs], own.k_norm.weight[pairs]])
            self._gains = gains.repeat_interleave(counts.to(gains.device), 0)
            self._epsilon = config.norm_epsilon

    def low_rank(self, tensors: Mapping[str, torch.Tensor], scale: float) -> BlockAdapters:
        """Return the adapters of this block, named from its own part on (`mlp.up_proj.lora_A...`),
        as they are added to its maps."""

        def of(target: _Map, *names: str) -> LowRank:
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


class _Map:
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


@dataclass(frozen=True)
class LowRank:
    """What adapters add to a map: `a` [in, parts * r], and `b` [r, out] of each part, whose outputs
    follow each other. In front there may be a dimension of texts. PyTorch's or NumPy's."""

    a: Any
    b: tuple[Any, ...]

    def add(self, inputs: Any, mapped: Any) -> None:
        """Add it to [B, T, outputs], mapped from `inputs`."""
        inner, first = inputs @ self.a, 0
        for number, b in enumerate(self.b):
            rank, last = b.shape[-2], first + b.shape[-1]
            mapped[..., first:last] += inner[..., number * rank : (number + 1) * rank] @ b
            first = last

    def arrays(self) -> LowRank:
        """Return the same in NumPy."""
        return LowRank(self.a.numpy(), tuple(b.numpy() for b in self.b))


@dataclass(frozen=True)
class BlockAdapters:
    """What is added to the maps of a block."""

    inputs: LowRank | None = None
    output: LowRank | None = None
    gate_and_up: LowRank | None = None
    down: LowRank | None = None

    def maps(self) -> tuple[LowRank | None, ...]:
        """Return them one after the other."""
        return self.inputs, self.output, self.gate_and_up, self.down


PathAdapters = Mapping[int, BlockAdapters]
"""By the number of the block."""

_NOTHING = BlockAdapters()


@dataclass(frozen=True)
class _Together:
    """What was put together last."""

    texts: Sequence[PathAdapters | None]
    adapters: PathAdapters

    def is_of(self, texts: Sequence[PathAdapters | None]) -> bool:
        """Return whether it is what these texts need."""
        return len(texts) == len(self.texts) and all(map(operator.is_, texts, self.texts))


def _of_block(tensors: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    front = f"model.layers.{number}."
    return {n.removeprefix(front): t for n, t in tensors.items() if n.startswith(front)}


def _stacked(texts: Sequence[PathAdapters | None], as_arrays: bool) -> PathAdapters:
    """Return the adapters of several texts together; those of a slot that is free are anything."""
    given = [text for text in texts if text is not None]
    if not given:
        return {}
    filled = [given[0] if text is None else text for text in texts]
    together = {}
    for number in given[0]:
        blocks = [text[number].maps() for text in filled]
        maps = [_stacked_map(several) for several in zip(*blocks, strict=True)]
        found = [one.arrays() if one is not None and as_arrays else one for one in maps]
        together[number] = BlockAdapters(*found)
    return together


def _stacked_map(several: Sequence[LowRank | None]) -> LowRank | None:
    given = [one for one in several if one is not None]
    if all(one is given[0] for one in given):
        return given[0]  # read once for all texts
    parts = zip(*(one.b for one in given), strict=True)
    return LowRank(torch.stack([o.a for o in given]), tuple(torch.stack(part) for part in parts))


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


def decoder_bytes(
    model: ModelConfig, parameters: int, slots: int, dtype: torch.dtype = torch.float32
) -> int:
    """Return what a `Decoder` takes: its parameters as `dtype`, a head of its own where it is tied
    to the embedding, and its caches."""
    cached = model.kv_heads * model.sequence_length * model.width_of_head
    head = model.vocabulary_size * model.hidden_size * model.tied_embedding
    return dtype.itemsize * (parameters + head) + 8 * slots * model.block_count * cached
