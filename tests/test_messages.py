"""The exchange's messages: what is malformed is refused, and the hello never changes."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from dipaco.peer.exchange import messages
from dipaco.peer.exchange.messages import (
    FetchRequest,
    HeldContent,
    HelloReply,
    HelloRequest,
    HoldingsReply,
    HoldingsRequest,
    MessageError,
)
from hypothesis import given
from hypothesis import strategies as st

SHA = "0a" * 32
HELD = {"module": "P17", "version": 1, "digest": SHA, "tokens": 2, "round": 3, "bytes": 4}


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    for message in (HelloReply, HoldingsRequest, FetchRequest):
        with contextlib.suppress(MessageError):
            parsed = messages.decode(message, data)
            assert messages.decode(message, messages.encode(parsed)) == parsed


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "../../etc/passwd"},
        {"sha256": SHA.upper()},
        {"offset": -1},
        {"offset": True},
        {"offset": 2**60},
        {"offset": "0"},
    ],
)
def test_fields_out_of_bounds_are_refused(change: dict[str, object]) -> None:
    good = {"sha256": SHA, "offset": 0}
    assert messages.decode(FetchRequest, msgpack.packb({**good, "added_later": 1})).offset == 0
    with pytest.raises(MessageError):
        messages.decode(FetchRequest, msgpack.packb({**good, **change}))


@pytest.mark.parametrize(
    "change", [{"module": "L0"}, {"tokens": -1}, {"digest": None}, {"bytes": 1.5}, {"version": []}]
)
def test_a_holding_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    reply = messages.decode(HoldingsReply, msgpack.packb({"held": HELD}))
    assert reply.held == HeldContent(**HELD)
    with pytest.raises(MessageError, match="held"):
        messages.decode(HoldingsReply, msgpack.packb({"held": {**HELD, **change}}))


def test_deep_nesting_and_size_are_refused() -> None:
    with pytest.raises(MessageError):
        messages.decode(HoldingsRequest, b"\x91" * 4000)
    with pytest.raises(MessageError, match="at most 4096"):
        messages.decode(HoldingsRequest, b"\x80" + bytes(5000))


def test_the_hello_is_the_same_in_every_version() -> None:
    """A frozen request and reply: peers of any version must be able to greet each other."""
    request = bytes.fromhex("82a870726f746f636f6c01a8736f667477617265a864697061636f2f31")
    assert messages.encode(HelloRequest(protocol=1, software="dipaco/1")) == request
    reply = HelloReply(protocol=1, software="x", received_s=1.0, sent_s=2.0)
    assert msgpack.unpackb(messages.encode(reply)) == {
        "protocol": 1,
        "software": "x",
        "received_s": 1.0,
        "sent_s": 2.0,
        "run": None,
    }
