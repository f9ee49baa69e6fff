"""Reading documents: local files or a data set of the Hugging Face Hub, always as a stream."""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dipaco.base.errors import CorpusError, DipacoError, nearest_name
from dipaco.base.files import at_home
from dipaco.protocol.config import Config

from .chats import CHAT_KEYS, FORMS_SAID, Chat, chat_content, is_chat, read_chat, says_nothing
from .corpus_files import identity_of, matched_files
from .hub import hub_rows
from .quoting import is_quoted, quoted
from .rows import Row, form_of, rows_of

Part = Literal["train", "validation"]

# A row may lack a field; if all of so many do, the field is not there.
_ROWS_WITHOUT_A_FIELD = 1000


@dataclass(frozen=True)
class Document:
    """One text of the corpus, and its label (a domain, a language) if the corpus has labels.

    Of a corpus of chats there is the `chat`, and the `place` where it stands.
    """

    text: str
    label: str | None = None
    chat: Chat | None = None
    place: str = field(default="", compare=False)

    @property
    def identity(self) -> bytes:
        """A hash by which documents are the same. The white space around a text does not count: it
        differs between forms of files."""
        chat = self.chat
        content = self.text.strip().encode() if chat is None else chat_content(chat)
        return hashlib.sha256(content).digest()[:16]

    @property
    def size(self) -> int:
        """Characters: how much work it is."""
        return len(self.text) + sum(len(message.content) for message in self.chat or ())


class CorpusConfig(Config):
    """Where the documents come from: `[data]` of a RUN.toml.

    Either files (`train`, and `validation` if there is a separate set) or a data set of the Hub
    (`hub`). Without a validation source, a part of the training documents is held out.
    """

    train: tuple[str, ...] = Field(
        (), description="Files, or patterns with `*` and `**`; one string or a list."
    )
    validation: tuple[str, ...] = Field(
        (), description="Files or patterns of held-out documents; only with `train`."
    )
    hub: str | None = Field(
        None,
        description="Data set of the Hub, such as `allenai/c4`, or a folder like one or of "
        "`save_to_disk`.",
    )
    hub_config: str | None = Field(None, description="Its configuration, such as `en`.")
    hub_revision: str | None = Field(
        None, description="Its commit or tag, so that the data cannot change during the run."
    )
    train_split: str = Field("train", description="Split of the Hub's data set to train on.")
    validation_split: str | None = Field(None, description="Split to validate on.")
    text_field: str = Field(
        "text", description="Field that holds the text. Rows may also be chats."
    )
    label_field: str | None = Field(
        None,
        description="Field by which results are reported, such as a domain. After the first "
        "1,000 labels, further ones count as none.",
    )
    txt_documents: Literal["file", "paragraph", "line"] = Field(
        "file", description="What counts as a document in a `.txt` file."
    )
    held_out_fraction: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="Share of the documents that is held out when there is no validation "
        "source, by a hash of the text.",
    )
    train_limit: int | None = Field(
        None, ge=1, description="Greatest number of training documents."
    )
    validation_limit: int | None = Field(
        None, ge=1, description="Greatest number of validation documents."
    )

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.train) == bool(self.hub):
            raise ValueError(
                "give either train = ['data/*.jsonl.gz'] (files) or hub = 'allenai/c4' (a data "
                "set of the Hub)"
            )
        if self.validation and self.hub:
            raise ValueError("validation names files; with hub write validation_split = '...'")
        if self.hub and self.validation_split and _overlap(self.train_split, self.validation_split):
            raise ValueError(
                f"validation_split = '{self.validation_split}' is in train_split = "
                f"'{self.train_split}'; name another one, or leave it out: then a part of the "
                f"training documents is held out"
            )
        return self

    @property
    def fields_read(self) -> frozenset[str]:
        """The fields of a row that matter."""
        return frozenset((self.text_field, self.label_field or "", *CHAT_KEYS))

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation source; if not, `is_held_out` chooses."""
        return bool(self.validation or (self.hub and self.validation_split))

    def relative_to(self, folder: Path) -> CorpusConfig:
        """Return this with files that are not absolute taken to be in `folder`; `hub` too, if
        there is a folder of that name."""

        def placed(patterns: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(
                str(folder / name)
                if (folder / name).exists()
                # Only what is written in the RUN.toml is a pattern.
                else os.path.join(glob.escape(str(folder)), name)
                for name in map(at_home, patterns)
            )

        files = {"train": placed(self.train), "validation": placed(self.validation)}
        if self.hub and (folder / at_home(self.hub)).is_dir():
            return self.model_copy(update={**files, "hub": str(folder / at_home(self.hub))})
        return self.model_copy(update=files)


def _overlap(train: str, validation: str) -> bool:
    """Tell whether two splits share documents; parts of one, as train[:90%], may not."""
    whole = train == validation or "[" not in train or "[" not in validation
    return whole and train.partition("[")[0] == validation.partition("[")[0]


def corpus_files(config: CorpusConfig, part: Part) -> list[Path]:
    """Return the files of a part, patterns resolved, in sorted order, each once.

    A file of `validation` is none of `train`, whatever its pattern says. Raises CorpusError if a
    name or pattern matches nothing, or a file that is not here.
    """
    if part == "validation":
        return matched_files(config.validation)
    held_out = set(files_in_both(config))
    found = [path for path in matched_files(config.train) if path not in held_out]
    if not found:
        raise CorpusError(
            f"every file of train is one of validation too; name others under train, or leave "
            f"validation out: then {config.held_out_fraction:.0%} of the documents are held out"
        )
    return found


def files_in_both(config: CorpusConfig) -> list[Path]:
    """Return the files that `train` names and `validation` as well. Raises CorpusError."""
    held_out = {identity_of(path) for path in matched_files(config.validation)}
    if not held_out:
        return []
    train = matched_files(config.train)
    return [path for path in train if identity_of(path) in held_out]


def iterate_documents(
    config: CorpusConfig,
    part: Part,
    *,
    chats: bool | None = None,
    rows_of_each: int | None = None,
) -> Iterator[Document]:
    """Yield the documents of a part that are not empty, always in the same order. Of each file the
    first `rows_of_each` rows are read, by default all.

    They are all chats or all texts: as `chats` says, else as the first one is. Raises CorpusError,
    naming the file, if one cannot be read, lacks the text field or is of the other kind, or if
    there is no document with text in the whole part.
    """
    limit = config.train_limit if part == "train" else config.validation_limit
    documents = 0
    for source in _sources(config, part):
        names: set[str] = set()
        number = 0
        try:
            for number, row in enumerate(itertools.islice(source.open(), rows_of_each), 1):
                if documents == limit:
                    return
                names.update(row)
                if number == _ROWS_WITHOUT_A_FIELD:
                    _check_fields(names, source.name, config, chats)
                if chats is None and row and not says_nothing(row, config.text_field):
                    chats = is_chat(row, config.text_field)
                document = _document(row, number, source.name, config, chats)
                if document is not None:
                    documents += 1
                    yield document
            if 0 < number < _ROWS_WITHOUT_A_FIELD:
                _check_fields(names, source.name, config, chats)
        except DipacoError:
            raise
        except Exception as error:  # the readers raise whatever their libraries raise
            raise CorpusError(f"{source.complaint}: {_first_line(error)}{source.remedy}") from error
    if not documents and chats:
        raise CorpusError(f"the {part} data hold no chat")
    if not documents:
        raise CorpusError(
            f"the {part} data hold no text: every '{config.text_field}' is empty; name another "
            f"field with text_field = '...' under [data]"
        )


def corpus_documents(
    config: CorpusConfig, left_out: Callable[[Document], None] = lambda document: None
) -> Iterator[tuple[Document, bool]]:
    """Yield all documents, first those to train on, each with whether it is held out.

    With a validation source, what is also there is not trained on: `left_out` is called with it.
    Raises CorpusError as `iterate_documents` does.
    """
    chats, held_out = None, set[bytes]()
    for document in iterate_documents(config, "train"):
        if chats is None:
            chats = document.chat is not None
            if config.has_validation:
                found = iterate_documents(config, "validation", chats=chats)
                held_out = {document.identity for document in found}
        if held_out and document.identity in held_out:
            left_out(document)
            continue
        yield (
            document,
            not config.has_validation and is_held_out(document, config.held_out_fraction),
        )
    if config.has_validation:
        for document in iterate_documents(config, "validation", chats=chats):
            yield document, True


def holds_chats(config: CorpusConfig) -> bool:
    """Tell whether the corpus is one of chats, by its first document. Raises CorpusError."""
    return next(iterate_documents(config, "train")).chat is not None


def is_held_out(document: Document, fraction: float) -> bool:
    """Tell whether a document is for validation when there is no validation source.

    Decided by its identity, so equal texts are never on both sides.
    """
    return int.from_bytes(document.identity[:8], "big") < fraction * 2.0**64


@dataclass(frozen=True)
class _Source:
    """A file or a split: what it is called, how its rows are read, and what to say before and
    after the reason if they cannot be read."""

    name: str
    open: Callable[[], Iterable[Row]]
    complaint: str
    remedy: str = ""


def _sources(config: CorpusConfig, part: Part) -> list[_Source]:
    """Return what a part consists of. Files are opened one by one so that an error can name its
    file, and so that files need not have the same fields."""
    if config.hub:
        return [_hub_source(config, part)]
    return [_file_source(path, config) for path in corpus_files(config, part)]


def _file_source(path: Path, config: CorpusConfig) -> _Source:
    def open_rows() -> Iterator[Row]:
        return rows_of(str(path), lambda: path.open("rb"), config.fields_read, config.txt_documents)

    return _Source(str(path), open_rows, f"{path} cannot be read")


def _hub_source(config: CorpusConfig, part: Part) -> _Source:
    split = config.train_split if part == "train" else config.validation_split
    name = f"{config.hub} ({split})"
    remedy = "; check hub, hub_config and the split under [data], and the connection"
    assert config.hub is not None
    assert split is not None
    open_rows = functools.partial(
        hub_rows, config.hub, config.hub_config, config.hub_revision, split, config.fields_read,
        config.txt_documents,
    )  # fmt: skip
    return _Source(name, open_rows, f"{name} cannot be read from the Hub", remedy)


def _document(
    row: Row, number: int, source: str, config: CorpusConfig, chats: bool | None
) -> Document | None:
    """Turn a row into a document, or None if it has no text."""
    if chats is not False and (not row or (chats is None and says_nothing(row, config.text_field))):
        return None
    place = f"{source}:{number}"
    if chats:
        chat = read_chat(row, config.text_field, place, config.label_field)
        return Document("", _label(row, source, config), chat=chat, place=place)
    if row and is_chat(row, config.text_field):
        raise CorpusError(f"{place} is a chat, and the documents before it are texts")
    is_plain = _is_plain_text(source)
    text = row.get("text" if is_plain else config.text_field)
    if text is None or (isinstance(text, str) and not text.strip()):
        return None
    if not isinstance(text, str):
        raise CorpusError(
            f"{source}, row {number}: '{config.text_field}' is a {type(text).__name__}, not a "
            f"text; name another field with text_field = '...' under [data]"
        )
    return Document(text, _label(row, source, config))


def _is_plain_text(source: str) -> bool:
    return form_of(source) == "text"


def _label(row: Row, source: str, config: CorpusConfig) -> str | None:
    if config.label_field is None or _is_plain_text(source):
        return None
    value = row.get(config.label_field)
    return None if value is None else str(value)


def _check_fields(
    names: Collection[str], source: str, config: CorpusConfig, chats: bool | None
) -> None:
    """Raise CorpusError if no row of a source had a field that is needed."""
    if _is_plain_text(source) or not names:
        return
    for option in (*([] if chats else ["text_field"]), "label_field"):
        field = getattr(config, option)
        if field is None or field in names:
            continue
        if not is_quoted():
            # A file may have what its owner wrote where others have names.
            raise CorpusError(
                f"{source} has no field '{field}'; name the one that holds the text with "
                f"--{option.replace('_', '-')}"
            )
        guess = nearest_name(field, names) or (next(iter(names)) if len(names) == 1 else "...")
        remedy = f"Write {option} = '{guess}' under [data] (or give --{option.replace('_', '-')})"
        if option == "text_field":
            remedy += f"; chats have {FORMS_SAID}"
        elif option == "label_field":
            remedy += ", or leave label_field out"
        raise CorpusError(
            f"{source} has no field '{field}'; it has {', '.join(sorted(names))}. {remedy}"
        )


def _first_line(error: BaseException) -> str:
    """Return the innermost reason of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    said = quoted(lines[0], len(lines[0])) if lines else ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
