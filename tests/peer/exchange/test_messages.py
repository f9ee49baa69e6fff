"""The exchange's messages: what is malformed is refused, and the hello never changes."""

import asyncio
import contextlib
from typing import get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco.peer.exchange.chain_store import ANSWERED_ROWS, ANSWERED_STEP_ROWS
from dipaco.peer.exchange.streams import messages
from dipaco.peer.exchange.streams.messages import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    AskReply,
    GetRequest,
    HelloReply,
    HelloRequest,
    MessageError,
    TellRequest,
)
from dipaco.protocol.chain.steps import MAX_ROWS
from dipaco.protocol.invitations import ADMISSION_BYTES

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
        messages.decode_request(msgpack.packb({**TELL, "more": bytes(MAX_REQUEST_BYTES)}))
    with pytest.raises(MessageError, match="at most 4096"):
        messages.decode_request(msgpack.packb({**GET, "more": bytes(5000)}))


def test_the_longest_tell_and_the_longest_answer_have_room():
    """So many rows, each of another peer, with the greatest numbers that a row may have."""

    def rows(count, begin=0):
        numbers = range(begin, begin + count)
        place, work = ["L15.E1023", 2**31, bytes(32), bytes(32), 1023], [2**62, bytes(32), 2**62, bytes(64)]
        return [[*place, f"{k:052}".replace("0", "A"), *work] for k in numbers]

    def size(message_class, rows, steps, **more):
        admissions = {row[5]: bytes(ADMISSION_BYTES) for row in (*rows, *(row for step in steps for row in step))}
        fields = {"rows": rows, "steps": steps, "admissions": admissions}
        return len(messages.encode(message_class(**fields, **more)))

    steps = [rows(MAX_ROWS, (k + 1) * MAX_ROWS) for k in range(messages.MAX_TOLD_STEPS)]
    more = {"run": RUN, "module": "L15.E1023", "keep": True, "admission": bytes(ADMISSION_BYTES)}
    assert size(TellRequest, rows(messages.MAX_TOLD_ROWS), steps, **more) <= MAX_REQUEST_BYTES
    steps = [rows(MAX_ROWS, k) for k in range(ANSWERED_ROWS, ANSWERED_ROWS + ANSWERED_STEP_ROWS, MAX_ROWS)]
    assert size(AskReply, rows(ANSWERED_ROWS), steps, has_more=True, held=None) <= MAX_ANSWER_BYTES


def beginning_of(data):
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(len(data).to_bytes(4, "big") + data)
        reader.read_exactly = reader.readexactly
        return await messages.read_beginning(reader)

    return asyncio.run(read())


@pytest.mark.parametrize("request_class", get_args(messages.Request))
def test_a_request_begins_with_its_kind_and_the_admission_of_who_asks(request_class):
    fields = {
        "hello": {"protocol": 8, "software": "x"},
        "call_back": {"addresses": ()},
        "tell": {**TELL, "rows": [bytes(60_000)]},
        "ask": {"run": RUN, "module": "P17", "locator": [bytes(32)] * 64},
        "get": GET,
        "put": {"run": RUN, "row": [bytes(9000)], "admissions": {}},
    }[request_class.model_fields["kind"].default]
    for admission in (b"a" * ADMISSION_BYTES, None):
        asked = request_class(**{**fields, "admission": admission})
        beginning = beginning_of(messages.encode(asked))
        assert (beginning.kind, beginning.admission) == (asked.kind, admission)
        assert len(beginning.data) < 512
        assert beginning.is_of_members == (asked.kind in ("tell", "put", "call_back"))


@pytest.mark.parametrize(
    "fields",
    [
        {"software": "x", "protocol": 8, "kind": "hello"},
        {b"kind": "get"},
        {"kind": ["tell"]},
        {"kind": "tell" * 1000},
        {"admission": bytes(2000), "kind": "hello"},
        {"kind": "hello", "more": bytes(5000)},
    ],
)
def test_what_begins_otherwise_is_refused_by_its_first_bytes(fields):
    with pytest.raises(MessageError):
        beginning_of(msgpack.packb(fields))


def test_a_request_is_of_the_kind_that_it_begins_with():
    """A peer that may not tell cannot tell by saying "kind" twice."""
    hello = msgpack.packb({"kind": "hello", "protocol": 8, "software": "x"})
    both = b"\x8a" + hello[1:] + msgpack.packb(TELL)[1:]
    assert msgpack.unpackb(both)["kind"] == "tell"
    with pytest.raises(MessageError, match="kind"):
        messages.decode_request(both)


def test_the_hello_is_the_same_in_every_version():
    """A frozen request and reply: peers of any version must be able to greet each other."""
    request = {"kind": "hello", "protocol": 1, "software": "dipaco/1", "admission": None}
    hello = HelloRequest(protocol=1, software="dipaco/1")
    assert msgpack.unpackb(messages.encode(hello)) == request
    assert messages.decode_request(msgpack.packb(request)) == hello
    reply = HelloReply(protocol=1, software="x", received_s=1.0, sent_s=2.0)
    assert msgpack.unpackb(messages.encode(reply)) == {
        "protocol": 1,
        "software": "x",
        "received_s": 1.0,
        "sent_s": 2.0,
        "run": None,
    }
