"""Coming back: a port that stays, and peers that are remembered when all given ones are gone."""

import json
import socket

import pytest

from dipaco.base.errors import RunSelectionError, UnreachableError
from dipaco.dht import dht_node
from dipaco.dht.dht_node import note_port, take_port
from dipaco.peer.exchange.contact.known_peers import MAX_KNOWN, MAX_RUNS, MAX_TRIED, KnownPeers
from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.join_run import join_run
from dipaco.protocol.view import SwarmView
from support.swarms.swarm_views import record
from support.wire.exchange_nodes import NOBODY

RUN = "0123456789abcdef"
KEYS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def peer_id(number):
    """Return one of the ids that look like real ones."""
    return NOBODY[:-2] + KEYS[number // len(KEYS)] + KEYS[number % len(KEYS)]


def address(number, host="203.0.113.5"):
    return f"/ip4/{host}/tcp/{4000 + number}/p2p/{peer_id(number)}"


def view_of(*numbers, reachable="direct", host="203.0.113.5"):
    peers = {}
    for number in numbers:
        said = record(peer_id(number), reachable=reachable)
        peers[peer_id(number)] = said.model_copy(update={"addresses": (address(number, host),)})
    return SwarmView(0.0, peers=peers)


def noted(folder, run, given, *seen):
    KnownPeers(folder).note(run, [address(given)], view_of(*seen), "me")


def test_peers_of_the_swarm_that_was_given_are_remembered(tmp_path):
    noted(tmp_path, RUN, 0, 1, 2)
    noted(tmp_path, "f" * 16, 50, 51)
    assert KnownPeers(tmp_path).beside([address(0)]) == (address(1), address(2))
    assert KnownPeers(tmp_path).beside([address(2)]) == (address(1), address(0))
    assert KnownPeers(tmp_path).beside([address(9)]) == (), "of another swarm nothing is known"


def test_the_newest_come_first_and_there_are_not_too_many(tmp_path):
    for first in range(0, 300, 10):
        noted(tmp_path, RUN, 0, *range(first, first + 10))
    found = KnownPeers(tmp_path).beside([address(0)])
    assert found == tuple(address(number) for number in range(290, 300)) + tuple(
        address(number) for number in range(280, 286)
    )
    assert len(found) == MAX_TRIED
    for number in range(3 * MAX_RUNS):
        noted(tmp_path, f"{number:016x}", 0, 1)
    known = json.loads((tmp_path / "known_peers.json").read_text())
    assert len(known) == MAX_RUNS
    assert all(len(addresses) <= MAX_KNOWN for addresses in known.values())


def test_the_run_is_remembered_also_where_nobody_can_be_called(tmp_path):
    KnownPeers(tmp_path).note(RUN, [address(0)], view_of(1, reachable="outgoing"), "me")
    assert list(KnownPeers(tmp_path).runs_with([address(0)])) == [RUN]
    assert KnownPeers(tmp_path).runs_with([address(1)]) == {}


def test_only_who_can_be_called_is_remembered(tmp_path):
    known = KnownPeers(tmp_path)
    known.note(RUN, [address(0)], view_of(1, reachable="outgoing"), "me")
    known.note(RUN, [address(0)], view_of(2), peer_id(2))
    liar = view_of(3)
    liar.peers[peer_id(3)].__dict__["addresses"] = (address(4), f"{address(5)}/p2p-circuit")
    known.note(RUN, [address(0)], liar, "me")
    assert known.beside([address(0)]) == ()
    known.note(RUN, [address(0)], view_of(6), "me")
    assert known.beside([address(0)]) == (address(6),)
    known.note(RUN, [address(0)], view_of(7), "me")
    assert known.beside([address(0)]) == (address(6),), "the disk is not written all the time"


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": 1}', b'{"a": [1, "/nonsense"]}', b"\xff"])
def test_a_file_that_cannot_be_read_is_as_good_as_none(tmp_path, content):
    (tmp_path / "known_peers.json").write_bytes(content)
    assert KnownPeers(tmp_path).beside([address(0)]) == ()
    noted(tmp_path, RUN, 0, 1)
    assert KnownPeers(tmp_path).beside([address(0)]) == (address(1),)


@pytest.mark.p2pd
def test_a_peer_comes_back_when_all_that_it_was_given_are_gone(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(dht_node, "MANIFEST_WAIT_S", 0.0)
    nodes.serving()
    gone = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
    said = []

    def join():
        join_run(
            initial_peers=(gone,),
            run=None,
            cache_folder=tmp_path,
            listening=Listening(host_maddrs=("/ip4/127.0.0.1/tcp/0",)),
            say=said.append,
        )

    with pytest.raises(UnreachableError):
        join()
    (tmp_path / "known_peers.json").write_text(json.dumps({RUN: [nodes.addresses[0], gone]}))
    with pytest.raises(RunSelectionError, match="holds no run"):
        join()
    # Once, where it is made.
    assert ["identity.key" in line and "back it up" in line for line in said].count(True) == 1


# -- the port


def test_a_port_that_is_in_use_is_left_to_who_uses_it(tmp_path, monkeypatch):
    monkeypatch.setattr(dht_node, "_taken", {})
    with socket.create_server(("0.0.0.0", 0)) as used, socket.socket(socket.AF_UNIX) as name:
        first = used.getsockname()[1]
        # Another node has chosen the next one, and does not listen yet.
        name.bind(f"\0dipaco-port-{first + 1}")
        port = take_port(first)
        note_port(tmp_path / "port", first)
        assert port > first + 1
        assert take_port(first) == port, "it stays the same in one process"
        with socket.socket(socket.AF_UNIX) as second, pytest.raises(OSError, match="in use"):
            second.bind(f"\0dipaco-port-{port}")
    for held, _ in dht_node._taken.values():
        held.close()
    monkeypatch.setattr(dht_node, "_taken", {})
    assert take_port(first, tmp_path / "port") == port, "others know it there"
    dht_node._taken[first][0].close()
    for content in ("", "-1", "80", "ninety", "99999999999"):
        monkeypatch.setattr(dht_node, "_taken", {})
        (tmp_path / "port").write_text(content)
        assert take_port(first, tmp_path / "port") >= first
        dht_node._taken[first][0].close()
