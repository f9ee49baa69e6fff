"""A contributor stays known until direct calls fail, whatever the DHT says."""

from dipaco.peer.exchange.contact.known_contributors import (
    APART_S,
    FAILURES,
    MAX_PEERS,
    MAX_PEERS_OF_MODULE,
    KnownContributors,
)
from support.waiting import HandClock
from support.wire.exchanges import MODULE, chain_of
from support.wire.peers import peer


def of_module(known, module):
    return tuple(known.of_modules([module]))


def test_the_last_to_contribute_come_first():
    known = KnownContributors()
    for step in chain_of(3, (0, 1)):
        known.step_taken(step)
    known.contributed(peer(2), MODULE, 7)
    known.contributed(peer(3), "P1", 9)
    assert of_module(known, MODULE) == (peer(2), *sorted((peer(0), peer(1))))
    assert of_module(known, "P0") == ()
    assert next(iter(known.all())) == peer(3)
    # What is told of an earlier round changes nothing.
    known.contributed(peer(2), MODULE, 1)
    assert of_module(known, MODULE)[0] == peer(2)


def test_who_cannot_be_called_any_more_is_forgotten_and_one_failure_is_none():
    clock = HandClock()
    known = KnownContributors(monotonic=clock)
    known.contributed(peer(0), MODULE, 1)
    for _ in range(50):
        known.failed(peer(0))
    assert of_module(known, MODULE), "many calls failed at once"
    known.answered(peer(0))
    for _ in range(FAILURES):
        assert of_module(known, MODULE) == (peer(0),)
        known.failed(peer(0))
        clock.s += APART_S
    assert of_module(known, MODULE) == ()
    known.failed(peer(0))
    known.contributed(peer(0), MODULE, 2)
    assert of_module(known, MODULE) == (peer(0),), "it is back"


def test_what_the_dht_hides_keeps_its_address():
    known = KnownContributors()
    known.contributed(peer(0), MODULE, 1)
    known.note_addresses({peer(0): ("/ip4/203.0.113.5/tcp/1",), peer(1): ("/ip4/1.2.3.4/tcp/1",)})
    known.note_addresses({peer(0): ()})
    for number in range(2 * MAX_PEERS):
        known.note_addresses({f"peer {number}": ("/ip4/1.2.3.4/tcp/1",)})
    assert known.all() == {peer(0): ("/ip4/203.0.113.5/tcp/1",)}
    assert len(known._addresses) <= MAX_PEERS


def test_a_module_with_many_contributors_keeps_the_newest():
    known = KnownContributors()
    for number in range(2 * MAX_PEERS_OF_MODULE):
        known.contributed(f"peer {number}", MODULE, number)
    assert len(of_module(known, MODULE)) == MAX_PEERS_OF_MODULE
    assert of_module(known, MODULE)[0] == f"peer {2 * MAX_PEERS_OF_MODULE - 1}"
