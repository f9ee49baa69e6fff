"""`dipaco-eval`: the perplexity of a swarm's model on any text, routed document by document.

dipaco-eval --initial-peers ADDR --data 'held-out/*.jsonl.gz' --label-field domain
dipaco-eval --state-dir my-run-simulated --data held-out.jsonl --baseline dense.safetensors
dipaco-eval --state-dir my-run-simulated --data held-out.jsonl --mix 2
dipaco-eval --state-dir my-run-simulated --data other.jsonl --fit-rerouter rerouter.safetensors
dipaco-eval --state-dir my-run-simulated --data held-out.jsonl --reroute 32 \\
    --rerouter rerouter.safetensors
dipaco-eval --initial-peers ADDR --data my-texts.jsonl --held-out
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError, printable
from dipaco.base.settings import Option

from .options import CorpusSettings, InferenceSettings, check_paths

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from dipaco.routing.documents.corpus import Document

    from .evaluate import Evaluated, EvaluationReport
    from .sources import StateSource


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(CorpusSettings, InferenceSettings):
    """The options of `dipaco-eval`."""

    group = "what is scored"

    baseline: Annotated[
        Path | None,
        Option("a dense model of the run's shape to score on the same tokens", "FILE.safetensors"),
    ] = None
    base: Annotated[
        bool, Option("do not score the model that the run began with", flag="--no-base")
    ] = True
    reroute: Annotated[
        int | None,
        Option(
            "also choose the path anew every W tokens, by --rerouter FILE; every path scores "
            "every document",
            "W",
            least=1,
        ),
    ] = None
    rerouter: Annotated[Path | None, Option("what --fit-rerouter wrote", "FILE")] = None
    fit_rerouter: Annotated[
        Path | None,
        Option(
            "score nothing: fit a rerouter to --data, texts that no path was trained on, and "
            "write it there",
            "FILE",
        ),
    ] = None
    mix: Annotated[
        int,
        Option(
            "also score the N best paths of a document mixed, and the one of them with the least "
            "loss on the first tokens",
            "N",
            least=1,
        ),
    ] = 1
    held_out: Annotated[
        bool,
        Option("of --data, texts of dipaco-peer --texts, score only the tenth that it holds out"),
    ] = False
    json: Annotated[bool, Option("print one JSON object")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.reroute is None) != (self.rerouter is None):
            raise ConfigurationError(
                "give --reroute W together with --rerouter FILE; "
                "'dipaco-eval --data TEXTS --fit-rerouter FILE' makes one"
            )
        if self.fit_rerouter is not None and self.reroute is not None:
            raise ConfigurationError("give --fit-rerouter without --reroute: it scores nothing")

    def documents(self) -> Iterator[Document]:
        """Yield the documents. Raises ConfigurationError and CorpusError."""
        from dipaco.routing.documents.corpus import is_held_out, iterate_documents
        from dipaco.routing.own_texts import HELD_OUT_FRACTION

        found = iterate_documents(self.corpus(), "train")
        if not self.held_out:
            return found
        return (document for document in found if is_held_out(document, HELD_OUT_FRACTION))


def run(settings: EvaluationSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from rich.console import Console

    from dipaco.base.progress import seldom

    from .evaluate import Rerouting, evaluate, load_baseline
    from .rerouter import read_rerouter

    device = settings.prepare_process()
    documents = settings.documents()
    notes = Console(stderr=True, highlight=False)
    say = notes.print if notes.is_terminal else seldom(notes.print)
    progress = (lambda line: None) if settings.json else say
    with settings.open_source() as source:
        settings.check_labels(source.plan)
        check_paths("--mix", settings.mix, source)
        if settings.fit_rerouter is not None:
            return _fit(settings, source, settings.fit_rerouter, device, progress)
        baseline = None
        if settings.baseline:
            baseline = load_baseline(settings.baseline, source.path_model(device))
        rerouting = None
        if settings.reroute is not None and settings.rerouter is not None:
            rerouter = read_rerouter(settings.rerouter, source.plan).to(device)
            rerouting = Rerouting(rerouter, settings.reroute)
        report = evaluate(
            source,
            documents,
            device=device,
            base=settings.base,
            baseline=baseline,
            rerouting=rerouting,
            mix=settings.mix,
            progress=progress,
        )
    if settings.json:
        print(json.dumps(report.as_dict()))
    else:
        show(report, Console(highlight=False))
    return 0


def _fit(
    settings: EvaluationSettings,
    source: StateSource,
    file: Path,
    device: torch.device,
    progress: Callable[[str], None],
) -> int:
    """Fit a rerouter to the documents and write it."""
    from dipaco.base.files import atomic_write

    from .fit_rerouter import fit_to_documents
    from .rerouter import rerouter_bytes

    rerouter, report = fit_to_documents(
        source,
        settings.documents(),
        device=device,
        progress=progress,
    )
    atomic_write(file, rerouter_bytes(rerouter, source.plan))
    if settings.json:
        print(json.dumps({"run": source.plan.run_id, "file": str(file), **asdict(report)}))
    else:
        print(
            f"{file}: fitted to {_documents(report.documents)}, with the parameters of step "
            f"{report.kept_step} of {report.steps}"
        )
    return 0


def show(report: EvaluationReport, console: Console) -> None:
    """Print a report for people."""
    overall = report.overall
    console.print(_table("path", {str(p): part for p, part in report.paths().items()}, overall))
    if report.labels():
        console.print(_table("label", report.labels(), overall))
    if report.missing_paths:
        console.print(
            f"not scored: {_documents(report.unscored_documents)} of paths "
            f"{', '.join(map(str, report.missing_paths))}, which lack the state of a module"
        )
    if report.short_documents:
        console.print(f"too short to score: {_documents(report.short_documents)}")


def _documents(count: int) -> str:
    return f"{count} document{'s' * (count != 1)}"


# What a column of a scorer is called.
_HEADINGS = {"routed": "perplexity", "base": "base model"}


def _table(what: str, parts: dict[str, Evaluated], overall: Evaluated) -> Table:
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    from .evaluate import SCORERS

    scorers = [name for name in SCORERS if name in overall.losses]
    headings = [_HEADINGS.get(name, name) for name in scorers]
    # All eight columns fit into the 80 characters of a terminal.
    columns = (Column(text, overflow="fold") for text in (what, *headings, "documents", "tokens"))
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=0)
    table.columns[0].no_wrap = True
    for name, part in [*parts.items(), ("all", overall)]:
        if part is overall:
            table.add_section()
        cells = [_perplexity(part.losses[scorer].perplexity) for scorer in scorers]
        tokens = part.losses["routed"].tokens
        table.add_row(Text(printable(name)), *cells, str(part.documents), str(tokens))
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
