"""`dipaco-eval`: the perplexity of a swarm's model on any text, routed document by document.

dipaco-eval --initial-peers ADDR --data 'held-out/*.jsonl.gz' --label-field domain
dipaco-eval --state-dir my-run-simulated --data held-out.jsonl --baseline dense.safetensors
dipaco-eval --state-dir my-run-simulated --data held-out.jsonl --reroute 16,64,128 --mix 2
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dipaco.base.command_line import Command
from dipaco.base.settings import Option

from .options import CorpusSettings, RerouterSettings, check_paths, parse_windows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .evaluate import Evaluated, EvaluationReport
    from .reroute_report import RerouteReport


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(CorpusSettings, RerouterSettings):
    """What `dipaco-eval` can be told."""

    group = "what is scored"

    baseline: Annotated[
        Path | None,
        Option("a dense model of the run's shape to score on the same tokens", "FILE.safetensors"),
    ] = None
    base: Annotated[
        bool, Option("do not score the model that the run began with", flag="--no-base")
    ] = True
    reroute: Annotated[
        str | None,
        Option(
            "also choose the path again every W tokens; every path scores every document",
            "W[,W...]",
        ),
    ] = None
    mix: Annotated[
        int,
        Option(
            "also its N best paths mixed, and the one of them to which its first tokens cost least",
            "N",
            least=1,
        ),
    ] = 1
    json: Annotated[bool, Option("print one JSON object")] = False


def run(settings: EvaluationSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from rich.console import Console

    from dipaco.base.progress import seldom
    from dipaco.routing.corpus import iterate_documents

    from .evaluate import Rerouting, evaluate, load_baseline

    device = settings.prepare_process()
    windows = parse_windows(settings.reroute, "--reroute")
    corpus = settings.corpus()
    notes = Console(stderr=True, highlight=False)
    say = notes.print if notes.is_terminal else seldom(notes.print)
    with settings.open_source() as source:
        settings.check_labels(source.plan)
        check_paths("--mix", settings.mix, source)
        baseline = load_baseline(settings.baseline, source.plan) if settings.baseline else None
        rerouting = Rerouting(settings.read_rerouter(source.plan), windows) if windows else None
        report = evaluate(
            source,
            iterate_documents(corpus, "train"),
            device=device,
            base=settings.base,
            baseline=baseline,
            rerouting=rerouting,
            mix=settings.mix,
            folder=settings.scores_folder(),
            progress=(lambda line: None) if settings.json else say,
        )
    if settings.json:
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
    if report.missing_paths:
        console.print(
            f"not scored: {report.unscored_documents} documents of paths "
            f"{', '.join(map(str, report.missing_paths))}, which lack the state of a module"
        )
    if report.short_documents:
        console.print(f"too short to score: {report.short_documents} documents")


def _table(what: str, parts: dict[str, Evaluated], overall: Evaluated) -> Table:
    from rich.table import Column, Table

    headings = [what, "perplexity", "documents", "tokens"]
    if overall.baseline is not None:
        headings.insert(2, "baseline")
    if overall.base is not None:
        headings.insert(2, "base model")
    if overall.mixed is not None:
        headings[2:2] = ["chosen", "mixed"]
    table = Table(*(Column(heading, overflow="fold") for heading in headings))
    table.columns[0].no_wrap = True
    for name, part in {**parts, "all": overall}.items():
        if name == "all":
            table.add_section()
        models = (part.routed, part.chosen, part.mixed, part.base, part.baseline)
        cells = [_perplexity(losses.perplexity) for losses in models if losses is not None]
        table.add_row(name, *cells, str(part.documents), str(part.routed.tokens))
    return table


def _reroute_table(report: RerouteReport) -> Table:
    from rich.table import Table

    table = Table("path chosen", "perplexity", "best path in hindsight", "switches", "decisions")
    table.add_row(
        "once a document",
        _perplexity(report.routed.perplexity),
        _perplexity(report.best_per_document.perplexity),
    )
    for window in report.windows:
        table.add_row(
            f"every {window.window} tokens",
            _perplexity(window.rerouted.perplexity),
            _perplexity(window.best.perplexity),
            f"{100 * window.switches:.1f} %",
            str(window.decisions),
        )
    table.add_section()
    for path, losses in report.single_paths.items():
        table.add_row(f"always {path}", _perplexity(losses.perplexity))
    return table


def _perplexity(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


COMMAND = Command(
    "dipaco-eval",
    EvaluationSettings,
    run,
    description="Route documents to paths and report the perplexity of each path on its own.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
