"""The typed configuration of model, grid and optimizers: frozen, validated early, no extras.

These classes are the fields of a run's plan (`dipaco.protocol.plan`), so they are what all peers
agree on. Unknown keys are refused with the nearest known name (`parse_config`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from dipaco.base.errors import ConfigurationError, nearest_name

CodecName = Literal["float32", "int4", "int2", "sign"]
# Whether peers may train on texts of their owners (design 4.14, texts).
OwnTexts = Literal["no", "yes"]
# Peers wait for the last file of a module at most this long, and at most this long for a proposal.
_LONGEST_GATHER_S, _LONGEST_GRACE_S = 60.0, 10.0
# The four special pieces of every tokenizer that a run trains.
UNKNOWN_TOKEN, BEGIN_TOKEN, END_TOKEN, PAD_TOKEN = 0, 1, 2, 3
# No number of a plan is greater. Python's integers have no end, and it computes with them in fp64.
_GREATEST_NUMBER = 2**53
_MOST_BLOCKS = _MOST_LEVELS = 1024
# Far more than anybody trains; a manifest from a stranger cannot ask for a table without end.
_MOST_PATHS = 2**15


class Config(BaseModel):
    """Base of every configuration class: frozen, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name, value in self:
            if isinstance(value, int | float) and abs(value) > _GREATEST_NUMBER:
                raise ValueError(f"{name} is beyond 2^53, and no number may be")
        return self


class RopeScaling(Config):
    """How the rotary frequencies of an imported base were stretched for longer texts."""

    kind: Literal["linear", "llama3"]
    factor: float = Field(ge=1, le=4096, description="How many times slower positions turn.")
    low_frequency_factor: float = Field(1.0, gt=0, description="Of llama3.")
    high_frequency_factor: float = Field(4.0, gt=0, description="Of llama3.")
    original_sequence_length: int = Field(8192, ge=1, description="Of llama3.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError("high_frequency_factor must be greater than low_frequency_factor")
        return self


class AdaptersConfig(Config):
    """Low-rank adapters of all linear maps of the blocks, over a frozen base (design 4.13,
    adapters): `base(x) + alpha / rank * B(A(x))`."""

    rank: int = Field(16, ge=1, le=2**12, description="Rows of A, columns of B.")
    alpha: float | None = Field(
        None,
        gt=0,
        description="What the adapters add is multiplied by `alpha / rank`. None: twice the rank.",
    )
    base_format: Literal["bf16", "fp16", "nf4", "float32"] = Field(
        "bf16",
        description="How all peers hold the base in memory. `nf4` (4 bits per weight, with "
        "bitsandbytes) costs quality; it is for GPUs that have too little memory "
        "for bf16.",
    )

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return (self.alpha or 2.0 * self.rank) / self.rank


class ModelFields(Config):
    """The fields of a model, each by itself: a RUN.toml may repeat some of them for a model that
    comes from elsewhere."""

    vocabulary_size: int = Field(4096, ge=8, le=2**20, description="Pieces in the tokenizer.")
    block_count: int = Field(6, ge=1, le=_MOST_BLOCKS, description="Transformer blocks in a path.")
    hidden_size: int = Field(128, ge=8, le=2**17, description="Width of the residual stream.")
    head_count: int = Field(
        4,
        ge=1,
        le=2**12,
        description="Query heads; divides `hidden_size` with an even quotient, unless "
        "`head_width` is given.",
    )
    kv_head_count: int | None = Field(
        None, ge=1, description="Key and value heads; divides `head_count`. None: `head_count`."
    )
    feed_forward_size: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Width of the SwiGLU. None: 8/3 of `hidden_size`, up to a multiple of 32.",
    )
    sequence_length: int = Field(
        256,
        ge=8,
        le=2**24,
        description="Tokens in a training sequence. With an imported base the default is the "
        "base's own, at most 1,024.",
    )
    context_length: int | None = Field(
        None,
        ge=8,
        le=2**24,
        description="Tokens of the longest text that the base is made for. None: "
        "`sequence_length`. Imported bases bring it.",
    )
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary frequencies.")
    norm_epsilon: float = Field(1e-5, gt=0, description="Epsilon of the RMS norms.")
    tied_embedding: bool = Field(
        True,
        description="The embedding is also the output head.",
    )
    family: Literal["llama", "qwen2", "qwen3", "transformers"] = Field(
        "llama",
        description="The architecture. `qwen2` has biases on queries, keys and values; `qwen3` "
        "norms queries and keys. `transformers` is a frozen base that this library "
        "computes. Imported bases bring it.",
    )
    head_width: int | None = Field(
        None,
        ge=2,
        le=1024,
        description="Width of a head; even. None: `hidden_size` / `head_count`.",
    )
    attention_bias: bool = Field(
        False, description="Biases on all projections of attention; not with `qwen2`."
    )
    feed_forward_bias: bool = Field(False, description="Biases in the SwiGLU; `llama` only.")
    rope_scaling: RopeScaling | None = Field(
        None,
        description="How the rotary frequencies were stretched, by `kind` (`linear`, `llama3`) "
        "and `factor`. Imported bases bring it.",
    )
    adapters: AdaptersConfig | None = Field(
        None,
        description="A RUN.toml has them in a table of their own.",
    )


class ModelConfig(ModelFields):
    """One path: a Llama-shaped decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention)."""

    adds_padding: bool = Field(
        False,
        description="Whether the last row is padding, and not one of the imported base. No text "
        "has it, and it has no probability. Without such a row, padding is token 3.",
    )
    transformers_config: str | None = Field(
        None,
        max_length=2**16,
        description="Of the family `transformers`: what the `config.json` of the base says.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.family == "transformers") != (self.transformers_config is not None):
            raise ValueError("family transformers is for imported bases; name one with base")
        if self.head_width is None and self.hidden_size % self.head_count:
            raise ValueError(
                f"head_count {self.head_count} does not divide hidden_size {self.hidden_size}"
            )
        if self.context < self.sequence_length:
            raise ValueError(
                f"context_length {self.context} is less than sequence_length {self.sequence_length}"
            )
        if self.width_of_head % 2:
            raise ValueError(
                "hidden_size / head_count (or head_width) must be even for rotary embeddings"
            )
        if self.family == "qwen2" and self.attention_bias:
            raise ValueError("family qwen2 has its own biases; leave attention_bias out")
        if self.family != "llama" and self.feed_forward_bias:
            raise ValueError(f"family {self.family} has no feed_forward_bias")
        if self.head_count % self.kv_heads:
            raise ValueError(
                f"kv_head_count {self.kv_heads} does not divide head_count {self.head_count}"
            )
        return self

    @property
    def context(self) -> int:
        """Tokens of the longest text that the model is made for, the default resolved."""
        return self.context_length or self.sequence_length

    @property
    def without_adapters(self) -> ModelConfig:
        """The same model without adapters, which is their base."""
        return self.model_copy(update={"adapters": None})

    @property
    def with_padding(self) -> ModelConfig:
        """The model of a run whose base is a checkpoint of this one: a row of padding is added."""
        size = self.vocabulary_size + 1
        return self.model_copy(update={"vocabulary_size": size, "adds_padding": True})

    @property
    def without_padding(self) -> ModelConfig:
        """The model of a checkpoint that is exported: without a row of padding that was added."""
        size = self.vocabulary_size - self.adds_padding
        return self.model_copy(update={"vocabulary_size": size, "adds_padding": False})

    @property
    def padding_token(self) -> int:
        """What fills up rows of tokens. It is never a target."""
        return self.vocabulary_size - 1 if self.adds_padding else PAD_TOKEN

    @property
    def width_of_head(self) -> int:
        """Width of a head, the default resolved."""
        return self.head_width or self.hidden_size // self.head_count

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default resolved."""
        return self.kv_head_count or self.head_count

    @property
    def feed_forward(self) -> int:
        """Width of the SwiGLU, the default resolved (a multiple of 32)."""
        return self.feed_forward_size or -(-(self.hidden_size * 8 // 3) // 32) * 32


class GridConfig(Config):
    """How the blocks of a path are divided into levels, and what belongs to one path alone."""

    modules_per_level: tuple[int, ...] = Field(
        (2, 2),
        min_length=1,
        max_length=_MOST_LEVELS,
        description="Modules in each level, 1 to 1,024. Their product is the number of paths, "
        "at most 2^15.",
    )
    level_starts: tuple[int, ...] | None = Field(
        None,
        max_length=_MOST_LEVELS,
        description="First block of every level, ascending from 0. None: blocks are divided "
        "evenly.",
    )
    private_blocks: tuple[int, ...] = Field(
        (),
        max_length=_MOST_BLOCKS,
        description="Blocks of which every path has its own. Each level must keep at least "
        "one shared parameter.",
    )
    private_embedding: bool = Field(
        False,
        description="Each path has its own embedding; otherwise it belongs to the first level.",
    )
    private_head: bool = Field(
        False,
        description="Each path has its own final norm and (untied) head; otherwise they "
        "belong to the last level.",
    )
    added_paths: int = Field(
        0,
        ge=0,
        le=1024,
        description="Paths that `prepare --add-path` has added; not for a RUN.toml.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(count < 1 or count > 1024 for count in self.modules_per_level):
            raise ValueError(f"modules_per_level must be 1 to 1024, got {self.modules_per_level}")
        if len(set(self.private_blocks)) != len(self.private_blocks):
            raise ValueError(f"private_blocks repeats a block: {self.private_blocks}")
        if self.path_count > _MOST_PATHS:
            raise ValueError(
                f"modules_per_level gives more than {_MOST_PATHS} paths, and no more are possible"
            )
        return self

    @property
    def combination_count(self) -> int:
        """Paths that are combinations of modules: all but the added ones, and before them."""
        return math.prod(self.modules_per_level)

    @property
    def path_count(self) -> int:
        """All paths of the run."""
        return self.combination_count + self.added_paths

    @property
    def module_counts(self) -> tuple[int, ...]:
        """Modules of each level, with those of the added paths."""
        return tuple(count + self.added_paths for count in self.modules_per_level)


class InnerConfig(Config):
    """The optimizer inside a round, and the per-path learning-rate schedule (by that path's own
    steps)."""

    optimizer: Literal["adamw", "muon"] = Field(
        "muon",
        description="`muon` trains the matrices of the blocks with Muon and all else with "
        "AdamW. The base model is trained in the same way.",
    )
    learning_rate: float = Field(
        1.5e-3, gt=0, description="Peak learning rate, of Muon and AdamW alike."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Of AdamW.")
    beta2: float = Field(0.99, ge=0, lt=1, description="Of AdamW.")
    weight_decay: float = Field(0.1, ge=0, description="On matrices only.")
    gradient_clip: float = Field(1.0, ge=0, description="Greatest norm of the gradient; 0 is off.")
    batch_sequences: int = Field(
        8,
        ge=1,
        le=2**16,
        description="Sequences in a batch, the same for every peer; a peer with little "
        "memory splits it.",
    )
    warmup_steps: int = Field(0, ge=0, description="Linear warmup of a path's first steps.")
    decay_steps: int = Field(
        0,
        ge=0,
        description="Steps from the peak to the floor by a cosine, after the warmup; 0 keeps "
        "the peak. Replicas of a path count once.",
    )
    floor_ratio: float = Field(0.1, ge=0, le=1, description="Floor of the cosine / peak.")
    first_step: int = Field(
        0,
        ge=0,
        le=2**40,
        description="Place of a path's first step in the schedule, for one schedule over a run "
        "and its successors.",
    )
    fresh_state_warmup_steps: int = Field(
        10, ge=0, description="Extra warmup when a peer starts a path with a fresh optimizer state."
    )


def check_adapters(model: ModelConfig, grid: GridConfig, inner: InnerConfig) -> None:
    """Raise ValueError for settings that are not for a model with adapters, if it has some."""
    if model.adapters is None:
        return
    if inner.optimizer == "muon":
        raise ValueError(
            "inner.optimizer 'muon' is not for adapters, whose matrices are of low rank; write "
            'optimizer = "adamw" under [inner]'
        )
    for part in ("private_embedding", "private_head"):
        if getattr(grid, part):
            raise ValueError(f"grid.{part} is not for adapters: that part of the base is frozen")


class OuterConfig(Config):
    """Nesterov on the averaged outer gradient (DiPaCo section 7.1; DiLoCo Alg. 1)."""

    learning_rate: float = Field(0.8, gt=0, description="Of Nesterov's step, for shared modules.")
    momentum: float = Field(0.5, ge=0, lt=1, description="For shared modules.")
    private_learning_rate: float = Field(0.5, gt=0, description="For private modules.")
    private_momentum: float = Field(0.0, ge=0, lt=1, description="For private modules.")
    sqrt_paths_rescaling: bool = Field(
        True,
        description="Multiply the average by the square root of the number of contributing paths "
        "(section 2.7 of the paper).",
    )


class RoundsConfig(Config):
    """The clock of a run (docs/protocol.md, "Rounds")."""

    duration_s: float = Field(
        600.0,
        ge=2.0,
        le=1e7,
        description="Seconds between two outer boundaries of a level; with `inner_steps` "
        "the limit of a round.",
    )
    inner_steps: int = Field(
        0,
        ge=0,
        description="0: rounds follow the clock. Otherwise (*fixed steps*) every round has this "
        "many, and ends when all that share its modules are done.",
    )
    level_offsets: tuple[float, ...] | None = Field(
        None,
        max_length=_MOST_LEVELS + 1,
        description="Where in a round each level ends: a number in (0, 1] for each, private "
        "modules last. None: spread evenly, the last at 1.",
    )
    gather_s: float | None = Field(
        None,
        gt=0,
        description="Seconds for which peers wait for late contributions; at most half a round. "
        "None: a quarter of the round, at most 60.",
    )
    grace_s: float | None = Field(
        None,
        gt=0,
        description="Seconds of silence after which the next mailbox proposes a step. None: "
        "a quarter of `gather_s`, at most 10.",
    )
    dwell_rounds: int = Field(
        2, ge=1, description="Rounds that a peer stays on a path before it may move on."
    )
    validation_every_rounds: int = Field(
        1,
        ge=1,
        description="Rounds between two scorings of a path's states. By the clock, a peer "
        "skips scorings that would take more than a tenth of its time.",
    )
    validation_sequences: int = Field(
        64,
        ge=1,
        description="Greatest number of held-out sequences scored for the published loss.",
    )
    copies: int = Field(
        3, ge=1, le=16, description="Peers that hold each module state; its trainers count."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.level_offsets and not all(0 < offset <= 1 for offset in self.level_offsets):
            raise ValueError(f"level_offsets must lie in (0, 1], got {self.level_offsets}")
        if self.gather_limit_s > self.duration_s / 2:
            raise ValueError(
                f"gather_s {self.gather_limit_s:g} is more than half of a round of "
                f"{self.duration_s:g} s; give a longer duration_s or a shorter gather_s"
            )
        return self

    @property
    def gather_limit_s(self) -> float:
        """Seconds after a boundary for which contributions are waited for, resolved."""
        return self.gather_s or min(_LONGEST_GATHER_S, self.duration_s / 4)

    @property
    def grace_limit_s(self) -> float:
        """Seconds of silence after which the next peer proposes, resolved."""
        return self.grace_s or min(_LONGEST_GRACE_S, self.gather_limit_s / 4)

    def round_at(self, since_start_s: float) -> int:
        """Return the round so many seconds after the run's start; negative before it."""
        return math.floor(since_start_s / self.duration_s)


class ContributionsConfig(Config):
    """How outer gradients are written (design 4.2, publish), and become one (design 4.3, step)."""

    codec: CodecName = Field(
        "int4",
        description="How outer gradients are encoded: in 4, 0.53, 0.27 or 0.14 bytes per "
        "parameter, in this order.",
    )
    shorten: bool = Field(
        True,
        description="Shorten contributions that are longer than the group's median to the median.",
    )
    combine: Literal["weighted_mean", "trimmed_mean"] = Field(
        "weighted_mean",
        description="How contributions are averaged. The trimmed mean limits what one lying "
        "replica of three or more does, or one path of three, at a cost in accuracy and time.",
    )
    trim_share: float = Field(
        0.2,
        gt=0,
        lt=0.5,
        description="Of `trimmed_mean`: share of the paths that is left out at each end of "
        "every coordinate, rounded up. One path remains, or two of an even number.",
    )


_ConfigT = TypeVar("_ConfigT", bound=BaseModel)


# At most so many mistakes are reported at once.
_MAX_TOLD = 8
# Of the letters of an unknown key.
_MAX_KEY = 80


def parse_config(config_class: type[_ConfigT], values: Mapping[str, Any], source: str) -> _ConfigT:
    """Build `config_class` from plain values, or raise `ConfigurationError` with one clear line
    that tells all mistakes.

    `source` names where the values came from (a file name) and starts the message. An unknown key
    is answered with the nearest known one.
    """
    try:
        # As JSON, where a list may become a tuple but a text no number. What TOML has besides, a
        # date, is a text.
        return config_class.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        # A value that may have one of several types has a complaint of each type: the first is
        # reported.
        first = {one["loc"][:2]: one for one in reversed(error.errors())}
        told = [_mistake(config_class, one) for one in [*reversed(first.values())][:_MAX_TOLD]]
        raise ConfigurationError(f"{source}: {'; and '.join(told)}") from None


def _mistake(config_class: type[BaseModel], error: ErrorDetails) -> str:
    """Say in a few words what is wrong with one key."""
    location = error["loc"]
    where = ".".join(str(part)[:_MAX_KEY] for part in location)
    if error["type"] == "extra_forbidden":
        owner = _class_at(config_class, location[:-1])
        known = sorted(owner.model_fields) if owner else []
        guess = nearest_name(str(location[-1])[:_MAX_KEY], known)
        hint = f"; did you mean '{guess}'?" if guess else f"; known: {', '.join(known)}"
        return f"unknown key '{where}'{hint}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "model_type":
        message = f"it is a table, [{where}]"
    elif error["type"] == "string_pattern_mismatch":
        message = _wanted(config_class, location) or message
    shown = repr(error.get("input"))
    seen = f" (got {shown})" if where and len(shown) < 80 else ""
    return f"{where or 'value'}: {message}{seen}"


def _wanted(config_class: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Return what the description of a key asks for, which is easier to read than its pattern."""
    owner = _class_at(config_class, location[:-1])
    field = owner.model_fields.get(str(location[-1])) if owner else None
    return field.description.removesuffix(".") if field and field.description else ""


def _class_at(config_class: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel] | None:
    """Follow a validation error's location down to the class that owns the key."""
    current: type[BaseModel] | None = config_class
    for part in location:
        if current is None or part not in current.model_fields:
            return None
        annotation = current.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        current = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
    return current
