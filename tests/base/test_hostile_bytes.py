"""Bytes that cost their reader more than their sender."""

import json
import time

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.dht import bounded_protocol, dht_node
from dipaco.modules.canonical_file import MAX_HEADER_BYTES
from dipaco.protocol.identity import is_of_small_order, is_signed
from dipaco.routing.run_folder import RunFolder

_ZERO = b"\x01" + bytes(31)


@pytest.mark.parametrize("sign", [0, 0x80])
def test_a_key_whose_one_signature_holds_for_everything_is_nobodys(sign):
    signature = _ZERO + bytes(32)
    Ed25519PublicKey.from_public_bytes(_ZERO).verify(signature, b"whatever")
    key = _ZERO[:-1] + bytes([sign])
    assert is_of_small_order(key)
    assert not is_signed(b"whatever", signature, key)


def test_of_types_within_each_other_two_are_read_and_a_third_is_refused_before_it_is(monkeypatch):
    """Attack: each level is a copy of the whole, so 300 of them around 4 MB are a gigabyte."""
    read = []

    def decode(type_code, data):
        read.append(len(data))
        return bounded_protocol.decode_shallow(type_code, data)

    def nested(depth):
        data = msgpack.packb(b"content")
        for _ in range(depth):
            data = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + data))
        return data

    monkeypatch.setattr(MSGPackSerializer, "_decode_ext_types", staticmethod(decode))
    assert MSGPackSerializer.loads(nested(2)) == ((b"content",),)
    for depth in (3, 300):
        read.clear()
        with pytest.raises(ValueError, match="more than 2 nested types"):
            MSGPackSerializer.loads(nested(depth))
        assert len(read) == 3


def test_a_dictionary_is_read(monkeypatch):
    decode = staticmethod(bounded_protocol.decode_shallow)
    monkeypatch.setattr(MSGPackSerializer, "_decode_ext_types", decode)
    dictionary = DictionaryDHTValue()
    dictionary.store(b"subkey", b"value", time.time() + 60)
    read = MSGPackSerializer.loads(MSGPackSerializer.dumps(dictionary))
    assert read.get(b"subkey").value == b"value"


def test_p2pd_is_the_one_that_was_released(tmp_path):
    dht_node.check_p2pd()
    other = tmp_path / "p2pd"
    other.write_bytes(b"another program")
    with pytest.raises(IntegrityError, match="pip install --force-reinstall"):
        dht_node.check_p2pd(other)
    with pytest.raises(IntegrityError, match="No such file"):
        dht_node.check_p2pd(tmp_path / "none")


def test_an_index_of_more_parts_than_its_run_can_have_is_refused_before_it_is_read(shared_run):
    """Attack: 60 MB of empty lists took 4 GB, and an operator names the size by the paths."""
    plan = shared_run.plan()
    lines = shared_run.shard_index(plan).model_dump(mode="json")
    for changed in (b"[" * 100_000, b"[" + b"[]," * 1000 + b"[]]", b'{"paths":[' + b"{}," * 1000 + b"{}]}"):
        sha = shared_run.blobs.add_bytes(changed)
        for name, read in (("shards", RunFolder.shard_index), ("genesis", RunFolder.genesis_index)):
            other = plan.model_copy(update={"blobs": plan.blobs.model_copy(update={name: sha})})
            with pytest.raises(IntegrityError, match="more parts than one of"):
                read(RunFolder(shared_run.path), other)
    # What is wrong in many lines is said of one.
    lines["paths"] = [{"wrong": 1}] * len(lines["paths"])
    sha = shared_run.blobs.add_bytes(json.dumps(lines).encode())
    blobs = plan.blobs.model_copy(update={"shards": sha})
    with pytest.raises(ConfigurationError) as refusal:
        RunFolder(shared_run.path).shard_index(plan.model_copy(update={"blobs": blobs}))
    assert len(str(refusal.value).split("; and ")) == 1


def test_a_plan_that_cannot_route_is_refused_before_its_prefixes_take_memory(shared_run):
    plan = shared_run.plan()
    for changes in ({"prefix_tokens": 2**40}, {"train_paths": 5}):
        routing = plan.routing.model_copy(update=changes)
        with pytest.raises(IntegrityError, match="ask its operator for another run"):
            shared_run.document_router(plan.model_copy(update={"routing": routing}))


def test_a_base_with_a_header_longer_than_any_is_refused_before_it_is_parsed(shared_run):
    """Attack: a header of 83 MB, of tensors without numbers, took 24 CPU seconds and 2 GB."""
    plan = shared_run.plan()
    content = shared_run.blobs.read(plan.blobs.base)
    length = int.from_bytes(content[:8], "little") + MAX_HEADER_BYTES
    longer = length.to_bytes(8, "little") + b" " * MAX_HEADER_BYTES + content[8:]
    sha = shared_run.blobs.add_bytes(longer)
    with pytest.raises(IntegrityError, match="without a whole header"):
        RunFolder(shared_run.path).load_base_model(plan.model, sha)
