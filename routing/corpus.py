"""Reading documents: local files or a data set of the Hugging Face Hub, always as a stream."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import fsspec
import numpy as np
from pydantic import Field, field_validator, model_validator

from dipaco.base.errors import CorpusError, nearest_name
from dipaco.base.files import is_utf16
from dipaco.modules.config import Config

from .chats import Chat, chat_content, is_chat, read_chat

Part = Literal["train", "validation"]

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_COMPRESSIONS = {".gz", ".zst", ".bz2", ".xz"}


@dataclass(frozen=True)
class Document:
    """One text of the corpus, and its label (a domain, a language) if the corpus has labels.

    Of a corpus that is tokenised already there are the `tokens` in place of the text, int [N]; of
    a corpus of chats the `chat`, and the `place` where it stands.
    """

    text: str
    label: str | None = None
    tokens: np.ndarray | None = field(default=None, compare=False)
    chat: Chat | None = None
    place: str = field(default="", compare=False)

    @property
    def content(self) -> bytes:
        """What is hashed where a document is chosen by its content."""
        if self.tokens is not None:
            return self.tokens.astype("<u4").tobytes()
        if self.chat is not None:
            return chat_content(self.chat)
        return self.text.encode("utf-8", "replace")

    @property
    def size(self) -> int:
        """Characters, or tokens: how much work it is."""
        if self.chat is not None:
            return sum(len(message.content) for message in self.chat)
        return len(self.text) if self.tokens is None else len(self.tokens)


class CorpusConfig(Config):
    """Where the documents come from: `[data]` of a RUN.toml.

    Either files (`train`, and `validation` if there is a separate set) or a data set of the Hub
    (`hub`). Without a validation source, a part of the training documents is held out.
    """

    train: tuple[str, ...] = Field((), description="Files or patterns with * and **.")
    validation: tuple[str, ...] = Field((), description="Files or patterns of held-out documents.")
    hub: str | None = Field(
        None, description="Data set of the Hub, such as allenai/c4, or a folder that holds one."
    )
    hub_config: str | None = Field(None, description="Its configuration, such as en.")
    hub_revision: str | None = Field(None, description="Commit or tag, so that it cannot change.")
    train_split: str = Field("train", description="Split of the Hub's data set to train on.")
    validation_split: str | None = Field(None, description="Split to validate on, if it has one.")
    text_field: str = Field("text", description="The field that holds the text.")
    label_field: str | None = Field(None, description="A field to report results by.")
    tokens_field: str | None = Field(
        None, description="The field that holds the tokens, of a corpus that is tokenised already."
    )
    tokenizer_sha256: str | None = Field(
        None, description="SHA-256 of the tokenizer that made them, which the run must have."
    )
    txt_documents: Literal["file", "paragraph", "line"] = Field(
        "file", description="What a document is in a .txt file."
    )
    held_out_fraction: float = Field(
        0.01, gt=0, lt=1, description="Part held out when there is no validation source."
    )
    train_limit: int | None = Field(None, ge=1, description="Training documents, at most.")
    validation_limit: int | None = Field(None, ge=1, description="Validation documents, at most.")

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.train) == bool(self.hub):
            raise ValueError(
                "give either train = ['data/*.jsonl.gz'] (files) or hub = 'allenai/c4' (a data "
                "set of the Hub)"
            )
        if self.is_tokenised != (self.tokenizer_sha256 is not None):
            raise ValueError(
                "tokens_field and tokenizer_sha256 belong together: the field of the tokens, and "
                "the SHA-256 of the tokenizer that made them"
            )
        if self.validation and self.hub:
            raise ValueError("validation names files; with hub write validation_split = '...'")
        return self

    @property
    def is_tokenised(self) -> bool:
        """Whether there are tokens in place of texts."""
        return self.tokens_field is not None

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
                for name in patterns
            )

        files = {"train": placed(self.train), "validation": placed(self.validation)}
        if self.hub and (folder / self.hub).is_dir():
            return self.model_copy(update={**files, "hub": str(folder / self.hub)})
        return self.model_copy(update=files)


def corpus_files(config: CorpusConfig, part: Part) -> list[Path]:
    """Return the files of a part, patterns resolved, in sorted order, each once.

    Raises CorpusError if a name or pattern matches nothing.
    """
    found: dict[Path, None] = {}
    for pattern in config.train if part == "train" else config.validation:
        matches = [Path(pattern)] if Path(pattern).is_file() else _matches(pattern)
        if not matches:
            if Path(pattern).is_dir():
                raise CorpusError(
                    f"{part} = '{pattern}' is a folder; name the files in it, for example "
                    f"'{pattern.rstrip('/')}/**/*.jsonl.gz'"
                )
            folder = Path(pattern).parent
            present = sorted(p.name for p in folder.glob("*") if p.is_file())[:8]
            holds = f"{folder} holds {', '.join(present)}" if present else f"{folder} has no files"
            raise CorpusError(
                f"no file matches {part} = '{pattern}'; {holds}. Relative names are looked up "
                f"beside the RUN.toml"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def _matches(pattern: str) -> list[Path]:
    return [
        path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file()
    ]


def iterate_documents(
    config: CorpusConfig, part: Part, *, chats: bool | None = None
) -> Iterator[Document]:
    """Yield the documents of a part that are not empty, always in the same order.

    They are all chats or all texts: as `chats` says, else as the first one is. Raises CorpusError,
    naming the file, if one cannot be read, lacks the text field or is of the other kind, or if
    there is no document with text in the whole part.
    """
    limit = config.train_limit if part == "train" else config.validation_limit
    documents = 0
    for source in _sources(config, part):
        try:
            for number, row in enumerate(source.open(), 1):
                if documents == limit:
                    return
                if chats is None and row:
                    chats = _is_chat(row, config)
                document = _document(row, number, source.name, config, chats)
                if document is not None:
                    documents += 1
                    yield document
        except CorpusError:
            raise
        except Exception as error:  # datasets raises whatever its readers raise
            raise CorpusError(f"{source.complaint}: {_first_line(error)}{source.remedy}") from error
    if not documents and chats:
        raise CorpusError(f"the {part} data hold no chat")
    if not documents:
        raise CorpusError(
            f"the {part} data hold no text: every '{config.tokens_field or config.text_field}' is "
            f"empty; name another field with text_field = '...' under [data]"
        )


def corpus_documents(config: CorpusConfig) -> Iterator[tuple[Document, bool]]:
    """Yield all documents, first those to train on, each with whether it is held out.

    Raises CorpusError as `iterate_documents` does.
    """
    chats = None
    for document in iterate_documents(config, "train"):
        chats = document.chat is not None
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

    Decided by a hash of its text, so equal texts are never on both sides.
    """
    digest = hashlib.sha256(document.content).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


@dataclass(frozen=True)
class _Source:
    """A file or a split: what it is called, how its rows are read, and what to say before and
    after the reason if they cannot be read."""

    name: str
    open: Callable[[], Iterable[dict[str, Any]]]
    complaint: str
    remedy: str = ""


def _sources(config: CorpusConfig, part: Part) -> list[_Source]:
    """Return what a part consists of. Files are opened one by one so that an error can name its
    file, and so that files need not have the same fields."""
    if config.hub:
        return [_hub_source(config, part)]
    return [_file_source(path, config) for path in corpus_files(config, part)]


def _file_source(path: Path, config: CorpusConfig) -> _Source:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSIONS]
    builder = _BUILDERS.get(suffixes[-1] if suffixes else "")

    def open_rows() -> Iterable[dict[str, Any]]:
        if path.stat().st_size == 0:
            raise CorpusError(f"{path} is empty; leave it out or make it again")
        with path.open("rb") as file:
            if is_utf16(file.read(2)):
                raise CorpusError(f"{path} is UTF-16; save it as UTF-8")
        # Slow to import, and only preparation and evaluation read text.
        import datasets

        from .compression import read_compressed_whole

        read_compressed_whole()
        if (
            suffixes[-1:] == [".jsonl"]
            and not config.is_tokenised
            and _begins_with_chat(path, config)
        ):
            return _lines(path)
        # What it would say is in the error that follows.
        datasets.logging.set_verbosity(logging.CRITICAL)

        if builder is None:
            known = ", ".join(sorted(_BUILDERS))
            raise CorpusError(
                f"{path} has an ending this version cannot read; it reads {known}, all but parquet "
                f"also compressed ({', '.join(sorted(_COMPRESSIONS))})"
            )
        options: dict[str, Any] = {}
        if builder == "text":
            unit = {"file": "document"}.get(config.txt_documents, config.txt_documents)
            options = {"sample_by": unit}
        # As an absolute local address; a plain name with [ or * would be taken for a pattern.
        files = [glob.escape(str(path.absolute()))]
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            builder, data_files=files, split="train", streaming=True, **options
        )
        return rows

    return _Source(str(path), open_rows, f"{path} cannot be read as {builder}")


def _hub_source(config: CorpusConfig, part: Part) -> _Source:
    split = config.train_split if part == "train" else config.validation_split
    name = f"{config.hub} ({split})"

    def open_rows() -> Iterable[dict[str, Any]]:
        import datasets

        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            config.hub,
            config.hub_config,
            split=split,
            revision=config.hub_revision,
            streaming=True,
        )
        return rows

    remedy = "; check hub, hub_config and the split under [data], and the connection"
    return _Source(name, open_rows, f"{name} cannot be read from the Hub", remedy)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON Lines as they are: a table of them would fill in the keys that a
    line lacks. A blank line is one without keys."""
    with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"{path}:{number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise CorpusError(f"{path}:{number} is no JSON object: {line.strip()[:60]}")
            yield row


def _begins_with_chat(path: Path, config: CorpusConfig) -> bool:
    """Tell whether the first line of a file is a chat; what is no JSON Lines is not."""
    try:
        return _is_chat(next((row for row in _lines(path) if row), {}), config)
    except CorpusError:
        return False


def _is_chat(row: Mapping[str, Any], config: CorpusConfig) -> bool:
    return not config.is_tokenised and is_chat(row, config.text_field)


def _document(
    row: Mapping[str, Any], number: int, source: str, config: CorpusConfig, chats: bool | None
) -> Document | None:
    """Turn a row into a document, or None if it has no text."""
    if config.tokens_field is not None:
        return _tokenised_document(row, number, source, config, config.tokens_field)
    if not row and chats is not False:
        return None
    place = f"{source}:{number}"
    if chats:
        chat = read_chat(row, config.text_field, place)
        return Document("", _label(row, source, config), chat=chat, place=place)
    if row and _is_chat(row, config):
        raise CorpusError(f"{place} is a chat, and the documents before it are texts")
    is_plain = _is_plain_text(source)
    text = _field(row, "text" if is_plain else config.text_field, source)
    if text is None or (isinstance(text, str) and not text.strip()):
        return None
    if not isinstance(text, str):
        raise CorpusError(
            f"{source}, row {number}: '{config.text_field}' is a {type(text).__name__}, not a "
            f"text; name another field with text_field = '...' under [data]"
        )
    if is_plain:
        # What Windows puts first is no text, and would lead all files to one path.
        text = text.removeprefix("\ufeff")
    return Document(text, _label(row, source, config))


def _is_plain_text(source: str) -> bool:
    return source.endswith((".txt", *(f".txt{packed}" for packed in _COMPRESSIONS)))


def _tokenised_document(
    row: Mapping[str, Any], number: int, source: str, config: CorpusConfig, name: str
) -> Document | None:
    values = _field(row, name, source, "tokens_field")
    if values is None or not len(values):
        return None
    tokens = np.asarray(values) if isinstance(values, list | np.ndarray) else np.empty(0)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or int(tokens.min()) < 0:
        raise CorpusError(
            f"{source}, row {number}: '{name}' is not a list of tokens (whole numbers from 0); "
            f"name another field with tokens_field = '...' under [data]"
        )
    return Document("", _label(row, source, config), tokens)


def _label(row: Mapping[str, Any], source: str, config: CorpusConfig) -> str | None:
    if config.label_field is None or _is_plain_text(source):
        return None
    value = _field(row, config.label_field, source, "label_field")
    return None if value is None else str(value)


def _field(row: Mapping[str, Any], field: str, source: str, option: str = "text_field") -> Any:
    if field in row:
        return row[field]
    names = sorted(row)
    guess = nearest_name(field, names) or next(iter(names), "...")
    raise CorpusError(
        f"{source} has no field '{field}'; it has {', '.join(names) or 'no fields'}. Write "
        f"{option} = '{guess}' under [data] (or give --{option.replace('_', '-')})"
    )


def _first_line(error: BaseException) -> str:
    """Return the innermost reason of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
