"""Which nodes a node of the DHT deals with: the admitted, and those whose addresses were given."""

import asyncio
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID

from dipaco.dht import bounded_protocol
from dipaco.dht.company import REMEMBERED_STRANGERS, Company, node_id_of, wants_to_be_asked
from dipaco.dht.directory import Directory
from dipaco.protocol.revocations import sign_revocations
from support.waiting import wait_until
from support.wire.dht_pair import GRID, RUN_ID, directory_of, paths_of, peer_record, publish, start_node
from support.wire.exchanges import INVITATION, OPERATOR, admission, new_gate
from support.wire.peers import RUN, peer


def name(number):
    return PeerID.from_base58(peer(number))


def said(number, *, by=None, is_client=False):
    """Return what a node says of itself; with the admission of another if `by` names one."""
    company = Company()
    company.admission, company.is_client = admission(number if by is None else by), is_client
    return bytes(company.introduction(node_id_of(name(number))).node_id)


def test_a_node_is_known_by_its_admission_or_because_it_was_given():
    company = Company([peer(9)])
    assert company.knows(name(9))
    assert not company.hears(name(0), said(0)), "no run is known yet"
    company.open([new_gate()])
    assert company.hears(name(0), said(0))
    assert company.hears(name(1), said(1, is_client=True))
    for bad in (b"", said(2)[:20], said(2, by=0), said(2)[:-1], b"x" * 1000):
        assert not company.hears(name(2), bad)
    assert company.hears(name(0), b""), "it has shown it before"
    assert company.hears(name(9), b"")


def test_whether_it_can_be_asked_is_said_beside_the_admission():
    assert wants_to_be_asked(said(0))
    assert not wants_to_be_asked(said(0, is_client=True))
    assert wants_to_be_asked(node_id_of(name(0)).to_bytes())
    assert not wants_to_be_asked(b"")


def test_nodes_of_another_run_of_the_chain_are_let_in():
    company = Company()
    company.open([new_gate("f" * 16)])
    assert not company.hears(name(0), said(0))
    company.open_also([new_gate()])
    assert company.hears(name(0), said(0))


def test_who_is_revoked_is_known_no_more():
    company, gate = Company(), new_gate()
    company.open([gate])
    assert company.hears(name(0), said(0))
    gate.revoke(sign_revocations(RUN, 1, {INVITATION.id: 0}, OPERATOR))
    assert not company.knows(name(0))


def test_strangers_are_remembered_for_a_while_and_not_without_end():
    clock = SimpleNamespace(s=0.0)
    company = Company(monotonic=lambda: clock.s)
    company.open([new_gate()])
    for number in range(REMEMBERED_STRANGERS + 9):
        company._note_stranger(f"stranger {number}")
    company.hears(name(0), b"")
    assert company.was_strange(name(0))
    assert len(company._strangers) == REMEMBERED_STRANGERS
    clock.s += 1e3
    assert not company.was_strange(name(0))


def test_names_in_an_answer_count_when_they_have_shown_their_admission(monkeypatch):
    """An insider that names twenty bare ids next to a key must not end the search there."""
    named = {node_id_of(name(number)): name(number) for number in range(6)}
    pinged = []

    class Protocol:
        company = Company()
        node_id = node_id_of(name(7))
        p2p = SimpleNamespace(peer_id=name(7))

        async def call_ping(self, peer_id):
            pinged.append(peer_id)
            number = next(n for n in range(6) if name(n) == peer_id)
            is_in = self.company.hears(peer_id, said(number) if number < 2 else b"")
            return node_id_of(peer_id) if is_in else None

    async def find(*_):
        return {"key": (None, dict(named))}

    monkeypatch.setattr(bounded_protocol, "_find", find)
    protocol = Protocol()

    def search():
        found = asyncio.run(bounded_protocol.call_find(protocol, "peer", ["key"]))
        return set(found["key"][1].values())

    assert search() == set(), "before the run is known no names are followed"
    protocol.company.open([new_gate()])
    assert search() == {name(0), name(1)}
    assert len(pinged) == 6
    assert search() == {name(0), name(1)}
    assert len(pinged) == 6, "nobody is asked again at once"


# -- real nodes


def admitted_node(folder, *given):
    node = start_node(folder, *given, run_id=None)
    node.directory = Directory(node.dht, node.identity, RUN, new_gate())
    node.directory.serve(GRID)
    return node


def come_in(node):
    node.directory.be_admitted(INVITATION.admit(node.identity.key, 0.0))


async def _table(node):
    return sorted(p.to_base58() for p in node.protocol.routing_table.peer_id_to_uid)


@pytest.mark.swarm
def test_a_node_enters_tables_when_it_is_admitted(tmp_path):
    first = admitted_node(tmp_path / "first")
    nodes = [first]
    try:
        come_in(first)
        second, third = (admitted_node(tmp_path / n, first.address) for n in ("second", "third"))
        nodes += [second, third]
        assert first.dht.call(_table) == []
        come_in(second)
        come_in(third)
        wait_until(lambda: len(first.dht.call(_table)) == 2)
        # They find each other by the first one, and check each other's admission.
        wait_until(lambda: third.peer_id in second.dht.call(_table))
        wait_until(lambda: second.peer_id in third.dht.call(_table))
    finally:
        for node in nodes:
            node.close()


@pytest.mark.swarm
def test_who_is_known_is_asked_itself_when_the_dht_does_not_show_it(tmp_path):
    shown, alone = start_node(tmp_path / "shown"), start_node(tmp_path / "alone")
    called = []
    gone = peer(5)
    try:
        assert publish(shown.directory, "peers", "0", peer_record(shown.peer_id, 1), 60.0)
        assert paths_of(alone.directory) == {}, "it is in no swarm"
        places = {shown.peer_id: (shown.address,), gone: (f"/ip4/127.0.0.1/tcp/9/p2p/{gone}",)}
        alone.directory = directory_of(
            alone,
            RUN_ID,
            known_directly=lambda modules: places,
            on_called=lambda who, has_answered: called.append((who, has_answered)),
        )
        assert paths_of(alone.directory) == {shown.peer_id: 1}
        assert called == [(shown.peer_id, True), (gone, False)]
    finally:
        shown.close()
        alone.close()
