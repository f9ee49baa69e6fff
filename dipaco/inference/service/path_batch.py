"""A path in memory, or several that are mixed, and the answers that it is giving: prompts are read
one by one, and then all answers get a token together."""

from __future__ import annotations

from collections import deque

import torch

from dipaco.inference.generate import choose_token
from dipaco.protocol.config import END_TOKEN

from .loader import Loaded
from .scores import TokenScore, scored
from .work import Answer, Began, Ended, Piece, PromptScores, ReadPrompt, ScoredToken


class PathBatch:
    """A path with its slots. Used by the model thread alone."""

    def __init__(self, loaded: Loaded, used_s: float) -> None:
        self.paths, self.states, self.decoder = loaded.paths, loaded.states, loaded.decoder
        self._longest = loaded.decoder.config.sequence_length
        self.used_s = used_s
        """When it was last given something to do."""
        self.has_begun = False
        """It has taken an answer since it came into memory."""
        self.is_draining = False
        """It takes no more answers: its room is wanted for another path."""
        self.again: deque[int] = deque()
        """Slots whose answers' context is to be read again."""
        self.failed: list[tuple[Answer, Exception]] = []
        """Answers that went wrong, for the engine to take away."""
        self._rows: list[Answer | None] = [None] * len(loaded.decoder.lengths)

    @property
    def is_idle(self) -> bool:
        """Whether no answer is at work."""
        return not any(self._rows)

    @property
    def has_room(self) -> bool:
        """Whether another answer can begin."""
        return None in self._rows and self.decoder.free_slots > 0

    def answers(self) -> list[Answer]:
        """Return the answers at work."""
        return [row for row in self._rows if row is not None]

    def begin(self, answer: Answer) -> int:
        """Read the context of an answer, choose its next token, and give it a slot if it goes on.

        Returns how many tokens were read.
        """
        self.has_begun = True
        work = answer.work
        first = not answer.started
        if first:
            answer.started = True
            if answer.index == 0:
                best = next((p for p in work.ranking if p in self.paths), self.paths[0])
                work.emit(Began(best, self.paths, self.states, work.routed))
        slot = self._rows.index(None)
        self._rows[slot] = answer
        return self._read_in(slot, answer, first)

    def answer_again(self) -> Answer:
        """Return the next answer of `again`."""
        answer = self._rows[self.again[0]]
        assert answer is not None
        return answer

    def read_again(self) -> int:
        """Read the context of the next answer of `again`, which has its slot, and choose its next
        token. Returns how many tokens were read."""
        answer = self.answer_again()
        return self._read_in(self.again.popleft(), answer, first=False)

    def _read_in(self, slot: int, answer: Answer, first: bool) -> int:
        goes_on = False
        try:
            logits, read = self._prompted(slot, answer, first)
            goes_on = self._choose(answer, logits) and self._goes_on(answer, slot)
        finally:
            if not goes_on:
                self._free(slot)
        return read

    def _prompted(self, slot: int, answer: Answer, first: bool) -> tuple[torch.Tensor, int]:
        """Put the context of an answer into a slot; return the logits of what comes next, fp32
        [V], and how many tokens were read."""
        work, shared = answer.work, answer.work.shared
        is_last = answer.index == work.answers - 1
        if is_last:
            work.shared = None  # They begin in order, and their request may last much longer.
        if first and shared is not None and shared.of is self.states:
            self.decoder.paste(slot, shared.stored)
            return shared.logits, 0
        logits, read = self._read(slot, answer, first), len(answer.context)
        if first and not is_last:
            work.shared = ReadPrompt(self.states, self.decoder.copy(slot, read), logits)
        return logits, read

    def _read(self, slot: int, answer: Answer, first: bool) -> torch.Tensor:
        """Read the context of an answer; return the logits of what comes next, fp32 [V]."""
        work, context = answer.work, answer.context
        if not (work.score_prompt and first and answer.index == 0):
            *_, logits = self.decoder.read(slot, context)
            return logits[-1]
        scores: list[TokenScore] = []
        for logits in self.decoder.read(slot, context, every=True):
            targets = context[len(scores) + 1 :][: len(logits)]
            scores += scored(logits[: len(targets)], targets, work.logprobs or 0)
        work.emit(PromptScores(scores))
        return logits[-1]

    def step(self) -> bool:
        """Give every answer a token; return whether all of them go on."""
        tokens = self.next_tokens()
        return bool(tokens) and self.take(self.decoder.step(tokens))

    def next_tokens(self) -> list[int | None]:
        """Return what the next step is for: the last token of the answer in each of the first
        slots, None where there is none. Empty if no answer waits for a step."""
        again = self.again
        tokens = [
            row.context[-1] if row is not None and slot not in again else None
            for slot, row in enumerate(self._rows)
        ]
        # Answers take the first free slots, so few answers make a narrow step.
        while tokens and tokens[-1] is None:
            tokens.pop()
        return tokens

    def take(self, logits: torch.Tensor) -> bool:
        """Choose the next token of each answer, by the logits of a step for `next_tokens`. Return
        whether all of them go on, and none is to be read again."""
        waiting, all_go_on = set(self.again), True
        for slot, row in enumerate(self._rows[: logits.shape[0]]):
            if row is None or slot in waiting:
                continue
            try:
                goes_on = self._choose(row, logits[slot]) and self._goes_on(row, slot)
            except Exception as error:  # an answer that fails must not take its neighbours along
                self.failed.append((row, error))
                goes_on = False
            if not goes_on:
                self._free(slot)
                all_go_on = False
        return all_go_on and not self.again

    def drop(self, answer: Answer) -> None:
        """Give up an answer that nobody wants any more."""
        if answer in self._rows:
            self._free(self._rows.index(answer))

    def _free(self, slot: int) -> None:
        self._rows[slot] = None
        if slot in self.again:
            self.again.remove(slot)
        self.decoder.free(slot)

    def _choose(self, answer: Answer, logits: torch.Tensor) -> bool:
        """Choose a token and send what can be sent; return whether the answer goes on."""
        work, most = answer.work, answer.work.sampling.max_tokens
        if most == 0:
            return self._end(answer, "length")
        token = choose_token(logits, work.sampling, answer.generator)
        score = None
        if work.logprobs is not None:
            score = scored(logits[None], [token], work.logprobs)[0]
            answer.unsent.append(ScoredToken(score, answer.text.decoded))
        if token == END_TOKEN:
            return self._end(answer, "stop")
        answer.tokens += 1
        self._send(answer, answer.text.add(token))
        if answer.text.stopped:
            return self._end(answer, "stop")
        if answer.tokens == most:
            return self._end(answer, "length")
        answer.context = [*answer.context[-self._longest :], token]
        return True

    def _goes_on(self, answer: Answer, slot: int) -> bool:
        """Return whether the answer goes on: in its slot, whose context is perhaps to be read
        again."""
        if self.decoder.lengths[slot] == self._longest:
            if not answer.work.slide:
                return self._end(answer, "length")
            answer.context = answer.context[-(self._longest // 2) :]
            self.again.append(slot)
        return True

    def _end(self, answer: Answer, reason: str) -> bool:
        """Send the rest of an answer. Returns that it does not go on."""
        self._send(answer, answer.text.rest(), ends=True)
        answer.work.open_answers -= 1
        answer.work.emit(Ended(answer.index, reason, answer.tokens))
        return False

    def _send(self, answer: Answer, text: str, *, ends: bool = False) -> None:
        """Send text, and the scores of the tokens that it consists of."""
        answer.sent += len(text)
        tokens: list[ScoredToken] = []
        if answer.unsent:
            everything = ends and not answer.text.stopped
            count = sum(everything or token.offset < answer.sent for token in answer.unsent)
            tokens, answer.unsent = answer.unsent[:count], answer.unsent[count:]
        if text or tokens:
            answer.work.emit(Piece(answer.index, text, self.paths, tokens))
