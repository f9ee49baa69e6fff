"""Rerouting at test time: the paths of a trained cell, chosen anew every 128 to 16 tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dipaco.inference.document_windows import TokenDocument, collect_windows
from dipaco.inference.fit_rerouter import RerouterConfig, fit_rerouter
from dipaco.inference.reroute_report import reroute_report
from dipaco.inference.sources import DiskSource, SourceSettings
from dipaco.inference.token_losses import losses_of_paths
from paper_table_cells import REROUTE_WINDOWS, Size
from paper_table_scores import HeldOut

CPU = torch.device("cpu")


def reroute(
    trained: Path, held_out: HeldOut, work: Path, size: Size, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fit a rerouter to training documents and score the held-out ones; return the figures.

    Scores of the paths are kept in `work`, so a killed cell goes on. `perplexity` is that of the
    best window.
    """
    # The newest states, so that what is not rerouted is the cell that the paths are of.
    with DiskSource(trained, SourceSettings(current=True)) as source:
        plan = source.plan
        router = source.document_router(CPU)
        fitted = collect_windows(
            router,
            source.training_documents(size.reroute_documents, plan.seed),
            plan,
            work / "training",
        )
        scored = collect_windows(
            router,
            (
                TokenDocument(tokens, label)
                for tokens, label in zip(held_out.documents, held_out.labels, strict=True)
            ),
            plan,
            work / "held-out",
        )
        kept = {"folder": work / "scores", "device": CPU, "progress": say}
        training_losses = losses_of_paths(source, fitted, **kept)
        held_out_losses = losses_of_paths(source, scored, **kept)
        base = source.base_model(CPU)
    config = RerouterConfig(windows=tuple(reversed(REROUTE_WINDOWS)), steps=size.reroute_steps)
    rerouter, fit = fit_rerouter(base, training_losses, config, device=CPU, progress=say)
    report = reroute_report(held_out_losses, rerouter, REROUTE_WINDOWS).as_dict()
    return {
        "perplexity": min(window["perplexity"] for window in report["windows"]),
        "tokens_scored": scored.tokens,
        "documents_scored": len(scored),
        "rerouting": report,
        "rerouter_fit": fit.as_dict(),
    }
