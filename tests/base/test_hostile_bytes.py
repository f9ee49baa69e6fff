"""Bytes that cost their reader more than their sender."""

import time

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from dipaco.base.errors import IntegrityError
from dipaco.dht import bounded_protocol, dht_node
from dipaco.protocol.identity import is_of_small_order, is_signed

_ZERO = b"\x01" + bytes(31)


@pytest.mark.parametrize("sign", [0, 0x80])
def test_a_key_whose_one_signature_holds_for_everything_is_nobodys(sign):
    signature = _ZERO + bytes(32)
    Ed25519PublicKey.from_public_bytes(_ZERO).verify(signature, b"whatever")
    key = _ZERO[:-1] + bytes([sign])
    assert is_of_small_order(key)
    assert not is_signed(b"whatever", signature, key)


def test_types_within_each_other_are_refused_at_once(monkeypatch):
    decode = staticmethod(bounded_protocol.decode_shallow)
    monkeypatch.setattr(MSGPackSerializer, "_decode_ext_types", decode)
    data = msgpack.packb(bytes(3_900_000))
    for _ in range(300):
        data = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + data))
    began = time.monotonic()
    with pytest.raises(ValueError, match="within each other"):
        MSGPackSerializer.loads(data)
    assert time.monotonic() - began < 0.2


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
