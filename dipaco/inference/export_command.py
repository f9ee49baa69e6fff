"""`dipaco-export`: write a path, or a whole run, so that other tools load it.

dipaco-export --state-dir my-run-simulated --path 3 --out path-3
dipaco-export --initial-peers ADDR --all --out my-model --dtype bfloat16
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError
from dipaco.base.running import say
from dipaco.base.settings import Option

from .export.form import DType, Format, check_dtype, form_for
from .options import SourceOptions

if TYPE_CHECKING:
    from .export.exporter import Exporter


@dataclass(frozen=True, kw_only=True)
class ExportSettings(SourceOptions):
    """The options of `dipaco-export`."""

    path: Annotated[int | None, Option("export this path", "P")] = None
    all: Annotated[bool, Option("export every path, and what finds the path of a text")] = False
    out: Annotated[Path, Option("folder to write; with --format gguf also a file, x.gguf", "DIR")]
    format: Annotated[
        Format | None,
        Option(
            "transformers is a folder for transformers and vLLM, gguf a file for llama.cpp, peft a "
            "folder for PEFT and vLLM. In a run with adapters, peft (the default) and gguf are the "
            "adapters alone, and transformers is the base with the adapters merged into it "
            "(default in other runs: transformers)"
        ),
    ] = None
    dtype: Annotated[
        DType | None,
        Option(
            "how parameters are stored; q8_0 is for gguf (default: float32, which is exact; for a "
            "merged path, the format of the base)"
        ),
    ] = None
    base_model: Annotated[
        str | None,
        Option(
            "what adapters call their base: a repository of the Hub or a folder (default: its name "
            "in the run)",
            "OWNER/NAME",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is not None) == self.all:
            raise ConfigurationError("give --path P for one path, or --all for all of them")
        check_dtype(self.format, self.dtype)


def run(settings: ExportSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from .export.exporter import Exporter
    from .export.tokenizer_files import lack_of_transformers
    from .export.whole_run import export_run

    with settings.open_source() as source:
        form = form_for(source.plan, settings.format, settings.dtype, settings.base_model)
        exporter = Exporter(source, form)
        lack = lack_of_transformers(exporter.tokenizer)
        if form.format == "transformers" and lack is not None:
            say(f"tokenizer.json is left out, it would give other tokens than the run's: {lack}")
        if settings.path is None:
            export_run(exporter, settings.out, say)
            print(f"{source.grid.path_count} paths and the router are in {settings.out}")
        elif form.format == "gguf" and settings.out.suffix == ".gguf":
            _write_file(exporter, settings.path, settings.out)
        else:
            is_new = exporter.write_path(settings.path, settings.out)
            already = "" if is_new else ", which was there already"
            print(
                f"path {settings.path} is in {settings.out}{already}; README.md there says how to "
                f"load it"
            )
        if form.format == "peft" and form.base is not None and "/" not in form.base:
            say(
                f"the adapters call their base '{form.base}', which is no repository of the "
                f"Hub; give --base-model OWNER/NAME, or a folder, so that PEFT, vLLM and route.py "
                f"find it"
            )
    say(f"to publish it: hf upload OWNER/NAME {shlex.quote(str(settings.out))}")
    return 0


def _write_file(exporter: Exporter, path: int, file: Path) -> None:
    """Write a path's GGUF alone, as llama.cpp's own tools do."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        exporter.write_path(path, Path(folder) / "path")
        (written,) = Path(folder).glob("path/*.gguf")
        written.replace(file)
    print(f"path {path} is in {file}")


COMMAND = Command(
    "dipaco-export",
    ExportSettings,
    run,
    description="Write a path so that transformers, vLLM, PEFT or llama.cpp loads it, or all paths "
    "with a router and a model card.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
