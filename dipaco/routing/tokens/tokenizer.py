"""What turns the texts of a run into tokens and back, whatever file it was read from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Tokenizer(ABC):
    """Text to tokens and back; `dipaco.routing.tokens.tokenizer_kinds` reads one."""

    vocabulary_size: int
    chat_template: str | None
    """The Jinja template of the checkpoint that the tokenizer came with, if it had one. Anybody who
    prepares a run can write it: only a sandbox may fill it in."""
    begin: tuple[int, ...]
    """What stands in front of every text; nothing where the checkpoint that the tokenizer came with
    puts nothing there."""
    end: int
    """What ends a text."""
    ends: frozenset[int]
    """What ends an answer: the end of a text, and whatever else the checkpoint says."""
    never_chosen: tuple[int, ...]
    """Special tokens that no text has, and that end nothing."""
    special_names: tuple[str | None, str | None, str | None, str | None]
    """Names of unknown, begin, end and padding, as a chat template writes them."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    @abstractmethod
    def control_names(self) -> list[str]:
        """Return the names of all special tokens."""

    @abstractmethod
    def writable(self, text: str) -> str:
        """Return the text without the characters that the tokenizer lacks."""

    @abstractmethod
    def encode_each(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Return the tokens of each text, without begin and end; names of special tokens are text,
        and what the tokenizer lacks is left out."""

    @abstractmethod
    def encode_marked(self, text: str, start: int = 0, end: int | None = None) -> list[int]:
        """Return the tokens of a part of a text, by default of all of it, in which names of special
        tokens, as a chat template writes them, are these tokens. What strangers wrote is `shielded`
        before a template is filled."""

    @abstractmethod
    def shielded(self, text: str) -> str:
        """Return a text whose names of special tokens stay text for `encode_marked`."""

    @abstractmethod
    def _decoded(self, tokens: Sequence[int], *, names: bool) -> str:
        """Return the text of tokens; special ones vanish, unless their `names` are wanted."""

    def unwritable_characters(self, text: str) -> int:
        """Return how many characters of a text its tokens leave out: a base's tokenizer may lack
        some control characters."""
        return len(text) - len(self.writable(text))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without begin and end. Names of special tokens are text."""
        return self.encode_each([text], 1)[0]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Begin, end and padding vanish; broken UTF-8 becomes U+FFFD."""
        # A text comes token by token, and few calls cost more than remembering.
        if len(tokens) == 1:
            token = int(tokens[0])
            if token not in self._texts:
                self._texts[token] = self._decoded([token], names=False)
            return self._texts[token]
        return self._decoded([int(token) for token in tokens], names=False)

    def decode_with_names(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, of special ones their names, for people to read."""
        return self._decoded([int(token) for token in tokens], names=True)

    def beginning(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on, with what stands in front of it. Where that is
        nothing, an empty text has the end of the one before it."""
        return [*self.begin, *self.encode(text)] or [self.end]

    def document_tokens(self, text: str) -> list[int]:
        """Return what a document is in a shard: what stands in front, its tokens, the end."""
        return self.tokens_of_documents([text])[0]

    def tokens_of_documents(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Return the `document_tokens` of many texts, computed by several threads.

        Called where a corpus is tokenised; the texts should be thousands, for threads to pay.
        """
        encoded = self.encode_each(texts, threads)
        return [[*self.begin, *tokens, self.end] for tokens in encoded]


def clean(text: str) -> str:
    """Return the text as UTF-8 can have it."""
    return text.encode("utf-8", "replace").decode("utf-8")
