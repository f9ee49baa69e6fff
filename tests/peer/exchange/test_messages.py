"""The exchange's messages: what is malformed is refused, and the hello never changes."""

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco.peer.exchange.streams import messages
from dipaco.peer.exchange.streams.messages import (
    MAX_REQUEST_BYTES,
    AskReply,
    GetRequest,
    HelloReply,
    HelloRequest,
    MessageError,
    TellRequest,
)

RUN = "0123456789abcdef"
GET = {"kind": "get", "sha256": bytes(32), "offset": 0}
TELL = {"kind": "tell", "run": RUN, "module": "P17", "rows": [], "steps": [], "keep": False, "admissions": {}}


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(data):
    with contextlib.suppress(MessageError):
        messages.decode_request(data)
    for message in (HelloReply, AskReply):
        with contextlib.suppress(MessageError):
            parsed = messages.decode(message, data)
            assert messages.decode(message, messages.encode(parsed)) == parsed


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "../../etc/passwd"},
        {"sha256": bytes(31)},
        {"offset": -1},
        {"offset": True},
        {"offset": 2**60},
        {"offset": "0"},
        {"kind": "fetch"},
        {"kind": 3},
    ],
)
def test_fields_out_of_bounds_are_refused(change):
    good = messages.decode_request(msgpack.packb({**GET, "added_later": 1}))
    assert isinstance(good, GetRequest)
    assert good.offset == 0
    with pytest.raises(MessageError):
        messages.decode_request(msgpack.packb({**GET, **change}))


@pytest.mark.parametrize("change", [{"module": "L0"}, {"run": "x"}, {"rows": [[]] * 1000}, {"admissions": {"me": b""}}])
def test_a_tell_out_of_bounds_is_refused(change):
    assert isinstance(messages.decode_request(msgpack.packb(TELL)), TellRequest)
    with pytest.raises(MessageError):
        messages.decode_request(msgpack.packb({**TELL, **change}))


def test_deep_nesting_and_size_are_refused():
    with pytest.raises(MessageError):
        messages.decode_request(b"\x91" * 4000)
    with pytest.raises(MessageError, match="at most"):
        messages.decode_request(bytes(MAX_REQUEST_BYTES + 1))
    with pytest.raises(MessageError, match="at most 4096"):
        messages.decode_request(msgpack.packb({**GET, "more": bytes(5000)}))


def test_the_hello_is_the_same_in_every_version():
    """A frozen request and reply: peers of any version must be able to greet each other."""
    request = msgpack.packb({"kind": "hello", "protocol": 1, "software": "dipaco/1", "admission": None})
    assert messages.encode(HelloRequest(protocol=1, software="dipaco/1")) == request
    reply = HelloReply(protocol=1, software="x", received_s=1.0, sent_s=2.0)
    assert msgpack.unpackb(messages.encode(reply)) == {
        "protocol": 1,
        "software": "x",
        "received_s": 1.0,
        "sent_s": 2.0,
        "run": None,
    }
