"""What peers say while they meet, as bytes on a libp2p stream.

A frame is four bytes of length, big-endian, and a MessagePack array: the kind of message and its
fields in order. The fields of a group are compressed: its leader sends them to everybody, and most
of what the rows say is the same. A call begins with a frame that names the meeting. Whatever a
stranger sends is refused with ValueError unless each field has its type and lies within its bounds.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from dataclasses import astuple, fields
from functools import lru_cache
from typing import Any, get_type_hints

import msgpack
from dipaco.peer.member.calls import (
    Absent,
    Closing,
    Confirm,
    Gathering,
    Group,
    Invite,
    Join,
    Leave,
    Message,
    Redirect,
    Refused,
    Searching,
    Standing,
)
from dipaco.peer.member.reception import GREATEST_GROUP

from .group import ROW_BYTES

LENGTH_BYTES = 4
# A group's rows are the longest that is said. What does not compress gets a little longer.
GREATEST_GROUP_BYTES = GREATEST_GROUP * (ROW_BYTES + 128) + 128
GREATEST_FRAME_BYTES = GREATEST_GROUP_BYTES + 256
GREATEST_KEY_CHARACTERS = 256
_GREATEST_NUMBER = 2**31
_GREATEST_TEXT = 200
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,64}")

_KINDS: dict[str, type[Any]] = {
    "join": Join,
    "invite": Invite,
    "confirm": Confirm,
    "leave": Leave,
    "absent": Absent,
    "searching": Searching,
    "gathering": Gathering,
    "redirect": Redirect,
    "refused": Refused,
    "closing": Closing,
    "group": Group,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_TYPES = {kind: get_type_hints(kind) for kind in _NAMES}


def encode(message: Message) -> bytes:
    """Return a message as a frame."""
    if isinstance(message, Group):
        return _encode_group(message)
    return frame(msgpack.packb((_NAMES[type(message)], *astuple(message))))


@lru_cache(maxsize=1)
def _encode_group(group: Group) -> bytes:
    fields_of_it = msgpack.packb((group.peers, group.rows))
    return frame(msgpack.packb((_NAMES[Group], zlib.compress(fields_of_it))))


def frame(data: bytes) -> bytes:
    """Return bytes with their length in front."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def decode(data: bytes) -> Message:
    """Read what a stranger said. Raises ValueError that says what is wrong, in plain text."""
    values = _unpack(data)
    if type(values) is not tuple or not values or type(values[0]) is not str:
        raise ValueError("message is not an array that begins with its kind")
    kind = _KINDS.get(values[0])
    if kind is Group:
        values = (values[0], *_unpack_group(values[1:]))
    if kind is None or len(values) != 1 + len(fields(kind)):
        raise ValueError("message has an unknown kind or a wrong number of fields")
    types = _TYPES[kind]
    message: Message = kind(
        *(
            _read(types[field.name], value, f"{values[0]}: {field.name}")
            for field, value in zip(fields(kind), values[1:], strict=True)
        )
    )
    if isinstance(message, Group) and len(message.peers) != len(message.rows):
        raise ValueError("group: there are not as many rows as peers")
    return message


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, use_list=False, raw=False, max_ext_len=0)
    except Exception as error:  # msgpack has no common base class for what it raises
        raise ValueError(f"message is not msgpack ({type(error).__name__})") from None


def _unpack_group(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the fields of a group, if they are not longer than any group has them."""
    inflate = zlib.decompressobj()
    try:
        (data,) = values
        content = inflate.decompress(data, GREATEST_GROUP_BYTES)
    except (zlib.error, TypeError, ValueError):
        raise ValueError("message of a group is not compressed") from None
    if not inflate.eof or inflate.unused_data:
        raise ValueError("message of a group is cut off or out of bounds")
    found = _unpack(content)
    return found if type(found) is tuple else ()


def _read(kind: Any, value: Any, name: str) -> Any:
    """Return the value of a field, or raise ValueError."""
    if kind == Standing | None and value is None:
        return None
    if kind in (Standing, Standing | None) and type(value) is tuple and len(value) == 2:
        return Standing(_read(int, value[0], name), _read_peer(value[1], name))
    if kind == tuple[str, ...] and type(value) is tuple and len(value) <= GREATEST_GROUP:
        return tuple(_read_peer(peer, name) for peer in value)
    if kind == tuple[bytes, ...] and type(value) is tuple and len(value) <= GREATEST_GROUP:
        return tuple(_read(bytes, row, name) for row in value)
    if kind is int and type(value) is int and 0 <= value < _GREATEST_NUMBER:
        return value
    if kind is bytes and type(value) is bytes and len(value) <= ROW_BYTES:
        return value
    if kind is str and type(value) is str and len(value) <= _GREATEST_TEXT and value.isprintable():
        return value
    raise ValueError(f"{name} is of a wrong type or out of bounds")


def _read_peer(value: Any, name: str) -> str:
    if type(value) is str and _PEER_ID.fullmatch(value):
        return value
    raise ValueError(f"{name} is not a peer id")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read the next frame. Raises ValueError when it is too long, EOFError at the end."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if size > GREATEST_FRAME_BYTES:
        raise ValueError(f"message of {size} bytes, at most {GREATEST_FRAME_BYTES}")
    return await reader.readexactly(size)


def read_key(data: bytes) -> str:
    """Read the frame that names a meeting. Raises ValueError."""
    key = data.decode("ascii")  # UnicodeDecodeError is a ValueError.
    if len(key) > GREATEST_KEY_CHARACTERS or not key.isprintable():
        raise ValueError("the name of the meeting is too long or not plain text")
    return key
