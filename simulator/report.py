"""The report of a round: losses, the score of every path, digests of all modules.

Scores are those of the *committed* states, which readers of a swarm would fetch, on held-out
sequences. They do not include what workers have trained since.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dipaco.modules.compose import load_path
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_files import even_sample
from dipaco.training.scoring import LossSum, sum_losses

from .path_worker import PathWorker
from .settings import SimulatorSettings
from .storage import KeptStates


@dataclass(frozen=True)
class PathReport:
    """One path after a round."""

    path: int
    step: int
    """Inner steps of the path so far."""
    train_loss: float | None
    """Mean over the round's inner steps, nats a token."""
    validation: LossSum
    """Its committed states on its held-out sequences."""


@dataclass(frozen=True)
class RoundReport:
    """The swarm after a round. Round -1 is the state before any."""

    round_index: int
    digests: Mapping[str, str]
    versions: Mapping[str, int]
    paths: tuple[PathReport, ...]
    tokens: int
    """Trained in the round."""
    bytes: int
    """Of the contributions that the peers published in the round."""
    seconds: float

    @property
    def train_loss(self) -> float | None:
        """Mean over the paths, in nats a token; None when nothing was trained."""
        losses = [path.train_loss for path in self.paths if path.train_loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def validation(self) -> LossSum:
        """All paths together, every token counting alike."""
        return LossSum.total(path.validation for path in self.paths)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values: a line of `--json` and `--log-json`."""
        return {
            "event": "simulated_round",
            "round": self.round_index,
            "tokens": self.tokens,
            "train_loss": self.train_loss,
            "perplexity": self.validation.perplexity,
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
            "validation": {
                "perplexity": self.validation.perplexity,
                "tokens": self.validation.tokens,
            },
            "seconds": round(self.seconds, 3),
        }


class Reporter:
    """Scores committed states, and makes the report of a round."""

    def __init__(self, run: RunFolder, settings: SimulatorSettings) -> None:
        self._run = run
        self._plan = run.plan()
        self._grid = run.grid(self._plan)
        self._device = torch.device(settings.device)
        self._sequences = settings.validation_sequences

    def report(
        self,
        round_index: int,
        workers: Sequence[PathWorker],
        states: KeptStates,
        *,
        trained: bool,
        started_s: float,
        sent_bytes: int = 0,
    ) -> RoundReport:
        """Report a round that began at `started_s` of `time.monotonic`.

        Without `trained` there was no round: the states are only scored.
        """
        steps = sum(len(worker.round_losses) for worker in workers) if trained else 0
        paths = sorted({worker.peer.path for worker in workers})
        scores = {path: self._score(path, states) for path in paths}
        return RoundReport(
            round_index=round_index,
            paths=tuple(
                _path_report([w for w in workers if w.peer.path == path], scores[path], trained)
                for path in paths
            ),
            digests={m: states.digest(m) for m in states},
            versions={module: states.summary(module).version for module in states},
            tokens=steps * self._plan.inner.batch_sequences * self._plan.model.sequence_length,
            bytes=sent_bytes,
            seconds=time.monotonic() - started_s,
        )

    def _score(self, path: int, states: KeptStates) -> LossSum:
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
        """A model of its own, so that scoring never disturbs the workers."""
        return PathModel(self._plan.model).to(self._device)


def _path_report(workers: Sequence[PathWorker], score: LossSum, trained: bool) -> PathReport:
    """Report a path; `workers` are its replicas."""
    losses = [loss for worker in workers for loss in worker.round_losses] if trained else []
    return PathReport(
        path=workers[0].peer.path,
        step=max(worker.path_step for worker in workers),
        train_loss=sum(losses) / len(losses) if losses else None,
        validation=score,
    )
