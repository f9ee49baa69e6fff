"""Which held-out rows a path is scored on: those that choose its best states, and the others.

Choosing the best of many states by a loss makes that loss look better than it is. Where an
operator wants figures that nothing was chosen by, the two are taken from different documents.
"""

from __future__ import annotations

import numpy as np
from dipaco.modules.config import BEGIN_TOKEN, RoundsConfig

from .token_files import even_sample


def are_shared(rounds: RoundsConfig) -> bool:
    """Tell whether the same documents choose the best states and give the reported losses."""
    return not rounds.early_stopping or rounds.early_stopping_split == "shared"


def early_stopping_rows(rows: np.ndarray, rounds: RoundsConfig) -> np.ndarray:
    """Return the rows of a path's held-out split [N, T] that choose its best states.

    At most `validation_sequences`, evenly spread. Peers, the simulator and whoever checks the
    score of a best path take the same ones.
    """
    chosen = rows if are_shared(rounds) else rows[_documents(rows) % 2 == 1]
    return even_sample(chosen, rounds.validation_sequences)


def reported_rows(rows: np.ndarray, rounds: RoundsConfig, count: int | None) -> np.ndarray:
    """Return at most `count` rows (None: all) for the loss that is published and reported."""
    chosen = rows if are_shared(rounds) else rows[_documents(rows) % 2 == 0]
    return even_sample(chosen, count)


def _documents(rows: np.ndarray) -> np.ndarray:
    """Return the number of each row's document: every document begins a new row."""
    return np.cumsum(rows[:, 0] == BEGIN_TOKEN)
