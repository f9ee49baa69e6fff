"""The report of a round: losses, the score of every path, digests of all modules.

Scores are those of the *anchors*, which readers of a swarm would fetch, on held-out
sequences. They do not include what trainers have learned since.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from dipaco.modules.compose import load_path
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_files import even_sample
from dipaco.training.scoring import LossSum, sum_losses
from dipaco.training.trainer import PathTrainer

from .simulated_peers import SimulatedPeer, SimulatorSettings


@dataclass(frozen=True)
class PathReport:
    """How one path does after a round."""

    path: int
    step: int
    """Inner steps of the path so far."""
    train_loss: float | None
    """Mean loss of the round's inner steps, in nats a token."""
    validation: LossSum
    """Loss of its anchors on its held-out sequences."""


@dataclass(frozen=True)
class RoundReport:
    """The swarm after a round. Round -1 is the state before any."""

    round_index: int
    digests: Mapping[str, str]
    versions: Mapping[str, int]
    paths: tuple[PathReport, ...]
    tokens: int
    """Tokens that were trained in the round."""
    bytes: int
    """Bytes of the contributions that the peers published in the round."""
    seconds: float

    @property
    def train_loss(self) -> float | None:
        """Mean of the paths' losses, in nats a token; None if nothing was trained."""
        losses = [path.train_loss for path in self.paths if path.train_loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def validation(self) -> LossSum:
        """Loss of all paths together, in which every token counts alike."""
        return LossSum.total(path.validation for path in self.paths)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values: a line of `--json`."""
        return {
            "event": "simulated_round",
            "round": self.round_index,
            "tokens": self.tokens,
            "train_loss": self.train_loss,
            "perplexity": self.validation.perplexity,
            "validation_tokens": self.validation.tokens,
            "bytes": self.bytes,
            "digests": dict(self.digests),
            "versions": dict(self.versions),
            "paths": [
                {
                    "path": path.path,
                    "step": path.step,
                    "train_loss": path.train_loss,
                    "validation_loss": path.validation.loss,
                    "validation_tokens": path.validation.tokens,
                }
                for path in self.paths
            ],
            "seconds": round(self.seconds, 3),
        }


@dataclass
class RoundNotes:
    """What is noted while a round goes on."""

    started_s: float = field(default_factory=time.monotonic)
    losses: dict[SimulatedPeer, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Losses of each peer's inner steps, in nats a token."""
    sent_bytes: int = 0
    """Bytes of the contributions that peers published."""


class Reporter:
    """Scores anchors, and makes the report of a round."""

    def __init__(self, run: RunFolder, settings: SimulatorSettings) -> None:
        self._run = run
        self._plan = run.plan()
        self._grid = run.grid(self._plan)
        self._device = torch.device(settings.device)
        self._sequences = settings.validation_sequences

    def report(
        self,
        round_index: int,
        trainers: Mapping[SimulatedPeer, PathTrainer],
        states: Mapping[str, ModuleState],
        notes: RoundNotes,
    ) -> RoundReport:
        """Report a round that has just ended, or the present states if `notes` has no losses."""
        steps = sum(map(len, notes.losses.values()))
        paths = []
        for path in sorted({peer.path for peer in trainers}):
            replicas = {peer: trainer for peer, trainer in trainers.items() if peer.path == path}
            losses = [loss for peer in replicas for loss in notes.losses.get(peer, ())]
            paths.append(
                PathReport(
                    path=path,
                    step=max(trainer.path_step for trainer in replicas.values()),
                    train_loss=sum(losses) / len(losses) if losses else None,
                    validation=self._score(path, states),
                )
            )
        return RoundReport(
            round_index=round_index,
            paths=tuple(paths),
            digests={module: state.digest for module, state in states.items()},
            versions={module: state.version for module, state in states.items()},
            tokens=steps * self._plan.inner.batch_sequences * self._plan.model.sequence_length,
            bytes=notes.sent_bytes,
            seconds=time.monotonic() - notes.started_s,
        )

    def _score(self, path: int, states: Mapping[str, ModuleState]) -> LossSum:
        """Score the states of a path on its held-out sequences."""
        if self._sequences == 0:
            return LossSum()
        own = {module: states[module] for module in self._grid.modules_of_path(path)}
        load_path(self._model, self._grid, path, own)
        held_out = self._run.validation_tokens(self._plan, path)
        rows = even_sample(held_out, self._sequences)
        return LossSum(*sum_losses(self._model, rows, self._plan.routing.prefix_tokens))

    @cached_property
    def _model(self) -> PathModel:
        """A model of its own, so that scoring never disturbs the trainers."""
        return self._run.path_model(self._plan, self._device)
