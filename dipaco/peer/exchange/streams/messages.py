"""The messages of the exchange: small msgpack maps, checked field by field before use.

Each stands on a stream behind a four-byte length; a request says in `kind` what it is. Whatever a
peer sends is refused with `MessageError` when it is too large, not a map, or has a field of the
wrong type or out of bounds. Fields that are not known are ignored, so a later version may add some.
The hello is the one message that every version of the protocol must understand; never change the
meaning of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dipaco.protocol.chain.steps import MAX_ROWS
from dipaco.protocol.invitations import ADMISSION_BYTES
from dipaco.protocol.records import AddressText, Count, HeldState, ModuleName, PeerId, TimeS

from .transport import Stream

# A step and as many rows besides, of 128 peers with their admissions, fit into a tell.
MAX_REQUEST_BYTES = 2**17
_MAX_REPLY_BYTES = 4096
MAX_ANSWER_BYTES = 2**18
# The most bytes of one message.
MAX_TOLD_STEPS, MAX_TOLD_ROWS = 1, MAX_ROWS
_MAX_ANSWERED_STEPS, _MAX_ANSWERED_ROWS = 256, 4 * MAX_ROWS
_MAX_ADMISSIONS = 512
_MAX_LOCATOR = 64
# Addresses at which a peer is called back.
MAX_CALLED_BACK = 4
_LENGTH_BYTES = 4
# The most entries of one array or map; what is nested deeper than the fields of rows cannot be
# long.
_MAX_ENTRIES = 1024

RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Hash = Annotated[bytes, Field(min_length=32, max_length=32)]
AdmissionBytes = Annotated[bytes, Field(max_length=2 * ADMISSION_BYTES)]
Admissions = Annotated[dict[PeerId, AdmissionBytes], Field(max_length=_MAX_ADMISSIONS)]


class MessageError(ValueError):
    """A message that is too large, cannot be read, or has a wrong field."""


class Message(BaseModel):
    """Base of every message."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    max_bytes: ClassVar[int] = _MAX_REPLY_BYTES


class _Asking(Message):
    """Base of every request.

    These two fields come first: they decide whether the others are read, and who pays for that.
    """

    kind: str
    admission: AdmissionBytes | None = None
    """The admission of the asker, which need not wait until its records are read."""


class HelloRequest(_Asking):
    """Asks for a peer's version and its time."""

    kind: Literal["hello"] = "hello"
    protocol: int = Field(ge=0, le=2**31)
    software: str = Field(max_length=64)


class HelloReply(Message):
    """The answer to a hello. Times are this peer's uncorrected Unix clock."""

    protocol: int = Field(ge=0, le=2**31)
    software: str = Field(max_length=64)
    received_s: TimeS
    sent_s: TimeS
    run: RunId | None = None


class CallBackRequest(_Asking):
    """Please try to call me at these addresses."""

    kind: Literal["call_back"] = "call_back"
    addresses: tuple[AddressText, ...] = Field(max_length=MAX_CALLED_BACK, strict=False)


class CallBackReply(Message):
    """The result of calling back.

    elsewhere: the caller is not seen to come from any of the addresses. untried: it was called a
    moment ago, or it is not known where it comes from.
    """

    result: Literal["reached", "silent", "elsewhere", "untried"]
    near: bool = False
    """The caller comes from an address that not everybody can call."""


class TellRequest(_Asking):
    """These rows and steps are new. `unpack_row` and `unpack_step` read them."""

    kind: Literal["tell"] = "tell"
    run: RunId
    module: ModuleName
    rows: list[Any] = Field(max_length=MAX_TOLD_ROWS)
    steps: list[Any] = Field(max_length=MAX_TOLD_STEPS)
    keep: bool
    admissions: Admissions


class TellReply(Message):
    """The answer to a tell: it has arrived."""


class AskRequest(_Asking):
    """Which steps come after the newest of these that you know, and which rows do you know?"""

    kind: Literal["ask"] = "ask"
    run: RunId
    module: ModuleName
    locator: list[Hash] = Field(max_length=_MAX_LOCATOR)


class AskReply(Message):
    """As many steps as fit, oldest first."""

    max_bytes: ClassVar[int] = MAX_ANSWER_BYTES

    steps: list[Any] = Field(max_length=_MAX_ANSWERED_STEPS)
    rows: list[Any] = Field(max_length=_MAX_ANSWERED_ROWS)
    has_more: bool
    held: HeldState | None
    trains: bool = False
    """Whether this peer trains the module."""
    admissions: Admissions


class GetRequest(_Asking):
    """Send the content with this hash, from `offset` on."""

    kind: Literal["get"] = "get"
    sha256: Hash
    offset: Count


class GetReply(Message):
    """What precedes the bytes of a get.

    ok: `total_bytes - offset` raw bytes follow. absent: not held here. busy: ask again in
    `retry_after_s`. beyond: `offset` lies behind the end.
    """

    status: Literal["ok", "absent", "busy", "beyond"]
    total_bytes: Count = 0
    retry_after_s: Annotated[float, Field(ge=0, le=3600)] = 0.0


class PutRequest(_Asking):
    """Take this file of mine, which the row names; its bytes follow when the answer is "send"."""

    kind: Literal["put"] = "put"
    run: RunId
    row: list[Any]
    admissions: Admissions


class PutReply(Message):
    """send: I wait for the bytes. stored: I have the file; also said once the bytes are here.
    refused: the row or the file is not what it should be. full: no room for it."""

    status: Literal["send", "stored", "refused", "full"]


Request = HelloRequest | CallBackRequest | TellRequest | AskRequest | GetRequest | PutRequest
_REQUESTS: dict[str, type[Request]] = {
    kind.model_fields["kind"].default: kind for kind in get_args(Request)
}
# These carry rows; the others are short.
_LONG = ("tell", "ask", "put")
# The requests that only members may make.
_OF_MEMBERS = ("tell", "put", "call_back")
# The kind of a request and the admission stand in its first bytes.
_BEGINNING_BYTES = 128 + ADMISSION_BYTES
# What is said to others with it instead of a reply.
TURNED_AWAY = bytes(_LENGTH_BYTES)

_MessageT = TypeVar("_MessageT", bound=Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    packed: bytes = msgpack.packb(message.model_dump(), use_bin_type=True)
    return packed


def _unpack(data: bytes, max_bytes: int) -> dict[Any, Any]:
    if len(data) > max_bytes:
        raise MessageError(f"{len(data)} bytes, at most {max_bytes} are allowed")
    try:
        values = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_array_len=_MAX_ENTRIES,
            max_map_len=_MAX_ENTRIES,
        )
    except Exception as error:  # msgpack has no common base class for what it raises
        raise MessageError(f"not msgpack ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise MessageError("not a map")
    return values


def _validate(message_class: type[_MessageT], values: dict[Any, Any]) -> _MessageT:
    try:
        return message_class.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise MessageError(f"{where}: {first['msg']}"[:200]) from None


def decode(message_class: type[_MessageT], data: bytes) -> _MessageT:
    """Read a message that came from another peer, or raise `MessageError`."""
    return _validate(message_class, _unpack(data, message_class.max_bytes))


@dataclass(frozen=True)
class Beginning:
    """What the first bytes of a request say."""

    size_bytes: int
    """The size of the whole request."""
    data: bytes
    """The first bytes of it."""
    kind: str
    admission: bytes | None

    @property
    def is_of_members(self) -> bool:
        """Whether only admitted peers are answered."""
        return self.kind in _OF_MEMBERS


async def read_beginning(stream: Stream) -> Beginning:
    """Read the length and the first bytes of a request.

    Raises `MessageError` for one that is too long for its kind or begins with something else, and
    `asyncio.IncompleteReadError` when the stream ends.
    """
    size = await _read_length(stream, MAX_REQUEST_BYTES)
    data = await stream.read_exactly(min(size, _BEGINNING_BYTES))
    kind, admission = _introduction(data)
    _check_size(kind, size)
    return Beginning(size, data, kind, admission)


def _introduction(data: bytes) -> tuple[str, bytes | None]:
    """Return the kind and the admission that a request begins with."""
    fields: dict[Any, Any] = {}
    unpacker = msgpack.Unpacker(raw=False, max_array_len=0, max_map_len=_MAX_ENTRIES)
    try:
        unpacker.feed(data)
        for _ in range(min(2, unpacker.read_map_header())):
            key = unpacker.unpack()
            fields[key] = unpacker.unpack()
    except Exception as error:  # as in `_unpack`; also a key that cannot be one
        if "kind" not in fields:
            raise MessageError(f"not a request ({type(error).__name__})") from None
    kind, admission = fields.get("kind"), fields.get("admission")
    if not isinstance(kind, str) or kind not in _REQUESTS:
        raise MessageError("not a kind of request")
    return kind, admission if isinstance(admission, bytes) else None


def decode_request(data: bytes) -> Request:
    """Read a request of any kind, or raise `MessageError`."""
    kind, _ = _introduction(data[:_BEGINNING_BYTES])
    _check_size(kind, len(data))
    return _validate(_REQUESTS[kind], _unpack(data, MAX_REQUEST_BYTES))


def _check_size(kind: str, size_bytes: int) -> None:
    if kind not in _LONG and size_bytes > _MAX_REPLY_BYTES:
        raise MessageError(f"{size_bytes} bytes, at most {_MAX_REPLY_BYTES} are allowed")


def framed(message: Message) -> bytes:
    """Return a message behind its length."""
    data = encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_frame(stream: Stream, max_bytes: int) -> bytes:
    """Read the bytes of a message. Raises `MessageError` for a longer one, before it is read, and
    `asyncio.IncompleteReadError` when the stream ends."""
    return await stream.read_exactly(await _read_length(stream, max_bytes))


async def _read_length(stream: Stream, max_bytes: int) -> int:
    size = int.from_bytes(await stream.read_exactly(_LENGTH_BYTES), "big")
    if size > max_bytes:
        raise MessageError(f"{size} bytes, at most {max_bytes} are allowed")
    return size
