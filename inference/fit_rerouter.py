"""Fitting a rerouter to the losses of all paths (DiPaCo sections 2.4.3 and 7.2.2).

At each counted position and for each window W the cost of a path is the summed negative
log-likelihood that it gives to the next W tokens of the document. Heads and the base LM below them
learn the path of least cost. Some documents are held out: they choose which parameters of the
training are kept, and for each W which head decides and how much better a path must look before
the current one is left. So a rerouter that has learnt nothing stays on the routed path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import nn

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.modules.config import Config, InnerConfig
from dipaco.modules.device import autocast_for
from dipaco.modules.transformer import PathModel
from dipaco.training.inner import learning_rate_at

from .document_windows import DocumentWindows
from .rerouter import DEFAULT_WINDOWS, Rerouter, WindowPolicy, decision_logits
from .rerouting import STAY, Decisions, choose_paths, decisions, window_sums
from .token_losses import TokenLosses, row_tensor

logger = logging.getLogger(__name__)

FEWEST_DOCUMENTS = 20
_EVALUATIONS = 10
# Held-out documents that it takes to tell the gains of policies apart.
_ENOUGH_DOCUMENTS = 100
_MARGIN_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97)


class RerouterConfig(Config):
    """How a rerouter is fitted; the paper gives 2,000 steps with the LM's own settings."""

    windows: tuple[int, ...] = Field(DEFAULT_WINDOWS, description="Look-ahead windows in tokens.")
    blocks: int | None = Field(None, ge=1, description="First blocks of the base LM; None: all.")
    steps: int = Field(1000, ge=1, description="Training steps.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate of AdamW.")
    weight_decay: float = Field(0.1, ge=0)
    batch_sequences: int = Field(16, ge=1, description="Windows of documents in a batch.")
    held_out_fraction: float = Field(0.1, gt=0, lt=1, description="Documents that choose.")
    seed: int = Field(0, ge=0, lt=2**32)


@dataclass(frozen=True)
class FitReport:
    """How a fit went. Losses are in nats a token over the held-out documents."""

    documents: int
    held_out_documents: int
    tokens: int
    steps: int
    kept_step: int
    """The step whose parameters were kept: the least held-out loss."""
    routed_loss: float
    """Without rerouting."""
    window_losses: dict[int, float]
    """With rerouting every W tokens as its policy says."""
    policies: tuple[WindowPolicy, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values: what `dipaco-reroute fit --json` prints."""
        return {
            "documents": self.documents,
            "held_out_documents": self.held_out_documents,
            "tokens": self.tokens,
            "steps": self.steps,
            "kept_step": self.kept_step,
            "routed_loss": self.routed_loss,
            "windows": [
                {
                    "window": own.window,
                    "loss": self.window_losses[own.window],
                    "head": own.head,
                    "stay_bonus": None if own.stay_bonus == STAY else own.stay_bonus,
                }
                for own in self.policies
            ],
        }


def fit_rerouter(
    base: PathModel,
    token_losses: TokenLosses,
    config: RerouterConfig,
    *,
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Rerouter, FitReport]:
    """Fit a rerouter that begins as `base` to the losses of all paths. Same inputs, same bits (on
    a CPU with the same number of threads).

    Raises CorpusError for less than 20 documents, ConfigurationError if a path has no losses.
    """
    documents = token_losses.documents
    if token_losses.paths != tuple(range(len(token_losses.paths))):
        raise ConfigurationError(
            f"a rerouter needs the losses of all paths, but there are only those of "
            f"{', '.join(map(str, token_losses.paths))}; see which modules have no state"
        )
    if len(documents) < FEWEST_DOCUMENTS:
        raise CorpusError(
            f"{len(documents)} documents have a token after the routing prefix; fitting a "
            f"rerouter takes at least {FEWEST_DOCUMENTS}, give more or longer --data"
        )
    held_out = _held_out(len(documents), config)
    rerouter = Rerouter(
        base.config,
        blocks=config.blocks or base.config.block_count,
        windows=config.windows,
        path_count=len(token_losses.paths),
    )
    rerouter.load_base(base)
    rerouter.to(device)
    fit = _Fit(rerouter, token_losses, config, held_out)
    kept_step = fit.train(progress)
    progress("choosing heads and margins on the held-out documents")
    losses = fit.choose_policies()
    report = FitReport(
        documents=len(documents),
        held_out_documents=int(held_out.sum()),
        tokens=documents.tokens,
        steps=config.steps,
        kept_step=kept_step,
        routed_loss=fit.routed_loss(),
        window_losses=losses,
        policies=rerouter.policies,
    )
    return rerouter.to("cpu").eval(), report


def _held_out(count: int, config: RerouterConfig) -> np.ndarray:
    """Return which documents are held out, bool [count]: a quarter if there are few, because too
    few cannot choose."""
    few = min(count // 4, _ENOUGH_DOCUMENTS)
    size = min(max(round(count * config.held_out_fraction), few), count - few)
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng((config.seed, 1)).permutation(count)[:size]] = True
    return chosen


class _Fit:
    """The training loop and its data."""

    def __init__(
        self, rerouter: Rerouter, losses: TokenLosses, config: RerouterConfig, held_out: np.ndarray
    ) -> None:
        self.rerouter, self.losses, self.config = rerouter, losses, config
        self.documents: DocumentWindows = losses.documents
        self.held_out = held_out
        self.device = rerouter.head.device
        self.row_documents = self.documents.row_documents
        self.held_out_rows = self.documents.rows_of_documents(held_out)
        self.training_rows = self.documents.rows_of_documents(~held_out)
        self._cached: dict[int, _HeldOut] = {}

    def train(self, progress: Callable[[str], None]) -> int:
        """Train, leave the best parameters in the rerouter, and return the step they are of."""
        config, rerouter = self.config, self.rerouter
        warmup = min(50, config.steps // 10)
        schedule = InnerConfig(
            learning_rate=config.learning_rate,
            warmup_steps=warmup,
            decay_steps=config.steps - warmup,
        )
        optimizer = self._optimizer()
        best, best_step, kept = self._held_out_loss(), 0, _copied(rerouter)
        progress(f"step 0 of {config.steps}: {best:.4f} nats a token on held-out documents")
        every = max(1, config.steps // _EVALUATIONS)
        for step, rows in enumerate(self._batches()):
            rerouter.train()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(schedule, step)
            loss = self._loss(rows)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(rerouter.parameters(), 1.0)
            if torch.isfinite(loss + norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % every == 0 or step + 1 == config.steps:
                own = self._held_out_loss()
                progress(f"step {step + 1} of {config.steps}: {own:.4f} nats a token")
                if own < best:
                    best, best_step, kept = own, step + 1, _copied(rerouter)
        rerouter.load_state_dict(kept)
        return best_step

    def _optimizer(self) -> torch.optim.AdamW:
        parameters = list(self.rerouter.named_parameters())
        decayed = [p for name, p in parameters if p.ndim >= 2 and name != "prior"]
        others = [p for name, p in parameters if p.ndim < 2 or name == "prior"]
        groups = [
            {"params": decayed, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.99))

    def _batches(self) -> Iterator[np.ndarray]:
        """Yield the rows of each step: whole epochs, each in an order of its own."""
        size = min(self.config.batch_sequences, len(self.training_rows))
        generator = np.random.default_rng((self.config.seed, 2))
        pending = np.empty(0, dtype=np.int64)
        for _ in range(self.config.steps):
            if len(pending) < size:
                pending = np.concatenate([pending, generator.permutation(self.training_rows)])
            yield pending[:size]
            pending = pending[size:]

    def _loss(self, rows: np.ndarray) -> torch.Tensor:
        """Return the loss of a batch, the mean over positions and windows."""
        costs, lengths, used = self._costs(rows)
        tokens = row_tensor(self.documents, rows).to(self.device)
        prefix = self.documents.prefix_tokens
        with autocast_for(self.device):
            hidden = self.rerouter.hidden_states(tokens)[:, prefix - 1 : -1]
        routed = torch.from_numpy(self.documents.paths[self.row_documents[rows]])
        routed = routed.to(self.device)[:, None].expand(used.shape)
        logits = self.rerouter.logits(hidden[used], routed[used])
        return _expected_cost(logits, costs, lengths)

    def _costs(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the costs of all decisions in some rows, [M, windows, paths], the tokens that
        they are sums over, [M, windows], and which positions they stand at, bool [B, n]."""
        counts = self.documents.row_tokens[rows] - self.documents.prefix_tokens
        used = np.arange(counts.max())[None, :] < counts[:, None]
        costs, lengths = [], []
        reach = self.rerouter.windows[-1]
        windows = np.array(self.rerouter.windows)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            start = int(self.documents.row_starts[row])
            end = int(self.documents.token_starts[self.row_documents[row] + 1])
            values = self.losses.array(start, min(end, start + count + reach)).astype(np.float64)
            summed = np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])
            first = np.arange(count)[:, None]
            last = np.minimum(first + windows, len(values))
            costs.append((summed[last] - summed[first]).astype(np.float32))
            lengths.append((last - first).astype(np.float32))
        return (
            torch.from_numpy(np.concatenate(costs)).to(self.device),
            torch.from_numpy(np.concatenate(lengths)).to(self.device),
            torch.from_numpy(used).to(self.device),
        )

    def _held_out_loss(self) -> float:
        """Return the mean over windows of the loss of following each window's own head."""
        self.rerouter.eval()
        found = self._logits({window: [window] for window in self.rerouter.windows})
        losses = [
            own.loss(choose_paths(logits[:, 0], own.decisions, self.documents.paths, 0.0))
            for own, logits in ((self._held_out(window), found[window]) for window in found)
        ]
        return float(np.mean(losses))

    def choose_policies(self) -> dict[int, float]:
        """Set the policies that gain most on the held-out documents; return their losses.

        The gain over staying on the routed path is the mean over documents less its standard
        error, so that luck with a few documents changes nothing. Of equal ones the larger margin
        wins, then the longer look-ahead.
        """
        heads = list(self.rerouter.windows)
        routed = self.documents.paths
        policies, losses = [], {}
        for window in heads:
            own = self._held_out(window)
            logits = self._logits({window: heads})[window]
            staying = own.document_costs(routed[own.decisions.documents])
            tried = []
            for column, head in enumerate(heads):
                for bonus in self._bonuses(logits[:, column], own.decisions):
                    choices = choose_paths(logits[:, column], own.decisions, routed, bonus)
                    gains = staying - own.document_costs(choices)
                    sure = gains.mean() - gains.std(ddof=1) / len(gains) ** 0.5
                    tried.append((sure, bonus, head, own.loss(choices)))
            _, bonus, head, loss = max(tried)
            policies.append(WindowPolicy(window, head, bonus))
            losses[window] = loss
        self.rerouter.policies = tuple(policies)
        return losses

    def _bonuses(self, logits: np.ndarray, made: Decisions) -> list[float]:
        """Return the margins to try: quantiles of how much better than the routed path another
        one looks, and never leaving it."""
        routed = self.documents.paths[made.documents]
        margins = logits.max(axis=1) - logits[np.arange(len(made)), routed]
        better = margins[margins > 0]
        tried = np.quantile(better, _MARGIN_QUANTILES).tolist() if len(better) else []
        return [0.0, *tried, STAY]

    def _logits(self, wanted: dict[int, list[int]]) -> dict[int, np.ndarray]:
        """Return the logits of the held-out decisions, fp32 [D, heads, paths]."""
        found = decision_logits(self.rerouter, self.documents, wanted, self.held_out_rows)
        return {window: logits[self._held_out(window).numbers] for window, logits in found.items()}

    def _held_out(self, window: int) -> _HeldOut:
        if window not in self._cached:
            made = decisions(self.documents, window)
            numbers = np.flatnonzero(self.held_out[made.documents])
            sums = [window_sums(self.losses, path, window)[numbers] for path in self.losses.paths]
            self._cached[window] = _HeldOut(
                numbers=numbers,
                decisions=Decisions(
                    made.starts[numbers], made.documents[numbers], made.ordinals[numbers]
                ),
                costs=np.stack(sums, axis=1),
                tokens=int(self.documents.document_tokens[self.held_out].sum()),
            )
        return self._cached[window]

    def routed_loss(self) -> float:
        """Return the nats a token of the held-out documents without rerouting."""
        own = self._held_out(self.rerouter.windows[-1])
        return own.loss(self.documents.paths[own.decisions.documents])


@dataclass(frozen=True)
class _HeldOut:
    """The decisions of one window in held-out documents, and what every path would cost."""

    numbers: np.ndarray
    """int64 [D]: their places among all decisions."""
    decisions: Decisions
    costs: np.ndarray
    """fp64 [D, paths]"""
    tokens: int

    def loss(self, choices: np.ndarray) -> float:
        """Return the nats a token of following choices, int64 [D]."""
        return float(self.document_costs(choices).sum()) / self.tokens

    def document_costs(self, choices: np.ndarray) -> np.ndarray:
        """Return the nats of each document, fp64, of following choices, int64 [D]."""
        firsts = np.flatnonzero(self.decisions.ordinals == 0)
        return np.add.reduceat(self.costs[np.arange(len(choices)), choices], firsts)


def _expected_cost(
    logits: torch.Tensor, costs: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the mean cost of drawing paths by logits [M, windows, paths], above the least one."""
    regrets = costs - costs.amin(dim=-1, keepdim=True)
    expected = (logits.softmax(dim=-1) * regrets).sum(dim=-1)
    # By the root of the window, regrets of all windows are of one size.
    return (expected / lengths.sqrt()).mean()


def _copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
