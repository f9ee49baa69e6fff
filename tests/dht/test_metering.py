"""What others ask a node of the DHT is paid for before it is parsed: strangers by where they are."""

import asyncio
import contextlib
import os
import time
from collections import Counter

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2

from dipaco.base.token_bucket import Rate, Rates
from dipaco.dht import bounded_protocol, metering
from dipaco.dht.company import Company, node_id_of
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.dht.metering import Metering, Origins, Refused
from dipaco.protocol.allowances import ADMITTED, CONTRIBUTOR, STRANGER, Asker
from support.wire.exchanges import admission, new_gate
from support.wire.peers import peer


def name(number):
    return PeerID.from_base58(peer(number))


def said(number):
    """Return what a member says of itself."""
    company = Company()
    company.admission = admission(number)
    return company.introduction(node_id_of(name(number)))


class Node:
    """A node whose peers are where a test says, and which counts what it parses."""

    def __init__(self, monkeypatch, each=1e9, together=1e9):
        plenty = Rate(1e9, 1e9)
        for table in ("DHT_SMALL", "DHT_LARGE"):
            rates = Rates(
                {CONTRIBUTOR: plenty, ADMITTED: plenty, STRANGER: Rate(each, 0.01)}, {STRANGER: Rate(together, 0.01)}
            )
            monkeypatch.setattr(metering, table, rates)
        monkeypatch.setattr(metering, "LISTING_PERIOD_S", 0.0)
        self.where, self.listings, self.handled, self.thrown_out = {}, 0, [], []
        self.company = Company()
        self.company.open([new_gate()])
        self.metering = Metering(self.company, Origins(self.connections), self.disconnect)

    async def connections(self):
        self.listings += 1
        return dict(self.where)

    async def disconnect(self, peer_id):
        self.thrown_out.append(peer_id)

    async def ask(self, number, data=b"x" * 88, answer=b"", *, net=None):
        if net is not None:
            self.where[peer(number)] = f"/ip4/10.0.{net}.{number % 250}/tcp/4001"

        async def handle(asker):
            self.handled.append(asker)
            return answer

        return await self.metering.answer(data, name(number), handle)

    async def answered(self, *numbers, **options):
        """Return for how many of some peers a request is answered."""
        count = 0
        for number in numbers:
            with contextlib.suppress(Refused):
                await self.ask(number, **options)
                count += 1
        return count


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60.0))


def test_a_flood_from_one_network_keeps_nobody_out_who_comes_from_another(monkeypatch):
    """Attack: 70 kB/s of a stranger without a key took what all strangers had together."""

    async def live():
        node = Node(monkeypatch, each=3 * 600.0)
        assert await node.answered(*range(20, 30), net=1) == 3, "keys cost nothing, and count for nothing"
        assert await node.answered(30, net=2) == 1
        # A member pays for itself, also where others flood.
        request = dht_pb2.FindRequest(keys=[bytes(20)], peer=said(0)).SerializeToString()
        assert await node.answered(*[0] * 9, data=request, net=1) == 9
        assert node.handled[-1] == Asker(ADMITTED, peer(0))
        node.company.contributors = frozenset([peer(0)])
        await node.ask(0)
        assert node.handled[-1] == Asker(CONTRIBUTOR, peer(0))
        assert node.handled[0] == Asker(STRANGER, "10.0.1.0/24")

    run(live())


def test_answers_are_paid_for_too_and_long_ones_before_they_are_put_together(monkeypatch):
    async def live():
        node = Node(monkeypatch, each=20_000.0)
        for expected in (1, 1, 0):
            # Two of these are less than there is, and three are more.
            assert await node.answered(20, answer=bytes(9_600), net=1) == expected
        asker = Asker(STRANGER, "10.0.7.0/24")
        await node.metering.pay_for_answer(asker, 2**14)
        await node.metering.pay_for_answer(asker, 20_000)
        await node.metering.pay_for_answer(asker, 2**14)
        with pytest.raises(Refused):
            await node.metering.pay_for_answer(asker, 2**14 + 1)

    run(live())


def test_what_is_too_long_of_a_stranger_is_refused_before_it_is_parsed(monkeypatch):
    """Attack: a request of 4 MB to store something cost two seconds before any limit applied."""
    longest = 2**17 + 2**12

    async def live():
        node = Node(monkeypatch)
        for size, is_answered in ((longest, True), (longest + 1, False), (2**22, False)):
            assert await node.answered(20, data=bytes(size), net=1) == is_answered
        assert len(node.handled) == 1
        assert node.thrown_out == [name(20)] * 2
        # A member hands over two megabytes to a node that hears of it for the first time.
        request = dht_pb2.StoreRequest(values=[bytes(2**21)], peer=said(1)).SerializeToString()
        assert await node.answered(1, data=request) == 1
        # What another one says of itself does not help.
        assert await node.answered(21, data=request, net=1) == 0

    run(live())


def test_what_is_asked_of_p2pd_is_bounded_and_who_has_gone_keeps_nobody_waiting(monkeypatch):
    async def live():
        node = Node(monkeypatch)
        node.where = {peer(number): "/ip4/10.0.3.1/tcp/1" for number in range(20, 40)}
        await asyncio.gather(*(node.ask(number) for number in range(20, 60)))
        assert node.listings == 1
        assert Counter(asker.name for asker in node.handled) == {"10.0.3.0/24": 20, "nowhere": 20}
        node.where = {peer(70): "/ip4/10.0.4.1/tcp/1"}
        await asyncio.gather(node.ask(70), node.ask(20))
        assert {asker.name for asker in node.handled[-2:]} == {"10.0.3.0/24", "10.0.4.0/24"}
        assert node.listings == 2

    run(live())


def test_p2pd_that_does_not_say_who_is_connected_keeps_nobody_out(monkeypatch):
    async def live():
        node = Node(monkeypatch)

        async def fail():
            raise ConnectionError

        node.metering = Metering(node.company, Origins(fail), node.disconnect)
        assert await node.answered(20, net=1) == 1
        assert node.handled[0].name == "nowhere"

    run(live())


def test_a_stranger_that_goes_on_asking_in_vain_is_disconnected(monkeypatch):
    async def live():
        node = Node(monkeypatch, each=600.0)
        assert await node.answered(*[20] * 33, net=1) == 1
        assert node.thrown_out == []
        assert await node.answered(20, net=1) == 0
        assert node.thrown_out == [name(20)]

    run(live())


def test_a_dictionary_of_more_records_than_a_key_has_is_refused_before_they_are_read():
    late = time.time() + 60

    def packed(count):
        return msgpack.packb([None, late, [[b"%d" % number, b"value", late] for number in range(count)]])

    assert len(bounded_protocol.read_dictionary(packed(1024)).data) == 1024
    with pytest.raises(ValueError, match="1025 exceeds"):
        bounded_protocol.read_dictionary(packed(1025))
    whole = DictionaryDHTValue()
    with whole.freeze():
        whole.store(b"subkey", b"value", late)
        found = bounded_protocol.read_dictionary(whole.packb())
    assert (found.data, found.latest_expiration_time) == (whole.data, whole.latest_expiration_time)


async def _client(host, addresses):
    return await P2P.create(
        initial_peers=addresses,
        host_maddrs=[f"/ip4/{host}/tcp/0"],
        tls=False,
        dht_mode="client",
        auto_nat=False,
        nat_port_map=False,
        startup_timeout=120,
    )


def test_a_real_node_tells_strangers_apart_by_the_addresses_that_they_come_from():
    """p2pd says with a request only who sent it."""

    async def flood(node, addresses):
        greedy, other = await _client("127.0.5.1", addresses), await _client("127.0.6.1", addresses)
        try:

            async def ask(one, count):
                keys = [os.urandom(20) for _ in range(count)]
                request = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo())
                return await one.call_protobuf_handler(node, "DHTProtocol.rpc_find", request, dht_pb2.FindResponse)

            # Of 5.6 kB each: 2 MiB are there at once, and 22 come in the two seconds that each waits. With
            # fewer than 33 refusals in a row the connection stays.
            answered = 0
            while True:
                found = await asyncio.gather(*(ask(greedy, 250) for _ in range(48)), return_exceptions=True)
                refused = [answer for answer in found if isinstance(answer, Exception)]
                answered += len(found) - len(refused)
                # A busy machine may let one wait for longer before there is nothing left.
                if refused and answered > 300:
                    break
            assert all("too many requests" in str(error) for error in refused)
            assert len((await ask(other, 250)).results) == 250
            twice = dht_pb2.FindRequest(keys=[bytes(20)] * 2, peer=dht_pb2.NodeInfo())
            with pytest.raises(Exception, match="asked for twice"):
                await other.call_protobuf_handler(node, "DHTProtocol.rpc_find", twice, dht_pb2.FindResponse)
        finally:
            await greedy.shutdown()
            await other.shutdown()

    dht = GuardedDHT(startup_timeout=120)
    try:
        dht.start(120.0)
        addresses = [str(address) for address in dht.get_visible_maddrs()]
        asyncio.run(asyncio.wait_for(flood(dht.peer_id, addresses), 240.0))
    finally:
        dht.shutdown()
