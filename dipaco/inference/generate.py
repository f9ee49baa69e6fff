"""Generating text: the prompt is routed once, and only its path runs, so that its key-value cache
stays valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from dipaco.modules.device import autocast_for
from dipaco.modules.transformer import PathModel, token_losses
from dipaco.routing.tokens.tokenizer import Tokenizer

from .decoder import Decoder
from .options import SamplingSettings
from .sources import StateSource, assemble_path

# An unfinished character has at most three bytes, each of which may be decoded as one of these.
_MAX_BROKEN = 3
_BROKEN_CHARACTER = "\ufffd"


def generate_tokens(
    model: PathModel,
    prompt: Sequence[int],
    sampling: SamplingSettings,
    mixed_with: Sequence[PathModel] = (),
    ends: frozenset[int] = frozenset(),
    never: Sequence[int] = (),
) -> Iterator[int]:
    """Yield the tokens with which `model` continues `prompt`, until one of `ends`. None of `never`
    is chosen. Both are what the run's tokenizer says (`ends`, `never_chosen`).

    The context is at most the model's sequence length: when it is full, generation goes on from its
    newer half. Other paths may be mixed in.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    longest = model.config.sequence_length
    context = list(prompt)[-longest:]
    decoder, is_read = Decoder([model, *mixed_with]), False
    for _ in range(sampling.max_tokens):
        if is_read and decoder.length == longest:
            context, is_read = context[-(longest // 2) :], False
        logits = decoder.step(context[-1]) if is_read else decoder.read(context)
        is_read = True
        token = choose_token(logits, sampling, generator, never)
        if token in ends:
            return
        yield token
        context = [*context[-longest:], token]


@torch.no_grad()
def cheapest_path(
    source: StateSource, paths: Sequence[int], prompt: Sequence[int], device: torch.device
) -> int:
    """Return the path that predicts the end of `prompt` (as much as fits a sequence) with the
    fewest nats, the first of equal ones. One path is in memory at a time."""
    text = torch.tensor([prompt[-source.model.sequence_length :]], device=device)
    model: PathModel | None = None
    costs: list[float] = []
    for path in paths:
        model = assemble_path(source, path, model=model, device=device)
        with autocast_for(device):
            costs.append(float(token_losses(model, text).sum()))
    return paths[costs.index(min(costs))]


def choose_token(
    logits: torch.Tensor,
    sampling: SamplingSettings,
    generator: torch.Generator,
    never: Sequence[int] = (),
) -> int:
    """Choose the next token by its logits, fp32 [V] on the CPU, which are not changed.

    None of `never` is chosen.
    """
    if sampling.temperature == 0:
        # NumPy's calls are cheaper.
        likeliest = int(logits.numpy().argmax())
        if likeliest not in never:
            return likeliest
    logits = logits.index_fill(0, torch.tensor(never, dtype=torch.int64), -torch.inf)
    if sampling.temperature == 0:
        return int(logits.argmax())
    count = min(sampling.top_k or len(logits), len(logits))
    tokens = None  # all of them; sorting a vocabulary takes longer than a pass of a small model
    if count < len(logits) or sampling.top_p < 1:
        logits, tokens = logits.topk(count)
    # The likeliest logit is taken off first: a small temperature must not overflow.
    chances = torch.softmax((logits - logits.max()).double() / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        # Likeliest first: a token stays while those before it are less than `top_p` together.
        chances[chances.cumsum(0) - chances >= sampling.top_p] = 0.0
    chosen = torch.multinomial(chances, 1, generator=generator)
    return int(chosen if tokens is None else tokens[chosen])


class _TextOfTokens:
    """Text from tokens as they come in; a character is held back until all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        """Tokens up to the last one, all of which end within a character."""
        self._given = 0
        """Characters of these that were returned."""

    def add(self, token: int) -> str:
        """Return the text that is complete with this token, often of several tokens or of none."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        whole = len(text.rstrip(_BROKEN_CHARACTER))
        if whole == len(text):
            return self.rest()
        # Bytes that no further byte can complete are broken for good.
        settled = max(whole, len(text) - _MAX_BROKEN)
        piece = text[self._given : settled]
        self._given = max(self._given, settled)
        return piece

    def rest(self) -> str:
        """Return what is held back, however incomplete."""
        text = self._tokenizer.decode(self._pending)[self._given :] if self._pending else ""
        self._pending.clear()
        self._given = 0
        return text


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield text as tokens come in, holding back a character until all its bytes are there."""
    text = _TextOfTokens(tokenizer)
    for token in tokens:
        if piece := text.add(token):
            yield piece
    if piece := text.rest():
        yield piece
