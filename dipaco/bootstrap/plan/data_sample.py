"""What the first documents tell before a run is prepared: whether they can be read, and of chats
how much is learned."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from dipaco.base.errors import CorpusError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.bootstrap.run_config import RunConfig, check_chats
from dipaco.routing.documents.corpus import Part, iterate_documents
from dipaco.routing.tokens.chat_tokens import ChatEncoder, UnusableChatError
from dipaco.routing.tokens.tokenizer import Tokenizer

_CHATS = 200
# With fewer, a path learns little that its base does not know.
DOCUMENTS_OF_A_PATH = 10


@dataclass(frozen=True)
class ChatSample:
    """The first chats of a corpus as tokens."""

    chats: int
    left_out: int
    """Chats in which nothing is to be learned."""
    tokens: int
    learned_tokens: int

    def line(self) -> str:
        """Return the sentence that `plan` prints about the chats."""
        left_out = f", {self.left_out:,} of them left out" if self.left_out else ""
        return (
            f"Of the {self.tokens:,} tokens of the first {self.chats:,} chats{left_out}, "
            f"{self.learned_tokens:,} are learned ({self.learned_tokens / self.tokens:.0%}): what "
            f"the assistant says; the others are only read"
        )


def look_at_data(config: RunConfig) -> bool:
    """Read the first document of each part, so that a wrong name is told before hours of work.
    Tell whether they are chats.

    A data set of the Hub is not fetched. Raises CorpusError, ConfigurationError as `check_chats`.
    """
    if _is_elsewhere(config):
        return False
    parts: tuple[Part, ...] = ("train", "validation") if config.data.has_validation else ("train",)
    firsts = [next(iterate_documents(config.data, part)) for part in parts]
    chats = firsts[0].chat is not None
    if chats:
        check_chats(config)
    return chats


def few_documents(config: RunConfig, paths: int) -> str:
    """Return a line if there are few training documents for so many paths, "" if there are enough.

    Raises CorpusError where `prepare` would have no document for some path.
    """
    if _is_elsewhere(config):
        return ""
    wanted = DOCUMENTS_OF_A_PATH * paths
    count = sum(1 for _ in itertools.islice(iterate_documents(config.data, "train"), wanted))
    if count >= wanted:
        return ""
    said = f"{count:,} training documents for {paths:,} paths"
    remedy = "write fewer modules_per_level under [grid], or give more data"
    if count < paths:
        raise CorpusError(f"{said}: each path needs one at least; {remedy}")
    return f"Few texts: {said}, less than {DOCUMENTS_OF_A_PATH} for each on average; {remedy}"


def _is_elsewhere(config: RunConfig) -> bool:
    hub = config.data.hub
    return hub is not None and not Path(hub).is_dir()


def look_at_chats(config: RunConfig) -> ChatSample | None:
    """Look at the first chats of `[data]`; None if it holds texts, is on the Hub, or if there is no
    base to look with.

    Raises ConfigurationError without a chat template, CorpusError if nothing is to be learned.
    """
    if config.base.checkpoint is None or _is_elsewhere(config):
        return None
    documents = list(itertools.islice(iterate_documents(config.data, "train"), _CHATS))
    if documents[0].chat is None:
        return None
    given = config.tokenizer.model_file
    tokenizer = given or ImportedBase(config.base.checkpoint).tokenizer
    assert tokenizer is not None  # a base that is imported brings one
    encoder = ChatEncoder(Tokenizer(tokenizer), config.router.prefix_tokens)
    tokens = learned = 0
    reasons = []
    try:
        for document in documents:
            assert document.chat is not None  # all are chats if the first one is
            try:
                found = encoder.encode(document.chat).tokens
            except UnusableChatError as error:
                reasons.append(f"{document.place}: {error}")
                continue
            tokens, learned = tokens + len(found), learned + int((found >= 0).sum())
    finally:
        encoder.close()
    if not learned:
        raise CorpusError(f"the first chats have no tokens to learn from; {reasons[0]}")
    return ChatSample(len(documents), len(reasons), tokens, learned)
