"""The whole corpus as tokens on the operator's disk, made once and read by every later stage.

    tokens.bin    all documents one after another, little-endian integers
    ends.bin      for each document the position after its last token, uint64
    labels.bin    for each document the number of its label, uint16

Of chats, tokens are marked (`dipaco.modules.marked_tokens`), and there is what routing sees:

    beginnings.bin    for each document its row of tokens, padded

The counts stand in `corpus.json`, which is written last: a corpus without it is not whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from dipaco.base.errors import CorpusError, IntegrityError
from dipaco.base.files import atomic_write, canonical_json
from dipaco.routing.documents.corpus import Document
from dipaco.routing.new_files import NewFiles

from .chat_tokens import ChatEncoder, UnusableChatError
from .token_files import token_dtype
from .tokenizer import Tokenizer

# Labels are stored as 16-bit numbers; the greatest one says that a document has none.
_NO_LABEL = 2**16 - 1
# Beginnings of chats are short, and filled up with -1.
_BEGINNING_DTYPE = np.dtype("<i4")
# With more of them, as where each document has its own, nobody reads a report by label.
MAX_LABELS = 1000
_CHUNK_CHARACTERS = 4_000_000
_COUNTS_FILE = "corpus.json"
_COUNTS = {"documents", "tokens", "dropped", "labels", "unlabelled"}
_PieceT = TypeVar("_PieceT")
_DoneT = TypeVar("_DoneT")


class Mapped(Protocol):
    """How pieces of work are done: like the builtin `map`, here or elsewhere, in their order."""

    def __call__(
        self, function: Callable[[_PieceT], _DoneT], pieces: Iterable[_PieceT], /
    ) -> Iterable[_DoneT]: ...


class EncodedDocument(NamedTuple):
    """A document of a corpus as tokens, begin and end included."""

    tokens: np.ndarray
    label: str | None
    held_out: bool
    dropped: int
    """Characters of its text that the tokenizer lacks."""
    beginning: np.ndarray | None = None
    """What routing sees of a chat."""
    left_out: str | None = None
    """Why nothing is to be learned in a chat, which then has no tokens."""
    place: str = ""


class LeftOut(NamedTuple):
    """Chats in which nothing is to be learned, for one reason."""

    chats: int
    first: str
    """Where the first of them stands, as file:line."""


class TokenCorpus:
    """Reads a finished token corpus through memory maps."""

    def __init__(self, folder: Path, vocabulary_size: int) -> None:
        self.folder = folder
        self.vocabulary_size = vocabulary_size
        counts = _counts_of(folder)
        chats: dict[str, Any] | None = counts.get("chats")
        # Of chats, some tokens are only read.
        self._dtype = token_dtype(vocabulary_size, marked=chats is not None)
        self.label_names: tuple[str, ...] = tuple(counts["labels"])
        self.ends = _mapped(folder / "ends.bin", np.dtype("<u8"), counts["documents"])
        self.labels = _mapped(folder / "labels.bin", np.dtype("<u2"), counts["documents"])
        self.tokens = _mapped(folder / "tokens.bin", self._dtype, counts["tokens"])
        self.left_out: dict[str, LeftOut] = {}
        """Chats that are not in it, by the reason."""
        self._beginnings: np.ndarray | None = None
        if chats is not None:
            width: int = chats["prefix_tokens"]
            self.left_out = {name: LeftOut(*found) for name, found in chats["left_out"].items()}
            size = counts["documents"] * width
            rows = _mapped(folder / "beginnings.bin", _BEGINNING_DTYPE, size)
            self._beginnings = rows.reshape(-1, width)

    def __len__(self) -> int:
        return len(self.ends)

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of a document, begin and end included."""
        start = int(self.ends[index - 1]) if index else 0
        return self.tokens[start : int(self.ends[index])]

    def beginning(self, index: int, prefix_tokens: int) -> np.ndarray:
        """Return what routing sees of a document: its first tokens; of a chat, those of the first
        turn of the user."""
        if self._beginnings is None:
            return self.document(index)[:prefix_tokens]
        row = self._beginnings[index]
        return row[row >= 0]

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, int64 [N]. Raises IntegrityError."""
        lengths = np.diff(np.asarray(self.ends, dtype=np.int64), prepend=0)
        if len(lengths) and int(lengths.min()) < 1:
            raise IntegrityError(f"{self.folder} is damaged; remove it, and prepare again")
        return lengths

    def sample(self, count: int, seed: int, longer_than_tokens: int = 0) -> np.ndarray:
        """Return the indices of at most `count` documents drawn at random, int64, ascending."""
        eligible = np.flatnonzero(self.lengths() > longer_than_tokens)
        generator = np.random.default_rng(seed)
        size = min(count, len(eligible))
        return np.sort(eligible[generator.choice(len(eligible), size=size, replace=False)])

    def label_name(self, index: int) -> str | None:
        """Return the label of a document, if it has one."""
        number = int(self.labels[index])
        return self.label_names[number] if number < len(self.label_names) else None

    def rows(self, sequence_length: int) -> np.ndarray:
        """Return all documents packed into rows, [N, sequence_length]; no incomplete row.

        Raises CorpusError if the corpus is shorter than one row.
        """
        count = len(self.tokens) // sequence_length
        if not count:
            raise CorpusError(
                f"the whole corpus has {len(self.tokens)} tokens, less than one sequence of "
                f"{sequence_length}; give more data or a smaller sequence_length under [model]"
            )
        return self.tokens[: count * sequence_length].reshape(count, sequence_length)


class TokenCorpusWriter:
    """Writes a token corpus, in chunks of documents. Of chats, `chat_prefix_tokens` are kept for
    routing."""

    def __init__(
        self, folder: Path, vocabulary_size: int, *, chat_prefix_tokens: int | None = None
    ) -> None:
        self._files = NewFiles(folder)
        self._prefix_tokens = chat_prefix_tokens
        self._dtype = token_dtype(vocabulary_size, marked=chat_prefix_tokens is not None)
        self.left_out: dict[str, LeftOut] = {}
        self.documents = self.tokens = 0
        self.dropped = 0
        """Characters of the texts that the tokenizer lacks."""
        self.unlabelled = 0
        """Documents whose label is one too many, and which have none here."""
        self._labels: dict[str, int] = {}

    def add(self, documents: Sequence[EncodedDocument]) -> None:
        """Append a chunk of documents."""
        kept = [document for document in documents if document.left_out is None]
        for document in documents:
            if document.left_out is not None:
                chats, first = self.left_out.get(document.left_out, (0, document.place))
                self.left_out[document.left_out] = LeftOut(chats + 1, first)
        if kept:
            self._append(kept)
        self.dropped += sum(document.dropped for document in kept)

    def finish(self) -> None:
        """Say that this is all."""
        self._files.sync()
        atomic_write(self._files.folder / _COUNTS_FILE, canonical_json(self._counts()))

    def _append(self, documents: Sequence[EncodedDocument]) -> None:
        lengths = np.array([len(document.tokens) for document in documents], dtype=np.uint64)
        flat = np.concatenate([np.asarray(d.tokens, self._dtype) for d in documents])
        labels = np.array([self._label(document.label) for document in documents], dtype="<u2")
        ends = np.cumsum(lengths, dtype=np.uint64) + np.uint64(self.tokens)
        self._files.append("tokens.bin", flat.tobytes())
        self._files.append("ends.bin", ends.astype("<u8").tobytes())
        self._files.append("labels.bin", labels.tobytes())
        if self._prefix_tokens is not None:
            shape = (len(documents), self._prefix_tokens)
            rows = np.full(shape, -1, _BEGINNING_DTYPE)
            for row, document in zip(rows, documents, strict=True):
                assert document.beginning is not None  # those of chats have one
                row[: len(document.beginning)] = document.beginning
            self._files.append("beginnings.bin", rows.tobytes())
        self.documents += len(documents)
        self.tokens += len(flat)

    def _label(self, label: str | None) -> int:
        if label is None:
            return _NO_LABEL
        if label not in self._labels and len(self._labels) >= MAX_LABELS:
            self.unlabelled += 1
            return _NO_LABEL
        return self._labels.setdefault(label, len(self._labels))

    def _counts(self) -> dict[str, Any]:
        counts = {
            "documents": self.documents,
            "tokens": self.tokens,
            "dropped": self.dropped,
            "labels": list(self._labels),
            "unlabelled": self.unlabelled,
        }
        if self._prefix_tokens is None:
            return counts
        return {
            **counts,
            "chats": {"prefix_tokens": self._prefix_tokens, "left_out": self.left_out},
        }


def write_token_corpora(
    documents: Iterable[tuple[Document, bool]],
    encode: Callable[[Sequence[tuple[Document, bool]]], Sequence[EncodedDocument]],
    train: TokenCorpusWriter,
    validation: TokenCorpusWriter,
    *,
    mapped: Mapped = map,
    chunk_documents: int = 1024,
) -> Iterator[tuple[int, int]]:
    """Tokenise a stream of (document, held out?) into two corpora, in bounded memory.

    `encode` makes tokens of a chunk (`encoded`), and `mapped` has it done. Yields (documents done,
    tokens done) after each chunk.
    """
    stream = iter(documents)
    chunks = iter(lambda: list(_take(stream, chunk_documents, _CHUNK_CHARACTERS)), [])
    for chunk in mapped(encode, chunks):
        for held_out, writer in ((False, train), (True, validation)):
            part = [document for document in chunk if document.held_out == held_out]
            if part:
                writer.add(part)
        yield train.documents + validation.documents, train.tokens + validation.tokens
    for writer in (train, validation):
        writer.finish()


def encoded(
    chunk: Sequence[tuple[Document, bool]],
    tokenizer: Tokenizer,
    threads: int = 1,
    chats: ChatEncoder | None = None,
) -> list[EncodedDocument]:
    """Return the tokens of documents, each with whether it is held out, as it was given.

    `chats` makes those of chats.
    """
    if chats is not None:
        return [_encoded_chat(document, held_out, chats, tokenizer) for document, held_out in chunk]
    dtype = token_dtype(tokenizer.vocabulary_size)
    tokens = tokenizer.tokens_of_documents([document.text for document, _ in chunk], threads)
    return [
        EncodedDocument(
            np.asarray(one, dtype),
            document.label,
            held_out,
            tokenizer.unwritable_characters(document.text),
        )
        for one, (document, held_out) in zip(tokens, chunk, strict=True)
    ]


def _encoded_chat(
    document: Document, held_out: bool, chats: ChatEncoder, tokenizer: Tokenizer
) -> EncodedDocument:
    assert document.chat is not None  # a corpus is of chats or of texts
    label, place = document.label, document.place
    try:
        tokens, beginning = chats.encode(document.chat)
    except UnusableChatError as error:
        nothing = np.empty(0, np.int64)
        return EncodedDocument(nothing, label, held_out, 0, left_out=str(error), place=place)
    text = "".join(message.content for message in document.chat)
    return EncodedDocument(
        tokens, label, held_out, tokenizer.unwritable_characters(text), beginning
    )


def _take(
    documents: Iterator[tuple[Document, bool]], count: int, characters: int
) -> Iterator[tuple[Document, bool]]:
    total = 0
    for document, held_out in islice(documents, count):
        yield document, held_out
        total += document.size
        if total >= characters:
            return


def _counts_of(folder: Path) -> dict[str, Any]:
    try:
        counts: dict[str, Any] = json.loads((folder / _COUNTS_FILE).read_bytes())
        if not counts.keys() >= _COUNTS:
            raise ValueError("a count is missing")
    except (OSError, ValueError, AttributeError):
        raise IntegrityError(
            f"{folder} holds no tokens of a corpus; remove it, and prepare again"
        ) from None
    return counts


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not count:
        return np.empty(0, dtype)
    if path.stat().st_size < count * dtype.itemsize:
        raise IntegrityError(f"{path} is shorter than it was; remove its folder, and prepare again")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
