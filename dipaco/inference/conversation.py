"""A chat with a model, one message after the other, for `dipaco-generate --chat`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from dipaco.base.errors import ConfigurationError
from dipaco.routing.documents.chat_template import ChatTemplate, TemplateError
from dipaco.routing.tokens.chat_tokens import question_tokens, routed_tokens, special_names
from dipaco.routing.tokens.tokenizer import Tokenizer


class Conversation:
    """What was said so far. Close it after use.

    Raises ConfigurationError for a model without a usable chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise ConfigurationError(
                "this model has no chat template, it continues texts; give the text without --chat"
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.chat_template)
        self._messages: list[dict[str, str]] = []

    def ask(self, message: str) -> list[int]:
        """Add a message of the user; return the tokens of the chat up to where its answer begins.

        Raises ConfigurationError if the template refuses it.
        """
        self._messages.append({"role": "user", "content": message})
        asked = [
            {**one, "content": self._tokenizer.shielded(one["content"])} for one in self._messages
        ]
        try:
            text = self._template.render(asked, special_names(self._tokenizer))
        except TemplateError as error:
            raise ConfigurationError(f"the chat template refuses this message: {error}") from None
        return question_tokens(self._tokenizer, text)

    def routed_by(self) -> list[int]:
        """Return the tokens that the chat is routed by, once something was asked."""
        return routed_tokens(self._tokenizer, self._messages)

    def answered(self, text: str) -> None:
        """Add what the model has said."""
        self._messages.append({"role": "assistant", "content": text})

    def close(self) -> None:
        """End the process that fills in the template."""
        self._template.close()


def typed_messages() -> Iterator[str]:
    """Yield each line that somebody types, or that standard input has, until Ctrl+D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (the arrow keys of input())
    if reconfigure := getattr(sys.stdin, "reconfigure", None):
        reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        if line.strip():
            yield line
