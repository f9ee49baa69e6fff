"""How good the swarm's model is: every document is scored by the path that it is routed to.

As in the paper, the tokens that routing saw are not scored, neither for the paths nor for what
they are compared with, and every other token of a document is scored exactly once (sections
2.4 and 4). The comparison, the base model and perhaps a dense one, is made on the same tokens, and
so is rerouting every W tokens (section 2.4.3).
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
import safetensors.torch
import torch

from dipaco.base.errors import CorpusError, IntegrityError
from dipaco.modules.transformer import PathModel
from dipaco.routing.documents.corpus import Document
from dipaco.training.scoring import LossSum

from .document_windows import DocumentWindows, collect_windows
from .mixing import mixed_losses
from .rerouter import Rerouter, rerouted_nats
from .sources import StateSource, assemble_path
from .token_losses import nats_of_paths, row_losses

# Documents of one path with one label.
GroupKey = tuple[int, str | None]
# What may score documents, in the order in which it is shown:
SCORERS: Final = {
    "routed": "the path of each document",
    "chosen": "the one of its best paths with the least loss on what is read before scoring begins",
    "mixed": "its best paths, mixed",
    "rerouted": "the paths that a rerouter chooses, again and again",
    "base": "the model that the run began with",
    "baseline": "a dense model of the run's shape",
}
# How many rows have their losses in memory at once.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Evaluated:
    """Some documents, and the loss of each scorer on them, by the scorer's name in `SCORERS`."""

    documents: int
    losses: Mapping[str, LossSum]

    @staticmethod
    def total(parts: Iterable[Evaluated]) -> Evaluated:
        """Add up parts, at least one, that have the same scorers."""
        parts = tuple(parts)
        losses = {
            name: LossSum.total(part.losses[name] for part in parts) for name in parts[0].losses
        }
        return Evaluated(sum(part.documents for part in parts), losses)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        others = [name for name in SCORERS if name in self.losses and name != "routed"]
        return {
            "perplexity": self.losses["routed"].perplexity,
            "tokens": self.losses["routed"].tokens,
            "documents": self.documents,
            **{f"{name}_perplexity": self.losses[name].perplexity for name in others},
        }


@dataclass(frozen=True)
class EvaluationReport:
    """What `dipaco-eval` found. Figures are over the documents whose path could be assembled."""

    run_id: str
    groups: Mapping[GroupKey, Evaluated]
    missing_paths: tuple[int, ...]
    """Paths with documents but without a state of some module."""
    unscored_documents: int
    """Documents of missing paths."""
    short_documents: int
    """Documents with no token after the routing prefix."""

    @property
    def overall(self) -> Evaluated:
        """All documents together, every token counting alike."""
        return Evaluated.total(self.groups.values())

    def paths(self) -> dict[int, Evaluated]:
        """Return the figures by path."""
        found = defaultdict[int, list[Evaluated]](list)
        for (path, _), part in self.groups.items():
            found[path].append(part)
        return {path: Evaluated.total(parts) for path, parts in sorted(found.items())}

    def labels(self) -> dict[str, Evaluated]:
        """Return the figures by label; documents without one are in none."""
        found = defaultdict[str, list[Evaluated]](list)
        for (_, label), part in self.groups.items():
            if label is not None:
                found[label].append(part)
        return {label: Evaluated.total(parts) for label, parts in sorted(found.items())}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values: what `dipaco-eval --json` prints."""
        return {
            "run": self.run_id,
            **self.overall.as_dict(),
            "paths": [{"path": path, **part.as_dict()} for path, part in self.paths().items()],
            "labels": {label: part.as_dict() for label, part in self.labels().items()},
            "missing_paths": list(self.missing_paths),
            "unscored_documents": self.unscored_documents,
            "short_documents": self.short_documents,
        }


@dataclass(frozen=True)
class Rerouting:
    """What to evaluate of rerouting."""

    rerouter: Rerouter
    window: int
    """Tokens between two choices."""


def evaluate(
    source: StateSource,
    documents: Iterable[Document],
    *,
    device: torch.device,
    base: bool = True,
    baseline: PathModel | None = None,
    rerouting: Rerouting | None = None,
    mix: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> EvaluationReport:
    """Route the documents and score each with its path, one path in memory at a time.

    `base` is whether to score the base model too, `baseline` a dense model of the run's shape to
    score on the same tokens. With `rerouting` every path scores every document; with `mix` so many
    of the best paths score each, alone and mixed, and one is chosen. `progress` is told
    what is being done. Windows and losses lie in a temporary folder; some 100 bytes a document are
    held in memory.

    Raises CorpusError if no document has a token to score, or if no path with documents can be
    assembled while some are missing (then also what to do).
    """
    with tempfile.TemporaryDirectory(prefix="dipaco-eval-") as temporary:
        progress("routing the documents")
        ranked = mix if rerouting is None else source.grid.path_count
        windows = _routed(source, documents, Path(temporary), ranked, device)
        file = Path(temporary) / "nats.f32"
        losses, missing = _losses_of_paths(source, windows, mix, rerouting, file, device, progress)
        chosen = ~np.isin(windows.paths, missing)
        if not chosen.any():
            assemble_path(source, missing[0])  # raises, saying what to do
        if base:
            progress("scoring the base model")
            losses["base"] = _document_nll(source.base_model(device), windows, chosen)
        if baseline is not None:
            progress("scoring the baseline")
            losses["baseline"] = _document_nll(baseline.to(device), windows, chosen)
        return EvaluationReport(
            run_id=source.plan.run_id,
            groups=_groups(windows, chosen, losses),
            missing_paths=missing,
            unscored_documents=int((~chosen).sum()),
            short_documents=windows.short_documents,
        )


def _routed(
    source: StateSource,
    documents: Iterable[Document],
    folder: Path,
    ranked: int,
    device: torch.device,
) -> DocumentWindows:
    """Return the windows of the documents, each routed to its `ranked` best paths.

    Raises CorpusError if no document has a token to score.
    """
    router = source.document_router(device)
    windows = collect_windows(router, documents, source.plan, folder, ranked=ranked)
    if not len(windows):
        raise CorpusError(
            f"none of the {windows.short_documents} documents is longer than the "
            f"{windows.prefix_tokens} tokens that routing sees, so there is nothing to score; "
            f"give longer documents"
        )
    return windows


def _losses_of_paths(
    source: StateSource,
    windows: DocumentWindows,
    mix: int,
    rerouting: Rerouting | None,
    file: Path,
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """Return the loss of each document, fp64 [N], by each scorer that consists of paths, and which
    of the routed paths have no state. What each path says of each token lies in `file`."""
    paths = windows.ranked[windows.row_documents]
    nats, missing = nats_of_paths(source, windows, paths, file, device, progress)
    absent = np.isin(paths, missing)
    paths = np.where(absent, paths[:, :1], paths)
    columns = _cheapest_columns(nats[:mix], windows)[windows.row_documents] if mix > 1 else None
    totals: dict[str, np.ndarray] = {}
    for start in range(0, len(paths), _ROWS_AT_ONCE):
        batch = np.arange(start, min(start + _ROWS_AT_ONCE, len(paths)))
        found = nats[:, batch]
        told = {"routed": found[0]}
        if columns is not None:
            told["chosen"] = found[columns[batch], np.arange(len(batch))]
            without = torch.from_numpy(absent[batch, :mix].T)
            told["mixed"] = mixed_losses(torch.from_numpy(found[:mix]), without).numpy()
        if rerouting is not None:
            told["rerouted"] = rerouted_nats(
                rerouting.rerouter, windows, found, paths[batch], batch, rerouting.window
            )
        for name, losses in told.items():
            _add_up(totals.setdefault(name, np.zeros(len(windows))), windows, batch, losses)
    return totals, tuple(sorted(set(windows.paths.tolist()) & set(missing)))


def _cheapest_columns(nats: np.ndarray, windows: DocumentWindows) -> np.ndarray:
    """Return which of K paths predicts best what is read before the first scored token, int64 [N].

    `nats` [K, R, L - 1] are those of `nats_of_paths`. For a text that is the routing prefix; for a
    chat it includes the question, because all chats of a template begin alike.
    """
    first_rows = np.unique(windows.row_documents, return_index=True)[1]
    found = [np.empty(0, np.int64)]
    for start in range(0, len(first_rows), _ROWS_AT_ONCE):
        rows = first_rows[start : start + _ROWS_AT_ONCE]
        scored = np.logical_or.accumulate(windows.scored(rows, nats.shape[2]), axis=1)
        costs = np.where(scored, 0.0, nats[:, rows]).sum(axis=2, dtype=np.float64)
        found.append(costs.argmin(axis=0))
    return np.concatenate(found)


def _document_nll(model: PathModel, windows: DocumentWindows, chosen: np.ndarray) -> np.ndarray:
    """Return the summed negative log-likelihood of each document, fp64 [N]; 0 for those that are
    not in `chosen`, bool [N]."""
    totals = np.zeros(len(windows))
    for batch, losses in row_losses(model, windows, windows.rows_of_documents(chosen)):
        _add_up(totals, windows, batch, losses)
    return totals


def _add_up(
    totals: np.ndarray, windows: DocumentWindows, batch: np.ndarray, losses: np.ndarray
) -> None:
    """Add the losses [B, T] of some rows to those of their documents."""
    # Behind a row's end the loss is 0: padding is never a target.
    scored = np.where(windows.scored(batch, losses.shape[1]), losses, 0.0)
    np.add.at(totals, windows.row_documents[batch], scored.sum(axis=1, dtype=np.float64))


def _groups(
    windows: DocumentWindows, chosen: np.ndarray, losses: Mapping[str, np.ndarray]
) -> dict[GroupKey, Evaluated]:
    """Add up the documents of each path and label, ordered by path, then by label."""
    names = windows.label_names
    # Labels in alphabetical order, no label first.
    ranks = np.empty(len(names) + 1, dtype=np.int64)
    ranks[[*sorted(range(len(names)), key=names.__getitem__), -1]] = [*range(1, len(names) + 1), 0]
    by_rank = (None, *sorted(names))
    keys = windows.paths[chosen] * len(ranks) + ranks[windows.label_numbers[chosen]]
    # Each document may have a label of its own, so one look at all of them has to do.
    found, group_of = np.unique(keys, return_inverse=True)
    documents = np.bincount(group_of)
    tokens = np.bincount(group_of, windows.document_tokens[chosen]).astype(np.int64)
    sums = {name: np.bincount(group_of, nll[chosen]) for name, nll in losses.items()}
    groups: dict[GroupKey, Evaluated] = {}
    for group, (path, rank) in enumerate(zip(*np.divmod(found, len(ranks)), strict=True)):
        scores = {name: LossSum(float(s[group]), int(tokens[group])) for name, s in sums.items()}
        groups[int(path), by_rank[rank]] = Evaluated(int(documents[group]), scores)
    return groups


def load_baseline(file: Path, model: PathModel) -> PathModel:
    """Read a dense model, or an adapter of a whole run, into a `model` of the run's shape.

    It is a safetensors file with the model's names, such as `dense.safetensors` of
    `dipaco-simulate --dense-steps`. Raises IntegrityError if it is not such a file.
    """
    try:
        model.load_state_dict(safetensors.torch.load_file(file))
    except (OSError, safetensors.SafetensorError) as error:
        raise IntegrityError(f"--baseline {file} cannot be read: {error}") from None
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise IntegrityError(
            f"--baseline {file} is not a model of this run's shape: {lines[0]}"
        ) from None
    return model.eval()
