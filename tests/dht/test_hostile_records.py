"""What a hostile node may try beyond plain forgery: spellings, replays, poisoned answers."""

import asyncio
import dataclasses
import math
import struct
import time
from types import SimpleNamespace

import pytest
from hivemind import DHT
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from dipaco.dht import bounded_protocol
from dipaco.dht.company import Company
from dipaco.dht.record_validator import MAX_COMPLAINTS, MAX_REMEMBERED, RecordValidator, signed_bytes
from dipaco.protocol.identity import PEER_ID_PREFIX, SIGNATURE_BYTES, load_or_create_identity, public_key_of_peer_id
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.record_keys import parse_record, parse_subkey, record_key, record_subkey
from dipaco.protocol.records import PeerRecord, clean_text
from support.wire.dht_pair import LOOPBACK, RUN_ID, paths_of, peer_record, publish, start_node
from support.wire.peers import identity

KEY = record_key("peers", RUN_ID, "0")
KEY_BYTES = DHTID.generate(source=KEY).to_bytes()


@pytest.fixture
def identities():
    return identity(0), identity(1)


def claim_of(identity, path=1):
    return peer_record(identity.peer_id, path).model_dump()


def subkey_of(identity, public_key=None):
    return record_subkey("peers", RUN_ID, "0", public_key or identity.public_key)


def signed(identity, value, *, tag=None, expiration_s=None):
    """Return a record whose signature is right, however it is spelled."""
    record = DHTRecord(
        KEY_BYTES,
        MSGPackSerializer.dumps(subkey_of(identity)) if tag is None else tag,
        MSGPackSerializer.dumps(value),
        time.time() + 60 if expiration_s is None else expiration_s,
    )
    return dataclasses.replace(record, value=record.value + identity.key.sign(signed_bytes(record)))


def test_a_subkey_has_one_spelling(identities):
    """Nodes pass records on in msgpack's shortest form, in which this signature would be wrong."""
    me, other = identities
    subkey = subkey_of(me)
    longer = b"\xc6" + struct.pack(">I", len(subkey)) + subkey
    assert MSGPackSerializer.loads(longer) == subkey
    validator = RecordValidator(other.key)
    assert validator.validate(signed(me, claim_of(me)))
    assert not validator.validate(signed(me, claim_of(me), tag=longer))


def test_a_public_key_has_one_spelling(identities):
    """Or one peer could stand in the DHT many times, under subkeys that differ."""
    me, other = identities
    own = public_key_of_peer_id(me.peer_id)
    assert parse_subkey(subkey_of(me, own)).peer_id == me.peer_id
    # The same point of the curve with the sign of x turned is another key, which this one is not.
    turned = own[:-1] + bytes([own[-1] ^ 0x80])
    for respelled in (own + b"\x00", b"\x00" + own, own[:-1], me.peer_id.encode()):
        with pytest.raises(RecordError, match="not of this protocol"):
            parse_subkey(subkey_of(me, respelled))
    assert parse_subkey(subkey_of(me, turned)).peer_id != me.peer_id
    tag = MSGPackSerializer.dumps(subkey_of(me, turned))
    assert not RecordValidator(other.key).validate(signed(me, claim_of(me), tag=tag))


@pytest.mark.parametrize("expiration", [True, 2**70, "soon", None])
def test_an_expiration_is_a_float(identities, expiration):
    me, other = identities
    good = signed(me, claim_of(me))
    validator = RecordValidator(other.key)
    assert not validator.validate(dataclasses.replace(good, expiration_time=expiration))
    whole = signed(me, claim_of(me), expiration_s=int(time.time()) + 60)
    assert not validator.validate(whole)


def test_two_signatures_or_a_bare_number_are_refused(identities):
    me, other = identities
    good = signed(me, claim_of(me))
    mark = good.value[-SIGNATURE_BYTES:]
    validator = RecordValidator(other.key)
    assert not validator.validate(dataclasses.replace(good, value=good.value + mark))
    assert not validator.validate(dataclasses.replace(good, value="text"))
    assert not validator.validate(signed(me, 7))


def test_nested_ext_types_do_not_exhaust_the_stack(identities):
    me, other = identities
    nested = b"\x00"
    while len(nested) < 480:
        size = len(nested)
        head = b"\xc7" + bytes([size]) if size < 256 else b"\xc8" + struct.pack(">H", size)
        nested = head + b"\x40" + nested
    record = dataclasses.replace(signed(me, 1), value=nested)
    assert not RecordValidator(other.key).validate(record)


def test_an_older_record_does_not_replace_a_withdrawal(identities):
    """Replaying is possible, for the signature is right, and changes nothing."""
    me, _ = identities
    claim = signed(me, claim_of(me), expiration_s=time.time() + 60)
    gone = signed(me, None, expiration_s=math.nextafter(claim.expiration_time, math.inf))
    storage, key = DHTLocalStorage(), DHTID.generate(source=KEY)
    assert storage.store_subkey(key, subkey_of(me), claim.value, claim.expiration_time)
    assert storage.store_subkey(key, subkey_of(me), gone.value, gone.expiration_time)
    assert not storage.store_subkey(key, subkey_of(me), claim.value, claim.expiration_time)
    entries = storage.get(key)
    assert entries.value.get(subkey_of(me)).value == gone.value


def test_what_was_accepted_is_remembered_but_still_expires(identities, monkeypatch):
    me, other = identities
    validator = RecordValidator(other.key)
    record = signed(me, claim_of(me))
    assert validator.validate(record)
    monkeypatch.setattr(validator, "_check_content", lambda *_: pytest.fail("checked twice"))
    assert validator.validate(record)
    with pytest.raises(pytest.fail.Exception):
        validator.validate(dataclasses.replace(record, value=record.value + b"x"))
    monkeypatch.setattr("dipaco.dht.record_validator.get_dht_time", lambda: time.time() - 10_000)
    assert not validator.validate(record)
    assert MAX_REMEMBERED * 16 < 2**20


def test_keys_by_the_hundred_do_not_fill_the_log(identities, caplog):
    validator = RecordValidator(identities[0].key)
    for number in range(5 * MAX_COMPLAINTS):
        validator._complain("a peer", "it is bad", f"key {number}")
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) <= MAX_COMPLAINTS
    assert len(validator._complaints._said_at) <= MAX_COMPLAINTS


def test_addresses_of_ipv6_relays_fit_and_device_names_are_cleaned(identities):
    me = identities[0]
    address = f"/ip6/2001:0db8:85a3:0000:0000:8a2e:0370:7334/tcp/65535/p2p/{me.peer_id}/p2p-circuit/p2p/{me.peer_id}"
    record = PeerRecord(
        peer_id=me.peer_id,
        protocol=1,
        software=clean_text("dipaco [fork] " + "x" * 200),
        device=clean_text("GPU™ [0]\n"),
        state="training",
        path=None,
        tokens_per_s=0.0,
        round=0,
        reachable="outgoing",
        addresses=(address,) * 4,
        bytes_up=0,
        bytes_down=0,
    )
    assert record.device == "GPU? ?0??"
    subkey = record_subkey("peers", RUN_ID, "7", me.public_key)
    value = MSGPackSerializer.dumps(record.model_dump())
    made = DHTRecord(
        DHTID.generate(source=record_key("peers", RUN_ID, "7")).to_bytes(),
        MSGPackSerializer.dumps(subkey),
        value,
        time.time() + 60,
    )
    validator = RecordValidator(me.key)
    assert validator.validate(dataclasses.replace(made, value=validator.sign_value(made)))
    assert parse_record(parse_subkey(subkey), MSGPackSerializer.loads(value)) == record


# -- poisoned answers


class Protocol:
    """As much of Hivemind's protocol as the check of a dictionary uses."""

    serializer = MSGPackSerializer

    def __init__(self, validator):
        self.validator = validator

    def _validate_record(self, key, tag, value, expiration_s):
        return self.validator.validate(DHTRecord(key, tag, value, expiration_s))


def test_one_bad_record_does_not_void_an_answer(identities):
    me, other = identities
    good, forged = signed(me, claim_of(me)), signed(me, claim_of(me))
    answer = DictionaryDHTValue(maxsize=1)
    answer.maxsize = "many"
    with answer.freeze():
        answer.store(subkey_of(me), good.value, good.expiration_time)
        answer.store(subkey_of(other), forged.value, forged.expiration_time + 5)
        answer.store("a free subkey", b"\x01", time.time() + 9e9)
    answer.latest_expiration_time = math.inf
    protocol = Protocol(RecordValidator(other.key))
    assert bounded_protocol.drop_refused(protocol, KEY_BYTES, answer)
    assert [subkey for subkey, _ in answer.items()] == [subkey_of(me)]
    assert answer.maxsize == math.inf
    assert answer.latest_expiration_time == good.expiration_time


def test_a_refused_record_that_expires_does_not_end_a_search(identities):
    """Hivemind's search ends without an answer when a dictionary cannot be walked through."""
    me, other = identities
    good = signed(me, claim_of(me))
    expired = signed(other, claim_of(other), expiration_s=time.time() - 1)
    answer = DictionaryDHTValue()
    with answer.freeze():
        answer.store(subkey_of(me), good.value, good.expiration_time)
        answer.store(subkey_of(other), expired.value, expired.expiration_time)
        answer.store(b"refused", b"", time.time() - 1)
        answer.store(b"refused soon", b"", time.time() + 0.01)
    assert bounded_protocol.drop_refused(Protocol(RecordValidator(other.key)), KEY_BYTES, answer)
    time.sleep(0.02)
    assert dict(answer.items()) == {subkey_of(me): (good.value, good.expiration_time)}


def test_an_answers_expiration_is_that_of_its_records(identities, monkeypatch):
    """An expiration that is never reached would end a search at the liar's answer."""
    full, empty = DictionaryDHTValue(), DictionaryDHTValue()
    expiration_s = time.time() + 60
    full.store(b"x", b"y", expiration_s)
    peer = PeerID(PEER_ID_PREFIX + b"x" * 32)
    me = PeerID(PEER_ID_PREFIX + b"m" * 32)
    near = {bounded_protocol.node_id_of(peer): peer}
    back = {bounded_protocol.node_id_of(me): me}
    answers = {
        "full": (ValueWithExpiration(full, math.inf), {}),
        # A node says of itself, or of others, that it is where the key is, or sends back.
        "empty": (ValueWithExpiration(empty, math.inf), {**near, **back, DHTID.generate(): peer}),
        "nothing": (None, {}),
    }

    async def find(*_):
        return answers

    monkeypatch.setattr(bounded_protocol, "_find", find)
    protocol = SimpleNamespace(
        node_id=bounded_protocol.node_id_of(me), company=Company([peer.to_base58(), me.to_base58()])
    )
    found = asyncio.run(bounded_protocol.call_find(protocol, "peer", ["full", "empty"]))
    assert found["full"][0] == ValueWithExpiration(full, expiration_s)
    assert found["empty"] == (None, near)
    assert found["nothing"] == (None, {})
    answers = None
    assert asyncio.run(bounded_protocol.call_find(protocol, "peer", [])) is None


def test_hivemind_still_has_what_is_replaced():
    """An update of Hivemind that renames these would silently undo the repair."""
    replaced = {name for name in vars(bounded_protocol) if callable(getattr(DHTProtocol, name, 0))}
    assert replaced == {
        "call_find",
        "call_ping",
        "call_store",
        "get_stub",
        "rpc_find",
        "rpc_ping",
        "rpc_store",
        "update_routing_table",
    }
    for name in ("_validate_dictionary", "_validate_record", "add_p2p_handlers"):
        assert callable(getattr(DHTProtocol, name))
    assert callable(DHTNode.find_nearest_nodes)


def test_readers_survive_a_node_that_stores_anything(tmp_path, monkeypatch):
    """A node without validators lies in its answers; the others' records are read as ever."""
    node = start_node(tmp_path / "honest")
    read = DHTID.from_bytes
    # Others say more of themselves than Hivemind expects.
    monkeypatch.setattr(DHTID, "from_bytes", lambda data: read(data[:20]))
    identity = load_or_create_identity(tmp_path / "liar.key")
    liar = DHT(
        initial_peers=[node.address],
        start=True,
        host_maddrs=[LOOPBACK],
        identity_path=str(identity.path),
        check_if_identity_free=False,
        node_id=bounded_protocol.node_id_of(PeerID.from_base58(identity.peer_id)),
    )
    try:
        record = peer_record(node.peer_id, 1)
        assert publish(node.directory, "peers", "0", record, 60.0)
        own = subkey_of(node.identity)
        late = time.time() + 500
        liar.store(KEY, claim_of(node.identity, 3), late, subkey=own)
        liar.store(KEY, "rubbish", late + 1, subkey="free")
        liar.store(KEY, True, late + 2, subkey=PEER_ID_PREFIX + b"x" * 32)
        stored = liar.get(KEY, latest=False)
        assert "free" in stored.value
        assert paths_of(node.directory) == {node.peer_id: 1}
        moved = record.model_copy(update={"path": 2})
        # The liar, which is asked to store it too, may say that nobody did.
        publish(node.directory, "peers", "0", moved, 60.0)
        assert paths_of(node.directory) == {node.peer_id: 2}
    finally:
        liar.shutdown()
        identity.release()
        node.close()
