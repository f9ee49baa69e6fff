"""RUN.toml: everything an operator decides about a run, typed and checked before any work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from dipaco.modules.config import (
    AveragingConfig,
    Config,
    GridConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
    parse_config,
)
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.grid import Grid
from dipaco.routing.corpus import CorpusConfig
from dipaco.routing.routers import ROUTER_KINDS
from dipaco.routing.windows import window_stride
from pydantic import Field, model_validator
from typing_extensions import Self

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class TokenizerConfig(Config):
    """`[tokenizer]`: the number of pieces stands in `[model]`."""

    kind: Literal["bpe", "unigram"] = Field("bpe", description="SentencePiece algorithm.")
    training_characters: int = Field(
        20_000_000, ge=1000, description="Characters that a new tokenizer is trained on, at most."
    )
    model_file: Path | None = Field(
        None, description="A SentencePiece model to use instead of training one."
    )


class BaseConfig(Config):
    """`[base]`: dense training of the model that every path starts from and that routes."""

    steps: int = Field(1000, ge=0, description="0: paths start from random parameters.")
    learning_rate: float = Field(4e-4, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(50, ge=0, description="Linear warmup.")
    batch_sequences: int = Field(8, ge=1, description="Sequences in a batch.")
    floor_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Last learning rate / peak, by a cosine. 1 keeps the peak, because the base is "
        "the beginning of one long schedule that the paths go on with.",
    )


class RouterConfig(Config):
    """`[router]`: how documents find their path."""

    kind: str = Field("kmeans", description="Kind of router.")
    balanced: bool = Field(True, description="Make the shards about equally large.")
    training_documents: int = Field(
        20_000, ge=1, description="Documents that the router is fitted on, at most."
    )
    prefix_tokens: int = Field(32, ge=1, description="Tokens that routing sees (section 2.4).")
    restarts: int = Field(8, ge=1, le=1000, description="Starts of k-means; the best one is used.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind not in ROUTER_KINDS:
            raise ValueError(f"kind '{self.kind}' is unknown; known: {', '.join(ROUTER_KINDS)}")
        return self


class RunConfig(Config):
    """A RUN.toml. `data` has no default; everything else has one that works."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="What people call the run."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Of everything that is drawn at random.")
    data: CorpusConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    grid: GridConfig = GridConfig()
    base: BaseConfig = BaseConfig()
    router: RouterConfig = RouterConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    rounds: RoundsConfig = RoundsConfig()
    averaging: AveragingConfig = AveragingConfig.model_validate({})
    mirrors: tuple[str, ...] = Field(
        (), description="fsspec addresses of folders that hold blobs by their SHA-256."
    )

    def base_inner(self) -> InnerConfig:
        """Return the settings of the inner loop for dense pretraining: AdamW as in the run."""
        return self.inner.model_copy(
            update={
                "learning_rate": self.base.learning_rate,
                "warmup_steps": self.base.warmup_steps,
                "batch_sequences": self.base.batch_sequences,
                "decay_steps": max(1, self.base.steps - self.base.warmup_steps),
                "floor_ratio": self.base.floor_ratio,
                "fresh_state_warmup_steps": 0,
            }
        )


def load_run_config(path: Path) -> RunConfig:
    """Read and check a RUN.toml; file names in it are relative to its own folder.

    Raises ConfigurationError if it cannot be read, has an unknown key or an impossible value, or
    if the model and the grid do not fit each other.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no {path}; start from a copy of examples/tiny/RUN.toml"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None
    if "data" not in values:
        raise ConfigurationError(
            f"{path}: [data] is missing; write for example\n[data]\ntrain = 'data/*.jsonl.gz'"
        )
    config = parse_config(RunConfig, values, str(path))
    window_stride(config.model.sequence_length, config.router.prefix_tokens)
    Grid(config.model, config.grid, config.rounds.level_offsets)
    folder = path.absolute().parent
    tokenizer = config.tokenizer
    if tokenizer.model_file is not None:
        tokenizer = tokenizer.model_copy(update={"model_file": folder / tokenizer.model_file})
    return config.model_copy(
        update={"data": config.data.relative_to(folder), "tokenizer": tokenizer}
    )
