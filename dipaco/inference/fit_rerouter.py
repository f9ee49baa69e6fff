"""Fitting a rerouter to what every path says of some documents (section 7.2.2).

The documents should be ones that no path was trained on: a path looks too good on its own shard.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import InnerConfig
from dipaco.routing.documents.corpus import Document
from dipaco.training.inner import learning_rate_at

from .document_windows import DocumentWindows, collect_windows
from .rerouter import Rerouter
from .sources import StateSource, assemble_path
from .token_losses import nats_of_paths, row_tensor

STEPS = 1000
_FEWEST_DOCUMENTS = 20
# Every so many documents one is held out, by which the best parameters are chosen.
_HELD_OUT_EVERY = 10
_EVALUATIONS = 10
_BATCH_ROWS = 16
_WARMUP_STEPS = 50
_LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class FitReport:
    """The figures of one fit of a rerouter."""

    documents: int
    steps: int
    kept_step: int
    """The step whose parameters were kept; 0 leaves every document to the run's router."""


def fit_to_documents(
    source: StateSource,
    documents: Iterable[Document],
    *,
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Rerouter, FitReport]:
    """Score documents with every path, and fit a rerouter to that.

    Raises as `_fit_rerouter`, as `assemble_path` if a path has no state, and ConfigurationError for
    a run whose base is not trained as a whole.
    """
    if source.plan.model.transformers_config is not None:
        raise ConfigurationError(
            f"a rerouter is the base of the run trained further, and that of run "
            f"'{source.plan.name}' is of a family of which only adapters are trained; compare "
            f"paths with --mix N"
        )
    paths = np.arange(source.grid.path_count)
    for path in paths.tolist():
        if source.missing_modules(path):
            assemble_path(source, path)  # raises, saying what to do
    with tempfile.TemporaryDirectory(prefix="dipaco-rerouter-") as temporary:
        progress("routing the documents")
        router = source.document_router(device)
        windows = collect_windows(router, documents, source.plan, Path(temporary))
        del router
        nats, _ = nats_of_paths(
            source,
            windows,
            np.tile(paths, (len(windows.rows), 1)),
            Path(temporary) / "nats.f32",
            device,
            progress,
        )
        base = source.base_model(device)
        return _fit_rerouter(base, windows, nats, device=device, progress=progress)


def _fit_rerouter(
    base: PathModel,
    windows: DocumentWindows,
    nats: np.ndarray,
    *,
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Rerouter, FitReport]:
    """Fit a rerouter that begins as `base`. `nats` fp32 [P, R, L - 1] are those of all paths, of
    every target of the rows. Same inputs, same bits, on a CPU with the same number of threads.

    Raises CorpusError for fewer than 20 documents.
    """
    if len(windows) < _FEWEST_DOCUMENTS:
        raise CorpusError(
            f"{len(windows)} documents have a token after the routing prefix; fitting a rerouter "
            f"takes at least {_FEWEST_DOCUMENTS}, give more or longer --data"
        )
    rerouter = Rerouter(base.config, len(nats))
    rerouter.load_base(base)
    rerouter.to(device)
    held_out = np.arange(len(windows)) % _HELD_OUT_EVERY == 0
    fit = _Fit(rerouter, windows, nats)
    schedule = InnerConfig(
        learning_rate=_LEARNING_RATE,
        warmup_steps=min(_WARMUP_STEPS, STEPS),
        decay_steps=max(STEPS - _WARMUP_STEPS, 1),
    )
    chosen_by = windows.rows_of_documents(held_out)
    best, kept_step, kept = fit.loss_of(chosen_by), 0, _copied(rerouter)
    every = max(1, STEPS // _EVALUATIONS)
    batches = _batches(windows.rows_of_documents(~held_out))
    for step, rows in enumerate(batches, start=1):
        fit.step(rows, learning_rate_at(schedule, step - 1))
        if step % every == 0 or step == STEPS:
            loss = fit.loss_of(chosen_by)
            progress(f"step {step} of {STEPS}: {loss:.5f} nats above the best path")
            if loss < best:
                best, kept_step, kept = loss, step, _copied(rerouter)
    rerouter.load_state_dict(kept)
    return rerouter.to("cpu").eval(), FitReport(len(windows), STEPS, kept_step)


def _batches(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of each step: whole epochs, each in its own order."""
    size = min(_BATCH_ROWS, len(rows))
    generator = np.random.default_rng(0)
    pending = np.empty(0, dtype=np.int64)
    for _ in range(STEPS):
        if len(pending) < size:
            pending = np.concatenate([pending, generator.permutation(rows)])
        yield pending[:size]
        pending = pending[size:]


class _Fit:
    """A rerouter in training, and its data."""

    def __init__(self, rerouter: Rerouter, windows: DocumentWindows, nats: np.ndarray) -> None:
        self._rerouter, self._windows, self._nats = rerouter, windows, nats
        decayed = [p for p in rerouter.parameters() if p.ndim >= 2 and p is not rerouter.routed]
        others = [p for p in rerouter.parameters() if p.ndim < 2 or p is rerouter.routed]
        groups = [
            {"params": decayed, "weight_decay": _WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))

    def step(self, rows: np.ndarray, learning_rate: float) -> None:
        """Take one step on some rows."""
        self._rerouter.train()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        loss, _ = self._loss(rows)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._rerouter.parameters(), 1.0)
        if torch.isfinite(loss + norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def loss_of(self, rows: np.ndarray) -> float:
        """Return the loss of some rows, the mean over all positions."""
        self._rerouter.eval()
        total, count = 0.0, 0
        for start in range(0, len(rows), _BATCH_ROWS):
            loss, positions = self._loss(rows[start : start + _BATCH_ROWS])
            total += float(loss) * positions
            count += positions
        return total / max(count, 1)

    def _loss(self, rows: np.ndarray) -> tuple[torch.Tensor, int]:
        """Return the loss of some rows, the mean over their positions, and how many these are.

        A position chooses for the rest of its sequence, as in the paper. Its loss is what this
        costs by the paths that the logits give, weighted by their probabilities, above what the
        best path costs: a wrong choice among paths that are alike costs nothing. Over the root of
        the tokens that are left, differences between paths are of one size everywhere.
        """
        windows, device = self._windows, self._rerouter.routed.device
        tokens = row_tensor(windows, rows)
        first, last = windows.prefix_tokens - 1, tokens.shape[1] - 1
        nats = torch.from_numpy(self._nats[:, rows, first:last]).to(device)
        # What is left to pay from each position on, by each path: [B, T, P].
        costs = nats.flip(2).cumsum(2).flip(2).permute(1, 2, 0)
        regrets = costs - costs.amin(dim=-1, keepdim=True)
        targets = torch.from_numpy(windows.row_tokens[rows] - 1).to(device)
        left = targets[:, None] - torch.arange(first, last, device=device)
        routed = torch.from_numpy(windows.paths[windows.row_documents[rows]])
        chances = self._rerouter(tokens, routed)[:, first:last].softmax(dim=-1)
        used = left > 0
        losses = (chances * regrets).sum(dim=-1)[used] / left[used].sqrt()
        return losses.mean(), len(losses)


def _copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
