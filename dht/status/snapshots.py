"""A status as few bytes, and back: what the history keeps of every moment. Pure.

Most of a status are the ids of peers, which stay the same, and lists of maps with equal keys. Long
strings become numbers (the history keeps which is which), lists of equal maps become columns, and
zlib takes what is left.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from typing import Any

# Strings from this length on are numbered; digests are not, which are new in every round.
LONG = 20
MOST_BYTES = 64 * 2**20
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Marks a number for a string, a string that begins with the mark itself, and a list of columns.
_MARK = "~"


class SnapshotError(Exception):
    """Bytes that no status was packed to."""


def pack(status: dict[str, Any], number_of: Callable[[str], int]) -> bytes:
    """Return a status as bytes; `number_of` gives every long string its number."""
    values = {name: value for name, value in status.items() if name != "problems"}
    # What problems say has counts in it, and would fill the table of strings.
    found = {"problems": status.get("problems", []), **_shortened(values, number_of)}
    return zlib.compress(json.dumps(found, separators=(",", ":")).encode(), 6)


def unpack(data: bytes, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return the status that was packed. Raises `SnapshotError` for any other bytes."""
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(data, MOST_BYTES)
        if not reader.eof:
            raise SnapshotError("it is cut off, or too large")
        values = json.loads(text)
        problems = values.pop("problems")
        status: dict[str, Any] = _restored(values, text_of)
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(str(error)) from None
    status["problems"] = problems
    return status


def _shortened(value: Any, number_of: Callable[[str], int]) -> Any:
    match value:
        case str():
            if len(value) >= LONG and not _DIGEST.fullmatch(value):
                return f"{_MARK}{number_of(value)}"
            return _MARK + value if value.startswith(_MARK) else value
        case dict():
            return {
                _shortened(name, number_of): _shortened(one, number_of)
                for name, one in value.items()
            }
        case [dict() as first, *rest] if first and all(
            isinstance(one, dict) and list(one) == list(first) for one in rest
        ):
            columns = [[_shortened(one[name], number_of) for one in value] for name in first]
            return {_MARK: [list(first), columns]}
        case list() | tuple():
            return [_shortened(one, number_of) for one in value]
    return value


def _restored(value: Any, text_of: Callable[[int], str]) -> Any:
    match value:
        case str():
            if not value.startswith(_MARK):
                return value
            rest = value.removeprefix(_MARK)
            # A string that begins with the mark has it twice.
            return rest if rest.startswith(_MARK) else text_of(int(rest))
        case dict():
            if list(value) == [_MARK]:
                names, columns = value[_MARK]
                whole = [_restored(column, text_of) for column in columns]
                return [dict(zip(names, row, strict=True)) for row in zip(*whole, strict=True)]
            return {
                _restored(name, text_of): _restored(one, text_of) for name, one in value.items()
            }
        case list():
            return [_restored(one, text_of) for one in value]
    return value
