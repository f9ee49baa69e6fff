"""Documents in two made-up languages with made-up losses, for tests of rerouting.

Path p gives a token of language p 1 nat and any other token 3, so the best path of a token is its
language. Documents change their language every `segment` tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipaco.inference.document_windows import DocumentWindows, TokenDocument, collect_windows
from dipaco.inference.token_losses import TokenLosses
from dipaco.modules.config import BEGIN_TOKEN, END_TOKEN, GridConfig, ModelConfig
from dipaco.modules.plan import RoutingPlan, RunPlan
from dipaco.modules.transformer import PathModel, initialise
from support.make_plan import make_plan

PREFIX_TOKENS = 4
LANGUAGES = ((10, 30), (30, 50))


def two_path_plan(**fields: Any) -> RunPlan:
    """A run of two paths with sequences of 16 tokens of which 4 are for routing."""
    model = ModelConfig(
        vocabulary_size=64, block_count=2, hidden_size=16, head_count=2, sequence_length=16
    )
    routing = RoutingPlan(prefix_tokens=PREFIX_TOKENS)
    grid = GridConfig(modules_per_level=(2,))
    return make_plan(**{"model": model, "grid": grid, "routing": routing, **fields})


def base_model(plan: RunPlan) -> PathModel:
    model = PathModel(plan.model)
    initialise(model, 0)
    return model.eval()


def changing_documents(count: int, segment: int, seed: int = 0) -> list[TokenDocument]:
    """Documents of 30 to 60 tokens, each routed to its first language."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length, first = int(random.integers(30, 60)), number % 2
        languages = (first + np.arange(length) // segment) % 2
        low, high = np.array(LANGUAGES)[languages].T
        tokens = np.concatenate([[BEGIN_TOKEN], random.integers(low, high), [END_TOKEN]])
        made.append(TokenDocument(tokens, label=("even", "odd")[first], path=first))
    return made


def windows_of(documents: list[TokenDocument], folder: Path) -> DocumentWindows:
    router: Any = None  # all documents have a path
    return collect_windows(router, documents, two_path_plan(), folder)


def language_losses(
    windows: DocumentWindows, documents: list[TokenDocument], right: float = 1.0
) -> TokenLosses:
    """Scores in which `right` nats are for a token in the path's language, 3 for others."""
    tokens = np.concatenate([d.tokens[PREFIX_TOKENS:] for d in documents])
    nll = {}
    for path, (low, high) in enumerate(LANGUAGES):
        own = (tokens >= low) & (tokens < high)
        nll[path] = np.where(own, right, 3.0).astype(np.float32)
    return TokenLosses(windows, nll)


CPU = torch.device("cpu")
