"""The messages of the exchange: small msgpack maps, checked field by field before use.

They travel in the `metadata` of Hivemind's `ExpertRequest` and `ExpertResponse`, or, for a fetch,
on a raw stream behind a four-byte length. Whatever a peer sends is refused with `MessageError`
when it is too large, not a map, or has a field of the wrong type or out of bounds. Fields that
are not known are ignored, so a later version may add some. The hello is the one message that
every version of the protocol must understand; never change the meaning of its fields.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgpack
from dipaco.dht.certificate_check import MAX_CERTIFICATE_BYTES
from dipaco.dht.records import AddressText, AnnouncedState, Count, ModuleName, Sha256, TimeS
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_MESSAGE_BYTES = 4096
# Certificates of two large groups, or of dozens of small ones.
MAX_CERTIFICATES_BYTES = 2**18
MAX_CERTIFICATES = 64
# Addresses at which a peer is called back.
MAX_CALLED_BACK = 4
LENGTH_BYTES = 4

RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class MessageError(ValueError):
    """A message that is too large, cannot be read, or has a wrong field."""


class Message(BaseModel):
    """Base of every message."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    max_bytes: ClassVar[int] = MAX_MESSAGE_BYTES


class HelloRequest(Message):
    """Who are you, and what time is it?"""

    protocol: int = Field(ge=0, le=2**31)
    software: str = Field(max_length=64)


class HelloReply(Message):
    """The answer to a hello. Times are this peer's uncorrected Unix clock."""

    protocol: int = Field(ge=0, le=2**31)
    software: str = Field(max_length=64)
    received_s: TimeS
    sent_s: TimeS
    run: RunId | None = None


class HoldingsRequest(Message):
    """What do you hold of this module now?"""

    run: RunId
    module: ModuleName


class HeldContent(AnnouncedState, Message):
    """One module state that a peer can serve. Whose it is, libp2p says."""


class HoldingsReply(Message):
    """The heaviest state held of the module asked for, if any."""

    held: HeldContent | None = None


class CertificatesRequest(Message):
    """Send the certificates of a state and of those before it, the newest first."""

    run: RunId
    module: ModuleName
    digest: Sha256
    count: int = Field(ge=1, le=MAX_CERTIFICATES)


class CertificatesReply(Message):
    """As many of them as are known and fit; `dht.certificate_check` reads each."""

    max_bytes: ClassVar[int] = MAX_CERTIFICATES_BYTES

    certificates: list[Annotated[bytes, Field(max_length=MAX_CERTIFICATE_BYTES)]] = Field(
        max_length=MAX_CERTIFICATES
    )


class OfferRequest(Message):
    """Please fetch this state from me: I am leaving, or you are to keep a copy."""

    run: RunId
    held: HeldContent


class OfferReply(Message):
    """Whether the offer was noted; the fetch follows in the background."""

    accepted: bool


class CallBackRequest(Message):
    """Please try to call me at these addresses."""

    addresses: tuple[AddressText, ...] = Field(max_length=MAX_CALLED_BACK, strict=False)


class CallBackReply(Message):
    """What came of it. elsewhere: the caller is not seen to come from any of them. untried: it
    was called a moment ago, or there is no telling where it comes from."""

    result: Literal["reached", "silent", "elsewhere", "untried"]
    near: bool = False
    """The caller comes from an address that not everybody can call."""


class FetchRequest(Message):
    """Send the content with this hash, from `offset` on."""

    sha256: Sha256
    offset: Count


class FetchReply(Message):
    """What precedes the bytes of a fetch.

    ok: `total_bytes - offset` raw bytes follow, and then the stream ends. absent: not held here.
    busy: ask again in `retry_after_s`. beyond: `offset` lies behind the end.
    """

    status: Literal["ok", "absent", "busy", "beyond"]
    total_bytes: Count = 0
    retry_after_s: Annotated[float, Field(ge=0, le=3600)] = 0.0


MessageT = TypeVar("MessageT", bound=Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    packed: bytes = msgpack.packb(message.model_dump(), use_bin_type=True)
    return packed


def decode(message_class: type[MessageT], data: bytes) -> MessageT:
    """Read a message that came from another peer, or raise `MessageError`."""
    limit = message_class.max_bytes
    if len(data) > limit:
        raise MessageError(f"{len(data)} bytes, at most {limit} are allowed")
    values: Any
    try:
        values = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack has no common base class for what it raises
        raise MessageError(f"not msgpack ({type(error).__name__})") from None
    try:
        return message_class.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise MessageError(f"{where}: {first['msg']}"[:200]) from None


def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Put a message with its length on a stream; the caller drains."""
    data = encode(message)
    writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)


async def read_message(
    reader: asyncio.StreamReader, message_class: type[MessageT], timeout_s: float
) -> MessageT:
    """Read a message with its length from a stream.

    Raises `MessageError`, `asyncio.IncompleteReadError` when the stream ends too early, and
    `asyncio.TimeoutError`.
    """

    async def read() -> bytes:
        size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if size > message_class.max_bytes:
            raise MessageError(f"{size} bytes, at most {message_class.max_bytes} are allowed")
        return await reader.readexactly(size)

    return decode(message_class, await asyncio.wait_for(read(), timeout_s))
