"""Scoring the cells, rerouted ones too: all on the same tokens, the first of every document left
out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from dipaco.base.errors import IntegrityError
from dipaco.inference.document_windows import TokenDocument, collect_windows
from dipaco.inference.fit_rerouter import RerouterConfig, fit_rerouter
from dipaco.inference.reroute_report import reroute_report
from dipaco.inference.sources import DiskSource
from dipaco.inference.token_losses import losses_of_paths
from dipaco.modules.compose import load_path
from dipaco.modules.evaluate import row_losses
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_corpus import TokenCorpus
from dipaco.routing.token_files import even_sample, scoring_windows, token_dtype

from parts.paper_table_cells import REROUTE_WINDOWS, Size
from parts.paper_table_training import DENSE_FILE

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HeldOut:
    """The held-out documents: tokens, labels and the windows that are scored."""

    documents: tuple[np.ndarray, ...]
    labels: tuple[str, ...]
    windows: tuple[np.ndarray, ...]

    @staticmethod
    def open(prepared: Path, size: Size) -> HeldOut:
        """Take them from the tokens that a preparation has kept."""
        corpus = TokenCorpus(prepared / "work" / "tokens" / "validation", size.vocabulary_size)
        chosen = even_sample(np.arange(len(corpus)), size.validation_documents or None)
        dtype = token_dtype(size.vocabulary_size)
        documents, labels, windows = [], [], []
        for index in chosen.tolist():
            document = np.array(corpus.document(index))
            rows = scoring_windows(document, size.sequence_length, size.prefix_tokens)
            if len(rows):
                documents.append(document)
                labels.append(corpus.label_name(index) or "")
                windows.append(rows.astype(dtype))
        return HeldOut(tuple(documents), tuple(labels), tuple(windows))


@dataclass(frozen=True)
class DocumentLosses:
    """Summed negative log-likelihood (nats) and scored tokens of every held-out document."""

    nll: np.ndarray
    tokens: np.ndarray
    paths: np.ndarray

    def save(self, file: Path) -> None:
        """Keep the losses of each document, for comparisons of the same documents."""
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, nll=self.nll, tokens=self.tokens, paths=self.paths)

    def as_dict(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return the figures of a cell."""
        by_label = {
            label: _perplexity(self.nll[chosen], self.tokens[chosen])
            for label in sorted(set(labels))
            if (chosen := np.array([own == label for own in labels])).any()
        }
        by_path = {
            str(path): {
                "perplexity": _perplexity(self.nll[chosen], self.tokens[chosen]),
                "documents": int(chosen.sum()),
                "tokens": int(self.tokens[chosen].sum()),
            }
            for path in np.unique(self.paths).tolist()
            if (chosen := self.paths == path).any()
        }
        return {
            "perplexity": _perplexity(self.nll, self.tokens),
            "tokens_scored": int(self.tokens.sum()),
            "documents_scored": len(self.nll),
            "by_label": by_label,
            "by_path": by_path,
        }


def _perplexity(nll: np.ndarray, tokens: np.ndarray) -> float:
    return math.exp(float(nll.sum()) / max(1, int(tokens.sum())))


def score_model(model: PathModel, held_out: HeldOut, prefix_tokens: int) -> DocumentLosses:
    """Score one model on all documents."""
    chosen = np.arange(len(held_out.documents))
    nll, tokens = _score(model, held_out, chosen, prefix_tokens)
    return DocumentLosses(nll, tokens, np.zeros(len(chosen), dtype=np.int64))


def score_dense(run: RunFolder, held_out: HeldOut) -> DocumentLosses:
    """Score the dense model of a run folder."""
    plan = run.plan()
    model = PathModel(plan.model)
    model.load_state_dict(safetensors.torch.load_file(run.path / DENSE_FILE))
    return score_model(model.eval(), held_out, plan.routing.prefix_tokens)


def score_routed(run: RunFolder, held_out: HeldOut) -> DocumentLosses:
    """Score every document with the path that it is routed to by its first tokens."""
    plan = run.plan()
    grid = run.grid(plan)
    paths = run.document_router(plan).route_tokens(held_out.documents)
    states = load_states(run)
    model = PathModel(plan.model).eval()
    nll = np.zeros(len(paths))
    tokens = np.zeros(len(paths), dtype=np.int64)
    for path in np.unique(paths).tolist():
        chosen = np.flatnonzero(paths == path)
        load_path(model, grid, path, states)
        nll[chosen], tokens[chosen] = _score(model, held_out, chosen, plan.routing.prefix_tokens)
    return DocumentLosses(nll, tokens, paths)


def load_states(run: RunFolder) -> Mapping[str, ModuleState]:
    """Return the trained states of all modules. Raises IntegrityError if one is missing."""
    grid = run.grid(run.plan())
    states = {m: run.states.load_latest(m, grid.layout(m)) for m in grid.modules()}
    missing = [module for module, state in states.items() if state is None]
    if missing:
        raise IntegrityError(f"{run.path / 'states'} lacks {', '.join(missing)}")
    return {module: state for module, state in states.items() if state is not None}


def _score(
    model: PathModel, held_out: HeldOut, chosen: np.ndarray, prefix_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (nll, tokens) of the chosen documents."""
    windows = [held_out.windows[index] for index in chosen.tolist()]
    with torch.inference_mode():
        nll, tokens = row_losses(model, np.concatenate(windows), prefix_tokens)
    starts = np.cumsum([0, *(len(rows) for rows in windows[:-1])])
    return np.add.reduceat(nll, starts), np.add.reduceat(tokens, starts)


def reroute(
    trained: Path, held_out: HeldOut, work: Path, size: Size, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fit a rerouter to training documents and score the held-out ones; return the figures.

    Scores of the paths are kept in `work`, so a killed cell goes on. `perplexity` is that of the
    best window.
    """
    with DiskSource(trained) as source:
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
