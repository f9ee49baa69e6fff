"""The tokenizer of a run: SentencePiece, set up so that any text survives a round trip.

No normalisation and no white-space rules are applied: prose, code and tables come back byte for
byte. What the vocabulary lacks is spelled in UTF-8 bytes. An imported base may bring a
`tokenizer.json` in its place.
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

from .tokenizer_json import JsonPieces

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


class Tokenizer:
    """Text to tokens and back. Given the path of a run's tokenizer, or its bytes: a SentencePiece
    model, or a packed `tokenizer.json` (`dipaco.routing.tokens.tokenizer_json`).

    Raises IntegrityError if it cannot be read, ConfigurationError if its special pieces are not
    at 0 to 3, or if some texts cannot be written in it.
    """

    def __init__(self, model: Path | bytes) -> None:
        data = model if isinstance(model, bytes) else Path(model).read_bytes()
        source = "the tokenizer" if isinstance(model, bytes) else f"the tokenizer {model}"
        self._pieces: SentencePieces | JsonPieces
        self._pieces = JsonPieces(data, source) if is_json(data) else SentencePieces(data, source)
        self.vocabulary_size: int = self._pieces.vocabulary_size
        self._texts: dict[int, str] = {}

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of the checkpoint that the tokenizer came with, if it had one.

        Anybody who prepares a run can write it: only a sandbox may fill it in.
        """
        return self._pieces.chat_template

    @property
    def begin(self) -> tuple[int, ...]:
        """What stands in front of every text; nothing where the checkpoint that the tokenizer came
        with puts nothing there."""
        return self._pieces.begin

    @property
    def ends(self) -> frozenset[int]:
        """What ends an answer: the end of a text, and whatever else the checkpoint says."""
        return self._pieces.ends

    def special_names(self) -> list[str | None]:
        """Return the names of unknown, begin, end and padding, as a chat template writes them."""
        return self._pieces.special_names()

    def control_names(self) -> list[str]:
        """Return the names of all special tokens."""
        return self._pieces.control_names()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without begin and end. Names of special tokens are text."""
        return self._pieces.encode([_clean(text)], 1)[0]

    def unwritable_characters(self, text: str) -> int:
        """Return how many characters of a text its tokens leave out: a base's tokenizer may lack
        some control characters."""
        return len(text) - len(self._pieces.writable(text))

    def encode_marked(self, text: str, start: int = 0, end: int | None = None) -> list[int]:
        """Return the tokens of a part of a text, by default of all of it, in which names of special
        tokens, as a chat template writes them, are these tokens. What strangers wrote is `shielded`
        before a template is filled."""
        return self._pieces.encode_marked(_clean(text), start, end)

    def shielded(self, text: str) -> str:
        """Return a text whose names of special tokens stay text for `encode_marked`."""
        return self._pieces.shielded(text)

    def tokens_of_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return the tokens that others, with the tokenizer of an export or of the base, know by
        these numbers: a `tokenizer.json` counts its tokens in another order than a run."""
        return self._pieces.run_tokens(numbers)

    def number_of_token(self, token: int) -> int:
        """Return the number by which others know a token."""
        return self._pieces.file_number(token)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Begin, end and padding vanish; broken UTF-8 becomes U+FFFD."""
        # A text comes token by token, and few calls cost more than remembering.
        if len(tokens) == 1:
            token = int(tokens[0])
            if token not in self._texts:
                self._texts[token] = self._pieces.decode([token])
            return self._texts[token]
        return self._pieces.decode([int(token) for token in tokens])

    def decode_with_names(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, of special ones their names, for people to read."""
        return self._pieces.decode([int(token) for token in tokens], names=True)

    def beginning(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on, with what stands in front of it. Where that is
        nothing, an empty text has the end of the one before it."""
        return [*self.begin, *self.encode(text)] or [END_TOKEN]

    def document_tokens(self, text: str) -> list[int]:
        """Return what a document is in a shard: what stands in front, its tokens, the end."""
        return [*self.begin, *self.encode(text), END_TOKEN]

    def tokens_of_documents(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Return the `document_tokens` of many texts, computed by several threads.

        Called where a corpus is tokenised; the texts should be thousands, for threads to pay.
        """
        encoded = self._pieces.encode([_clean(text) for text in texts], threads)
        return [[*self.begin, *tokens, END_TOKEN] for tokens in encoded]


class SentencePieces:
    """A SentencePiece model; used through `Tokenizer`."""

    chat_template = None
    begin = (BEGIN_TOKEN,)
    ends = frozenset((END_TOKEN,))

    def special_names(self) -> list[str | None]:
        """Return the names of unknown, begin, end and padding."""
        return ["<unk>", "<s>", "</s>", "<pad>"]

    def __init__(self, data: bytes, source: str) -> None:
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=data)
            self.vocabulary_size = int(self._pieces.vocab_size())
        except (RuntimeError, ValueError, OSError) as error:
            raise IntegrityError(f"{source} is not a SentencePiece model: {error}") from None
        self._check_special_pieces(source)
        self._space_mark = [self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in b"\xe2\x96\x81"]

    def _check_special_pieces(self, source: str) -> None:
        model = self._pieces
        ids = (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id())
        if ids != (UNKNOWN_TOKEN, BEGIN_TOKEN, END_TOKEN, PAD_TOKEN):
            raise ConfigurationError(
                f"{source} has unknown, begin, end and padding at {ids}, but a run needs them at "
                f"(0, 1, 2, 3); train it with unk_id=0, bos_id=1, eos_id=2, pad_id=3"
            )
        if not model.is_byte(model.piece_to_id("<0x00>")):
            raise ConfigurationError(
                f"{source} has no byte pieces, so some texts could not be written in it; train it "
                f"with byte_fallback=True, or leave out model_file"
            )

    def control_names(self) -> list[str]:
        """Return the names of all special pieces."""
        pieces = self._pieces
        rows = range(self.vocabulary_size)
        return [pieces.id_to_piece(n) for n in rows if pieces.is_control(n) or pieces.is_unknown(n)]

    def writable(self, text: str) -> str:
        """Return the text: every one can be written."""
        return text

    def encode(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Return the tokens of each text; those without the space's mark by several threads."""
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
        """Return the tokens of a part of a text; names of special pieces are text in any case."""
        return self.encode([text[start:end]], 1)[0]

    def shielded(self, text: str) -> str:
        """Return the text, whose names are text in any case."""
        return text

    def run_tokens(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers: those of the file are those of the run."""
        return list(numbers)

    def file_number(self, token: int) -> int:
        """Return the number of a token, which is the same in the file."""
        return token

    def decode(self, tokens: Sequence[int], *, names: bool = False) -> str:
        """Return the text of tokens; rows of an imported embedding without a piece have none, and
        special tokens have none in any case."""
        return str(self._pieces.decode([t for t in tokens if 0 <= t < self.vocabulary_size]))


def is_json(data: bytes) -> bool:
    """Return whether a run's tokenizer is a packed `tokenizer.json`, not a SentencePiece model."""
    return data[:1] == b"{"


def _clean(text: str) -> str:
    """Return the text as UTF-8 can have it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def train_tokenizer(
    texts: Iterable[str],
    vocabulary_size: int,
    output: Path,
    *,
    character_limit: int,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Tokenizer:
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
    return Tokenizer(model)


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
        clean = text.encode("utf-8", "replace").decode("utf-8")
        for line in (clean.translate(cut) if cut else clean).split("\n"):
            for start in range(0, len(line), _LONGEST_LINE_BYTES // 4):
                yield line[start : start + _LONGEST_LINE_BYTES // 4]
