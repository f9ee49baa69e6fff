"""`dipaco-export`: write a path, or a whole run, so that other tools load it.

dipaco-export --state-dir my-run-simulated --path 3 --format llama --out path-3
dipaco-export --initial-peers ADDR --all --out my-model --dtype bfloat16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.dht.logs import run_logged
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.files import storage_errors

from .options import (
    add_rerouter_argument,
    add_source_arguments,
    open_source_of,
    prepare_process,
    rerouter_of,
)

if TYPE_CHECKING:
    from .export_card import CardNotes
    from .sources import StateSource


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `dipaco-export`; returns the exit code."""
    return run_logged(run, build_parser().parse_args(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="dipaco-export",
        description="Write a path as a folder that transformers loads, or all paths with the "
        "router and a model card.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--path", type=int, metavar="P", help="export this path")
    what.add_argument(
        "--all", action="store_true", help="export every path, the router and a model card"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--format", choices=("llama",), default="llama", help="of a path (default llama)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="how parameters are stored (default float32, which is exact)",
    )
    parser.add_argument(
        "--tokenizer",
        choices=("exact", "sentencepiece"),
        default="exact",
        help="sentencepiece writes tokenizer.model alone, for a tokenizer that cannot be written "
        "with exactly its ids for transformers (default exact)",
    )
    parser.add_argument(
        "--eval-json",
        type=Path,
        metavar="FILE",
        help="what 'dipaco-eval --json' printed, for the figures of the model card",
    )
    parser.add_argument("--licence", metavar="NAME", help="licence of the model, for the card")
    parser.add_argument(
        "--attribution",
        type=Path,
        metavar="FILE",
        help="Markdown on origin and licences of the data, for the card",
    )
    add_rerouter_argument(parser)
    add_source_arguments(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the command. Raises the errors of `dipaco.modules.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from .export import DTYPES, Exporter
    from .export_card import path_readme

    prepare_process(options)
    if options.path is not None and options.eval_json is not None:
        raise ConfigurationError("--eval-json is for the model card of --all; leave it out")
    notes = _notes(options)
    with open_source_of(options) as source:
        if options.all:
            _export_all(options, source, notes)
            print(f"{source.grid.path_count} paths and the router: {options.out}")
            return 0
        exporter = Exporter(
            source, DTYPES[options.dtype], exact_tokenizer=options.tokenizer == "exact"
        )
        is_new = exporter.write_path(
            options.path, options.out, lambda path: path_readme(source, path, notes)
        )
        best = source.best_round(options.path)
        states = "newest states" if best is None else f"best states, of round {best}"
        already = "" if is_new else ", which was there already"
        print(f"path {options.path} ({states}): {options.out}{already}")
    return 0


def _export_all(options: argparse.Namespace, source: StateSource, notes: CardNotes) -> None:
    from .export import DTYPES
    from .export_all import export_all
    from .export_card import load_evaluation

    evaluation = load_evaluation(options.eval_json, source.plan) if options.eval_json else None
    export_all(
        source,
        options.out,
        DTYPES[options.dtype],
        notes=notes,
        evaluation=evaluation,
        rerouter=_rerouter(options, source),
        share_modules=options.current,
        exact_tokenizer=options.tokenizer == "exact",
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _rerouter(options: argparse.Namespace, source: StateSource) -> bytes | None:
    """Return the rerouter's file: the one that is named, or the one beside the states, if any."""
    from .rerouter import REROUTER_FILE, rerouter_bytes

    beside = options.state_dir / REROUTER_FILE if options.state_dir else None
    if options.rerouter is None and (beside is None or not beside.is_file()):
        return None
    return rerouter_bytes(rerouter_of(options, source), source.plan)


def _notes(options: argparse.Namespace) -> CardNotes:
    from .export_card import CardNotes

    attribution = None
    if options.attribution is not None:
        with storage_errors(options.attribution.parent):
            content = options.attribution.read_bytes()
        attribution = content.decode("utf-8", "replace").strip()
    return CardNotes(options.licence, attribution)


if __name__ == "__main__":
    sys.exit(main())
