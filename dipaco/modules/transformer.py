"""One path as an ordinary transformer with the parameter names of a Hugging Face Llama.

RMSNorm, rotary positions (halves rotated, as Hugging Face does), SwiGLU and grouped-query
attention; with biases a Qwen2, with norms of queries and keys a Qwen3. Because names and arithmetic
are theirs, a trained path is a plain checkpoint for other tools. Parameters are zero (norms one)
until `initialise` or `load_path` fills them. With adapters these are the only parameters, and what
is theirs at Hugging Face is a frozen base (design 4.13, adapters).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dipaco.protocol.config import AdaptersConfig, ModelConfig

from .device import format_of_products, free_and_total_bytes, permitted_share
from .frozen_base import FrozenBase, Nf4Weight, product
from .marked_tokens import NOT_LEARNED, learned_targets, plain_tokens

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Logits that are held at once, tokens times vocabulary: 128 MiB in fp32. More tokens go in pieces.
LOGITS_AT_ONCE = 2**25
# The head's weights, and their gradient, go through memory once a piece, which a GPU feels: there a
# piece has this many at least, and one for so many bytes of the memory that is
# for this process.
LOGITS_AT_ONCE_ON_GPU = 2**27
_GPU_BYTES_A_LOGIT = 256

Rotation = tuple[torch.Tensor, torch.Tensor]


class _Past:
    """The keys and values of a text in one block, for the tokens that come behind it."""

    def __init__(self) -> None:
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None

    def with_more(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values [B, heads, T, D], and return all so far, in the text's order."""
        if self._stored is not None:
            keys = torch.cat((self._stored[0], keys), dim=2)
            values = torch.cat((self._stored[1], values), dim=2)
        self._stored = keys, values
        return keys, values


class Projection(nn.Linear):
    """A linear map. Zero at first: drawing here would spend the global generator."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Fill with zeros."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return product(inputs, self.weight, self.bias)

    @torch.no_grad()
    def full_weight(self) -> torch.Tensor:
        """Return the map as one matrix, fp32 [outputs, inputs]; to be read."""
        return self.weight.to(torch.float32)


class AdaptedProjection(Projection):
    """A frozen linear map and a low-rank adapter beside it, which is trained."""

    def __init__(self, inputs: int, outputs: int, bias: bool, adapters: AdaptersConfig) -> None:
        super().__init__(inputs, outputs, bias)
        # The names of PEFT.
        self.lora_A = Projection(inputs, adapters.rank)
        self.lora_B = Projection(adapters.rank, outputs)
        self.scale = adapters.scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return super().forward(inputs) + self.scale * self.lora_B(self.lora_A(inputs))

    @torch.no_grad()
    def full_weight(self) -> torch.Tensor:
        """Return base and adapter together as one matrix, fp32 [outputs, inputs]; to be read."""
        adapter = self.lora_B.weight @ self.lora_A.weight
        return super().full_weight() + self.scale * adapter


def _projection(config: ModelConfig, inputs: int, outputs: int, bias: bool) -> Projection:
    """Return a linear map of a block, adapted if the model has adapters."""
    if config.adapters is None:
        return Projection(inputs, outputs, bias)
    return AdaptedProjection(inputs, outputs, bias, config.adapters)


class Embedding(nn.Embedding):
    """A token embedding, zero at first."""

    def reset_parameters(self) -> None:
        """Fill with zeros."""
        nn.init.zeros_(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [B, T, H] of tokens [B, T] in fp32, whatever format a frozen embedding has."""
        return super().forward(tokens).float()


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in fp32 whatever the autocast.

    It returns what the products behind it compute in: they would change the format themselves, each
    for itself, and send their gradients back in fp32.
    """

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of [..., size]."""
        normed = F.rms_norm(hidden.float(), self.weight.shape, self.weight, self.epsilon)
        return normed.to(format_of_products(hidden))


class _Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share a key head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.head_count, config.kv_heads
        self.width = config.width_of_head
        hidden, inside = config.hidden_size, config.attention_bias or config.family == "qwen2"
        self.q_proj = _projection(config, hidden, self.heads * self.width, inside)
        self.k_proj = _projection(config, hidden, self.kv_heads * self.width, inside)
        self.v_proj = _projection(config, hidden, self.kv_heads * self.width, inside)
        self.o_proj = _projection(config, self.heads * self.width, hidden, config.attention_bias)
        self.has_norms = config.family == "qwen3"
        if self.has_norms:
            self.q_norm = RMSNorm(self.width, config.norm_epsilon)
            self.k_norm = RMSNorm(self.width, config.norm_epsilon)

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        seen: torch.Tensor | None = None,
        past: _Past | None = None,
    ) -> torch.Tensor:
        """Map [B, T, H] to [B, T, H]; `seen` and `past` as for `PathModel.hidden_states`."""
        batch, length, _ = hidden.shape
        queries = self._split(self.q_proj(hidden), self.heads)
        keys = self._split(self.k_proj(hidden), self.kv_heads)
        values = self._split(self.v_proj(hidden), self.kv_heads)
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = _rotate(queries, rotation), _rotate(keys, rotation)
        if past is not None:
            keys, values = past.with_more(keys, values)
        if self.kv_heads != self.heads:
            group = self.heads // self.kv_heads
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        # A token behind a text sees all of it.
        is_causal = seen is None and keys.shape[2] == length
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, is_causal=is_causal
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))

    def _split(self, projected: torch.Tensor, heads: int) -> torch.Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, heads, self.width).transpose(1, 2)


class _FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inside, bias = config.hidden_size, config.feed_forward, config.feed_forward_bias
        self.gate_proj = _projection(config, hidden, inside, bias)
        self.up_proj = _projection(config, hidden, inside, bias)
        self.down_proj = _projection(config, inside, hidden, bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [B, T, H] to [B, T, H]."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Block(nn.Module):
    """A transformer block: attention and feed-forward, each on a normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = _FeedForward(config)

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        seen: torch.Tensor | None = None,
        past: _Past | None = None,
    ) -> torch.Tensor:
        """Map [B, T, H] to [B, T, H]; `seen` and `past` as for `PathModel.hidden_states`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, seen, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Backbone(nn.Module):
    """Embedding, blocks and final norm; exists for the `model.` in the parameter names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocabulary_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.block_count))
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)


class PathModel(nn.Module):
    """One path: tokens [B, T] in, logits [B, T, V] out. Holds nothing but its parameters.

    Any path's parameters can be loaded into the same instance (`dipaco.modules.compose`).

    With a `base` everything but adapters is frozen, and the base's own tensors: no parameters, and
    shared with all models that stand on it. Without adapters that is the base itself as a model.
    A model with adapters computes nothing until it has a base (`stand_on`).
    """

    def __init__(self, config: ModelConfig, base: FrozenBase | None = None) -> None:
        super().__init__()
        self.config = config
        self._base: FrozenBase | None = None
        is_frozen = config.adapters is not None or base is not None
        # What is frozen takes no memory here.
        with torch.device("meta") if is_frozen else nullcontext():
            self._build(config)
        if is_frozen:
            self._freeze()
        if base is not None:
            self.stand_on(base)

    def _build(self, config: ModelConfig) -> None:
        self.model = _Backbone(config)
        self.lm_head: Projection | None = None
        """None: the head is the embedding."""
        self.recomputes = False
        """Whether the backward pass computes blocks again, instead of having kept what is in them:
        a third slower, with a fraction of the memory."""
        if not config.tied_embedding:
            self.lm_head = Projection(config.hidden_size, config.vocabulary_size)

    def _freeze(self) -> None:
        """Leave the adapters as parameters, zero, and of all others a place for the base's."""
        for name, parameter in list(self.named_parameters()):
            owner, leaf = self._owner(name)
            delattr(owner, leaf)
            is_trained = ".lora_" in name
            setattr(owner, leaf, nn.Parameter(torch.zeros(parameter.shape)) if is_trained else None)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """Return the part that has a parameter, and what it is called there."""
        path, _, leaf = name.rpartition(".")
        return self.get_submodule(path), leaf

    def stand_on(self, base: FrozenBase) -> None:
        """Take the tensors of a base, on its device, for everything but adapters."""
        for name, weight in base.weights.items():
            owner, leaf = self._owner(name)
            setattr(owner, leaf, weight)
        self._base = base

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Follow the adapters to another device (`Module.to`), where one base serves all models."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._base is not None:
            device = fn(torch.empty(0, device=self._base.device)).device
            if device != self._base.device:
                self.stand_on(self._base.on(device))
        return self

    @property
    def base(self) -> FrozenBase | None:
        """The frozen base that the model stands on."""
        return self._base

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.embed_tokens.weight.device

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all that the model holds: parameters, and the tensors of a base."""
        yield from self.parameters()
        for weight in (self._base.weights if self._base else {}).values():
            yield weight if isinstance(weight, torch.Tensor) else weight.packed

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Return the model as one without adapters, fp32 by Hugging Face name; to be read.

        Adapters are added to the base; without a base these are the parameters.
        """
        return dict(self.iterate_whole())

    def iterate_whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `whole_parameters` returns, one after the other: not all is in memory."""
        if self._base is None:
            yield from ((name, parameter.detach()) for name, parameter in self.named_parameters())
            return
        for name in self._base.weights:
            owner, leaf = self._owner(name)
            weight: torch.Tensor | Nf4Weight = getattr(owner, leaf)
            if isinstance(owner, Projection) and leaf == "weight":
                yield name, owner.full_weight()
            else:
                yield name, weight.to(torch.float32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, V] of the token after each of `tokens` [B, T]."""
        return self.logits(self.hidden_states(tokens))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] for outputs [..., H] of `hidden_states`, or for some of them.

        Padding that the run has added gets -inf, so it has no probability in any softmax.
        """
        hidden = self.model.norm(hidden)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return product(hidden, head.weight, self._exclusion(hidden))

    def _exclusion(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to logits, [V], None if nothing is.

        A bias of the head costs nothing in either pass; -inf written into the logits would have
        the backward pass copy their gradient.
        """
        if not self.config.adds_padding:
            return None
        bias = torch.zeros(
            self.config.vocabulary_size, dtype=format_of_products(hidden), device=hidden.device
        )
        bias[self.config.padding_token] = -torch.inf
        return bias

    def new_past(self) -> Any:
        """Return what `hidden_states` takes as `past` of a text that begins."""
        return [_Past() for _ in self.model.layers]

    def hidden_states(
        self,
        tokens: torch.Tensor,
        seen: torch.Tensor | None = None,
        rotation: Rotation | None = None,
        past: Any = None,
    ) -> torch.Tensor:
        """Return the output [B, T, H] of the last block, before the final norm (section 7.2.1).

        `seen` is which position sees which, bool [B, 1, T, T]; None: all that is before it.
        `rotation` is `rotation_of` the length; a caller that compiles this gives it. `past` is from
        `new_past`: at first of a text that begins, then of one token at a time.
        """
        rotation = rotation or rotation_of(self.config, tokens.shape[1], tokens.device)
        hidden = self.model.embed_tokens(plain_tokens(tokens))
        for number, block in enumerate(self.model.layers):
            if self.recomputes and torch.is_grad_enabled():
                hidden = checkpoint(
                    block, hidden, rotation, seen, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = block(hidden, rotation, seen, past and past[number])
        return hidden


def rotation_of(config: ModelConfig, length: int, device: torch.device) -> Rotation:
    """Return cosines and sines of the positions below `length` in fp32, [T, D/2].

    Computed in each pass: they cost nothing beside a block, and no buffer can get stale. Not within
    what is compiled, where each block would compute them anew for each number that it turns: on an
    H100 a quarter of a step.
    """
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * rotary_frequencies(config, device)
    return angles.cos(), angles.sin()


def rotary_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Return by how much each pair of a head's numbers turns from position to position, [D/2]."""
    width, scaling = config.width_of_head, config.rope_scaling
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    frequencies = config.rope_theta**-exponents
    if scaling is None:
        return frequencies
    slower = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slower
    # Llama 3: waves that fit often into the first length keep their speed, long ones do not.
    fits = scaling.original_sequence_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((fits - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * slower + kept * frequencies


def _rotate(vectors: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply rotary positions to [B, heads, T, D], the two halves of D being the pairs."""
    cosines, sines = (part.to(vectors.dtype) for part in rotation)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def initialise(model: PathModel, seed: int) -> None:
    """Draw the parameters of a new base model, the same for a seed on every device.

    Normal with deviation 0.02; projections onto the residual stream are divided by the root of
    their number, so that its variance does not grow with depth. Called when a run is prepared.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_scale = 1 / math.sqrt(2 * model.config.block_count)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            onto_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.02 * (residual_scale if onto_residual else 1.0)
            drawn = torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
            parameter.copy_(drawn)


def target_mask(tokens: torch.Tensor, padding: int, skip_tokens: int = 0) -> torch.Tensor:
    """Return which targets count, bool [B, T-1] for the targets `tokens[:, 1:]`.

    Padding does not, nor what is marked as not to be learned, nor the first `skip_tokens`
    positions, which routing has seen.
    """
    mask = learned_targets(tokens[:, 1:], padding) != NOT_LEARNED
    if skip_tokens > 1:
        mask[:, : skip_tokens - 1] = False
    return mask


def token_losses(model: PathModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood in nats of each target `tokens[:, 1:]`, fp32 [B, T-1].

    Where the target is padding, or is not to be learned, it is 0.
    """
    return losses_of_outputs(model, model.hidden_states(tokens), tokens)


def losses_of_outputs(model: PathModel, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return `token_losses` by the outputs [B, T, H] of the last block for these tokens."""
    losses = [head_losses(model, *piece) for piece in head_pieces(model.config, hidden, tokens)]
    return torch.cat(losses).view(tokens.shape)[:, :-1]


def logits_at_once(device: torch.device) -> int:
    """Return how many logits, tokens times vocabulary, are held at once on a device."""
    if device.type == "cpu":
        return LOGITS_AT_ONCE
    return max(LOGITS_AT_ONCE_ON_GPU, _own_bytes(device) // _GPU_BYTES_A_LOGIT)


@functools.cache
def _own_bytes(device: torch.device) -> int:
    """Return what of a device's memory is for this process; 0 where nobody says."""
    # What is on "meta" has shapes alone.
    memory = None if device.type == "meta" else free_and_total_bytes(device)
    if memory is None:
        return 0
    share = permitted_share(device)
    return int(memory[1] * (1.0 if share is None else share))


def head_pieces(
    config: ModelConfig, hidden: torch.Tensor, tokens: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut outputs [B, T, H] of the last block into pieces [n, H] of about the same size, each with
    its targets, int64 [n], whose logits are few enough to be held at once.

    Logits are the largest tensors of a pass: with a vocabulary of 32,000 those of a batch take
    several times the memory of all blocks.
    """
    # The last position gets a target that is not learned: cutting it off would copy all others.
    learned = learned_targets(tokens[:, 1:], config.padding_token)
    targets = F.pad(learned, (0, 1), value=NOT_LEARNED).flatten()
    count = math.ceil(len(targets) * config.vocabulary_size / logits_at_once(hidden.device))
    size = math.ceil(len(targets) / count)
    return zip(hidden.flatten(0, 1).split(size), targets.split(size), strict=True)


def head_losses(model: PathModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss in nats of each target, fp32 [n], for outputs [n, H] of the last block."""
    logits = model.logits(hidden).float()
    return F.cross_entropy(logits, targets, ignore_index=NOT_LEARNED, reduction="none")
