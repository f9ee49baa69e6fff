"""Mutations of what msgpack, JSON or safetensors say in some bytes; libFuzzer mutates the bytes.

Everything is drawn from one generator: a seed is a mutation.
"""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import msgpack

Spelling = Literal["bytes", "msgpack", "json", "safetensors"]

_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 127, 256, 2**16, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63),
    2**64 - 1, 0.0, -0.0, 1e308, float("inf"), float("nan"), "", "a" * 300, "\x00", "\ud7ff\u2028",
    "../../etc/passwd", b"", b"\xff" * 70, [], {}, [[[[[]]]]], {"": None},
)  # fmt: skip
_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, KeyError, AttributeError)


def mutate(data: bytes, spelling: Spelling, rng: random.Random) -> bytes | None:
    """Change one to three values inside and spell the whole again; None for what cannot be read
    or written."""
    try:
        if spelling == "msgpack":
            content = msgpack.unpackb(data, raw=False, strict_map_key=False)
            packed: bytes = msgpack.packb(_changed_often(rng, content), use_bin_type=True)
            return packed
        if spelling == "json":
            return _spelled(_changed_often(rng, json.loads(data)))
        if spelling == "safetensors":
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            metadata = header["__metadata__"]
            for name, value in metadata.items():
                if value[:1] in ("{", "["):  # Its entries are JSON in JSON.
                    metadata[name] = json.loads(value)
            header = _changed_often(rng, header)
            metadata = header.get("__metadata__")
            if isinstance(metadata, dict):
                texts = {k: v if isinstance(v, str) else _text(v) for k, v in metadata.items()}
                header["__metadata__"] = texts
            spelled = _spelled(header)
            spelled += b" " * (-len(spelled) % 8)
            return len(spelled).to_bytes(8, "little") + spelled + data[8 + length :]
    except (*_UNREADABLE, msgpack.UnpackException):
        pass
    return None


def _spelled(content: Any) -> bytes:
    return _text(content).encode()


def _text(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)


def _changed_often(rng: random.Random, content: Any) -> Any:
    for _ in range(rng.randint(1, 3)):
        content = _changed(rng, content)
    return content


def _changed(rng: random.Random, value: Any) -> Any:
    """Return `value` with one change somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value, key=repr))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                new = rng.choice(("", "x", "format", "__metadata__", "a" * 100))
                return {**value, new: rng.choice(_LEAVES)}
            case _:
                return {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * rng.choice((2, 3, 300)) + value[at + 1 :]
            case _:
                return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(("", "0", "f", "/", "\n", "é")) + value[at + 1 :]
    if isinstance(value, bytes) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 2**32))
    return rng.choice(_LEAVES)
