"""`dipaco-eval`: the perplexity of a swarm's model on any text, routed document by document.

dipaco-eval --initial-peers ADDR --data 'held-out/*.jsonl.gz' --label-field domain
dipaco-eval --state-dir my-run-simulated --data held-out.jsonl --baseline dense.safetensors
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.dht.logs import configure_logging
from dipaco.modules.errors import ConfigurationError, CorpusError, run_command

from .options import add_source_arguments, open_source_of, prepare_process

if TYPE_CHECKING:
    from dipaco.routing.corpus import CorpusConfig
    from rich.console import Console
    from rich.table import Table

    from .evaluate import Evaluated, EvaluationReport


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `dipaco-eval`; returns the exit code."""
    options = build_parser().parse_args(arguments)
    configure_logging(options.debug)
    return run_command(lambda: run(options), options.debug)


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="dipaco-eval",
        description="Route documents to paths and report the perplexity of each path on its own.",
    )
    add_source_arguments(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="documents: jsonl, parquet or txt files or patterns, also compressed",
    )
    parser.add_argument(
        "--text-field", default="text", metavar="F", help="field of the text (default: text)"
    )
    parser.add_argument(
        "--label-field", metavar="F", help="report by this field too, such as domain"
    )
    parser.add_argument(
        "--limit-documents", type=int, metavar="N", help="score only the first N documents"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE.safetensors",
        help="a dense model of the run's shape to score on the same tokens",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the command. Raises the errors of `dipaco.modules.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from dipaco.routing.corpus import iterate_documents
    from rich.console import Console

    from .evaluate import evaluate, load_baseline

    device = prepare_process(options)
    corpus = _corpus(options)
    notes = Console(stderr=True, highlight=False)
    quiet = options.json or not notes.is_terminal
    with open_source_of(options) as source:
        baseline = load_baseline(options.baseline, source.plan) if options.baseline else None
        report = evaluate(
            source,
            iterate_documents(corpus, "train"),
            device=device,
            baseline=baseline,
            progress=(lambda line: None) if quiet else notes.print,
        )
    if options.json:
        print(json.dumps(report.as_dict()))
    else:
        show(report, Console(highlight=False))
    return 0


def _corpus(options: argparse.Namespace) -> CorpusConfig:
    """Return the documents to score. Raises ConfigurationError and CorpusError."""
    from dipaco.modules.config import parse_config
    from dipaco.routing.corpus import CorpusConfig

    if options.limit_documents is not None and options.limit_documents < 1:
        raise ConfigurationError(f"--limit-documents {options.limit_documents} must be at least 1")
    for pattern in options.data:
        if not Path(pattern).is_file() and not glob.glob(pattern, recursive=True):
            raise CorpusError(f"--data '{pattern}' matches no file; check its name")
    values = {
        "train": options.data,
        "text_field": options.text_field,
        "label_field": options.label_field,
        "train_limit": options.limit_documents,
    }
    return parse_config(CorpusConfig, values, "--data")


def show(report: EvaluationReport, console: Console) -> None:
    """Print a report for people."""
    overall = report.overall
    console.print(_table("path", {str(p): part for p, part in report.paths().items()}, overall))
    if report.labels():
        console.print(_table("label", report.labels(), overall))
    if report.missing_paths:
        console.print(
            f"not scored: {report.unscored_documents} documents of paths "
            f"{', '.join(map(str, report.missing_paths))}, of which a module has no state"
        )
    if report.short_documents:
        console.print(f"too short to score: {report.short_documents} documents")


def _table(what: str, parts: dict[str, Evaluated], overall: Evaluated) -> Table:
    from rich.table import Table

    headings = [what, "perplexity", "base model", "documents", "tokens"]
    if overall.baseline is not None:
        headings.insert(3, "baseline")
    table = Table(*headings)
    for name, part in {**parts, "all": overall}.items():
        if name == "all":
            table.add_section()
        cells = [name, _perplexity(part.score.perplexity), _perplexity(part.base.perplexity)]
        if part.baseline is not None:
            cells.append(_perplexity(part.baseline.perplexity))
        table.add_row(*cells, str(part.documents), str(part.score.tokens))
    return table


def _perplexity(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
