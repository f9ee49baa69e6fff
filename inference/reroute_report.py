"""Perplexities of rerouting every W tokens, beside those without rerouting and with hindsight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dipaco.training.scoring import LossSum

from .rerouter import Rerouter
from .rerouting import (
    best_document_loss,
    best_window_loss,
    decisions,
    rerouted_loss,
    routed_loss,
    single_path_losses,
    switches,
)
from .token_losses import TokenLosses


@dataclass(frozen=True)
class RerouteWindow:
    """Rerouting every `window` tokens."""

    window: int
    head: int
    """The look-ahead window that decided."""
    rerouted: LossSum
    switches: float
    """The fraction of decisions that left the path of the tokens before."""
    decisions: int
    best: LossSum
    """With the best path of each window in hindsight: a bound."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "window": self.window,
            "head": self.head,
            "perplexity": self.rerouted.perplexity,
            "switches": self.switches,
            "decisions": self.decisions,
            "best_path_per_window_perplexity": self.best.perplexity,
        }


@dataclass(frozen=True)
class RerouteReport:
    """All of it is computed from the same losses of the same tokens."""

    routed: LossSum
    """Every document by the path that the run's router sends it to."""
    best_per_document: LossSum
    """Every document by its best path in hindsight: a bound."""
    single_paths: Mapping[int, LossSum]
    """All documents by one path."""
    windows: tuple[RerouteWindow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values: `reroute` in what `dipaco-eval --json` prints."""
        return {
            "routed_perplexity": self.routed.perplexity,
            "best_path_per_document_perplexity": self.best_per_document.perplexity,
            "paths": [
                {"path": path, "perplexity": losses.perplexity}
                for path, losses in self.single_paths.items()
            ],
            "windows": [window.as_dict() for window in self.windows],
        }


def reroute_report(
    losses: TokenLosses, rerouter: Rerouter, windows: Sequence[int]
) -> RerouteReport:
    """Reroute every W tokens for each W of `windows`, in one pass of the rerouter.

    Paths without losses are never chosen.
    """
    allowed = np.isin(np.arange(rerouter.path_count), losses.paths)
    choices = rerouter.choose(losses.documents, windows, allowed)
    return RerouteReport(
        routed=routed_loss(losses),
        best_per_document=best_document_loss(losses),
        single_paths=single_path_losses(losses),
        windows=tuple(
            RerouteWindow(
                window=window,
                head=rerouter.policy(window).head,
                rerouted=rerouted_loss(losses, choices[window], window),
                switches=switches(losses, choices[window], window),
                decisions=int(losses.kept[decisions(losses.documents, window).documents].sum()),
                best=best_window_loss(losses, window),
            )
            for window in windows
        ),
    )
