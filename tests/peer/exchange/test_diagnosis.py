"""Why an address cannot be joined through, told of real nodes and of none."""

import asyncio

import pytest

from dipaco.base.errors import ProtocolVersionError, UnreachableError
from dipaco.peer.exchange import responder
from dipaco.peer.exchange.contact.diagnosis import diagnose, examine
from dipaco.protocol.plan import PROTOCOL_VERSION
from support.wire.exchange_nodes import NOBODY

pytestmark = pytest.mark.p2pd


def test_a_sound_address_is_not_blamed(nodes):
    nodes.serving()
    sound, none = nodes.addresses[0], f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
    assert diagnose([sound, none]) is None
    errors = examine([sound, none])
    assert errors[sound] is None
    assert isinstance(errors[none], UnreachableError)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (lambda nodes: f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}", "connection refused"),
        (lambda nodes: nodes.addresses[0].rpartition("/")[0] + f"/{NOBODY}", "another peer"),
        (lambda nodes: "127.0.0.1:31337", "not a peer's address"),
        (lambda nodes: f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY[:-1]}", "mistyped or cut off"),
    ],
)
def test_unreachable_says_why(nodes, address, reason):
    with pytest.raises(UnreachableError, match=reason) as caught:
        diagnose([address(nodes)])
    assert address(nodes) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_address_of_a_peer_has_its_own_reason():
    addresses = [f"/{where}/p2p/{NOBODY}" for where in ("ip4/127.0.0.1/tcp/1", "dns4/no.invalid/tcp/2")]
    refused, unknown = examine(addresses).values()
    assert str(refused) == "connection refused"
    assert "host name is unknown" in str(unknown)


def test_another_protocol_is_told(nodes, monkeypatch):
    nodes.serving()
    monkeypatch.setattr(responder, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with pytest.raises(ProtocolVersionError, match=f"protocol {PROTOCOL_VERSION + 1}"):
        diagnose(nodes.addresses)


def test_a_plain_hivemind_node_is_diagnosed(nodes):
    with pytest.raises(ProtocolVersionError, match="plain hivemind node"):
        diagnose(nodes.addresses)


def test_a_hello_that_hangs_is_bounded(nodes, monkeypatch):
    async def hang(*arguments, **options):
        await asyncio.sleep(3600)

    monkeypatch.setattr(responder.Responder, "_answer", hang)
    nodes.serving()
    assert "does not answer" in str(examine(nodes.addresses, timeout_s=3.0)[nodes.addresses[0]])
