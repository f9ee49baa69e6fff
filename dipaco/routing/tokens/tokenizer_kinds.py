"""Which tokenizer is in a file?"""

from __future__ import annotations

from pathlib import Path

from .sentencepiece_tokenizer import SentencePieceTokenizer
from .tokenizer import Tokenizer
from .tokenizer_json import JsonTokenizer


def read_tokenizer(model: Path | bytes) -> Tokenizer:
    """Return the tokenizer at the path of a run's tokenizer, or of its bytes: a SentencePiece
    model, or a packed `tokenizer.json`.

    Raises IntegrityError if it cannot be read, ConfigurationError if it lacks what begins or ends a
    text, or if some texts cannot be written in it.
    """
    data = model if isinstance(model, bytes) else Path(model).read_bytes()
    source = "the tokenizer" if isinstance(model, bytes) else f"the tokenizer {model}"
    return JsonTokenizer(data, source) if is_json(data) else SentencePieceTokenizer(data, source)


def is_json(data: bytes) -> bool:
    """Return whether a run's tokenizer is a packed `tokenizer.json`, not a SentencePiece model."""
    return data[:1] == b"{"
