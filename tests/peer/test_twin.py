"""A peer notices that another machine speaks for it."""

from dipaco.peer.presence.twin import TwinWatch
from dipaco.protocol.records import PeerRecord
from dipaco.protocol.view import SwarmView
from support.wire.peers import peer

OWN, FOREIGN = "/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/1"


def view(since_s, *addresses):
    record = PeerRecord.model_construct(peer_id=peer(1), since_s=since_s, addresses=addresses)
    return SwarmView(100.0, peers={peer(1): record})


def test_what_only_another_machine_can_have_said():
    told = []
    watch = TwinWatch(peer(1), 10.0, told.append)
    watch.said((OWN,))
    for quiet in (SwarmView(100.0), view(20.0, OWN), view(20.0), view(5.0, FOREIGN)):
        watch.on_view(quiet)
    assert not told
    watch.on_view(view(20.0, OWN, FOREIGN))
    watch.on_view(view(21.0, FOREIGN))
    assert told == [(FOREIGN,)]
