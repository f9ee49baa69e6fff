"""Why an address cannot be joined through, told of real nodes and of none."""

import asyncio

import pytest

from dipaco.base.errors import ClockError, ProtocolVersionError, UnreachableError
from dipaco.peer.exchange import responder
from dipaco.peer.exchange.contact.diagnosis import diagnose, examine
from dipaco.peer.exchange.contact.hello import Greeting
from dipaco.protocol.plan import PROTOCOL_VERSION
from support.wire.exchange_nodes import NOBODY, set_ahead

pytestmark = pytest.mark.p2pd


def test_a_sound_address_is_not_blamed(nodes):
    server = nodes.serving()
    findings = diagnose([*nodes.addresses, f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"])
    assert findings[0].hello is not None
    assert findings[0].hello.peer_id == server.peer_id
    assert isinstance(findings[-1].error, UnreachableError)


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
    refused, unknown = examine([*addresses])
    assert str(refused.error) == "connection refused"
    assert "host name is unknown" in str(unknown.error)


def test_a_wrong_clock_is_told_before_all_else(nodes):
    server = nodes.serving(Greeting(protocol=PROTOCOL_VERSION + 1))
    set_ahead(server, 3600.0)
    with pytest.raises(ClockError, match=r"3600\.\d s behind that of .*timedatectl"):
        diagnose(nodes.addresses)
    set_ahead(server, 0.0)
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
    findings = examine(nodes.addresses, timeout_s=3.0)
    assert "does not answer" in str(findings[0].error)
