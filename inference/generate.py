"""Generating text: the prompt is routed once, and only its path runs.

So the key-value cache stays valid; with rerouting every W tokens (`PathChooser`) it is computed
again whenever the path changes (section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from dipaco.modules.config import BEGIN_TOKEN, END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN
from dipaco.modules.errors import DipacoError
from dipaco.modules.transformer import PathModel
from dipaco.routing.tokenizer import Tokenizer

from .options import Sampling
from .rerouter import Rerouter
from .sources import StateSource, assemble_path

# A character has at most four bytes; more pending tokens than that are no character.
_GREATEST_PENDING_TOKENS = 4
_BROKEN_CHARACTER = "\ufffd"


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt: the beginning of a document."""
    return [BEGIN_TOKEN, *tokenizer.encode(prompt)]


@torch.no_grad()
def generate_tokens(
    model: PathModel,
    prompt: Sequence[int],
    sampling: Sampling,
    reroute: Callable[[Sequence[int]], bool] | None = None,
) -> Iterator[int]:
    """Yield the tokens with which `model` continues `prompt`, until the document ends.

    The context is at most the run's sequence length: when it is full, generation goes on from its
    newer half. `reroute` is called with the context before every token and tells whether it has
    put another path into `model`: then the cache is computed again. Called by `dipaco-generate`.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    device = next(model.parameters()).device
    longest = model.config.sequence_length
    context = list(prompt)[-longest:]
    cache, unseen = model.new_cache(), context
    for _ in range(sampling.max_tokens):
        if cache.length + len(unseen) > longest:
            context = context[-(longest // 2) :]
            cache, unseen = model.new_cache(), context
        if reroute is not None and reroute(context):
            cache, unseen = model.new_cache(), context
        logits = model(torch.tensor([unseen], device=device), cache)[0, -1]
        token = choose_token(logits.float().cpu(), sampling, generator)
        if token == END_TOKEN:
            return
        yield token
        context = [*context[-longest:], token]
        unseen = [token]


def choose_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose the next token by its logits, fp32 [V] on the CPU, which are not changed.

    Pieces that are never part of a text (unknown, begin, padding) are never chosen.
    """
    logits = logits.clone()
    logits[[UNKNOWN_TOKEN, BEGIN_TOKEN, PAD_TOKEN]] = -torch.inf
    if sampling.temperature == 0:
        return int(logits.argmax())
    count = min(sampling.top_k or len(logits), len(logits))
    values, tokens = logits.topk(count)
    # The likeliest logit is taken off first: a small temperature must not overflow.
    chances = torch.softmax((values - values[0]).double() / sampling.temperature, dim=0)
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield text as tokens come in, holding back a character until all its bytes are there."""
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith(_BROKEN_CHARACTER) and len(pending) < _GREATEST_PENDING_TOKENS:
            continue
        pending = []
        if text:
            yield text
    if pending:
        yield tokenizer.decode(pending)


class PathChooser:
    """Decides at the end of the prompt, but not before the tokens that the run's router sees, and
    then after every `window` tokens.

    `path` is the path in use, which begins as the rerouter's choice for the prompt. `say` gets a
    line for each change. Called by `dipaco-generate`.
    """

    def __init__(
        self,
        source: StateSource,
        rerouter: Rerouter,
        routed: int,
        prompt: Sequence[int],
        window: int,
        say: Callable[[str], None],
    ) -> None:
        self.path = routed
        self._source = source
        self._rerouter = rerouter
        self._routed = routed
        self._window = window
        self._say = say
        self._allowed = np.ones(rerouter.path_count, dtype=bool)
        self._tokens = len(prompt)
        self._next = max(self._tokens, source.plan.routing.prefix_tokens)
        if self._tokens == self._next:
            self.path = self._choice(prompt)
            self._next += window

    def of(self, model: PathModel) -> Callable[[Sequence[int]], bool]:
        """Return what `generate_tokens` asks before every token about `model`, which must hold the
        present path: whether it was given another one."""
        self._tokens -= 1  # the first question is about the prompt

        def reroute(context: Sequence[int]) -> bool:
            self._tokens += 1
            if self._tokens < self._next:
                return False
            self._next = self._tokens + self._window
            return self._move(model, self._choice(context))

        return reroute

    def _choice(self, context: Sequence[int]) -> int:
        return self._rerouter.next_path(
            context, self._routed, self.path, self._window, self._allowed
        )

    def _move(self, model: PathModel, path: int) -> bool:
        """Put a path into the model if it is another one and can be fetched."""
        if path == self.path:
            return False
        try:
            assemble_path(self._source, path, model=model)
        except DipacoError as error:
            self._allowed[path] = False
            self._say(f"token {self._tokens}: staying on path {self.path}; {error}")
            return False
        self._say(f"token {self._tokens}: path {self.path} -> path {path}")
        self.path = path
        return True
