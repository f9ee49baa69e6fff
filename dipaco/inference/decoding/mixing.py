"""Several paths as one: each token by all of them, weighted by how well they did lately.

A path's log-weight is minus the sum of its nats so far, those of a token `age` tokens ago times
0.9 to that power. It costs a pass of every path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import PAD_TOKEN

from .adapter_decoder import AdapterDecoder, decoders_over_one_base, step_together
from .decoder import Decoder
from .text_decoder import TextDecoder

FORGETTING = 0.9


def mixed_logprobs(evidence: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [...] that K paths give together.

    `logprobs` [K, ...] are theirs; `evidence` [K, ...] is what `with_evidence` made of their nats.
    """
    return torch.logsumexp(torch.log_softmax(-evidence, dim=0) + logprobs, dim=0)


def with_evidence(evidence: torch.Tensor, nats: torch.Tensor) -> torch.Tensor:
    """Return the evidence against each path, [K, ...], after a token that cost it so many nats."""
    return FORGETTING * evidence + nats


def mixed_losses(nats: torch.Tensor) -> torch.Tensor:
    """Return the nats [B, T] of texts by a mixture, by those of each of its paths, [K, B, T]."""
    evidence = torch.zeros_like(nats[:, :, 0])
    mixed = torch.empty_like(nats[0])
    for place in range(nats.shape[2]):
        mixed[:, place] = -mixed_logprobs(evidence, -nats[:, :, place])
        evidence = with_evidence(evidence, nats[:, :, place])
    return mixed


class MixedDecoder:
    """Paths that give each token together; used as `Decoder` is. Its logits are
    log-probabilities."""

    def __init__(self, decoders: Sequence[TextDecoder]) -> None:
        self._decoders = decoders
        self.config = decoders[0].config
        paths, slots = len(decoders), len(self.lengths)
        self._evidence = torch.zeros(paths, slots, 1)
        self._next = torch.zeros(paths, slots, self.config.vocabulary_size)
        """Each path's log-probabilities of the next token."""

    @property
    def lengths(self) -> list[int]:
        """As `PathDecoder.lengths`."""
        return self._decoders[0].lengths

    @property
    def free_slots(self) -> int:
        """As `PathDecoder.free_slots`."""
        first = self._decoders[0]
        # Paths over one base take slots of one store.
        each = len(self._decoders) if isinstance(first, AdapterDecoder) else 1
        return first.free_slots // each

    def read(
        self, slot: int, tokens: Sequence[int], *, every: bool = False
    ) -> Iterator[torch.Tensor]:
        """As `Decoder.read`. What the text cost each path is known when all was taken."""
        evidence, place = torch.zeros(len(self._decoders), 1), 0
        parts = [decoder.read(slot, tokens, every=True) for decoder in self._decoders]
        for logits in zip(*parts, strict=True):
            logprobs = torch.stack(logits).log_softmax(dim=-1)
            mixed = torch.empty_like(logprobs[0])
            for index in range(len(mixed)):
                mixed[index] = mixed_logprobs(evidence, logprobs[:, index])
                place += 1
                if place < len(tokens):
                    nats = -logprobs[:, index, tokens[place], None]
                    evidence = with_evidence(evidence, nats)
            if every or place == len(tokens):
                yield mixed if every else mixed[-1:]
        self._evidence[:, slot], self._next[:, slot] = evidence, logprobs[:, -1]

    def step(self, tokens: Sequence[int | None]) -> torch.Tensor:
        """As `Decoder.step`; a slot that is left alone must be read again."""
        width = len(tokens)
        given = torch.tensor([PAD_TOKEN if token is None else token for token in tokens])
        nats = -self._next[:, torch.arange(width), given]
        self._evidence[:, :width] = with_evidence(self._evidence[:, :width], nats[:, :, None])
        logits = torch.stack(self._step_each(tokens))
        self._next[:, :width] = logits.log_softmax(dim=-1)
        return mixed_logprobs(self._evidence[:, :width], self._next[:, :width])

    def _step_each(self, tokens: Sequence[int | None]) -> list[torch.Tensor]:
        over_one_base = [d for d in self._decoders if isinstance(d, AdapterDecoder)]
        if over_one_base:
            return step_together(over_one_base, [tokens] * len(over_one_base))
        return [decoder.step(tokens) for decoder in self._decoders]

    def copy(self, slot: int, length: int) -> list[torch.Tensor]:
        """As `Decoder.copy`, right after the text was read."""
        texts = [own for decoder in self._decoders for own in decoder.copy(slot, length)]
        return [self._evidence[:, slot].clone(), self._next[:, slot].clone(), *texts]

    def paste(self, slot: int, text: list[torch.Tensor]) -> None:
        """As `Decoder.paste`."""
        self._evidence[:, slot], self._next[:, slot] = text[:2]
        own = (len(text) - 2) // len(self._decoders)
        for number, decoder in enumerate(self._decoders):
            decoder.paste(slot, text[2 + number * own : 2 + (number + 1) * own])

    def free(self, slot: int) -> None:
        """As `Decoder.free`."""
        for decoder in self._decoders:
            decoder.free(slot)


def decoder_of(models: Sequence[PathModel], slots: int) -> TextDecoder:
    """Return what gives tokens by one path, or by several together."""
    decoders: Sequence[TextDecoder]
    if models[0].config.adapters is not None:
        decoders = decoders_over_one_base(models, slots)
    else:
        decoders = [Decoder(model, slots) for model in models]
    return decoders[0] if len(decoders) == 1 else MixedDecoder(decoders)
