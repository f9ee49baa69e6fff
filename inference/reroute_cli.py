"""`dipaco-reroute fit`: a rerouter for `dipaco-eval --reroute` and `dipaco-generate --reroute`.

dipaco-reroute fit --state-dir my-run-simulated
dipaco-reroute fit --initial-peers ADDR --data 'held-out/*.jsonl.gz' --out rerouter.safetensors
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dipaco.base.command_line import Command, Program
from dipaco.base.errors import ConfigurationError
from dipaco.base.settings import Option

from .options import CorpusSettings, InferenceSettings, parse_windows

if TYPE_CHECKING:
    from rich.console import Console

    from dipaco.routing.document_routing import DocumentRouter

    from .document_windows import TokenDocument
    from .fit_rerouter import FitReport, RerouterConfig
    from .sources import StateSource


@dataclass(frozen=True, kw_only=True)
class FitSettings(CorpusSettings, InferenceSettings):
    """What `dipaco-reroute fit` can be told."""

    group = "the fit"

    data: Annotated[
        tuple[str, ...],
        Option(
            "documents: jsonl, parquet or txt files or patterns, also compressed (default: "
            "training documents of the run's shards)",
            "FILE",
        ),
    ] = ()
    limit_documents: Annotated[
        int,
        Option("documents that every path scores, at most", "N", flag="--documents", least=1),
    ] = 2000
    steps: Annotated[int, Option("training steps", "N", least=1)] = 1000
    windows: Annotated[str, Option("look-ahead windows in tokens", "W[,W...]")] = (
        "16,32,64,128,256,512,1024"
    )
    blocks: Annotated[
        int | None, Option("use the first K blocks of the base (default: all)", "K", least=1)
    ] = None
    learning_rate: Annotated[float, Option("peak", "R", least=0)] = 1e-3
    batch_sequences: Annotated[int, Option("batch", "N", least=1)] = 16
    seed: Annotated[int, Option("documents and batches", "N", least=0, most=2**32 - 1)] = 0
    out: Annotated[
        Path | None,
        Option("the file to write (default: rerouter.safetensors in --state-dir)", "FILE"),
    ] = None
    json: Annotated[bool, Option("print one JSON object")] = False


def run(settings: FitSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from rich.console import Console

    from dipaco.base.files import atomic_write

    from .document_windows import collect_windows
    from .fit_rerouter import fit_rerouter
    from .rerouter import REROUTER_FILE, rerouter_bytes
    from .token_losses import losses_of_paths

    device = settings.prepare_process()
    config = _config(settings)
    out = settings.out or (settings.state_folder / REROUTER_FILE if settings.state_folder else None)
    if out is None:
        raise ConfigurationError("--initial-peers needs --out FILE: where to write the rerouter")
    notes = Console(stderr=True, highlight=False)
    progress = (lambda line: None) if settings.json else notes.print
    with (
        tempfile.TemporaryDirectory(prefix="dipaco-reroute-") as temporary,
        settings.open_source() as source,
    ):
        progress("routing the documents")
        router = source.document_router(device)
        documents = collect_windows(
            router, _documents(settings, source, router), source.plan, Path(temporary)
        )
        del router
        losses = losses_of_paths(
            source,
            documents,
            folder=settings.scores_folder() or Path(temporary),
            device=device,
            progress=progress,
        )
        base = source.base_model(device)
        rerouter, report = fit_rerouter(base, losses, config, device=device, progress=progress)
        content = rerouter_bytes(rerouter, source.plan)
        run_id = source.plan.run_id
    atomic_write(out, content)
    sha256 = hashlib.sha256(content).hexdigest()
    if settings.json:
        print(json.dumps({"run": run_id, "file": str(out), "sha256": sha256, **report.as_dict()}))
    else:
        show(report, Console(highlight=False))
        print(f"{out}: {sha256}")
    return 0


def _config(settings: FitSettings) -> RerouterConfig:
    from dipaco.modules.config import parse_config

    from .fit_rerouter import RerouterConfig

    names = ("blocks", "steps", "learning_rate", "batch_sequences", "seed")
    values = {name: getattr(settings, name) for name in names}
    values["windows"] = parse_windows(settings.windows, "--windows")
    return parse_config(RerouterConfig, values, "dipaco-reroute")


def _documents(
    settings: FitSettings, source: StateSource, router: DocumentRouter
) -> Iterable[TokenDocument]:
    """Return the documents of --data, or a sample of the run's shards."""
    from dipaco.routing.corpus import iterate_documents

    from .document_windows import tokenised

    if settings.data:
        settings.check_labels(source.plan)
        return tokenised(router, iterate_documents(settings.corpus(), "train"))
    return source.training_documents(settings.limit_documents, settings.seed)


def show(report: FitReport, console: Console) -> None:
    """Print how the fit went for people."""
    import math

    from rich.table import Table

    def perplexity(loss: float) -> str:
        return f"{math.exp(loss):.2f}" if loss < 700 else "-"

    table = Table("path chosen", "perplexity", "look-ahead", "margin")
    table.add_row("once a document", perplexity(report.routed_loss))
    for policy in report.policies:
        table.add_row(
            f"every {policy.window} tokens",
            perplexity(report.window_losses[policy.window]),
            str(policy.head),
            "never leaves" if math.isinf(policy.stay_bonus) else f"{policy.stay_bonus:.3f}",
        )
    console.print(table)
    console.print(
        f"on {report.held_out_documents} held-out of {report.documents} documents, which chose "
        f"look-ahead and margin; the parameters of step {report.kept_step} of {report.steps}"
    )


FIT = Command(
    "fit",
    FitSettings,
    run,
    summary="fit a rerouter to a trained run",
    description="Score documents with every path and fit a rerouter to the losses.",
)
COMMAND = Program(
    "dipaco-reroute",
    "Choose paths again in the middle of a document: fit what chooses.",
    (FIT,),
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
