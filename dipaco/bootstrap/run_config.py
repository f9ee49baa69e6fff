"""RUN.toml: everything an operator decides about a run, typed and checked before any work."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.base.files import read_toml
from dipaco.modules.hub_cache import cached_snapshots, is_hub_name
from dipaco.modules.llama import CONFIG_FILE, llama_weight_files
from dipaco.protocol.config import (
    AdaptersConfig,
    Config,
    ContributionsConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
    check_adapters,
    parse_config,
)
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import (
    BASE_NAME_PATTERN,
    PROTOCOL_VERSION,
    BaseSource,
    Mirror,
    RoutingPlan,
    RunBlobs,
    RunPlan,
)
from dipaco.routing.documents.corpus import CorpusConfig
from dipaco.routing.routers.kinds import ROUTER_KINDS, RouterConfig
from dipaco.routing.tokens.token_files import window_stride

from .import_base import ImportedBase


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
    """`[base]`: dense training of the model that every path starts from and that routes.

    `base = "path/to/dir"` in place of the table imports a checkpoint and trains no further.
    """

    checkpoint: Path | None = Field(
        None,
        description="Folder of a Llama checkpoint to start from, or what the Hugging Face Hub "
        "calls one that is in its cache; then steps is 0 unless given.",
    )
    name: str | None = Field(
        None,
        pattern=BASE_NAME_PATTERN,
        description="What the Hugging Face Hub calls the checkpoint in a folder; peers then look "
        "for it in their cache.",
    )
    steps: int = Field(1000, ge=0, description="0: paths start from random parameters.")
    learning_rate: float = Field(4e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(50, ge=0, description="Linear warmup.")
    batch_sequences: int = Field(8, ge=1, description="Sequences in a batch.")
    floor_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Last learning rate / peak, by a cosine. 1 keeps the peak, because the base is "
        "the beginning of one long schedule that the paths continue.",
    )

    @model_validator(mode="before")
    @classmethod
    def _import(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"checkpoint": values}
        if isinstance(values, dict) and values.get("checkpoint") is not None:
            return {"steps": 0, **values}
        return values


def adapter_defaults(adapters: AdaptersConfig) -> dict[str, dict[str, Any]]:
    """Return what adapters have as defaults, by table: see docs/configuration.md, "adapters".

    AdamW moves every number by the rate, so what is added to the base moves by the rate times
    alpha: a larger alpha than that of rank 16 gets a smaller rate.
    """
    return {
        "grid": {"modules_per_level": [2, 2]},
        "inner": {
            "optimizer": "adamw",
            "learning_rate": 1e-3 * min(1.0, 32 / (adapters.scale * adapters.rank)),
            "weight_decay": 0.0,
            "fresh_state_warmup_steps": 5,
        },
        "outer": {
            "learning_rate": 1.0,
            "momentum": 0.0,
            "private_learning_rate": 1.0,
            "sqrt_paths_rescaling": False,
        },
    }


class _Adapters(Config):
    """The table of a RUN.toml alone, to be checked before others get their defaults from it."""

    adapters: AdaptersConfig | None = None


class RunConfig(Config):
    """A RUN.toml. `name` and `data` have no default; everything else has one that works."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="What people call the run."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of everything that is drawn at random.")
    data: CorpusConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    grid: GridConfig = GridConfig()
    base: BaseConfig = BaseConfig()
    adapters: AdaptersConfig | None = Field(
        None, description="Train adapters over a frozen base; see the table."
    )
    router: RouterConfig = RouterConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    rounds: RoundsConfig = RoundsConfig()
    contributions: ContributionsConfig = ContributionsConfig()
    mirrors: tuple[Mirror, ...] = Field(
        (), max_length=16, description="Addresses of folders that hold blobs by their SHA-256."
    )

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        check_adapters(self.model, self.grid, self.inner)
        return self

    def plan(
        self,
        blobs: RunBlobs,
        start_s: float,
        successor_of: str | None = None,
        base_source: BaseSource | None = None,
    ) -> RunPlan:
        """Return the plan of the run with these blobs, that begins at `start_s`."""
        return RunPlan(
            protocol_version=PROTOCOL_VERSION,
            name=self.name,
            seed=self.seed,
            start_s=start_s,
            model=self.model,
            grid=self.grid,
            inner=self.inner,
            outer=self.outer,
            rounds=self.rounds,
            contributions=self.contributions,
            routing=RoutingPlan(
                kind=self.router.kind,
                prefix_tokens=self.router.prefix_tokens,
                train_paths=self.router.train_paths,
            ),
            blobs=blobs,
            base_source=base_source,
            mirrors=self.mirrors,
            successor_of=successor_of,
        )

    def base_inner(self) -> InnerConfig:
        """Return the settings of the inner loop for dense pretraining: the run's optimizer."""
        return self.inner.model_copy(
            update={
                "learning_rate": self.base.learning_rate,
                "warmup_steps": self.base.warmup_steps,
                "batch_sequences": self.base.batch_sequences,
                "decay_steps": max(1, self.base.steps - self.base.warmup_steps),
                "floor_ratio": self.base.floor_ratio,
                "first_step": 0,
                "fresh_state_warmup_steps": 0,
            }
        )


def change_value(values: dict[str, Any], change: str) -> None:
    """Set one value of a RUN.toml. Raises ConfigurationError."""
    key, equals, text = change.partition("=")
    *tables, name = key.strip().split(".")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a word without quotes, which a shell takes away
    for number, table in enumerate(tables, 1):
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            named = ".".join(tables[:number])
            raise ConfigurationError(
                f"--set '{change}': {named} is {values!r} in the RUN.toml, and has no keys; write "
                f"--set {named}={text.strip()}"
            )
    if not equals or not name:
        raise ConfigurationError(
            f"--set '{change}' is not a key and a value of a RUN.toml; for example --set "
            "outer.momentum=0.9"
        )
    values[name] = value


def load_run_config(
    path: Path, trained: ModelConfig | None = None, changes: Sequence[str] = ()
) -> RunConfig:
    """Read and check a RUN.toml; file names in it are relative to its own folder.

    `changes` are values to take in place of its own, such as "outer.momentum=0.9".

    `trained` is the model of the run that this one goes on with: `[model]` may be left out then,
    and what it says must agree. Raises ConfigurationError if it cannot be read, has an unknown key
    or an impossible value, or if the model and the grid do not fit each other.
    """
    if not path.exists():
        raise ConfigurationError(f"there is no {path}; start from a copy of examples/tiny/RUN.toml")
    values = read_toml(path)
    for change in changes:
        change_value(values, change)
    if "data" not in values:
        raise ConfigurationError(
            f"{path}: [data] is missing; write for example\n[data]\ntrain = 'data/*.jsonl.gz'"
        )
    model = values.setdefault("model", {})
    if not isinstance(model, dict):
        raise ConfigurationError(f"{path}: model is {model!r}; write a table [model], or nothing")
    if "adapters" in model:
        raise ConfigurationError(f"{path}: model.adapters: write them as a table [adapters]")
    folder = path.absolute().parent
    _place_base(values, folder, str(path))
    if trained is None:
        _import_model(values, str(path))
    else:
        values["model"] = _trained_model(model, trained, str(path))
    _use_adapters(values, trained, str(path))
    config = parse_config(RunConfig, values, str(path))
    _check_parts_fit(config, path, goes_on=trained is not None)
    tokenizer = config.tokenizer
    if tokenizer.model_file is not None:
        tokenizer = tokenizer.model_copy(update={"model_file": folder / tokenizer.model_file})
    return config.model_copy(
        update={"data": config.data.relative_to(folder), "tokenizer": tokenizer}
    )


def _check_parts_fit(config: RunConfig, path: Path, *, goes_on: bool) -> None:
    """Raise ConfigurationError unless the tables of a RUN.toml fit each other, in a run that goes
    on with another one or begins."""
    window_stride(config.model.sequence_length, config.router.prefix_tokens)
    grid = Grid(config.model, config.grid, config.rounds.level_offsets)
    if config.grid.added_paths:
        raise ConfigurationError(
            f"{path}: added_paths under [grid] is counted by 'prepare --from RUN --add-path "
            f"NEW.jsonl'; leave it out"
        )
    if config.router.train_paths > grid.path_count:
        raise ConfigurationError(
            f"{path}: train_paths {config.router.train_paths} under [router] is more than the "
            f"{grid.path_count} paths of the grid"
        )
    if ROUTER_KINDS[config.router.kind].needs_labels and config.data.label_field is None:
        raise ConfigurationError(
            f"{path}: kind = '{config.router.kind}' under [router] routes by a label of the "
            f"documents; name the field that holds it with label_field = '...' under [data]"
        )
    base = config.base
    has_tokenizer = goes_on or config.tokenizer.model_file or base.checkpoint
    if config.data.is_tokenised and not has_tokenizer:
        raise ConfigurationError(
            f"{path}: tokens_field under [data] needs the tokenizer that made the tokens; name it "
            f"with model_file = '...' under [tokenizer]"
        )
    if goes_on and base.checkpoint is not None:
        raise ConfigurationError(
            f"{path}: base = '{base.checkpoint}' cannot be imported into a run that continues "
            f"another one (--from), whose modules it begins with; leave base out"
        )


def _place_base(values: dict[str, Any], folder: Path, source: str) -> None:
    """Put the folder of the checkpoint that `base` names in the place of its name, and say what
    the hub calls it. Raises ConfigurationError."""
    base = values.get("base")
    table = {"checkpoint": base} if isinstance(base, str) else base
    if not isinstance(table, dict) or not isinstance(table.get("checkpoint"), str):
        return
    given = table["checkpoint"]
    place, name = folder / given, _plain_word(Path(given).name)
    if not (place / CONFIG_FILE).is_file() and is_hub_name(given):
        snapshots = cached_snapshots(given)
        if not snapshots and not place.exists():
            raise ConfigurationError(
                f"{source}: base '{given}' is neither a folder beside it nor in the cache of the "
                f"Hugging Face Hub; fetch it with: hf download {given}"
            )
        if snapshots:
            place, name = _whole_snapshot(snapshots, given, source), given
    values["base"] = {"name": name, **table, "checkpoint": str(place)}


def _plain_word(name: str) -> str:
    """Return a folder's name as a plan can have it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:64] or "base"


def _whole_snapshot(snapshots: Sequence[Path], given: str, source: str) -> Path:
    """Return the newest revision of which the hub's cache has all weights: an interrupted download
    leaves a part, and so does a program that looks at the configuration alone.

    Raises ConfigurationError if there is none.
    """
    reasons = []
    for folder in snapshots:
        try:
            llama_weight_files(folder)
        except DipacoError as error:
            reasons.append(str(error))
        else:
            return folder
    raise ConfigurationError(
        f"{source}: base '{given}' is not whole in the cache of the Hugging Face Hub; fetch it "
        f"with: hf download {given} ({reasons[0]})"
    )


def _use_adapters(values: dict[str, Any], trained: ModelConfig | None, source: str) -> None:
    """Give a run with adapters the defaults that these have, and let its model have them.

    Raises ConfigurationError for adapters without a base, or with one that is trained further.
    """
    adapters = values.get("adapters")
    if adapters is None and (trained is None or trained.adapters is None):
        return
    if not isinstance(adapters, dict | None):
        return  # its parser says so
    found = parse_config(_Adapters, {"adapters": adapters}, source).adapters
    base = values.get("base")
    if trained is None:
        if not isinstance(base, dict) or "checkpoint" not in base:
            raise ConfigurationError(
                f"{source}: [adapters] need a base, which does not change; name a checkpoint in a "
                f'first line: base = "FOLDER or OWNER/NAME"'
            )
        if base.get("steps"):
            raise ConfigurationError(
                f"{source}: base.steps is {base['steps']}, but with [adapters] the base does "
                f"not change; leave it out"
            )
        values["model"] = {**values["model"], "adapters": adapters}
    elif found is not None and found != trained.adapters:
        raise ConfigurationError(
            f"{source}: [adapters] differ from those of the run that this one continues; leave "
            f"the table out"
        )
    used = found if trained is None else trained.adapters
    assert used is not None
    for table, defaults in adapter_defaults(used).items():
        given = values.get(table, {})
        values[table] = {**defaults, **given} if isinstance(given, dict) else given


def _import_model(values: dict[str, Any], source: str) -> None:
    """Fill `[model]` from the checkpoint that `base` names, if it names one."""
    base = values.get("base")
    checkpoint = base.get("checkpoint") if isinstance(base, dict) else None
    if not isinstance(checkpoint, str):
        return
    tokenizer = values.get("tokenizer", {})
    given = isinstance(tokenizer, dict) and "model_file" in tokenizer
    imported = ImportedBase(Path(checkpoint), own_tokenizer=not given)
    values["model"] = imported.agreed_model(values["model"], source)


def _trained_model(given: dict[str, Any], trained: ModelConfig, source: str) -> dict[str, Any]:
    """Return `[model]` of a successor: that of the run before; what RUN.toml says must agree."""
    kept = trained.model_dump(mode="json")
    defaults = {"kv_head_count": trained.kv_heads, "feed_forward_size": trained.feed_forward}
    for key, value in given.items():
        if key in kept and value not in (kept[key], defaults.get(key, kept[key])):
            raise ConfigurationError(
                f"{source}: model.{key} is {value!r}, but the run that this one continues has "
                f"{kept[key]!r}; modules fit only the model that they were trained in. Leave "
                f"[model] out"
            )
        # The parser names a key that does not exist, with its nearest neighbour.
        kept.setdefault(key, value)
    return kept
