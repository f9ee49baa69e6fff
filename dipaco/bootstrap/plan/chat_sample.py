"""One chat as it will be trained on, for the operator to read before hours of work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dipaco.base.errors import CorpusError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.bootstrap.run_config import RunConfig
from dipaco.routing.documents.corpus import iterate_documents
from dipaco.routing.tokens.chat_tokens import ChatEncoder, UnusableChatError
from dipaco.routing.tokens.tokenizer import Tokenizer
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer

_CHATS = 200
_MOST_CHARACTERS = 3000


def chat_as_trained(config: RunConfig) -> list[str]:
    """Return lines that show the first chat with what is learned of it, and say where the template
    asks for an answer otherwise than it shows one; none without a base to look with.

    Raises ConfigurationError without a chat template, CorpusError if nothing is to be learned in
    the first chats.
    """
    if config.base.checkpoint is None:
        return []
    given = config.tokenizer.model_file or ImportedBase(config.base.checkpoint).tokenizer
    assert given is not None  # a base that is imported brings one
    tokenizer = read_tokenizer(given)
    encoder = ChatEncoder(tokenizer, config.router.prefix_tokens)
    reason = ""
    try:
        for document in itertools.islice(iterate_documents(config.data, "train"), _CHATS):
            assert document.chat is not None
            try:
                tokens = encoder.encode(document.chat).tokens
            except UnusableChatError as error:
                reason = reason or f"{document.place}: {error}"
                continue
            text = "".join(_marked(tokenizer, tokens.tolist()))
            return [
                f"The chat {document.place} as it is trained; » and « enclose what is learned:",
                text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ...",
                *_said_otherwise(encoder.asked_otherwise(document.chat)),
            ]
    finally:
        encoder.close()
    raise CorpusError(f"the first chats have no tokens to learn from; {reason}")


def _marked(tokenizer: Tokenizer, tokens: list[int]) -> Iterator[str]:
    for is_learned, group in itertools.groupby(tokens, lambda token: token >= 0):
        text = tokenizer.decode_with_names([t if is_learned else ~t for t in group])
        yield f"»{text}«" if is_learned else text


def _said_otherwise(found: tuple[str, str] | None) -> list[str]:
    if found is None:
        return []
    asked, shown = found
    return [
        f"The template asks for an answer with {asked!r}, and trains it after {shown!r}: an answer "
        f"may begin otherwise than it was trained."
    ]
