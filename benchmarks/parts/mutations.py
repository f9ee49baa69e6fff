"""Mutations of recorded bytes: on the bytes themselves, and on what msgpack or JSON says in them.

Everything is drawn from one generator: a seed is a sequence of inputs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgpack

Spelling = Literal["bytes", "msgpack", "json", "safetensors"]

MAX_BYTES = 2**20
_NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53,
            2**63 - 1, -(2**63), 2**64 - 1)  # fmt: skip
_LEAVES: tuple[Any, ...] = (
    None, True, False, *_NUMBERS, 0.0, -0.0, 1e308, float("inf"), float("nan"), "", "a" * 300,
    "\x00", "\ud7ff\u2028", "../../etc/passwd", b"", b"\xff" * 70, [], {}, [[[[[]]]]], {"": None},
)  # fmt: skip


def mutate(rng: random.Random, samples: Sequence[bytes], spelling: Spelling) -> bytes:
    """Return a sample with one to four mutations of one kind."""
    data = rng.choice(samples)
    if spelling != "bytes" and rng.random() < 0.6:
        structured = _mutate_content(rng, data, spelling)
        if structured is not None:
            return structured[:MAX_BYTES]
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(_ON_BYTES)(rng, data, samples)
    return data[:MAX_BYTES]


def _flip(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    width = rng.choice((1, 2, 4, 8))
    value = (rng.choice(_NUMBERS) % 2 ** (8 * width)).to_bytes(width, rng.choice(("big", "little")))
    # Lengths and kinds stand in front.
    at = rng.randrange(min(len(data), 16) + 1) if rng.random() < 0.5 else _position(rng, data)
    return data[:at] + value + data[at + width :]


def _cut(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: _position(rng, data)]


def _remove(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start = _position(rng, data)
    return data[:start] + data[start + rng.randint(1, 16) :]


def _insert(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _position(rng, data)
    return data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]


def _repeat(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start = _position(rng, data)
    block = data[start : start + rng.randint(1, 64)]
    return data[:start] + block * rng.randint(2, 40) + data[start:]


def _splice(rng: random.Random, data: bytes, samples: Sequence[bytes]) -> bytes:
    other = rng.choice(samples)
    return data[: _position(rng, data)] + other[_position(rng, other) :]


def _position(rng: random.Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1)


_ON_BYTES: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip, _overwrite, _cut, _remove, _insert, _repeat, _splice,
)  # fmt: skip


def _mutate_content(rng: random.Random, data: bytes, spelling: Spelling) -> bytes | None:
    """Change values inside and spell the whole again; None for what cannot be read or written."""
    head, tail = b"", b""
    try:
        if spelling == "safetensors":
            length = int.from_bytes(data[:8], "little")
            content, tail = json.loads(data[8 : 8 + length]), data[8 + length :]
            _open_metadata(content)
        elif spelling == "json":
            content = json.loads(data)
        else:
            content = msgpack.unpackb(data, raw=False, strict_map_key=False)
        for _ in range(rng.randint(1, 3)):
            content = _changed(rng, content)
        if spelling == "msgpack":
            packed: bytes = msgpack.packb(content, use_bin_type=True)
            return packed
        if spelling == "safetensors":
            _close_metadata(content)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str).encode()
        if spelling == "safetensors":
            text += b" " * (-len(text) % 8)
            head = len(text).to_bytes(8, "little")
        return head + text + tail
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        KeyError,
        msgpack.UnpackException,
    ):
        return None


def _open_metadata(header: dict[str, Any]) -> None:
    """Metadata entries of a safetensors file are JSON in JSON."""
    metadata = header["__metadata__"]
    for key, value in metadata.items():
        if value[:1] in ("{", "["):
            metadata[key] = json.loads(value)


def _close_metadata(header: Any) -> None:
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict):
        for key, value in metadata.items():
            if not isinstance(value, str):
                metadata[key] = json.dumps(value, sort_keys=True, separators=(",", ":"))


def _changed(rng: random.Random, value: Any) -> Any:
    """Return `value` with one change somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value, key=repr))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, _leaf_key(rng): rng.choice(_LEAVES)}
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
        return _flip(rng, value, ())
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 2**32))
    return rng.choice(_LEAVES)


def _leaf_key(rng: random.Random) -> Any:
    return rng.choice(("", "x", "format", "__metadata__", "a" * 100))
