"""What the first documents show before a run is prepared: whether they can be read, and whether
there are enough."""

from __future__ import annotations

import itertools
from pathlib import Path

from dipaco.base.errors import CorpusError
from dipaco.bootstrap.first_look import rough_tokens
from dipaco.bootstrap.run_config import RunConfig, check_chats
from dipaco.routing.documents.corpus import Part, corpus_files, iterate_documents

# With fewer documents, a path learns little that its base does not know.
_DOCUMENTS_OF_A_PATH = 10
_ROWS_OF_A_FILE = 100


def look_at_data(config: RunConfig) -> bool:
    """Read the first rows of each file, so that faults are reported before hours of work. Return
    whether they are chats.

    A data set of the Hub is not fetched. Raises CorpusError, ConfigurationError as `check_chats`.
    """
    if _is_elsewhere(config):
        return False
    parts: tuple[Part, ...] = ("train", "validation") if config.data.has_validation else ("train",)
    chats: bool | None = None
    for part in parts:
        for document in iterate_documents(
            config.data, part, chats=chats, rows_of_each=_ROWS_OF_A_FILE
        ):
            chats = document.chat is not None
    if chats:
        check_chats(config)
    return bool(chats)


def tokens_in_sight(config: RunConfig, *, chats: bool) -> int | None:
    """Return about how many tokens the training documents have, from the first 100 million
    characters; None for a data set of the Hub. Raises CorpusError."""
    data = config.data
    if data.hub is not None:
        return None
    files = corpus_files(data, "train")
    return rough_tokens(files, None if chats else data.text_field, data.txt_documents)


def few_documents(config: RunConfig, paths: int) -> str:
    """Return a line if there are few training documents for so many paths, "" if there are enough.

    Raises CorpusError where `prepare` would have no document for some path.
    """
    if _is_elsewhere(config):
        return ""
    wanted = _DOCUMENTS_OF_A_PATH * paths
    count = sum(1 for _ in itertools.islice(iterate_documents(config.data, "train"), wanted))
    if count >= wanted:
        return ""
    said = f"{count:,} training documents for {paths:,} paths"
    remedy = "write fewer modules_per_level under [grid], or give more data"
    if count < paths:
        raise CorpusError(f"{said}: each path needs one at least; {remedy}")
    return f"Few texts: {said}, less than {_DOCUMENTS_OF_A_PATH} for each on average; {remedy}"


def _is_elsewhere(config: RunConfig) -> bool:
    hub = config.data.hub
    return hub is not None and not Path(hub).is_dir()
