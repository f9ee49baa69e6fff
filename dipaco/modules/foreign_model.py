"""A frozen base of a family that `PathModel` does not compute: transformers' own model of it.

Its linear maps and its embedding are replaced by ours, so adapters, the formats of a base and the
head in pieces are the same for every family; what lies between them is transformers' arithmetic.
The plan has the `config.json` of the base. No more than tested families are taken from one, and
no key that makes transformers fetch or run something.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dipaco.base.errors import ConfigurationError
from dipaco.protocol.config import AdaptersConfig, ModelConfig

from .frozen_base import FrozenBase, product
from .marked_tokens import plain_tokens
from .transformer import AdaptedProjection, Embedding, PathModel, Projection, Rotation

FOREIGN_FAMILIES: Final = {
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""The `model_type` of each family that transformers computes here, and its architecture."""

# What does not describe a model: how it was saved, and what transformers would fetch or run for it.
_LEFT_OUT: Final = {
    "auto_map", "dtype", "kernel_config", "quantization_config", "torch_dtype",
    "transformers_version", "use_kernels",
}  # fmt: skip

# What transformers calls the sizes of a model, and what a plan does.
_SIZES: Final = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "kv_head_count",
    "intermediate_size": "feed_forward_size",
    "head_dim": "head_width",
}
# Rotary frequencies are some hundred, and a scale for an embedding is one.
_MOST_IN_BUFFERS = 2**20
_MOST_LETTERS_OF_A_REASON = 500


def new_path(config: ModelConfig, base: FrozenBase | None = None) -> PathModel:
    """Return a model of this configuration, whoever computes it; as `PathModel`."""
    kind = PathModel if config.transformers_config is None else _ForeignPath
    return kind(config, base)


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a `config.json` describes a model of `FOREIGN_FAMILIES`."""
    kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in _LEFT_OUT}
    # A base is frozen and adapters have no dropout: training and scoring compute the same.
    return {k: 0.0 if k.endswith(("dropout", "pdrop")) else v for k, v in kept.items()}


def foreign_values(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values of a `ModelConfig` that a `config.json` of these families describes.

    Sequences are no longer than a window of attention, or than what its rotary frequencies are
    for without a switch to others. Raises ConfigurationError. Called when a base is imported.
    """
    kept = _described(config)
    read = _read_config(kept, source)
    longest = [read.max_position_embeddings]
    window, layers = getattr(read, "sliding_window", None), getattr(read, "layer_types", None)
    if window and (layers is None or "sliding_attention" in layers):
        longest.append(window)
    if getattr(read, "use_bidirectional_attention", False):
        raise ConfigurationError(f"{source}: use_bidirectional_attention is not for texts")
    rope = read.rope_parameters or {}
    if rope.get("rope_type") == "longrope":
        longest.append(
            rope.get("original_max_position_embeddings") or read.original_max_position_embeddings
        )
    return {
        "family": "transformers",
        "transformers_config": json.dumps(kept, sort_keys=True),
        "vocabulary_size": read.vocab_size,
        "block_count": read.num_hidden_layers,
        **{ours: getattr(read, theirs, None) for theirs, ours in _SIZES.items()},
        "sequence_length": min(longest),
        "norm_epsilon": read.rms_norm_eps,
        "tied_embedding": read.tie_word_embeddings,
    }


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            "the base of this run is computed by transformers, which is missing; install it with: "
            "pip install 'dipaco[bases]'"
        ) from None
    # What it warns of in a config.json is for those who write one.
    transformers.logging.set_verbosity_error()
    return transformers


def _read_config(values: Mapping[str, Any], source: str) -> Any:
    """Return transformers' configuration. Raises ConfigurationError for one that it refuses."""
    kind = values.get("model_type")
    if str(kind) not in FOREIGN_FAMILIES or any(
        k.startswith("_") or k in _LEFT_OUT for k in values
    ):
        raise ConfigurationError(f"{source} describes no base that a run can have")
    library = _library()
    try:
        rest = {key: value for key, value in values.items() if key != "model_type"}
        return library.AutoConfig.for_model(kind, **rest)
    except Exception as error:  # what it raises is of many classes
        raise _refused(source, error) from None


def _refused(source: str, error: Exception) -> ConfigurationError:
    reason = f"{type(error).__name__}: {error}"[:_MOST_LETTERS_OF_A_REASON]
    return ConfigurationError(f"{source} is refused by transformers: {reason}")


def _planned(config: ModelConfig) -> Any:
    """Return transformers' configuration of a plan's base. Raises ConfigurationError.

    Only what the plan itself says of sizes is bounded, and counted where a run has to fit.
    """
    try:
        values = json.loads(config.transformers_config or "")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigurationError("the plan describes its base with what is no JSON object")
    read = _read_config(_of_size(values, config), "the plan")
    for theirs, ours in _SIZES.items():
        said, planned = getattr(read, theirs, None), getattr(config, ours)
        if said != planned:
            raise ConfigurationError(
                f"the plan has {ours} {planned}, and describes a base with {theirs} "
                f"{str(said)[:40]}; ask its operator for another run"
            )
    return read


def _of_size(values: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return a `config.json` with the tokens of a run, which adds some, and with as many blocks as
    `config` has: an estimate looks at one alone."""
    a_block_each = {
        key: values[key][: config.block_count]
        for key in ("layer_types", "no_rope_layers")
        if isinstance(values.get(key), list)
    }
    counts = {"vocab_size": config.vocabulary_size, "num_hidden_layers": config.block_count}
    return values | a_block_each | counts


class _ForeignPath(PathModel):
    """A path over a base that transformers computes; used as `PathModel`."""

    def _build(self, config: ModelConfig) -> None:
        read = _planned(config)
        try:
            with torch.device("meta"):
                whole = _library().AutoModelForCausalLM.from_config(
                    read, dtype=torch.float32, attn_implementation="sdpa"
                )
            _fill_buffers(whole)
        except Exception as error:  # what it raises is of many classes
            raise _refused("the plan", error) from None
        self.recomputes = False
        self.lm_head: Projection | None = None
        if not config.tied_embedding:
            self.lm_head = Projection(config.hidden_size, config.vocabulary_size)
        backbone = whole.model
        _replace_maps(backbone, config.adapters)
        for block in backbone.layers:
            block.forward = self._twice(block.forward)
        # The outputs of the last block are wanted as they are (section 7.2.1).
        self._final_norm = backbone.norm.forward
        backbone.norm.forward = lambda hidden: hidden
        self.model = backbone
        # What a family does to its logits stands in the forward pass of the whole model.
        whole.model, whole.lm_head = _Given(), _Head(self._head_weight)
        self._past_config, self._to_logits = read, whole.forward

    def _twice(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def block(*given: Any, **named: Any) -> Any:
            if not (self.recomputes and torch.is_grad_enabled()):
                return forward(*given, **named)
            return checkpoint(
                forward, *given, use_reentrant=False, preserve_rng_state=False, **named
            )

        return block

    def _head_weight(self) -> torch.Tensor:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        weight: torch.Tensor = head.weight
        return weight

    def new_past(self) -> Any:
        """Return where keys and values of a text are kept."""
        return _library().DynamicCache(config=self._past_config)

    def hidden_states(
        self,
        tokens: torch.Tensor,
        seen: torch.Tensor | None = None,
        rotation: Rotation | None = None,
        past: Any = None,
    ) -> torch.Tensor:
        """Return the output [B, T, H] of the last block, before the final norm.

        `rotation` is not used: positions are those behind `past`.
        """
        found = self.model(
            input_ids=plain_tokens(tokens),
            attention_mask=seen,
            cache=past,
            use_cache=past is not None,
        )
        hidden: torch.Tensor = found.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] for outputs [..., H] of `hidden_states`, or for some of them."""
        flat = self._final_norm(hidden).view(1, -1, hidden.shape[-1])
        logits: torch.Tensor = self._to_logits(inputs_embeds=flat, use_cache=False).logits
        logits = logits.view(*hidden.shape[:-1], -1)
        # A bias of the head would be put through what a family does to its logits.
        excluded = self._exclusion(hidden)
        return logits if excluded is None else logits + excluded


class _Given(nn.Module):
    """Stands in place of a whole model's blocks, and gives outputs that are set."""

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class _Head(nn.Module):
    def __init__(self, weight: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return product(hidden, self._weight())


class _ScaledEmbedding(Embedding):
    """The embedding of a family that multiplies it; in fp32, whatever format a frozen one has."""

    def __init__(self, tokens: int, width: int, scale: float) -> None:
        super().__init__(tokens, width)
        self.scale = scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


def _replace_maps(backbone: nn.Module, adapters: AdaptersConfig | None) -> None:
    """Put our linear maps and our embedding, which take a frozen base, in place of PyTorch's."""
    for name, part in list(backbone.named_modules()):
        owner, _, leaf = name.rpartition(".")
        ours: nn.Module
        if isinstance(part, nn.Embedding):
            scale = getattr(part, "scalar_embed_scale", 1.0)
            ours = _ScaledEmbedding(part.num_embeddings, part.embedding_dim, scale)
        elif isinstance(part, nn.Linear):
            shape = part.in_features, part.out_features, part.bias is not None
            ours = Projection(*shape) if adapters is None else AdaptedProjection(*shape, adapters)
        else:
            continue
        setattr(backbone.get_submodule(owner), leaf, ours)


def _fill_buffers(whole: Any) -> None:
    """Compute the buffers of a model that has shapes alone, rotary frequencies for example: no
    checkpoint has them."""
    if sum(buffer.numel() for buffer in whole.buffers()) > _MOST_IN_BUFFERS:
        raise ValueError(f"it computes more than {_MOST_IN_BUFFERS} numbers in advance")
    for part in whole.modules():
        if names := [name for name, buffer in part._buffers.items() if buffer is not None]:
            with torch.device("cpu"):
                for name in names:
                    part._buffers[name] = torch.empty_like(part._buffers[name], device="cpu")
                whole._init_weights(part)
