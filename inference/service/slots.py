"""Continuous batching: texts of one path, at different lengths, that get a token together.

A step has all positions of the context, and as many slots as are in use, but only numbers of them
that were seen to compute a row alike (`steady_widths`). So what a row computes does not depend on
the rows beside it, not in the last bit, and a seed gives the same text in any company.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dipaco.modules.config import END_TOKEN, ModelConfig
from dipaco.modules.transformer import KeyValueCache, PathModel

# Tokens of the text with which steps of several widths are compared.
_TRIED_TOKENS = 40
# Positions whose logits are computed at once when a prompt is scored.
_SCORED_AT_ONCE = 128


class SlotCache(KeyValueCache):
    """Keys and values of `slots` texts, [slots, heads, context, D] for each block, each text at a
    position of its own. Zero at first: what is masked is multiplied by zero, and must be finite."""

    def __init__(self, model: ModelConfig, slots: int, device: torch.device) -> None:
        super().__init__(model.block_count)
        shape = (slots, model.kv_heads, model.sequence_length, model.width_of_head)
        self._keys = [torch.zeros(shape, device=device) for _ in range(model.block_count)]
        self._values = [torch.zeros(shape, device=device) for _ in range(model.block_count)]
        self._rows = torch.arange(slots, device=device)
        self._places = torch.arange(model.sequence_length, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        """Tokens that are stored of each text; 0 in a free slot."""
        self._mask: torch.Tensor | None = None
        self.width = slots
        """The next step is of so many slots, the first ones."""

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the position of the next token of each text, [width, 1]."""
        assert length == 1, "a step is one token of each text"
        self._mask = None
        return self.lengths[: self.width, None]

    def mask(self, length: int, device: torch.device) -> torch.Tensor:
        """Return what the next token of each text sees, bool [width, 1, 1, context]."""
        if self._mask is None:  # the first block of a step
            seen = self._places[None, :] <= self.lengths[: self.width, None]
            self._mask = seen[:, None, None, :]
        return self._mask

    def extend(
        self, block: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [width, heads, 1, D] for one block and return all that is stored of it."""
        width = self.width
        rows, places = self._rows[:width], self.lengths[:width]
        for stored, new in ((self._keys[block], keys), (self._values[block], values)):
            stored[rows, :, places] = new[:, :, 0]
        return self._keys[block][:width], self._values[block][:width]

    def advance(self, tokens: int) -> None:
        """Count a token in every slot that is in use."""
        self.lengths[: self.width] += (self.lengths[: self.width] > 0) * tokens

    def fill(self, slot: int, cache: KeyValueCache) -> None:
        """Put a text that was read on its own into a slot."""
        for block in range(len(self._keys)):
            keys, values = cache.stored(block)
            self._keys[block][slot, :, : cache.length] = keys[0]
            self._values[block][slot, :, : cache.length] = values[0]
        self.lengths[slot] = cache.length

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.lengths[slot] = 0

    def clear(self) -> None:
        """Make everything as it was at first."""
        for tensor in (*self._keys, *self._values, self.lengths):
            tensor.zero_()


@torch.no_grad()
def steady_widths(model: PathModel, cache: SlotCache) -> tuple[int, ...]:
    """Return the widths, rising, at which a row of a step of `model` has the same bits as in a step
    of all slots, in whatever slot it is. The widest are all slots. Where the bits depend on the
    slot even in a step of all of them, every width is as good.

    In which order numbers are added up depends on the shapes alone, but by a rule that nobody
    promises: so it is tried, with one text in all slots. The `cache` must be empty, and is again
    when this returns.
    """
    slots, context = len(cache.lengths), model.config.sequence_length
    stored = min(context - 1, _TRIED_TOKENS)
    draw = torch.Generator().manual_seed(0)
    text = KeyValueCache(model.config.block_count)
    shape = (1, model.config.kv_heads, stored, model.config.width_of_head)
    device = cache.lengths.device
    for block in range(model.config.block_count):
        keys, values = torch.randn(2, *shape, generator=draw).to(device)
        text.extend(block, keys, values)
    text.advance(stored)
    token = torch.full((slots, 1), END_TOKEN, device=device)

    def step(width: int) -> torch.Tensor:
        for slot in range(slots):
            cache.fill(slot, text)
        cache.width = width
        return model(token[:width], cache)[:, 0]

    whole = step(slots)
    narrower = [1 << bit for bit in range(slots.bit_length()) if 1 << bit < slots]
    if torch.equal(whole, whole[:1].expand_as(whole)):
        narrower = [w for w in narrower if torch.equal(step(w), whole[:1].expand(w, -1))]
    # Else a row depends on its slot, as with several threads: there are no bits to keep.
    cache.clear()
    return (*narrower, slots)


def cache_bytes(model: ModelConfig, slots: int) -> int:
    """Return what the `SlotCache` of a path takes."""
    numbers = slots * model.kv_heads * model.sequence_length * model.width_of_head
    return 2 * 4 * model.block_count * numbers


class Prefill:
    """A text that a path has read: its cache, and the logits of the next token, fp32 [V].

    With `score`, also the log-probabilities of the text's own tokens; see `scores`.
    """

    @torch.no_grad()
    def __init__(self, model: PathModel, tokens: Sequence[int], *, score: int | None) -> None:
        device = next(model.parameters()).device
        self.cache = model.new_cache()
        row = torch.tensor([list(tokens)], device=device)
        hidden = model.hidden_states(row, self.cache)[0]
        self.logits = model.logits(hidden[-1:])[0].float().cpu()
        self.scores: list[TokenScore] = []
        if score is not None:
            for start in range(0, len(tokens) - 1, _SCORED_AT_ONCE):
                targets = list(tokens[start + 1 : start + 1 + _SCORED_AT_ONCE])
                logits = model.logits(hidden[start : start + len(targets)]).float().cpu()
                self.scores += scored(logits, targets, score)


class TokenScore:
    """A token of a text with its log-probability, and the likeliest tokens in its place."""

    __slots__ = ("logprob", "token", "top")

    def __init__(self, token: int, logprob: float, top: list[tuple[int, float]]) -> None:
        self.token, self.logprob, self.top = token, logprob, top


def scored(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Return the scores of tokens by logits [T, V], with the `top` likeliest of each place.

    Of the model itself: neither temperature nor what is never chosen changes them.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(list(tokens))[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return [
        TokenScore(token, logprob, list(zip(places, values, strict=True)))
        for token, logprob, places, values in zip(
            tokens, own, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
