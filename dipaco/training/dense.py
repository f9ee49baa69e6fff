"""Dense training of one path-sized model, resumable to the bit: base models, and the baseline that
a swarm is compared with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dipaco.base.files import atomic_file
from dipaco.training.inner import InnerLoop

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedTraining:
    """The file from which a training goes on that was stopped."""

    file: Path
    inputs: str
    """What the training is made of; a file of other inputs is not used."""
    every_s: float = 60.0
    """Seconds between two saves."""

    def save(self, inner: InnerLoop, steps: int, loss: float) -> None:
        """Keep parameters and optimizer after `steps`. Raises StorageError."""
        content = {
            "inputs": self.inputs,
            "steps": steps,
            "loss": loss,
            "model": dict(inner.model.named_parameters()),
            "inner": inner.lent_state_dict(),
        }
        with atomic_file(self.file) as file:
            torch.save(content, file)

    def restore(self, inner: InnerLoop) -> tuple[int, float | None]:
        """Load what was kept and return the steps done and the loss of the last one.

        (0, None), and nothing loaded, without a file of these inputs that is whole.
        """
        if not self.file.exists():
            return 0, None
        parameters = dict(inner.model.named_parameters())
        try:
            content = torch.load(self.file, map_location="cpu", weights_only=True)
            if content["inputs"] != self.inputs:
                return 0, None
            kept = {name: content["model"][name].view_as(p) for name, p in parameters.items()}
            steps, loss = int(content["steps"]), content["loss"]
            if not inner.load_state_dict(content["inner"]):
                return 0, None
        except Exception as error:  # pickle, zip and key errors alike: starting again is right
            logger.warning("%s cannot be used; training starts again", self.file)
            logger.debug("it cannot be read: %s", error)
            return 0, None
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])
        return steps, loss


def train_steps(
    inner: InnerLoop,
    batch: Callable[[int], torch.Tensor],
    steps: int,
    *,
    saved: SavedTraining | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> float | None:
    """Train until `steps` steps are done and return the loss of the last, None if there is none.

    `batch` gives the tokens of a step, int64 [B, T]; `on_step` gets the number of a step and its
    loss, in nats. With `saved`, a later call goes on and ends with the same bits (on a CPU
    with the same number of threads; a GPU may sum in another order).
    """
    first, loss = saved.restore(inner) if saved else (0, None)
    saved_at = time.monotonic()
    inner.model.train()
    for step in range(first, steps):
        loss = inner.step(batch(step), step)
        if on_step is not None:
            on_step(step, loss)
        if saved is None:
            continue
        if step + 1 == steps or time.monotonic() - saved_at >= saved.every_s:
            saved.save(inner, step + 1, loss)
            saved_at = time.monotonic()
    return loss
