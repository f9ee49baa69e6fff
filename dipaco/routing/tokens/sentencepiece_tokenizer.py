"""The tokenizer of a run: SentencePiece, set up so that any text survives a round trip.

No normalisation and no white-space rules are applied: prose, code and tables come back byte for
byte. What the vocabulary lacks is spelled in UTF-8 bytes.
"""

from __future__ import annotations

import hashlib
import heapq
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import sentencepiece

from dipaco.base.errors import ConfigurationError, CorpusError, IntegrityError
from dipaco.base.files import atomic_write
from dipaco.protocol.config import BEGIN_TOKEN, END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN

from .tokenizer import Tokenizer, clean

# SentencePiece writes a space as this character, so the character itself goes through bytes.
_SPACE_MARK = "\u2581"
_LONGEST_LINE_BYTES = 4096
# Unknown, begin, end, padding, the line break, and the bytes.
_FIXED_PIECES = 4 + 1 + 256
# The part of the sample's characters, by how often they occur, that get pieces of their own.
_USUAL_COVERAGE = 0.9995
# Where the characters do not fit, so much of the vocabulary is for them; the rest is for words.
# Made-up Chinese beside nine alphabetic domains has 2.8, 2.7, 2.5 and 2.0 bytes a token at 25, 50,
# 75 and 95% of 4,096 pieces, the Chinese alone 3.1, 3.4, 3.3 and 3.0.
_CHARACTER_SHARE = 0.5
# Of a corpus too large to read for a tokenizer, this many times the sample is looked at.
_SCAN_FACTOR = 20


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model of these bytes.

    Raises IntegrityError if they are none, ConfigurationError if it has no begin or end, or if some
    texts cannot be written in it.
    """

    chat_template = None

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__()
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=data)
            self.vocabulary_size = int(self._pieces.vocab_size())
        except (RuntimeError, ValueError, OSError) as error:
            raise IntegrityError(f"{source} is not a SentencePiece model: {error}") from None
        self._check_pieces(source)
        model = self._pieces
        unknown, begin, self.end = model.unk_id(), model.bos_id(), model.eos_id()
        self.begin, self.ends = (begin,), frozenset((self.end,))
        self.padding = model.pad_id() if model.pad_id() >= 0 else None
        """The piece that is padding, if there is one."""
        special = (unknown, begin, self.padding)
        self.never_chosen = tuple(number for number in special if number is not None)
        self.special_names = (
            model.id_to_piece(unknown),
            model.id_to_piece(begin),
            model.id_to_piece(self.end),
            None if self.padding is None else model.id_to_piece(self.padding),
        )
        self._space_mark = [self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in b"\xe2\x96\x81"]

    def _check_pieces(self, source: str) -> None:
        model = self._pieces
        if min(model.bos_id(), model.eos_id()) < 0:
            raise ConfigurationError(
                f"{source} has begin and end at {model.bos_id(), model.eos_id()}, but a run needs "
                f"both; train it with bos_id=1, eos_id=2"
            )
        if not model.is_byte(model.piece_to_id("<0x00>")):
            raise ConfigurationError(
                f"{source} has no byte pieces, so some texts could not be written in it; train it "
                f"with byte_fallback=True, or leave out model_file"
            )

    def control_names(self) -> list[str]:
        pieces = self._pieces
        rows = range(self.vocabulary_size)
        return [pieces.id_to_piece(n) for n in rows if pieces.is_control(n) or pieces.is_unknown(n)]

    def writable(self, text: str) -> str:
        return text

    def encode_each(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        # Only those without the space's mark are encoded by several threads.
        texts = [clean(text) for text in texts]
        simple = [text for text in texts if _SPACE_MARK not in text]
        encoded = iter(self._pieces.encode(simple, num_threads=threads))
        return [
            self._encode_parts(text.split(_SPACE_MARK)) if _SPACE_MARK in text else next(encoded)
            for text in texts
        ]

    def _encode_parts(self, texts: list[str]) -> list[int]:
        parts = self._pieces.encode(texts, num_threads=1)
        tokens: list[int] = list(parts[0])
        for part in parts[1:]:
            tokens += self._space_mark
            tokens += part
        return tokens

    def encode_marked(self, text: str, start: int = 0, end: int | None = None) -> list[int]:
        # Names of special pieces are text in any case.
        return self.encode(text[start:end])

    def shielded(self, text: str) -> str:
        return text

    def _decoded(self, tokens: Sequence[int], *, names: bool) -> str:
        # Rows of an imported embedding without a piece have no text, nor have special tokens.
        return str(self._pieces.decode([t for t in tokens if 0 <= t < self.vocabulary_size]))


def train_tokenizer(
    texts: Iterable[str],
    vocabulary_size: int,
    output: Path,
    *,
    character_limit: int,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> SentencePieceTokenizer:
    """Train a BPE tokenizer of exactly `vocabulary_size` pieces, write it to `output`, return it.

    At most `character_limit` characters are trained on: a random sample (by `seed`) of the first
    20 times as many. The same texts and seed give the same bytes.
    Where the texts have more characters than the vocabulary has pieces, the rarer ones are written
    as bytes, and `say` gets a line about it.

    Raises CorpusError if there is no text, ConfigurationError if the vocabulary is too small for
    the special pieces or too large for the texts.
    """
    sample = _sample(texts, character_limit, seed)
    if not sample:
        raise CorpusError("there is no text to train a tokenizer on; check [data] in the RUN.toml")
    counts = Counter(chain.from_iterable(_lines(sample)))
    as_bytes = _characters_as_bytes(counts, vocabulary_size)
    try:
        model = _trained_pieces(_lines(sample, as_bytes), vocabulary_size, bool(as_bytes))
    except RuntimeError as error:
        raise ConfigurationError(
            f"a tokenizer of {vocabulary_size} pieces cannot be trained on {len(sample)} texts: "
            f"{_reason(error)}; change vocabulary_size under [model]"
        ) from None
    atomic_write(output, model)
    if as_bytes and say is not None:
        coverage = 1.0 - sum(counts[character] for character in as_bytes) / sum(counts.values())
        say(
            f"character coverage {coverage:.4f}: {len(as_bytes):,} of {len(counts):,} characters "
            f"of the sample are written as bytes; a larger vocabulary_size under [model] would "
            f"hold them"
        )
    return SentencePieceTokenizer(model, "the tokenizer")


def _trained_pieces(lines: Iterator[str], vocabulary_size: int, has_bytes: bool) -> bytes:
    """Return a model of SentencePiece; with `has_bytes` some characters are cut out of the lines.

    Raises RuntimeError, as SentencePiece does.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary_size,
        byte_fallback=True,
        # It takes no coverage below 0.98, so what it shall not cover is cut out.
        character_coverage=1.0 if has_bytes else _USUAL_COVERAGE,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        # Its own piece, because a line break is never seen inside a training line.
        user_defined_symbols=["\n"],
        max_sentence_length=2 * _LONGEST_LINE_BYTES,
        unk_id=UNKNOWN_TOKEN,
        bos_id=BEGIN_TOKEN,
        eos_id=END_TOKEN,
        pad_id=PAD_TOKEN,
        minloglevel=2,
    )
    return model.getvalue()


def _characters_as_bytes(counts: Mapping[str, int], vocabulary_size: int) -> list[str]:
    """Return the rarest characters, where those to be covered are more than there are pieces."""
    room = vocabulary_size - _FIXED_PIECES
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    covered = np.cumsum([counts[character] for character in ordered]) / sum(counts.values())
    # In fp32, as SentencePiece counts.
    required = np.searchsorted(covered.astype(np.float32), np.float32(_USUAL_COVERAGE)) + 1
    return ordered[int(_CHARACTER_SHARE * room) :] if required > room > 0 else []


def _reason(error: RuntimeError) -> str:
    """Return the human part of a SentencePiece error ("Internal: file.cc(12) [check] reason")."""
    return str(error).rsplit("] ", 1)[-1].strip() or str(error)


def _sample(texts: Iterable[str], character_limit: int, seed: int) -> list[str]:
    """Return a random sample of texts of at most `character_limit` characters, in their order.

    Every text gets a random priority and the best that fit are kept, so memory is bounded by the
    limit however long the corpus is. A text longer than the limit is cut.
    """
    kept: list[tuple[float, int, str]] = []  # a heap, the worst priority first
    kept_characters = scanned_characters = 0
    for index, text in enumerate(texts):
        piece = text[:character_limit]
        digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=6).digest()
        heapq.heappush(kept, (-int.from_bytes(digest, "big"), index, piece))
        kept_characters += len(piece)
        while kept_characters > character_limit:
            kept_characters -= len(heapq.heappop(kept)[2])
        scanned_characters += len(text)
        if scanned_characters > _SCAN_FACTOR * character_limit:
            break
    return [piece for _, _, piece in sorted(kept, key=lambda entry: entry[1])]


def _lines(texts: Iterable[str], without: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines of the texts, cut at the characters `without`, and long ones cut, because
    SentencePiece drops a line that is too long."""
    cut = {ord(character): "\n" for character in without}
    for text in texts:
        written = clean(text)
        for line in (written.translate(cut) if cut else written).split("\n"):
            for start in range(0, len(line), _LONGEST_LINE_BYTES // 4):
                yield line[start : start + _LONGEST_LINE_BYTES // 4]
