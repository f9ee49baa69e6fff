"""The four verbs over real libp2p daemons on loopback, also when one of them is killed."""

import contextlib
import hashlib
import os
import signal
import time

import pytest

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import NetworkError, ProtocolVersionError
from dipaco.dht.dht_node import join_dht
from dipaco.peer.exchange.streams.calls import PROTOCOL_NAME
from dipaco.peer.exchange.streams.transport import HivemindTransport
from dipaco.peer.owner.uplink import Uplink
from dipaco.protocol.identity import load_or_create_identity
from dipaco.protocol.member.events import Told
from support.waiting import wait_until
from support.wire.exchanges import GENESIS, INVITATION, LIMIT_S, MODULE, NOW_S, Held, Node, admission, chain_of, file_of
from support.wire.exchanges import row_of as made_row
from support.wire.peers import peer

pytestmark = pytest.mark.p2pd

CONTENT = bytes(range(251)) * 80_000
SHA = hashlib.sha256(CONTENT).hexdigest()


class RealNode(Node):
    """A node with a DHT process and a p2pd of its own."""

    def __init__(self, folder, through, held, uplink=None):
        folder.mkdir()
        self.identity = load_or_create_identity(folder / "identity.key", lambda line: None)
        self.dht = join_dht(
            through,
            identity=self.identity,
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
            announce_maddrs=(),
            client_mode=False,
        )
        transport = HivemindTransport(self.dht, uplink)
        super().__init__(transport, folder, 0, is_in=False, held=held)
        admission = INVITATION.admit(self.identity.key, NOW_S)
        self.run = type(self.run)(**{**self.run.__dict__, "admission": admission})
        self.exchange.serve_run(self.run)

    def row(self, round_index, data):
        me = self.identity
        return made_row(0, round_index, GENESIS, data, me.key, peer=me.peer_id)

    def stop(self):
        with contextlib.suppress(Exception):
            self.exchange.stop()
        with contextlib.suppress(Exception):
            self.dht.shutdown()


@pytest.fixture
def make(tmp_path):
    made = []

    def one(*contents, uplink=None):
        through = ()
        if made:
            through = tuple(str(address) for address in made[0].dht.get_visible_maddrs())
        made.append(RealNode(tmp_path / str(len(made)), through, Held(*contents), uplink))
        return made[-1]

    yield one
    for node in made:
        node.stop()


def test_four_verbs_a_hello_and_a_huge_length(make, tmp_path):
    one, other = make(CONTENT), make()
    assert other.exchange.hello(one.peer, timeout_s=LIMIT_S).run == one.run.run_id
    assert one.peer in other.exchange.connected_peers()
    # tell
    row = one.row(0, CONTENT)
    one.exchange.tell([other.peer], MODULE, [row], keep=False)
    wait_until(lambda: other.told)
    assert other.told == [Told(one.peer, MODULE, (row,), (), False)]
    # ask
    steps = chain_of(3)
    one.chains.note_admissions({peer(0): admission(0)})
    one.chains.serve(MODULE, steps[-1].name, steps)
    answer = other.exchange.ask(one.peer, MODULE, [GENESIS])
    assert answer.steps == tuple(steps)
    # get, and gather
    blobs = BlobStore(tmp_path / "blobs")
    path = other.exchange.get(SHA, [one.peer], blobs, max_bytes=2**30, timeout_s=LIMIT_S)
    assert path.read_bytes() == CONTENT
    # put
    mine = other.row(0, b"a contribution" * 100_000)
    assert other.exchange.put(one.peer, mine, file_of(mine, b"a contribution" * 100_000))
    assert one.files.find(mine.file) is not None
    assert not other.exchange.put(one.peer, row, CONTENT)

    async def shout():
        stream = await other.exchange._transport.open_stream(one.peer, PROTOCOL_NAME)
        await stream.write(b"\xff" * 8 + bytes(2**16), LIMIT_S)
        found = b""
        with contextlib.suppress(OSError):
            found = await stream.read(100)
        stream.close()
        return found

    assert other.exchange._thread.call(shout(), LIMIT_S) == b""
    assert other.exchange.hello(one.peer, timeout_s=LIMIT_S).run == one.run.run_id


def test_a_holder_that_is_killed_in_the_middle_is_replaced_by_another(make, tmp_path):
    reader = make()
    holders = [make(CONTENT, uplink=Uplink(40.0)), make(CONTENT, uplink=Uplink(40.0))]
    killed = []

    def kill(done, total):
        if done > 2**21 and not killed:
            killed.append(max(holders, key=lambda holder: holder.exchange.uplink.sent_bytes))
            killed[0].dht.shutdown()

    blobs = BlobStore(tmp_path / "blobs")
    peers = [holder.peer for holder in holders]
    path = reader.exchange.get(SHA, peers, blobs, max_bytes=2**30, timeout_s=LIMIT_S, on_progress=kill)
    assert path.read_bytes() == CONTENT
    assert killed
    assert reader.exchange.uplink.received_bytes < 1.3 * len(CONTENT)
    # A peer that is gone is not waited for.
    began_s = time.monotonic()
    assert reader.exchange.ask(killed[0].peer, MODULE, [GENESIS], timeout_s=3.0) is None
    with pytest.raises(NetworkError):
        reader.exchange.hello(killed[0].peer, timeout_s=3.0)
    assert time.monotonic() - began_s < LIMIT_S


async def id_of_p2pd(node):
    return node.p2p._child.pid


def test_after_its_p2pd_was_killed_a_node_answers_and_asks_again(make):
    one, other = make(), make()
    for node in (one, other):
        node.dht.on_restart(node.exchange.connect_again)
    assert one.exchange.hello(other.peer, timeout_s=LIMIT_S)
    address = str(one.dht.get_visible_maddrs()[0])
    os.kill(one.dht.call(id_of_p2pd), signal.SIGKILL)
    # What asks meanwhile hears that there is no network, whatever p2pd's socket says.
    wait_until(lambda: _connected(one) is None)
    wait_until(lambda: _connected(one) is not None and one.dht.starts == 2)
    wait_until(lambda: _says_hello(other, one.peer))
    assert str(one.dht.get_visible_maddrs()[0]) == address
    assert one.exchange.hello(other.peer, timeout_s=LIMIT_S)
    assert one.exchange.peer_id == one.peer


def _says_hello(node, peer):
    try:
        return node.exchange.hello(peer, timeout_s=5.0)
    except (NetworkError, ProtocolVersionError):
        return None


def _connected(node):
    try:
        return node.exchange.connected_peers()
    except NetworkError:
        return None
