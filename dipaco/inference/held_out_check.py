"""Whether states that a swarm gave are fit to read with, judged by held-out texts (design 4.4,
chain).

A reader begins with states that most contributors name, and most contributors can lie. So it reads
a few held-out texts of the path with them, and with the genesis in place of each module. A state
for which the genesis is better by more than `MUCH_WORSE_NATS` is refused, the worst one first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from dipaco.modules.compose import lent_parameters
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.protocol.grid import Grid
from dipaco.protocol.member.taking import ruined_by
from dipaco.training.scoring import sum_losses

logger = logging.getLogger(__name__)

# Rows and tokens of each: as long as a prompt that a machine without a GPU reads, too.
ROWS, _TOKENS = 4, 128


def ruined_module(
    model: PathModel,
    grid: Grid,
    path: int,
    states: Mapping[str, ModuleState],
    rows: torch.Tensor,
    skip_tokens: int,
    genesis: Callable[[str], ModuleState],
) -> str | None:
    """Return the module whose state is much worse than its genesis, the worst one of several; None
    if there is none, or nothing to score with.

    :param model: of the run's shape; its parameters are what they were afterwards
    :param rows: held-out scoring windows of the path, [sequences, length]
    :param skip_tokens: how many tokens of a row are not scored: the routing prefix
    """
    rows = rows[:ROWS, :_TOKENS]

    def loss(read: Mapping[str, ModuleState]) -> float | None:
        with lent_parameters(model, grid, path, read):
            nll, tokens = sum_losses(model, rows, skip_tokens)
        return nll / tokens if tokens else None

    whole = loss(states)
    if whole is None:
        return None
    trained = [module for module, state in states.items() if state.version]
    losses = {module: loss({**states, module: genesis(module)}) or whole for module in trained}
    ruined = ruined_by(whole, losses)
    if not ruined:
        return None
    logger.warning(
        "a state of %s is refused: held-out loss %.3f, with the genesis %.3f",
        ruined,
        whole,
        losses[ruined],
    )
    return ruined
