"""How a text is continued: what its next token may be, by one path or by several together.

A path keeps the keys and values of what it has read, so a token costs one pass of that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dipaco.modules.transformer import PathModel, losses_of_outputs, rotation_of

from .mixing import mixed_logprobs, with_evidence


class Decoder:
    """A text and the paths that continue it. With several paths, each token comes from a
    mixture."""

    def __init__(self, models: Sequence[PathModel]) -> None:
        self._paths = [_DecodedPath(model) for model in models]
        self._evidence = torch.zeros(len(models), 1)
        self._logprobs = torch.empty(0)
        """Each path's log-probabilities of the next token, [K, V]."""
        self.length = 0
        """The number of tokens in the text."""

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Begin a new text; return the log-probabilities of the next token, fp32 [V] on the CPU.
        The text has at least one token, and at most as many as the model's context.
        """
        self.length = len(tokens)
        self._logprobs = torch.stack([path.read(tokens) for path in self._paths])
        self._evidence = torch.zeros(len(self._paths), 1)
        if len(self._paths) > 1:
            losses = torch.stack([path.losses for path in self._paths])
            for nats in losses.split(1, dim=1):
                self._evidence = with_evidence(self._evidence, nats)
        return mixed_logprobs(self._evidence, self._logprobs)

    def step(self, token: int) -> torch.Tensor:
        """Add a token to the text, which must have room; return what `read` does."""
        self._evidence = with_evidence(self._evidence, -self._logprobs[:, token, None])
        self._logprobs = torch.stack([path.step(token, self.length) for path in self._paths])
        self.length += 1
        return mixed_logprobs(self._evidence, self._logprobs)


class _DecodedPath:
    """A path and its cache of what it has read."""

    def __init__(self, model: PathModel) -> None:
        self._model = model
        self._rotation = rotation_of(model.config, model.config.sequence_length, model.device)
        self._past: Any = None
        self._text = self._outputs = torch.empty(0)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities after the last one of these tokens."""
        self._past = self._model.new_past()
        self._text = torch.tensor([tokens], device=self._model.device)
        self._outputs = self._model.hidden_states(self._text, past=self._past)
        return self._after(self._outputs[0, -1])

    @property
    @torch.inference_mode()
    def losses(self) -> torch.Tensor:
        """The nats of each token that was read, except the first, fp32 [T-1] on the CPU."""
        return losses_of_outputs(self._model, self._outputs, self._text)[0].cpu()

    @torch.inference_mode()
    def step(self, token: int, place: int) -> torch.Tensor:
        """Return the log-probabilities after this token, which stands at `place`."""
        cosines, sines = self._rotation
        rotation = cosines[place : place + 1], sines[place : place + 1]
        given = torch.tensor([[token]], device=self._model.device)
        outputs = self._model.hidden_states(given, rotation=rotation, past=self._past)
        return self._after(outputs[0, -1])

    def _after(self, output: torch.Tensor) -> torch.Tensor:
        return self._model.logits(output).float().log_softmax(dim=-1).cpu()
