"""A checkpoint on disk as the base model of a run: `base = "path/to/dir"` in a RUN.toml.

A run has the numbers of the checkpoint's tokens, and one row of its embedding more: padding.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from sentencepiece import sentencepiece_model_pb2

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.base.files import check_content, sha256_of_file, storage_errors
from dipaco.modules.frozen_file import with_padding
from dipaco.modules.llama import (
    CHAT_TEMPLATE,
    CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_JSON,
    TOKENIZER_SETTINGS,
    check_llama_parameters,
    llama_weight_files,
    read_config_file,
    read_llama_config,
    read_llama_parameters,
)
from dipaco.protocol.config import ModelConfig, ModelFields, parse_config
from dipaco.protocol.plan import BaseFile, BaseSource
from dipaco.routing.tokens.chat_tokens import SPECIAL_NAMES, turn_end
from dipaco.routing.tokens.sentencepiece_tokenizer import SentencePieceTokenizer
from dipaco.routing.tokens.tokenizer_json import (
    SPLITS_SPECIAL,
    GenerationSettings,
    SpecialNumbers,
    pack_tokenizer,
    with_added_tokens,
)

# Its classes are made at import, where no type checker sees them.
_sentencepiece_format: Any = sentencepiece_model_pb2
_ADDED_TOKENS, _SPECIAL_TOKENS = "added_tokens.json", "special_tokens_map.json"
_GENERATION = "generation_config.json"
# Of a base that is made for longer texts, where RUN.toml says nothing: few documents are longer,
# and the memory that a step takes grows with it.
_USUAL_SEQUENCE_LENGTH = 1024


class ImportedBase:
    """The checkpoint in `folder`. Nothing is read until it is needed.

    With `own_tokenizer` off, `[tokenizer] model_file` is used instead of the checkpoint's, and its
    pieces must be numbered as the rows of the embedding.
    """

    def __init__(self, folder: Path, *, own_tokenizer: bool = True) -> None:
        self.folder = folder
        self._own_tokenizer = own_tokenizer

    @cached_property
    def _stored_model(self) -> ModelConfig:
        """The model as the checkpoint has it."""
        # Missing parts of a tokenizer and its settings would be left out otherwise.
        for ending in ("json", "model", "jinja"):
            check_content(*sorted(self.folder.glob(f"*.{ending}")))
        values = read_llama_config(self.folder)
        return parse_config(ModelConfig, values, str(self.folder / CONFIG_FILE))

    @cached_property
    def model(self) -> ModelConfig:
        """The model of the run.

        Raises StorageError, ConfigurationError or IntegrityError if it cannot be imported.
        """
        stored, _ = self._stored_model, self.tokenizer
        with storage_errors(self.folder):
            check_llama_parameters(self.folder, stored)
        return stored.with_padding

    def agreed_model(self, given: ModelFields, source: str) -> ModelConfig:
        """Return the model of a run, which is the checkpoint's. What RUN.toml says of it must
        agree, but sequences may be shorter than the checkpoint's. By default they are shorter if it
        is made for very long ones, which few texts fill and few machines can train.

        Raises ConfigurationError naming the field and both values.
        """
        model = self.model
        longest = model.sequence_length
        length = min(longest, _USUAL_SEQUENCE_LENGTH)
        if "sequence_length" in given.model_fields_set:
            length = given.sequence_length
        for key, said, kept in differing_fields(given, model):
            if key != "sequence_length" or length > longest:
                raise ConfigurationError(
                    f"{source}: model.{key} is {said!r}, but {self.folder / CONFIG_FILE} has "
                    f"{kept!r}; leave it out of [model], it is taken from there"
                )
        if length == longest and "sequence_length" not in given.model_fields_set:
            return model
        return model.model_copy(update={"sequence_length": length, "context_length": longest})

    @cached_property
    def _weight_digests(self) -> dict[str, str]:
        with storage_errors(self.folder):
            files = llama_weight_files(self.folder)
            return {file.name: sha256_of_file(file) for file in files}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that is imported."""
        with storage_errors(self.folder):
            digests = [sha256_of_file(self.folder / CONFIG_FILE), *self._weight_digests.values()]
        return hashlib.sha256("".join(digests).encode() + (self.tokenizer or b"")).hexdigest()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters, fp32 on the CPU, by name.

        Raises IntegrityError naming the parameter if one is missing or wrong.
        """
        parameters = read_llama_parameters(self.folder, self._stored_model)
        return {name: with_padding(name, tensor) for name, tensor in parameters.items()}

    @cached_property
    def tokenizer(self) -> bytes | None:
        """The tokenizer of the run; None if another one is to be used."""
        if not self._own_tokenizer:
            return None
        rows = self._stored_model.vocabulary_size
        file = self.folder / TOKENIZER_FILE
        if not file.is_file():
            return _read_tokenizer_json(self.folder, rows)
        with storage_errors(self.folder):
            model = file.read_bytes()
        if lacking := _lacking_tokens(self.folder, model):
            if not (self.folder / TOKENIZER_JSON).is_file():
                raise ConfigurationError(
                    f"{self.folder} has the tokens {', '.join(lacking[:4])}, which its "
                    f"{TOKENIZER_FILE} lacks; put its {TOKENIZER_JSON} there, which "
                    f"save_pretrained of transformers writes"
                )
            return _read_tokenizer_json(self.folder, rows)
        proto = _proto(model, str(file))
        # In a run, text comes back from its tokens as it was, and is streamed piece by piece.
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        written: bytes = proto.SerializeToString(deterministic=True)
        pieces = SentencePieceTokenizer(written, str(file)).vocabulary_size
        if pieces > rows:
            raise ConfigurationError(
                f"{file} has {pieces} pieces, but {self.folder / CONFIG_FILE} has a vocab_size "
                f"of {rows}; they are of different models"
            )
        return written

    def source(self, name: str) -> BaseSource:
        """Return what the plan of a run with adapters says of the checkpoint."""
        return BaseSource(
            name=name,
            files=tuple(
                BaseFile(name=file, sha256=sha256) for file, sha256 in self._weight_digests.items()
            ),
        )


def differing_fields(given: ModelFields, kept: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields that are given and differ from a model's, each with both values. What a
    model leaves to its defaults may be said as a number, and a row of padding that was added to an
    imported base is not counted."""
    kept = kept.without_padding
    resolved = {"kv_head_count": kept.kv_heads, "feed_forward_size": kept.feed_forward}
    for key in sorted(given.model_fields_set):
        said, there = getattr(given, key), getattr(kept, key)
        if said not in (there, resolved.get(key, there)):
            yield key, said, there


def _lacking_tokens(folder: Path, model: bytes) -> list[str]:
    """Return the tokens that a checkpoint has beside its SentencePiece model: those added later,
    and another end of a text."""
    proto = _proto(model, str(folder / TOKENIZER_FILE))
    known = {piece.piece.replace("\u2581", " ") for piece in proto.pieces}
    names = [token["content"] for token in added_tokens(folder)]
    if (folder / TOKENIZER_JSON).is_file():
        listed = _json_object(folder / TOKENIZER_JSON).get("added_tokens") or ()
        names += [token["content"] for token in listed]
    lacking = [name for name in dict.fromkeys(names) if name.replace("\u2581", " ") not in known]
    _, _, end, _ = _special_names(folder)
    if end is not None and end != proto.trainer_spec.eos_piece and end not in lacking:
        lacking.append(end)
    return lacking


def added_tokens(folder: Path) -> list[dict[str, Any]]:
    """Return what a checkpoint's files add to its vocabulary beside `tokenizer.json`, in the form
    of that file and the order of AutoTokenizer; `id` is None where no number is said.

    Raises IntegrityError if a file lists them in another form.
    """
    settings = _settings(folder)
    decoder, special = settings.get("added_tokens_decoder"), _special_names(folder)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    try:
        if decoder is not None:
            tokens = [{**token, "id": int(number)} for number, token in decoder.items()]
        elif (folder / _ADDED_TOKENS).is_file():
            tokens = [
                {"content": name, "id": int(number), "special": name in special}
                for name, number in _json_object(folder / _ADDED_TOKENS).items()
            ]
        else:
            tokens = []
        tokens.sort(key=lambda token: int(token["id"]))
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = settings.get(key)
            for name in listed if isinstance(listed, list) else ():
                content = name["content"] if isinstance(name, dict) else name
                tokens.append({"content": content, "id": None, "special": True})
        return [
            {**flags, "special": False, "normalized": not token.get("special", False)}
            | {key: token[key] for key in token if key != "__type"}
            | {"content": str(token["content"])}
            for token in tokens
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise IntegrityError(
            f"{folder} lists added tokens in another form than transformers does; save its "
            f"tokenizer again with save_pretrained"
        ) from None


def _read_tokenizer_json(folder: Path, rows: int) -> bytes:
    """Return the tokenizer of a checkpoint that has a `tokenizer.json`, for `rows` of an embedding.

    Raises ConfigurationError naming what is missing or impossible, IntegrityError if it is broken.
    """
    file = folder / TOKENIZER_JSON
    if not file.is_file():
        raise ConfigurationError(
            f"{folder} has neither {TOKENIZER_FILE} nor {TOKENIZER_JSON}; put its tokenizer there, "
            f"or name a SentencePiece model with the same pieces as model_file under [tokenizer]"
        )
    special, template = _special_names(folder), _chat_template(folder)
    if special[2] is None:
        raise ConfigurationError(
            f"{folder} does not say what ends a text; write eos_token in its {TOKENIZER_SETTINGS}"
        )
    content = with_added_tokens(_json_object(file), added_tokens(folder), str(file))
    splits = _settings(folder).get(SPLITS_SPECIAL) is True
    turn_end_name = None
    if template is not None and not splits:
        named = zip(SPECIAL_NAMES, special, strict=True)
        controls = [token["content"] for token in content["added_tokens"] if token["special"]]
        turn_end_name = turn_end(template, {k: n for k, n in named if n is not None}, controls)
    generation = _json_object(folder / _GENERATION) if (folder / _GENERATION).is_file() else None
    return pack_tokenizer(
        content, special, template, str(file),
        rows=rows,
        stated=_stated(SpecialNumbers, read_config_file(folder), rows),
        generation=None if generation is None else _stated(GenerationSettings, generation, rows),
        splits_special=splits,
        turn_end=turn_end_name,
    )  # fmt: skip


def _special_names(folder: Path) -> list[str | None]:
    """Return what a checkpoint calls unknown, begin, end and padding; None for what it lacks."""
    settings, file = _settings(folder), folder / _SPECIAL_TOKENS
    if "added_tokens_decoder" not in settings and file.is_file():  # as transformers does
        settings |= {key: value for key, value in _json_object(file).items() if value is not None}
    names: list[str | None] = []
    for key in ("unk_token", "bos_token", "eos_token", "pad_token"):
        value = settings.get(key)
        called = value.get("content") if isinstance(value, dict) else value
        names.append(called if isinstance(called, str) else None)
    return names


_StatedT = TypeVar("_StatedT", SpecialNumbers, GenerationSettings)


def _stated(kind: type[_StatedT], values: Mapping[str, Any], rows: int) -> _StatedT:
    """Return what a file of a checkpoint says, without what is not known of its kind, and without
    numbers that no token has: what opens an export would end at them."""
    found: dict[str, Any] = {}
    for key in kind.model_fields:
        with contextlib.suppress(ValidationError):
            found[key] = getattr(kind.model_validate({key: values.get(key)}), key)
    for key in SpecialNumbers.model_fields:
        said = found.get(key)
        if isinstance(said, list):
            found[key] = [number for number in said if 0 <= number < rows] or None
        elif said is not None and not 0 <= said < rows:
            found[key] = None
    return kind.model_validate(found)


def _chat_template(folder: Path) -> str | None:
    """Return the chat template, if there is one: in a file of its own, as newer checkpoints."""
    file = folder / CHAT_TEMPLATE
    if file.is_file():
        with storage_errors(folder):
            return file.read_bytes().decode("utf-8", "replace")
    found = _settings(folder).get("chat_template")
    if isinstance(found, list):
        found = {
            str(item.get("name")): item.get("template") for item in found if isinstance(item, dict)
        }
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / TOKENIZER_SETTINGS
    return _json_object(file) if file.is_file() else {}


def _json_object(file: Path) -> dict[str, Any]:
    with storage_errors(file.parent):
        data = file.read_bytes()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise IntegrityError(f"{file} is not JSON") from None
    if not isinstance(content, dict):
        raise IntegrityError(f"{file} is not a JSON object")
    return content


def _proto(model: bytes, source: str) -> Any:
    try:
        return _sentencepiece_format.ModelProto.FromString(model)
    except DecodeError:
        raise IntegrityError(f"{source} is not a SentencePiece model") from None
