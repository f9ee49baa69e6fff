"""A path that gives tokens: few calls for each token, and a cache of fixed size.

What a token costs beside reading the weights is the number of calls. So blocks are fused,
positions are looked up, and nothing is allocated that can stay.

Each text may have low-rank adapters of its own: then the weights are those of a base, are read once
for all texts, and what its adapters add is computed for each text beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dipaco.modules.transformer import PathModel, rotary_frequencies
from dipaco.protocol.config import PAD_TOKEN, ModelConfig

from .fused_block import FusedBlock, Map, few_normed, normed
from .low_rank import NOTHING, PathAdapters, StackedAdapters
from .text_decoder import PathDecoder

# Positions whose logits are computed at once when a text is scored.
_SCORED_AT_ONCE = 128
# On a CPU, NumPy gives so few texts a token in less time than PyTorch: its calls cost less.
_FEW_TEXTS = 4


class Decoder(PathDecoder):
    """A path and the texts in its `slots`, each at a position of its own.

    Nothing can be loaded into it, and the model that it is made of can be dropped. Used by one
    thread at a time.

    :param dtype: how the weights lie in memory; activations are fp32 in any case
    """

    @torch.no_grad()
    def __init__(self, model: PathModel, slots: int, dtype: torch.dtype = torch.float32) -> None:
        config = model.config
        super().__init__(config, slots)
        self.adapters: list[PathAdapters | None] = [None] * slots
        """What is added for the text in each slot: for all texts, or for none."""
        self._stacked: dict[tuple[bool, bool], StackedAdapters] = {}
        self._embedding = model.model.embed_tokens.weight.detach().float()
        self._device = device = self._embedding.device
        root = math.sqrt(config.hidden_size)
        self._floor = torch.tensor(root * math.sqrt(config.norm_epsilon), device=device)
        blocks: Any = model.model.layers
        self._blocks = [FusedBlock(block, config, dtype) for block in blocks]
        head = model.lm_head or model.model.embed_tokens
        self._head = Map([head], model.model.norm, dtype=dtype)
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

        It is stacked when it changes: when a text comes or goes.
        """
        # A prompt that is read between two steps does not undo what the steps have.
        key, wanted = (as_arrays, last - first > 1), self.adapters[first:last]
        known = self._stacked.get(key)
        if known is None or not known.is_of(wanted):
            known = self._stacked[key] = StackedAdapters.of(wanted, as_arrays)
        return known.blocks

    @torch.inference_mode()
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(normed(hidden, self._floor)).float().cpu()

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
            own = added.get(number, NOTHING)
            queries, new = block.attended(normed(hidden, self._floor), rotation, own)
            stored[rows, :, places] = new
            mixed = _attention(queries, stored[slot:last, :, :used], mask)
            hidden = hidden + block.output(mixed, own.output)
            hidden = hidden + block.fed_forward(normed(hidden, self._floor), own)
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
            stored, own = tensor.numpy(), added.get(number, NOTHING)
            queries, new = block.few_attended(few_normed(hidden, floor), rotation, own)
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
            hidden += block.few_fed_forward(few_normed(hidden, floor), own)
        return self._head.few(few_normed(hidden, floor))


def _of_block(tensors: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    front = f"model.layers.{number}."
    return {n.removeprefix(front): t for n, t in tensors.items() if n.startswith(front)}


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
