"""`dipaco-eval`: the perplexity of a swarm's model on any text, routed document by document.

dipaco-eval --initial-peers ADDR --data 'held-out/*.jsonl.gz' --label-field domain
dipaco-eval --state-dir my-run-simulated --data held-out.jsonl --baseline dense.safetensors
dipaco-eval --state-dir my-run-simulated --data held-out.jsonl --reroute 16,64,128
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.dht.logs import run_logged

from .options import (
    add_corpus_arguments,
    add_rerouter_argument,
    add_source_arguments,
    check_labels,
    corpus_of,
    open_source_of,
    parse_windows,
    prepare_process,
    rerouter_of,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .evaluate import Evaluated, EvaluationReport
    from .reroute_report import RerouteReport


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `dipaco-eval`; returns the exit code."""
    return run_logged(run, build_parser().parse_args(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="dipaco-eval",
        description="Route documents to paths and report the perplexity of each path on its own.",
    )
    add_source_arguments(parser)
    add_corpus_arguments(parser, required=True)
    parser.add_argument(
        "--limit-documents", type=int, metavar="N", help="score only the first N documents"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE.safetensors",
        help="a dense model of the run's shape to score on the same tokens",
    )
    parser.add_argument(
        "--no-base", action="store_true", help="do not score the model that the run began with"
    )
    parser.add_argument(
        "--reroute",
        metavar="W[,W...]",
        help="also choose the path again every W tokens; every path scores every document",
    )
    add_rerouter_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the command. Raises the errors of `dipaco.modules.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from dipaco.routing.corpus import iterate_documents
    from rich.console import Console

    from .evaluate import Rerouting, evaluate, load_baseline

    device = prepare_process(options)
    windows = parse_windows(options.reroute, "--reroute")
    corpus = corpus_of(options)
    notes = Console(stderr=True, highlight=False)
    quiet = options.json or not notes.is_terminal
    with open_source_of(options) as source:
        check_labels(options, source.plan)
        baseline = load_baseline(options.baseline, source.plan) if options.baseline else None
        rerouting = Rerouting(rerouter_of(options, source), windows) if windows else None
        report = evaluate(
            source,
            iterate_documents(corpus, "train"),
            device=device,
            base=not options.no_base,
            baseline=baseline,
            rerouting=rerouting,
            folder=options.cache_dir / "scores" if options.cache_dir else None,
            progress=(lambda line: None) if quiet else notes.print,
        )
    if options.json:
        print(json.dumps(report.as_dict()))
    else:
        show(report, Console(highlight=False))
    return 0


def show(report: EvaluationReport, console: Console) -> None:
    """Print a report for people."""
    overall = report.overall
    console.print(_table("path", {str(p): part for p, part in report.paths().items()}, overall))
    if report.labels():
        console.print(_table("label", report.labels(), overall))
    if report.reroute is not None:
        console.print(_reroute_table(report.reroute))
    best, scored = len(report.paths_with_best), len(report.paths())
    console.print(
        f"states: the best so far by held-out loss of {best} paths, the newest of {scored - best}"
    )
    if report.missing_paths:
        console.print(
            f"not scored: {report.unscored_documents} documents of paths "
            f"{', '.join(map(str, report.missing_paths))}, which lack the state of a module"
        )
    if report.short_documents:
        console.print(f"too short to score: {report.short_documents} documents")


def _table(what: str, parts: dict[str, Evaluated], overall: Evaluated) -> Table:
    from rich.table import Table

    headings = [what, "perplexity", "documents", "tokens"]
    if overall.baseline is not None:
        headings.insert(2, "baseline")
    if overall.base is not None:
        headings.insert(2, "base model")
    table = Table(*headings)
    for name, part in {**parts, "all": overall}.items():
        if name == "all":
            table.add_section()
        scores = (part.score, part.base, part.baseline)
        cells = [_perplexity(score.perplexity) for score in scores if score is not None]
        table.add_row(name, *cells, str(part.documents), str(part.score.tokens))
    return table


def _reroute_table(report: RerouteReport) -> Table:
    from rich.table import Table

    table = Table("path chosen", "perplexity", "best path by hindsight", "switches", "decisions")
    table.add_row(
        "once a document",
        _perplexity(report.routed.perplexity),
        _perplexity(report.best_per_document.perplexity),
    )
    for window in report.windows:
        table.add_row(
            f"every {window.window} tokens",
            _perplexity(window.score.perplexity),
            _perplexity(window.best.perplexity),
            f"{100 * window.switches:.1f} %",
            str(window.decisions),
        )
    table.add_section()
    for path, score in report.single_paths.items():
        table.add_row(f"always {path}", _perplexity(score.perplexity))
    return table


def _perplexity(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
