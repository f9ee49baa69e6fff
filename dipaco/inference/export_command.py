"""`dipaco-export`: write a path, or a whole run, so that other tools load it.

dipaco-export --state-dir my-run-simulated --path 3 --format llama --out path-3
dipaco-export --initial-peers ADDR --all --out my-model --dtype bfloat16
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError
from dipaco.base.files import storage_errors
from dipaco.base.running import say
from dipaco.base.settings import Option
from dipaco.inference.options import InferenceSettings

if TYPE_CHECKING:
    import torch

    from dipaco.inference.sources import StateSource

    from .export.form import ExportForm
    from .export.model_card import CardNotes


@dataclass(frozen=True, kw_only=True)
class ExportSettings(InferenceSettings):
    """What `dipaco-export` can be told."""

    path: Annotated[int | None, Option("export this path", "P")] = None
    all: Annotated[bool, Option("export every path, the router and a model card")] = False
    out: Annotated[Path, Option("folder to write; with --format gguf also a file, x.gguf", "DIR")]
    format: Annotated[
        Literal["llama", "gguf", "peft"] | None,
        Option(
            "llama (the default) is a folder for transformers and vLLM, gguf a file for llama.cpp. "
            "In a run with adapters, peft (the default) and gguf are the adapters alone, and llama "
            "is the base with the adapters merged into it"
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "q8_0"] | None,
        Option(
            "how parameters are stored; q8_0 is for gguf (default: float32, which is exact; for a "
            "merged path, the format of the base)"
        ),
    ] = None
    tokenizer: Annotated[
        Literal["exact", "sentencepiece"],
        Option(
            "sentencepiece writes tokenizer.model alone, for a tokenizer that cannot be written "
            "with exactly its ids for transformers"
        ),
    ] = "exact"
    eval_json: Annotated[
        Path | None,
        Option("what 'dipaco-eval --json' printed, for the figures of the model card", "FILE"),
    ] = None
    licence: Annotated[str | None, Option("licence of the model, for the card", "NAME")] = None
    attribution: Annotated[
        Path | None, Option("Markdown on origin and licences of the data, for the card", "FILE")
    ] = None
    base_model: Annotated[
        str | None,
        Option("repository of the Hub that the run's base is from, for the card", "OWNER/NAME"),
    ] = None
    dataset: Annotated[
        tuple[str, ...],
        Option("repositories of the Hub that the texts are from, for the card", "OWNER/NAME"),
    ] = ()
    repository: Annotated[
        str | None,
        Option("repository of the Hub that this will be in, for the card", "OWNER/NAME"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is not None) == self.all:
            raise ConfigurationError("give --path P for one path, or --all for all of them")
        fits = ("float32", "float16", "q8_0" if self.format == "gguf" else "bfloat16")
        if self.dtype not in (*fits, None):
            raise ConfigurationError(
                f"--format {self.format or 'llama'} cannot be stored as {self.dtype}; give --dtype "
                f"{', '.join(fits[:2])} or {fits[2]}"
            )


def run(settings: ExportSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    settings.prepare_process()
    notes = _notes(settings)
    with settings.open_source() as source:
        if settings.path is None:
            _export_all(settings, source, notes)
            print(f"{source.grid.path_count} paths and the router are in {settings.out}")
        else:
            _export_path(settings, settings.path, source, notes)
        if _are_adapters_alone(settings, source) and settings.format != "gguf":
            _say_where_the_base_is(source, notes)
    # The paths have what is in modules/ themselves: those are hard links.
    apart = " --exclude 'modules/*'" if (settings.out / "modules").is_dir() else ""
    out = shlex.quote(str(settings.out))
    say(f"to publish it: hf upload {settings.repository or 'OWNER/NAME'} {out}{apart}")
    return 0


def _say_where_the_base_is(source: StateSource, notes: CardNotes) -> None:
    """Say that other tools will not find the base by its name, if it is that of a folder."""
    from .export.model_card import base_name

    name = base_name(source.plan, notes)
    if name is not None and "/" not in name:
        say(
            f"the adapters call their base '{name}', which is no repository of the Hub; give "
            f"--base-model OWNER/NAME, or a folder, so that PEFT, vLLM and route.py find it"
        )


def _export_path(
    settings: ExportSettings, path: int, source: StateSource, notes: CardNotes
) -> None:
    from .export.adapter_exporter import open_exporter
    from .export.model_card import model_card

    form = _form(settings, source)
    exporter = open_exporter(source, form, base=notes.base_model)
    evaluation = _evaluation(settings, source)

    def card(path: int) -> str:
        rounding = exporter.rounding
        return model_card(source, notes, form, path=path, rounding=rounding, evaluation=evaluation)

    if form.gguf is not None and settings.out.suffix == ".gguf":
        # The file alone, as llama.cpp's own tools write it.
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=settings.out.parent) as folder:
            exporter.write_path(path, Path(folder) / "path")
            (file,) = Path(folder).glob("path/*.gguf")
            file.replace(settings.out)
        print(f"path {path} is in {settings.out}")
        return
    is_new = exporter.write_path(path, settings.out, card)
    already = "" if is_new else ", which was there already"
    print(f"path {path} is in {settings.out}{already}; README.md there says how to load it")


def _export_all(settings: ExportSettings, source: StateSource, notes: CardNotes) -> None:
    from .export.whole_run import export_all

    export_all(
        source,
        settings.out,
        _form(settings, source),
        notes=notes,
        evaluation=_evaluation(settings, source),
        say=say,
    )


def _evaluation(settings: ExportSettings, source: StateSource) -> dict[str, Any] | None:
    from .export.model_card import load_evaluation

    return load_evaluation(settings.eval_json, source.plan) if settings.eval_json else None


def _form(settings: ExportSettings, source: StateSource) -> ExportForm:
    """Return the form that is asked for. Raises ConfigurationError if the run does not have it."""
    from .export.form import ExportForm
    from .export.path_gguf import GGUF_TYPES

    return ExportForm(
        dtype=_dtype(settings, source),
        gguf=GGUF_TYPES[settings.dtype or "float32"] if settings.format == "gguf" else None,
        adapters_alone=_are_adapters_alone(settings, source),
        exact_tokenizer=settings.tokenizer == "exact",
    )


def _are_adapters_alone(settings: ExportSettings, source: StateSource) -> bool:
    """Return whether adapters alone are written. Raises ConfigurationError."""
    if source.plan.model.adapters is not None:
        return settings.format != "llama"
    if settings.format == "peft":
        raise ConfigurationError(
            f"run '{source.plan.name}' has no adapters, which --format peft is for; give --format "
            f"llama"
        )
    return False


def _dtype(settings: ExportSettings, source: StateSource) -> torch.dtype:
    """Return how parameters are stored; of q8_0, what is nearest in size."""
    from dipaco.modules.frozen_base import FILE_FORMATS

    from .export.path_exporter import DTYPES

    adapters = source.plan.model.adapters
    if settings.dtype is None and adapters is not None and settings.format == "llama":
        return FILE_FORMATS[adapters.base_format]
    return DTYPES["float16" if settings.dtype == "q8_0" else settings.dtype or "float32"]


def _notes(settings: ExportSettings) -> CardNotes:
    from .export.model_card import CardNotes

    attribution = None
    if settings.attribution is not None:
        with storage_errors(settings.attribution.parent):
            content = settings.attribution.read_bytes()
        attribution = content.decode("utf-8", "replace").strip()
    return CardNotes(
        settings.licence,
        attribution,
        settings.repository,
        settings.base_model,
        settings.dataset,
    )


COMMAND = Command(
    "dipaco-export",
    ExportSettings,
    run,
    description="Write a path as a folder that transformers loads, or all paths with the "
    "router and a model card.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
