"""RUN.toml: everything an operator decides about a run, typed and checked before any work.

`RunToml` is what the file says. `RunConfig` is what the run is: some defaults depend on what lies
elsewhere, on the checkpoint that `base` names or on the run that this one continues, and
`_resolved` puts them in.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.base.files import at_home, read_toml
from dipaco.modules.hub_cache import cached_snapshots, is_hub_name
from dipaco.modules.llama import CONFIG_FILE, llama_weight_files
from dipaco.protocol.about import AboutRun
from dipaco.protocol.config import (
    AdaptersConfig,
    Config,
    ContributionsConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    ModelFields,
    OuterConfig,
    OwnTexts,
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

from .import_base import ImportedBase, differing_fields

_ConfigT = TypeVar("_ConfigT", bound=Config)


class TokenizerConfig(Config):
    """`[tokenizer]`: the number of pieces stands in `[model]`."""

    training_characters: int = Field(
        20_000_000,
        ge=1000,
        description="Greatest number of characters that a new tokenizer is trained on.",
    )
    model_file: Path | None = Field(
        None,
        description="A SentencePiece model to use in place of a new one. It needs begin and end, "
        "byte pieces and, if there is no imported base, padding as piece 3.",
    )


class BaseConfig(Config):
    """`[base]`: dense training of the model that every path starts from and that routes.

    `base = "path/to/dir"` in place of the table imports a checkpoint and trains no further.
    """

    checkpoint: Path | None = Field(
        None,
        description="Checkpoint to start from: a folder, or the name of one in the cache of the "
        "Hugging Face Hub, such as `HuggingFaceTB/SmolLM2-135M`.",
    )
    name: str | None = Field(
        None,
        pattern=BASE_NAME_PATTERN,
        description="The Hub's name for the checkpoint in a folder: OWNER/NAME, or one word of "
        "letters, digits, `.`, `_` and `-`. With adapters, peers look for it in "
        "their cache. None: the name of the folder.",
    )
    steps: int = Field(
        1000,
        ge=0,
        description="Inner steps. With a `checkpoint` the default is 0.",
    )
    learning_rate: float = Field(
        4e-3,
        gt=0,
        description="Peak learning rate. With a `checkpoint` it has no default: a trained model "
        "wants about a tenth.",
    )
    warmup_steps: int = Field(50, ge=0, description="Steps of linear warmup.")
    batch_sequences: int = Field(8, ge=1, description="Sequences in a batch.")
    floor_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Last learning rate / peak, reached by a cosine; 1 keeps the peak.",
    )

    @model_validator(mode="before")
    @classmethod
    def _import(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"checkpoint": values}
        if isinstance(values, dict) and values.get("checkpoint") is not None:
            return {"steps": 0, **values}
        return values


class RunToml(Config):
    """A RUN.toml as it is written. `name` and `data` have no default; everything else has one that
    works."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of the run, which `--run` accepts: at most 64 letters, digits, "
        "`.`, `_` and `-`, the first a letter or digit.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="Seed of everything random: tokenizer sample, base parameters, router, "
        "batches.",
    )
    about: AboutRun = AboutRun()
    data: CorpusConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelFields = ModelFields()
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
    own_texts: OwnTexts = Field(
        "no",
        description="Whether a peer may also train on texts of its owner, which stay on its "
        "machine (`dipaco-peer --texts`). Nobody can check what was trained.",
    )
    mirrors: tuple[Mirror, ...] = Field(
        (),
        max_length=16,
        description="Up to 16 addresses of folders with blobs, each beginning with "
        "`https://`, `s3://`, `gs://` or `hf://`.",
    )


# What a plan has too, under the same names.
IN_PLANS = tuple(name for name in RunToml.model_fields if name in RunPlan.model_fields)


class RunConfig(RunToml):
    """What a run is, before anything is made: a RUN.toml with all defaults in it."""

    model: ModelConfig = ModelConfig()

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
            start_s=start_s,
            routing=RoutingPlan(
                kind=self.router.kind,
                prefix_tokens=self.router.prefix_tokens,
                train_paths=self.router.train_paths,
            ),
            blobs=blobs,
            base_source=base_source,
            successor_of=successor_of,
            **{name: getattr(self, name) for name in IN_PLANS},
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


def load_run_config(
    path: Path, trained: ModelConfig | None = None, changes: Sequence[str] = ()
) -> RunConfig:
    """Read and check a RUN.toml; file names in it are relative to its own folder.

    `changes` are values to take in place of its own, such as "outer.momentum=0.9". `trained` is the
    model of the run that this one continues.

    Raises ConfigurationError if it cannot be read, has an unknown key or an impossible value, or if
    its parts do not fit each other.
    """
    source = str(path)
    written = read_run_toml(path, changes)
    base = None
    if trained is None and written.base.checkpoint is not None:
        own_tokenizer = written.tokenizer.model_file is None
        base = ImportedBase(written.base.checkpoint, own_tokenizer=own_tokenizer)
    config = _resolved(written, base, trained, source)
    _check_parts_fit(config, source, goes_on=trained is not None)
    return config


def read_run_toml(path: Path, changes: Sequence[str] = ()) -> RunToml:
    """Return what a RUN.toml says, with the files that it names in their places.

    Raises ConfigurationError.
    """
    if not path.exists():
        raise ConfigurationError(f"there is no {path}; start from a copy of examples/tiny/RUN.toml")
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; name a file in it, such as {path}/RUN.toml")
    values = changed(read_toml(path), changes)
    if "data" not in values:
        raise ConfigurationError(
            f"{path}: [data] is missing; write for example\n[data]\ntrain = 'data/*.jsonl.gz'"
        )
    written, folder = parse_config(RunToml, values, str(path)), path.absolute().parent
    tokenizer = written.tokenizer
    if tokenizer.model_file is not None:
        tokenizer = tokenizer.model_copy(
            update={"model_file": folder / at_home(str(tokenizer.model_file))}
        )
    return written.model_copy(
        update={
            "data": written.data.relative_to(folder),
            "tokenizer": tokenizer,
            "base": _placed_base(written.base, folder, str(path)),
        }
    )


def changed(values: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return the values of a RUN.toml with some of them in place of its own, each given as
    "outer.momentum=0.9". Raises ConfigurationError."""
    found = dict(values)
    for change in changes:
        key, equals, text = change.partition("=")
        *tables, name = key.strip().split(".")
        if not equals or not name:
            raise ConfigurationError(
                f"--set '{change}' is not a key and a value of a RUN.toml; for example --set "
                "outer.momentum=0.9"
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()  # a word without quotes, which a shell takes away
        table = found
        for number, inner in enumerate(tables, 1):
            there = table.get(inner, {})
            if not isinstance(there, dict):
                named = ".".join(tables[:number])
                raise ConfigurationError(
                    f"--set '{change}': {named} is {there!r} in the RUN.toml, and has no keys; "
                    f"--set {named}=VALUE replaces it"
                )
            table[inner] = table = dict(there)
        table[name] = value
    return found


def _resolved(
    written: RunToml, base: ImportedBase | None, trained: ModelConfig | None, source: str
) -> RunConfig:
    """Return the run that a RUN.toml describes, with the defaults that depend on the checkpoint
    that it begins with, or on the model of the run that it continues.

    Raises ConfigurationError if it says something else than these; `source` names the file.
    """
    if written.model.adapters is not None:
        raise ConfigurationError(f"{source}: model.adapters: write them as a table [adapters]")
    if trained is not None:
        model = _trained_model(written, trained, source)
    elif base is not None:
        model = base.agreed_model(written.model, source)
        if written.adapters is not None:
            model = model.model_copy(update={"adapters": written.adapters})
        elif model.transformers_config is not None:
            raise ConfigurationError(
                f"{source}: the base is of a family that a run does not train as a whole; write a "
                f"table [adapters], with which it stays as it is"
            )
    else:
        model = _built(
            ModelConfig, written.model.model_dump(exclude_unset=True), f"{source}: model"
        )
    if trained is None and written.adapters is not None:
        _check_frozen_base(written.base, source)
    is_trained = written.base.checkpoint is not None and written.base.steps > 0
    if is_trained and "learning_rate" not in written.base.model_fields_set:
        raise ConfigurationError(
            f"{source}: base.steps trains a checkpoint further, and its rate has no default; write "
            f"learning_rate under [base], such as 4e-4"
        )
    parts: dict[str, Any] = {name: getattr(written, name) for name in RunToml.model_fields}
    parts["model"] = model
    if model.adapters is not None:
        for table, defaults in adapter_defaults(model.adapters).items():
            given = getattr(written, table).model_dump(exclude_unset=True)
            parts[table] = _built(type(parts[table]), {**defaults, **given}, f"{source}: {table}")
    return _built(RunConfig, parts, source)


def adapter_defaults(adapters: AdaptersConfig) -> dict[str, dict[str, Any]]:
    """Return what adapters have as defaults, by table: see docs/configuration.md, "adapters".

    AdamW moves every number by the rate, so what is added to the base moves by the rate times
    alpha: a larger alpha than that of rank 16 gets a smaller rate.
    """
    return {
        "grid": {"modules_per_level": (2, 2)},
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


def _trained_model(written: RunToml, trained: ModelConfig, source: str) -> ModelConfig:
    """Return the model of the run before; what RUN.toml says of it must agree."""
    for key, said, kept in differing_fields(written.model, trained):
        raise ConfigurationError(
            f"{source}: model.{key} is {said!r}, but the run that this one continues has "
            f"{kept!r}; modules fit only the model that they were trained in. Leave [model] out"
        )
    if written.adapters not in (None, trained.adapters):
        raise ConfigurationError(
            f"{source}: [adapters] differ from those of the run that this one continues; leave "
            f"the table out"
        )
    return trained


def _check_frozen_base(base: BaseConfig, source: str) -> None:
    if base.checkpoint is None:
        raise ConfigurationError(
            f"{source}: [adapters] need a base, which does not change; name a checkpoint in a "
            f'first line: base = "FOLDER or OWNER/NAME"'
        )
    if base.steps:
        raise ConfigurationError(
            f"{source}: base.steps is {base.steps}, but with [adapters] the base does not change; "
            f"leave it out"
        )


def _built(kind: type[_ConfigT], values: Mapping[str, Any], source: str) -> _ConfigT:
    """Build a configuration of values that are right each by itself; their checks of each other
    raise ConfigurationError."""
    try:
        return kind(**values)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise ConfigurationError(f"{source}: {message}") from None


def _check_parts_fit(config: RunConfig, source: str, *, goes_on: bool) -> None:
    """Raise ConfigurationError unless the tables of a RUN.toml fit each other, in a run that goes
    on with another one or begins."""
    window_stride(config.model.sequence_length, config.router.prefix_tokens)
    grid = Grid(config.model, config.grid, config.rounds.level_offsets)
    if config.grid.added_paths:
        raise ConfigurationError(
            f"{source}: added_paths under [grid] is counted by 'prepare --from RUN --add-path "
            f"NEW.jsonl'; leave it out"
        )
    if config.router.train_paths > grid.path_count:
        raise ConfigurationError(
            f"{source}: train_paths {config.router.train_paths} under [router] is more than the "
            f"{grid.path_count} paths of the grid"
        )
    if ROUTER_KINDS[config.router.kind].needs_labels and config.data.label_field is None:
        raise ConfigurationError(
            f"{source}: kind = '{config.router.kind}' under [router] routes by a label of the "
            f"documents; name the field that holds it with label_field = '...' under [data]"
        )
    base = config.base
    if goes_on and base.checkpoint is not None:
        raise ConfigurationError(
            f"{source}: base = '{base.checkpoint}' cannot be imported into a run that continues "
            f"another one (--from), whose modules it begins with; leave base out"
        )


def check_chats(config: RunConfig) -> None:
    """Raise ConfigurationError for a new run of chats that cannot be."""
    if config.base.checkpoint is None:
        raise ConfigurationError(
            "[data] holds chats, which need the chat template of a base; name its folder with "
            "base = 'FOLDER', or give texts"
        )
    if config.base.steps:
        raise ConfigurationError(
            f"[data] holds chats, and steps is {config.base.steps} under [base]; only paths train "
            f"on chats, so leave steps out"
        )


def _placed_base(base: BaseConfig, folder: Path, source: str) -> BaseConfig:
    """Return `[base]` with the folder of the checkpoint in the place of its name, and with what the
    hub calls it. Raises ConfigurationError."""
    if base.checkpoint is None:
        return base
    given = at_home(str(base.checkpoint))
    place, name = folder / given, _plain_word(base.checkpoint.name)
    if not (place / CONFIG_FILE).is_file() and is_hub_name(given):
        snapshots = cached_snapshots(given)
        if not snapshots and not place.exists():
            raise ConfigurationError(
                f"{source}: base '{given}' is neither a folder beside it nor in the cache of the "
                f"Hugging Face Hub; fetch it with: hf download {given}"
            )
        if snapshots:
            place, name = _whole_snapshot(snapshots, given, source), given
    elif not place.exists():
        # An address of the Hub, a revision of a model, or the name of a folder on another system.
        meant = re.search(r"([\w.-]+/[\w.-]+?)(?:@[\w.-]+)?/?$", given)
        is_of_hub = meant and ("huggingface.co" in given or given.count("/") < 3)
        hint = f"; did you mean the Hub's name '{meant[1]}'?" if meant and is_of_hub else ""
        raise ConfigurationError(
            f"{source}: base '{given}' is no folder ({place}), and no name of the Hub "
            f"(OWNER/NAME){hint}"
        )
    return base.model_copy(update={"checkpoint": place, "name": base.name or name})


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
