"""What the rows of some files hold, before there is a RUN.toml: which field is the text, which one
a label, and how much text there is."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dipaco.base.errors import CorpusError
from dipaco.routing.documents.chats import is_chat
from dipaco.routing.documents.corpus_files import matched_files
from dipaco.routing.documents.rows import READABLE, Row, TextUnit, form_of, rows_of

# How many rows are read to find the fields, and how many characters to find the length of
# documents.
_ROWS = 1000
_CHARACTERS = 100_000_000
# Fewer text files than that hold more than one document each.
_TEXT_FILES = 40
# A label names a group of documents: it is short, and most of its values come again and again.
_LABEL_CHARACTERS, _MOST_LABELS, _ROWS_OF_A_LABEL = 40, 50, 10
# Rough figure for most languages and vocabularies.
_CHARACTERS_OF_A_TOKEN = 4
_HELD_OUT_WORDS = frozenset({"validation", "valid", "val", "dev", "test", "heldout"})


@dataclass(frozen=True)
class FirstLook:
    """What was found in the files of a corpus."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    """The files whose names mark them as held out."""
    chats: bool
    text_field: str
    label_field: str | None
    text_unit: TextUnit
    """What a document is in a plain text."""
    documents: int
    characters: int
    counted: float
    """The part of the files that was read to count them, 0 to 1; the rest is taken to be alike."""

    @property
    def tokens(self) -> int:
        """Roughly the number of tokens to train on."""
        return self.characters // _CHARACTERS_OF_A_TOKEN


def look_at_files(names: Sequence[str]) -> FirstLook:
    """Read the first rows of each file, and count documents and characters. A folder stands for
    the files in it that are of one form, the one with most bytes.

    Raises CorpusError if there is no file, or no field with texts, or if a file cannot be read.
    """
    files = _files(names)
    held_out = tuple(path for path in files if _is_held_out(path))
    train = tuple(path for path in files if path not in held_out)
    if not train:
        train, held_out = held_out, ()
    unit = _text_unit(train)
    chats, text, label = _fields(train, unit)
    documents, characters, counted = _count(train, None if chats else text, unit)
    return FirstLook(train, held_out, chats, text, label, unit, documents, characters, counted)


def rough_tokens(files: Sequence[Path], text: str | None, unit: TextUnit) -> int:
    """Return about how many tokens some files hold; `text` is the field of the text, None for
    chats. Raises CorpusError if a file cannot be read."""
    return _count(files, text, unit)[1] // _CHARACTERS_OF_A_TOKEN


def _files(names: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for name in names:
        if not Path(name).is_dir():
            found += matched_files((name,))
            continue
        of_form: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(Path(name).rglob("*")):
            if path.is_file() and (form := form_of(path.name)) is not None:
                of_form[form].append(path)
        if not of_form:
            raise CorpusError(f"{name} holds no file that can be read; a run reads {READABLE}")
        found += max(of_form.values(), key=lambda paths: sum(p.stat().st_size for p in paths))
    return list(dict.fromkeys(found))


def _is_held_out(path: Path) -> bool:
    words = path.name.lower().replace("-", ".").replace("_", ".").split(".")
    return not _HELD_OUT_WORDS.isdisjoint(words)


def _text_unit(files: Sequence[Path]) -> TextUnit:
    texts = [path for path in files if form_of(path.name) == "text"]
    if not texts or len(texts) >= _TEXT_FILES:
        return "file"
    lines = [row["text"].strip() for row in itertools.islice(_rows(texts[0], "line"), _ROWS)]
    # What follows the last line is an empty one.
    return "line" if all(lines[:-1]) else "paragraph"


class _EveryField(frozenset[str]):
    """All fields of a row, whatever they are called."""

    def __contains__(self, name: object) -> bool:
        return True


def _rows(path: Path, unit: TextUnit, opened: list[BinaryIO] | None = None) -> Any:
    def open_file() -> BinaryIO:
        file = path.open("rb")
        if opened is not None:
            opened.append(file)
        return file

    return rows_of(str(path), open_file, _EveryField(), unit)


def _fields(files: Sequence[Path], unit: TextUnit) -> tuple[bool, str, str | None]:
    """Return whether the first rows of each file are chats, the field of the text, and that of a
    label. No row is kept, because a row may be a whole file."""
    chats, rows = False, 0
    characters = Counter[str]()
    values: dict[str, Counter[str]] = defaultdict(Counter)
    for row in itertools.chain.from_iterable(
        itertools.islice(_rows(path, unit), _ROWS) for path in files
    ):
        rows += 1
        chats = chats or is_chat(row, "text")
        for name, value in row.items():
            if not isinstance(value, str):
                continue
            characters[name] += len(value)
            counts = values[name]
            if len(value) <= _LABEL_CHARACTERS and len(counts) <= _MOST_LABELS:
                counts[value] += 1
    text = "text" if chats else _text_field(characters, files)
    return chats, text, _label_field(values, rows, text)


def _text_field(characters: Counter[str], files: Sequence[Path]) -> str:
    """Return "text" if there are texts in it, or else the field with most characters."""
    if not any(characters.values()):
        raise CorpusError(f"the first rows of {files[0]} hold no text in any field")
    return "text" if characters["text"] else characters.most_common(1)[0][0]


def _label_field(values: Mapping[str, Counter[str]], rows: int, text: str) -> str | None:
    """Return the field that parts the documents into few groups: the one with fewest of them."""
    most = min(_MOST_LABELS, rows // _ROWS_OF_A_LABEL)
    groups = {
        name: len(counts)
        for name, counts in values.items()
        if name != text and 2 <= len(counts) <= most and counts.total() > 0.9 * rows
    }
    return min(groups, key=lambda name: groups[name], default=None)


def _count(files: Sequence[Path], text: str | None, unit: TextUnit) -> tuple[int, int, float]:
    """Return documents, characters and the part of the files that was counted; `text` is the field
    of the text, None for chats."""
    sizes = [path.stat().st_size for path in files]
    documents = characters = 0
    for number, path in enumerate(files):
        opened: list[BinaryIO] = []
        read = sum(sizes[:number])
        for row in _rows(path, unit, opened):
            size = _characters(row, text)
            documents, characters = documents + (size > 0), characters + size
            # The columns of a table do not lie in the order of its rows, so it is read to its end.
            if characters > _CHARACTERS and form_of(path.name) in ("json", "text"):
                read += opened[0].tell()
                break
        else:
            read += sizes[number]
        if characters > _CHARACTERS:
            part = read / sum(sizes)
            return round(documents / part), round(characters / part), part
    return documents, characters, 1.0


def _characters(row: Row, text: str | None) -> int:
    if text is not None:
        value = row.get(text)
        return len(value.strip()) if isinstance(value, str) else 0
    said = [row.get(name) for name in ("messages", "conversations", "prompt", "completion")]
    return sum(len(str(value)) for value in said if value is not None)
