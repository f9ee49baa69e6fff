"""A run's tokenizer as the tokenizer files that `transformers` reads.

A `tokenizer.json` that came with an imported base goes back as it was.

A SentencePiece model is written as one. The plain conversion of `transformers` changes ids: it adds
a space in front, parses `<s>` where a text has it, and takes U+2581 for a space. Here a space stays
a space, so U+2581 is spelled in bytes as in `dipaco.routing.tokens.tokenizer`, and every text has
the same ids in both. A foreign model that is not BPE, or does more than that, is left as it is, and
the reason is told (`lack_of_transformers`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from dipaco.modules.llama import TOKENIZER_FILE, TOKENIZER_JSON, TOKENIZER_SETTINGS
from dipaco.routing.tokens.chat_tokens import SPECIAL_NAMES
from dipaco.routing.tokens.sentencepiece_tokenizer import SentencePieceTokenizer
from dipaco.routing.tokens.tokenizer_json import SPLITS_SPECIAL, JsonTokenizer
from dipaco.routing.tokens.tokenizer_kinds import is_json

_SPACE_MARK = "\u2581"
_SOURCE = "the tokenizer"
# Its classes are made at import, where no type checker sees them.
_sentencepiece_format: Any = sentencepiece_model_pb2
_Piece = _sentencepiece_format.ModelProto.SentencePiece
_Trainer = _sentencepiece_format.TrainerSpec


def tokenizer_files(tokenizer: bytes, context: int, *, as_in_run: bool = False) -> dict[str, bytes]:
    """Return the tokenizer's files of a checkpoint, by name. `tokenizer` is the blob of the run.

    Of a SentencePiece model that `lack_of_transformers`, the model alone. `as_in_run`: it reads a
    text as documents were read.
    """
    if is_json(tokenizer):
        pieces = json_pieces(tokenizer)
        content = {
            TOKENIZER_JSON: pieces.for_texts if as_in_run else pieces.tokenizer,
            TOKENIZER_SETTINGS: _json_settings(pieces, context),
        }
        return {name: json_bytes(value) for name, value in content.items()}
    files = {TOKENIZER_FILE: tokenizer}
    if lack_of_transformers(tokenizer) is None:
        files[TOKENIZER_JSON] = json_bytes(tokenizer_json(tokenizer))
        files[TOKENIZER_SETTINGS] = json_bytes(tokenizer_config(tokenizer, context))
    return files


def special_numbers(tokenizer: bytes) -> dict[str, Any]:
    """Return what `config.json` says of begin, end and padding in the exported tokenizer."""
    if is_json(tokenizer):
        return json_pieces(tokenizer).origin.numbers.model_dump(mode="json")
    pieces = SentencePieceTokenizer(tokenizer, _SOURCE)
    ends = {"eos_token_id": pieces.end, "pad_token_id": pieces.padding}
    return {"bos_token_id": pieces.begin[0], **ends}


def generation_settings(tokenizer: bytes) -> dict[str, Any]:
    """Return the content of `generation_config.json`: that of the base, or as `dipaco-generate`."""
    if is_json(tokenizer):
        origin = json_pieces(tokenizer).origin
        said = origin.generation or origin.numbers
        settings = said.model_dump(mode="json", exclude_none=True)
        if unsaid := ends_unsaid_by_base(tokenizer):
            settings["eos_token_id"] = sorted(unsaid | _stated_ends(settings))
        return settings
    return {
        **special_numbers(tokenizer),
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 50,
        # As in dipaco-generate: pieces that are never part of a text are never chosen.
        "suppress_tokens": list(SentencePieceTokenizer(tokenizer, _SOURCE).never_chosen),
    }


def ends_unsaid_by_base(tokenizer: bytes) -> set[int]:
    """Return the tokens that end an answer of the run although the files of its base do not say so:
    those that the chat template writes behind an answer."""
    if not is_json(tokenizer):
        return set()
    pieces = json_pieces(tokenizer)
    said = pieces.origin.generation or pieces.origin.numbers
    return {*pieces.ends} - _stated_ends(said.model_dump())


def _stated_ends(settings: Mapping[str, Any]) -> set[int]:
    stated = settings.get("eos_token_id")
    listed = stated if isinstance(stated, list) else [stated]
    return {number for number in listed if number is not None}


def names_are_text(tokenizer: bytes) -> bool:
    """Return whether the tokenizer of an exported path takes names of special tokens in a text for
    text, as training does; `tokenizer` is the blob of the run."""
    return not is_json(tokenizer) or json_pieces(tokenizer).splits_special


def _json_settings(pieces: JsonTokenizer, context: int) -> dict[str, Any]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        **dict(zip(SPECIAL_NAMES, pieces.origin.names, strict=True)),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if pieces.splits_special:
        settings[SPLITS_SPECIAL] = True
    if pieces.chat_template is not None:
        settings["chat_template"] = pieces.chat_template
    return settings


@functools.lru_cache(maxsize=1)
def json_pieces(tokenizer: bytes) -> JsonTokenizer:
    """Return the tokenizer of a blob; one of a real model takes a second to read."""
    return JsonTokenizer(tokenizer, _SOURCE)


def tokenizer_json(model: bytes) -> dict[str, Any]:
    """Return the content of `tokenizer.json` for a SentencePiece model, the blob `tokenizer` of a
    run, which must not `lack_of_transformers`."""
    proto = _sentencepiece_format.ModelProto.FromString(model)
    pieces = [piece.piece.replace(_SPACE_MARK, " ") for piece in proto.pieces]
    [number] = SentencePieceTokenizer(model, _SOURCE).begin
    name = pieces[number]
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    sequences = [{"Sequence": {"id": part, "type_id": index}} for index, part in enumerate("AB")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [*_added_tokens(proto, pieces)],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, sequences[0]],
            "pair": [begin, sequences[0], sequences[1]],
            "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(proto, pieces),
    }


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return JSON as it is written into exports: the same content has the same bytes."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def tokenizer_config(model: bytes, context: int) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`, which goes with `tokenizer_json`."""
    names = SentencePieceTokenizer(model, _SOURCE).special_names
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        **dict(zip(SPECIAL_NAMES, names, strict=True)),
        # A text may contain "</s>", as HTML does; only SentencePiece's rule keeps it a text.
        SPLITS_SPECIAL: True,
        "clean_up_tokenization_spaces": False,
        # What the model takes; version 4 of transformers would add more.
        "model_input_names": ["input_ids", "attention_mask"],
    }


def lack_of_transformers(tokenizer: bytes) -> str | None:
    """Return why the run's tokenizer cannot be written with its ids for transformers, if so: what
    a SentencePiece model does and the files written here cannot."""
    if is_json(tokenizer):
        return None
    proto = _sentencepiece_format.ModelProto.FromString(tokenizer)
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    reasons = {
        f"its normalisation is '{normalizer.name}', not 'identity'": bool(
            normalizer.precompiled_charsmap
        ),
        "it puts a space in front of a text (add_dummy_prefix)": normalizer.add_dummy_prefix,
        "it removes white space (remove_extra_whitespaces)": normalizer.remove_extra_whitespaces,
        "it does not write a space as U+2581": not normalizer.escape_whitespaces,
        "it treats white space as a suffix": trainer.treat_whitespace_as_suffix,
        "it is not BPE": trainer.model_type != _Trainer.BPE,
        "it has unused pieces": any(piece.type == _Piece.UNUSED for piece in proto.pieces),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _added_tokens(proto: Any, pieces: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the special pieces, and the user-defined ones that need to be cut out of a text."""
    for index, piece in enumerate(proto.pieces):
        special = piece.type in (_Piece.CONTROL, _Piece.UNKNOWN)
        if special or (piece.type == _Piece.USER_DEFINED and not _stands_alone(index, pieces)):
            yield {
                "id": index,
                "content": pieces[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }


def _stands_alone(index: int, pieces: list[str]) -> bool:
    """Return whether a piece is one character that no other piece has, so nothing can take it."""
    piece = pieces[index]
    return len(piece) == 1 and sum(piece in other for other in pieces) == 1


def _text_pieces(proto: Any, pieces: list[str]) -> dict[str, int]:
    """Return the pieces that a text is made of, with their ids."""
    kinds = (_Piece.NORMAL, _Piece.USER_DEFINED)
    return {pieces[i]: i for i, piece in enumerate(proto.pieces) if piece.type in kinds}


def _bpe(proto: Any, pieces: list[str]) -> dict[str, Any]:
    """Return the BPE model: SentencePiece's rule (the best scored result first) as merges."""
    known = _text_pieces(proto, pieces)
    merges: list[tuple[float, int, int, str, str]] = []
    for text, index in known.items():
        if proto.pieces[index].type == _Piece.USER_DEFINED:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in known and right in known:
                # SentencePiece takes the leftmost of equal ones. In a run of one character the odd
                # piece is the last, so the longer piece on the left comes first.
                score = proto.pieces[index].score
                merges.append((-score, index, -cut, left, right))
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": next(p.piece for p in proto.pieces if p.type == _Piece.UNKNOWN),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {piece: index for index, piece in enumerate(pieces)},
        # Pairs, not joined strings: the pieces contain spaces.
        "merges": [[left, right] for *_, left, right in sorted(merges)],
    }
