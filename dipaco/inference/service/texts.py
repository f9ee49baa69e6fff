"""The text of one answer as its tokens come in: whole characters only, and up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from dipaco.inference.generate import TextOfTokens
from dipaco.protocol.config import BEGIN_TOKEN, END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN
from dipaco.routing.tokens.tokenizer import Tokenizer

_SPECIAL = {UNKNOWN_TOKEN: "<unk>", BEGIN_TOKEN: "<s>", END_TOKEN: "</s>", PAD_TOKEN: "<pad>"}


class AnswerText:
    """Text that can be sent: no half characters, and nothing that may begin a stop string.

    `stopped` tells that a stop string was met; the text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._characters = TextOfTokens(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        self.decoded = 0
        """Characters that are complete, sent or not, without what a stop string cut off."""

    def add(self, token: int) -> str:
        """Return what can be sent after this token."""
        return self._released(self._characters.add(token))

    def rest(self) -> str:
        """Return what is left when the answer ends."""
        sent = self._released(self._characters.rest())
        held, self._held = self._held, ""
        return sent if self.stopped else sent + held

    def _released(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        self.decoded += len(text)
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            cut = min(found)
            self.decoded -= len(self._held) - cut
            sent, self._held, self.stopped = self._held[:cut], "", True
            return sent
        kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        sent, self._held = (
            self._held[: len(self._held) - kept],
            self._held[len(self._held) - kept :],
        )
        return sent


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are a beginning of `stop`, at most."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TokenNames:
    """How tokens are written in log-probabilities: their text, or `token_id:228` where they have
    none of their own, as half a character has. Remembers what it worked out.

    Numbers are those of the tokenizer that exports have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = dict(_SPECIAL)

    def name(self, token: int) -> str:
        """Return the name of a token."""
        known = self._names.get(token)
        if known is None:
            text = self._tokenizer.decode([token])
            known = text if text and "\ufffd" not in text else self._number(token)
            self._names[token] = known
        return known

    def text(self, token: int) -> str:
        """Return the text that a token stands for by itself; none of its own is no text."""
        name = self.name(token)
        return "" if token in _SPECIAL or name == self._number(token) else name

    def _number(self, token: int) -> str:
        return f"token_id:{self._tokenizer.number_of_token(token)}"

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Return where the text of each token begins in the text of all; of what is a part of a
        character, where the character does."""
        text, found = AnswerText(self._tokenizer, ()), []
        for token in tokens:
            found.append(text.decoded)
            text.add(token)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(tokens)
