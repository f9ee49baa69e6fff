"""A `tokenizer.json`, as checkpoints of others have it, as the tokenizer of a run.

Some tokenizers (those of Llama 2 and Mistral) put a space in front of a text. They do so in a run,
too: at the beginning of a text, and behind a special token where `tokenizers` puts one there. What
goes on in the middle of a text, as an answer does, is encoded without it. A decoded text keeps it.

The blob of such a tokenizer is JSON: the file as it is, the chat template of its checkpoint, and
what that says of its tokens (`_Origin`).
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers
from pydantic import Field, JsonValue, ValidationError

from dipaco.base.errors import ConfigurationError, DipacoError, IntegrityError
from dipaco.base.files import canonical_json
from dipaco.protocol.config import Config

from .tokenizer import Tokenizer, clean

_FORMAT = "dipaco-tokenizer/1"
SPLITS_SPECIAL = "split_special_tokens"
_FIELDS = {"format", "chat_template", "tokenizer", "origin"}
_MAX_BYTES = 2**27
_MAX_TOKENS = 2**20
_MAX_PATTERN = 4096
_MAX_TEMPLATE = 2**18
# A code point that Unicode keeps out of texts that are exchanged.
_SHIELD = "\ufdd0"
# All replacements of a normalizer, or of a decoder, together make a text at most so many times as
# long: each multiplies what those before it made, and a few would fill any memory. Normal forms
# alone make it at most 18 times as long, once.
_MAX_GROWTH = 16
# What a tokenizer may lack: control characters, and what stands after the planes of Unicode that
# are in use, a range for each first byte of UTF-8 there. No more is known to be missing anywhere.
_DISPENSABLE = (
    *((code, code) for code in (*range(9), 11, 12, *range(14, 32), 127)),
    *((start, min(start + 0x3FFFF, 0x10FFFF)) for start in range(0x40000, 0x110000, 0x40000)),
)
# What reads a tokenizer does nothing but look up and replace; kinds with tables of their own in
# other formats, or that draw, are not among these.
_KINDS = {
    "model": {"BPE", "Unigram"},
    "normalizer": {"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Replace", "Prepend"},
    "pre_tokenizer": {
        "Sequence", "Split", "ByteLevel", "Digits", "Whitespace", "Punctuation", "Metaspace",
    },
    "decoder": {"Sequence", "ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"},
}  # fmt: skip
# What takes away in a decoded text the space that was put in front.
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_POST_PROCESSORS = {"Sequence", "TemplateProcessing", "ByteLevel"}


class SpecialNumbers(Config):
    """What `config.json` and `generation_config.json` call the special tokens."""

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | list[int] | None = None


class GenerationSettings(SpecialNumbers):
    """What a `generation_config.json` may say; what else it says is left out."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None


class _Origin(Config):
    """What a checkpoint says of itself, and its exports say again."""

    names: tuple[str | None, str | None, str | None, str | None] = Field(
        description="What it calls unknown, begin, end and padding; two may be the same."
    )
    rows: int = Field(ge=1, le=_MAX_TOKENS, description="Of its embedding.")
    numbers: SpecialNumbers = SpecialNumbers()
    generation: GenerationSettings | None = None
    turn_end: int | None = Field(
        None, description="The token that its chat template writes behind an answer."
    )

    @property
    def ends(self) -> set[int]:
        """All that it says ends an answer, but for its `eos_token`."""
        said = (self.generation or self.numbers).eos_token_id
        listed = said if isinstance(said, list) else [said]
        return {number for number in (*listed, self.turn_end) if number is not None}


class JsonTokenizer(Tokenizer):
    """The tokenizer of a blob of `pack_tokenizer`.

    Raises IntegrityError if the bytes are no such blob or are larger than any tokenizer,
    ConfigurationError if texts do not come back from their tokens.
    """

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__()
        content = _content(data, source)
        self.tokenizer: dict[str, Any] = content["tokenizer"]
        self.chat_template = content["chat_template"]
        self.origin: _Origin = content["origin"]
        self.special_names = self.origin.names
        self.splits_special: bool = content.get(SPLITS_SPECIAL, False)
        """Names of special tokens are text even in a chat."""
        # Both read names of special tokens as text; `_marked` is for what lies between these.
        self._marked = _load_for_texts(self.tokenizer, source)
        if not all(token["content"] for token in self.tokenizer.get("added_tokens") or ()):
            raise IntegrityError(f"{source} has an added token whose name is empty")
        going_on = _without_space_in_front(self.tokenizer)
        self._going_on = _load_for_texts(going_on, source)
        """For what stands in the middle of a text; it decodes, too."""
        self.puts_space_in_front = any(
            going_on.get(part) != self.tokenizer.get(part)
            for part in ("normalizer", "pre_tokenizer")
        )
        self._puts_space_at_start_alone = _puts_space_at_start_alone(self.tokenizer)
        self._controls = {} if self.splits_special else _controls(self.tokenizer)
        self._named_control = _named(self._controls.values())
        self._control_names = () if self.splits_special else tuple(self.control_names())
        with _panics(source):
            self.for_texts = _without_stripping(self.tokenizer)
        """The `tokenizer.json` as documents are read with it: they come back whole, with all white
        space, whatever added tokens are named in them."""
        self._plain = _load_for_texts(self.for_texts, source)
        self.vocabulary_size = self.origin.rows
        with _panics(source):
            self.begin = tuple(_put_in_front(self.tokenizer.get("post_processor")))
        numbers: dict[Any, int] = self._marked.get_vocab(with_added_tokens=True)
        if not {*numbers.values(), *self.begin} <= {*range(self.vocabulary_size)}:
            raise IntegrityError(f"{source} has tokens without a row")
        _, begin, end, _ = self.origin.names
        if end not in numbers:
            raise IntegrityError(f"{source} has nothing that ends a text")
        self.end = numbers[end]
        # What a text is made of ends nothing: some config.json has the numbers of another model.
        ends = self.origin.ends & {token["id"] for token in self.tokenizer["added_tokens"]}
        self.ends = frozenset((self.end, *ends))
        self.never_chosen = tuple({numbers[begin]} - self.ends) if begin in numbers else ()
        self._unwritable: re.Pattern[str] | None = None
        with _panics(source):
            self._unwritable = _unwritable(self)
            lost = _lost_added_tokens(self)
            if lost:
                self.for_texts = _as_text(self.for_texts, lost)
                self._plain = _load_for_texts(self.for_texts, source)
            _check_round_trip(self, source)

    def control_names(self) -> list[str]:
        return [t["content"] for t in self.tokenizer["added_tokens"] if t["special"]]

    def writable(self, text: str) -> str:
        return self._unwritable.sub("", text) if self._unwritable else text

    def encode_each(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        texts = [self.writable(clean(text)) for text in texts]
        with _cutting():
            if threads == 1:
                return [self._plain.encode(text, add_special_tokens=False).ids for text in texts]
            encoded = self._plain.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encoded]

    def encode_marked(self, text: str, start: int = 0, end: int | None = None) -> list[int]:
        text = clean(text)
        end = len(text) if end is None else end
        numbers: list[int] = []
        position = start
        for found in self._named_control.finditer(text, start, end) if self._named_control else ():
            numbers += self._numbers_between(text, position, found.start())
            assert found.lastindex is not None  # each name is a group
            numbers.append([*self._controls][found.lastindex - 1])
            position = found.end()
        return [*numbers, *self._numbers_between(text, position, end)]

    def _numbers_between(self, text: str, start: int, end: int) -> list[int]:
        """Return the numbers of a part of a text without special tokens in it."""
        is_behind_special = text.endswith(self._control_names, 0, start)
        gets_space = is_behind_special and not self._puts_space_at_start_alone
        tokenizer = self._marked if start == 0 or gets_space else self._going_on
        written = self.writable(text[start:end].replace(_SHIELD, ""))
        with _cutting():
            found: list[int] = tokenizer.encode(written, add_special_tokens=False).ids
        return found

    def shielded(self, text: str) -> str:
        if self._named_control is None:
            return text
        # `encode_marked` takes the mark out again.
        return self._named_control.sub(lambda name: f"{name[0][0]}{_SHIELD}{name[0][1:]}", text)

    def _decoded(self, tokens: Sequence[int], *, names: bool) -> str:
        # A space that the tokenizer has put in front of a text stays.
        known = [token for token in tokens if 0 <= token < self.vocabulary_size]
        return str(self._going_on.decode(known, skip_special_tokens=not names))


def with_added_tokens(
    tokenizer: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]], source: str
) -> dict[str, Any]:
    """Return a `tokenizer.json` to which more tokens were added, as AutoTokenizer adds those of the
    files beside it: a known one gets the new flags, an unknown one the next number.

    Raises ConfigurationError for one that is said to have another number than it gets.
    """
    content = {**tokenizer, "truncation": None, "padding": None}
    known: dict[str, int] = _load(content, source).get_vocab(with_added_tokens=True)
    after = max(known.values(), default=-1) + 1
    added = {str(token["content"]): dict(token) for token in content.get("added_tokens") or ()}
    for token in tokens:
        name, said = str(token["content"]), token["id"]
        number = known.setdefault(name, after)
        after += number == after
        if said not in (None, number):
            raise ConfigurationError(
                f"{source} gives the token {name!r} the number {number}, and the files beside it "
                f"say {said}; save the tokenizer again with save_pretrained"
            )
        if said is not None or name not in added:
            added[name] = {**token, "id": number}
    return {**content, "added_tokens": sorted(added.values(), key=lambda token: int(token["id"]))}


def pack_tokenizer(
    tokenizer: Mapping[str, Any],
    names: Sequence[str | None],
    chat_template: str | None,
    source: str,
    *,
    rows: int,
    stated: SpecialNumbers | None = None,
    generation: GenerationSettings | None = None,
    splits_special: bool = False,
    turn_end: str | None = None,
) -> bytes:
    """Return the blob of a `tokenizer.json` of a checkpoint whose `names` for unknown, begin, end
    and padding these are, and which has so many `rows`.

    `stated`, `generation` and `turn_end` are for the `_Origin`. Called when a base is imported.
    Raises as `JsonTokenizer` does, and ConfigurationError for tokens that have no row.
    """
    content = {**tokenizer, "truncation": None, "padding": None}
    known: dict[str, int] = _load(content, source).get_vocab(with_added_tokens=True)
    unknown, begin, end, padding = names
    if end not in known:
        raise ConfigurationError(
            f"{source} has no token {end!r}, which should end a text; write another "
            f"eos_token in the tokenizer_config.json beside it"
        )
    if max(known.values()) >= rows:
        raise ConfigurationError(
            f"{source} has a token {max(known.values())}, but the model beside it has a vocab_size "
            f"of {rows}; they are of different models"
        )
    own = {name: known[name] for name in (begin, end) if name is not None and name in known}
    content["added_tokens"] = _with_special(tokenizer.get("added_tokens") or (), own)
    content["post_processor"] = _known_post_processor(tokenizer.get("post_processor"))
    origin = _Origin(
        names=(unknown, begin, end, padding),
        rows=rows,
        numbers=stated or SpecialNumbers(),
        generation=generation,
        turn_end=known.get(str(turn_end)),
    )
    blob = canonical_json(
        {
            "format": _FORMAT,
            "chat_template": chat_template,
            "tokenizer": content,
            "origin": origin.model_dump(mode="json"),
            **({SPLITS_SPECIAL: True} if splits_special else {}),
        }
    )
    JsonTokenizer(blob, source)
    return blob


def _with_special(
    added: Iterable[Mapping[str, Any]], chosen: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the added tokens of a file, the chosen special ones among them, by their numbers."""
    # A text must not be able to say where a document begins or ends.
    tokens = [
        {**token, "special": token.get("special", False) or token["content"] in chosen}
        for token in added
    ]
    there = {token["content"] for token in tokens}
    tokens += [_added_token(chosen[name], name) for name in chosen if name not in there]
    return sorted(tokens, key=lambda token: int(token["id"]))


def _known_post_processor(part: Any) -> dict[str, JsonValue] | None:
    """Return what puts tokens around a text, if it does no more than that."""
    kinds = {found.get("type") for found in _parts(part)}
    return dict(part) if part and kinds <= _POST_PROCESSORS else None


def _added_token(number: int, name: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **flags, "special": True}


def _put_in_front(post_processor: Any) -> list[int]:
    """Return the numbers of the tokens that a post-processor puts in front of a text."""
    found: list[int] = []
    for part in _parts(post_processor):
        for piece in part["single"] if part["type"] == "TemplateProcessing" else ():
            if "SpecialToken" not in piece:
                break
            found += part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return found


def _content(data: bytes, source: str) -> dict[str, Any]:
    """Return the fields of a blob, their types checked."""
    if len(data) > _MAX_BYTES:
        raise IntegrityError(f"{source} has {len(data)} bytes; no tokenizer is so large")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise IntegrityError(f"{source} is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise IntegrityError(f"{source} is no tokenizer of format {_FORMAT}")
    template = content.get("chat_template")
    if (
        set(content) - {SPLITS_SPECIAL} != _FIELDS
        or not isinstance(content.get(SPLITS_SPECIAL, False), bool)
        or not (template is None or isinstance(template, str))
        or len(template or "") > _MAX_TEMPLATE
    ):
        raise IntegrityError(f"{source} is a broken tokenizer: wrong fields or template")
    try:
        origin = _Origin.model_validate(content["origin"])
    except (ValidationError, RecursionError):
        raise IntegrityError(f"{source} is a broken tokenizer: no such origin") from None
    try:
        "".join(filter(None, (template, *origin.names))).encode()
    except UnicodeEncodeError:
        # JSON can say half of a character. No file of an export could.
        raise IntegrityError(
            f"{source} has half a character in its chat template or a special token's name; give a "
            f"checkpoint with another tokenizer"
        ) from None
    return {**content, "origin": origin}


def _load(tokenizer: Any, source: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of allowed parts. Raises IntegrityError or ConfigurationError."""
    if not isinstance(tokenizer, Mapping):
        raise IntegrityError(f"{source} is no tokenizer.json")
    for part, kinds in _KINDS.items():
        growth = 1
        for found in _listed_parts(tokenizer.get(part), source):
            kind = found.get("type", "BPE" if part == "model" and "merges" in found else None)
            if not isinstance(kind, str) or kind not in kinds:
                raise ConfigurationError(
                    f"{source}: {part} is {str(kind)[:40]!r}, and a run can have "
                    f"{', '.join(sorted(kinds))}; give a checkpoint with another tokenizer"
                )
            pattern = found.get("pattern")
            if isinstance(pattern, Mapping) and any(
                len(str(text)) > _MAX_PATTERN for text in pattern.values()
            ):
                raise IntegrityError(f"{source} has a pattern of over {_MAX_PATTERN} letters")
            if kind == "Replace":
                growth *= _growth(pattern, str(found.get("content", "")))
            elif kind == "Prepend":
                growth *= 1 + len(str(found.get("prepend", "")))
        if growth > _MAX_GROWTH:
            raise ConfigurationError(
                f"{source}: the replacements of its {part} make a text up to {growth} times as "
                f"long, and {_MAX_GROWTH} is the most; give a checkpoint with another tokenizer"
            )
    if (tokenizer.get("model") or {}).get("dropout"):
        raise ConfigurationError(
            f"{source}: model.dropout is not 0, so one text can become different tokens"
        )
    with _panics(source):
        return tokenizers.Tokenizer.from_str(json.dumps(tokenizer))


def _growth(pattern: Any, content: str) -> int:
    """Return how many times as long a replacement makes a text at most.

    Lengths are those of the longest normal form: where one follows, it takes a letter apart into
    up to 18, and each of them may be replaced again.
    """
    length = len(unicodedata.normalize("NFKD", content))
    replaced = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    if isinstance(replaced, str) and replaced:
        return max(1, math.ceil(length / len(replaced)))
    # A regular expression may match nothing, in front of each letter.
    return 1 + length


def _load_for_texts(tokenizer: Any, source: str) -> tokenizers.Tokenizer:
    loaded = _load(tokenizer, source)
    loaded.encode_special_tokens = True
    return loaded


@contextmanager
def _panics(source: str) -> Iterator[None]:
    """Turn what the library raises at broken input into an IntegrityError: a panic in Rust is a
    BaseException of no public class."""
    try:
        yield
    except (DipacoError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise IntegrityError(f"{source} is no tokenizer.json: {str(error)[:200]}") from None


@contextmanager
def _cutting() -> Iterator[None]:
    """Do the same for a text that its patterns give up on, which is not quoted: it is somebody's.
    The caller of `_panics` says more."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        reason = "the tokenizer of the run gives up on a text: a pattern of it tries too long"
        raise IntegrityError(f"{reason}; leave out very long words, or tell the operator") from None


def _listed_parts(part: Any, source: str) -> list[Mapping[str, Any]]:
    try:
        return list(_parts(part))
    except RecursionError:
        raise IntegrityError(f"{source} is nested too deeply") from None


def _parts(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a part of a tokenizer and, in a sequence, what it consists of."""
    if part is None:
        return
    if not isinstance(part, Mapping):
        yield {"type": type(part).__name__}
        return
    yield part
    if part.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            listed = part.get(key)
            for inner in listed if isinstance(listed, list) else ():
                yield from _parts(inner)


def _controls(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return what finds each special token in a text, by number: its name, with the white space
    around it that it takes. Of names that begin alike the longest comes first."""
    special = [token for token in tokenizer.get("added_tokens") or () if token["special"]]
    special.sort(key=lambda token: -len(token["content"]))
    return {
        token["id"]: r"\s*" * token["lstrip"]
        + re.escape(token["content"])
        + r"\s*" * token["rstrip"]
        for token in special
    }


def _named(patterns: Iterable[str]) -> re.Pattern[str] | None:
    """Return what finds any of these, each in a group of its own; None if there is none."""
    groups = [f"({pattern})" for pattern in patterns]
    return re.compile("|".join(groups)) if groups else None


def _unwritable(pieces: JsonTokenizer) -> re.Pattern[str] | None:
    """Return what finds the dispensable characters that do not come back from their tokens."""
    lacking = [
        f"{chr(first)}-{chr(last)}"
        for first, last in _DISPENSABLE
        if not _comes_back(pieces, "".join(map(chr, range(first, last + 1, 0x7FF))))
    ]
    return re.compile(f"[{''.join(lacking)}]") if lacking else None


def _without_stripping(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `tokenizer.json` whose added tokens leave the white space around them in the text.

    Names of special tokens are text in a document, but those of others are tokens in it too.
    """
    added = tokenizer.get("added_tokens") or ()
    return {**tokenizer, "added_tokens": [{**t, "lstrip": False, "rstrip": False} for t in added]}


def _without_space_in_front(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `tokenizer.json` that puts no space in front of a text, and takes none away where
    it decodes."""
    parts = {part: _changed(tokenizer.get(part), _without_space) for part in _KINDS}
    return {**tokenizer, **{part: value for part, value in parts.items() if part in tokenizer}}


def _without_space(part: Mapping[str, Any]) -> dict[str, Any] | None:
    if part.get("type") == "Prepend" or part == _STRIP:
        return None
    return {**part, "prepend_scheme": "never"} if part.get("type") == "Metaspace" else {**part}


def _changed(part: Any, change: Callable[[Mapping[str, Any]], dict[str, Any] | None]) -> Any:
    """Return a part of a tokenizer with each thing that it consists of changed, or left out."""
    if not isinstance(part, Mapping):
        return part
    if part.get("type") != "Sequence":
        return change(part)
    lists = {key: value for key, value in part.items() if isinstance(value, list)}
    kept = {
        key: [new for inner in value if (new := _changed(inner, change)) is not None]
        for key, value in lists.items()
    }
    return {**part, **kept}


def _puts_space_at_start_alone(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether there is no space behind a special token."""
    parts = [*_parts(tokenizer.get("normalizer")), *_parts(tokenizer.get("pre_tokenizer"))]
    schemes = {part.get("prepend_scheme") for part in parts if part.get("type") == "Metaspace"}
    return "first" in schemes


def _lost_added_tokens(pieces: JsonTokenizer) -> set[str]:
    """Return the added tokens that a decoder turns into another text than their names."""
    names = [token["content"] for token in pieces.for_texts["added_tokens"]]
    texts = {name: f"a \n {name} \n b" for name in names}
    if _comes_back(pieces, "".join(texts.values())):
        return set()
    return {name for name, text in texts.items() if not _comes_back(pieces, text)}


def _as_text(tokenizer: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return a `tokenizer.json` in which some added tokens are special, so that their names in a
    document are read letter by letter."""
    added = [
        {**token, "special": token["special"] or token["content"] in names}
        for token in tokenizer["added_tokens"]
    ]
    return {**tokenizer, "added_tokens": added}


def _comes_back(pieces: JsonTokenizer, text: str) -> bool:
    back = _without_front(pieces, pieces.decode(pieces.encode(text)))
    return unicodedata.normalize("NFKC", back) == unicodedata.normalize("NFKC", text)


def _without_front(pieces: JsonTokenizer, text: str) -> str:
    return text.removeprefix(" ") if pieces.puts_space_in_front else text


def _check_round_trip(pieces: JsonTokenizer, source: str) -> None:
    """Refuse a tokenizer in which texts cannot be written, or that cannot be streamed."""
    plain = "The city, 1789:\n\n\tlies  there."
    tokens = pieces.encode(plain)
    back = "".join(pieces.decode([token]) for token in tokens)
    if _without_front(pieces, back) != plain:
        raise ConfigurationError(
            f"{source} does not give a text back piece by piece; a run needs byte-level BPE, or "
            f"pieces with byte fallback and spaces as they are"
        )
    # Every byte that UTF-8 has stands in these; what is dispensable may be missing.
    text = "".join(map(chr, (*range(1, 0x180), *range(0x600, 0x800), *range(0x1000, 0xD800, 911))))
    text += "".join(map(chr, range(0xE000, 0x110000, 0x7FFF)))
    if not _comes_back(pieces, pieces.writable(text)):
        raise ConfigurationError(
            f"{source} cannot write every text; a run needs byte-level BPE, or byte fallback"
        )
