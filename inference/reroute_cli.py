"""`dipaco-reroute fit`: a rerouter for `dipaco-eval --reroute` and `dipaco-generate --reroute`.

dipaco-reroute fit --state-dir my-run-simulated
dipaco-reroute fit --initial-peers ADDR --data 'held-out/*.jsonl.gz' --out rerouter.safetensors
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.dht.logs import run_logged
from dipaco.modules.errors import ConfigurationError

from .options import (
    add_corpus_arguments,
    add_source_arguments,
    check_labels,
    corpus_of,
    open_source_of,
    parse_windows,
    prepare_process,
)

if TYPE_CHECKING:
    from dipaco.routing.document_routing import DocumentRouter
    from rich.console import Console

    from .document_windows import TokenDocument
    from .fit_rerouter import FitReport, RerouterConfig
    from .sources import StateSource

_LABELS = ("cost", "hard", "soft")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `dipaco-reroute`; returns the exit code."""
    return run_logged(run, build_parser().parse_args(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="dipaco-reroute",
        description="Choose paths again in the middle of a document: fit what chooses.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fit = commands.add_parser(
        "fit",
        help="fit a rerouter to a trained run",
        description="Score documents with every path and fit a rerouter to the scores.",
    )
    add_source_arguments(fit)
    add_corpus_arguments(
        fit, required=False, otherwise=" (default: training documents of the run's shards)"
    )
    fit.add_argument(
        "--documents",
        type=int,
        default=2000,
        metavar="N",
        dest="limit_documents",
        help="documents that every path scores, at most (default 2000)",
    )
    fit.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="training steps (default 1000)"
    )
    fit.add_argument(
        "--windows",
        default="16,32,64,128,256,512,1024",
        metavar="W[,W...]",
        help="look-ahead windows in tokens (default 16,32,64,128,256,512,1024)",
    )
    fit.add_argument(
        "--blocks", type=int, metavar="K", help="use the first K blocks of the base (default: all)"
    )
    fit.add_argument(
        "--labels",
        choices=_LABELS,
        default="cost",
        help="what is learnt: the expected cost of a choice, the best path, or the posterior of "
        "the paths (default cost)",
    )
    fit.add_argument(
        "--learning-rate", type=float, default=1e-3, metavar="R", help="peak (default 0.001)"
    )
    fit.add_argument(
        "--batch-sequences", type=int, default=16, metavar="N", help="batch (default 16)"
    )
    fit.add_argument(
        "--seed", type=int, default=0, metavar="N", help="documents and batches (default 0)"
    )
    fit.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the file to write (default: rerouter.safetensors in --state-dir)",
    )
    fit.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the command. Raises the errors of `dipaco.modules.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from dipaco.modules.files import atomic_write
    from rich.console import Console

    from .document_windows import collect_windows
    from .fit_rerouter import fit_rerouter
    from .rerouter import REROUTER_FILE, rerouter_bytes
    from .token_scores import token_scores

    device = prepare_process(options)
    config = _config(options)
    if options.limit_documents < 1:
        raise ConfigurationError(f"--documents {options.limit_documents} must be at least 1")
    out = options.out or (options.state_dir / REROUTER_FILE if options.state_dir else None)
    if out is None:
        raise ConfigurationError("--initial-peers needs --out FILE: where to write the rerouter")
    notes = Console(stderr=True, highlight=False)
    progress = (lambda line: None) if options.json else notes.print
    with (
        tempfile.TemporaryDirectory(prefix="dipaco-reroute-") as temporary,
        open_source_of(options) as source,
    ):
        progress("routing the documents")
        router = source.document_router(device)
        documents = collect_windows(
            router, _documents(options, source, router), source.plan, Path(temporary)
        )
        del router
        scores = token_scores(
            source,
            documents,
            folder=options.cache_dir / "scores" if options.cache_dir else Path(temporary),
            device=device,
            progress=progress,
        )
        base = source.base_model(device)
        rerouter, report = fit_rerouter(base, scores, config, device=device, progress=progress)
        content = rerouter_bytes(rerouter, source.plan)
        run_id = source.plan.run_id
    atomic_write(out, content)
    sha256 = hashlib.sha256(content).hexdigest()
    if options.json:
        print(json.dumps({"run": run_id, "file": str(out), "sha256": sha256, **report.as_dict()}))
    else:
        show(report, Console(highlight=False))
        print(f"{out}: {sha256}")
    return 0


def _config(options: argparse.Namespace) -> RerouterConfig:
    from dipaco.modules.config import parse_config

    from .fit_rerouter import RerouterConfig

    values = {
        "windows": parse_windows(options.windows, "--windows"),
        "blocks": options.blocks,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "batch_sequences": options.batch_sequences,
        "labels": options.labels,
        "seed": options.seed,
    }
    return parse_config(RerouterConfig, values, "dipaco-reroute")


def _documents(
    options: argparse.Namespace, source: StateSource, router: DocumentRouter
) -> Iterable[TokenDocument]:
    """Return the documents of --data, or a sample of the run's shards."""
    from dipaco.routing.corpus import iterate_documents

    from .document_windows import tokenised

    if options.data:
        check_labels(options, source.plan)
        return tokenised(router, iterate_documents(corpus_of(options), "train"))
    return source.training_documents(options.limit_documents, options.seed)


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


if __name__ == "__main__":
    sys.exit(main())
