"""Which nodes a node of the DHT deals with: the admitted, and those that it was given.

See design 4.8, the DHT stays small.

Otherwise an attacker could make keys until some are next to a key, swallow what is stored there
and hide who there is. So:

* The id of a node follows from its peer id. Every request and every answer therefore has, in the
  place of the id, what says who its sender is: the id, if the sender wants to be asked, and its
  admission.
* A node asks, believes, stores at and has in its table only nodes whose admission it has checked,
  and those whose addresses it was given. Names in an answer are asked for theirs first.
* A node that does not know its run yet hears the given ones alone, and finds the manifest there.
* A node that is neither is answered as a stranger, see `metering.py`, and stores nothing but what
  certifies itself.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from dipaco.protocol.admission import Gate
from dipaco.protocol.invitations import ADMISSION_BYTES
from dipaco.protocol.record_errors import RecordError

_NODE_ID_BYTES = DHTID.HASH_NBYTES
# Of those that were asked for their admission and had none, how many are not asked again, and
# for how long.
REMEMBERED_STRANGERS, _STRANGER_S = 4096, 60.0


def node_id_of(peer_id: PeerID) -> DHTID:
    """Return the one id that a peer may have as a node."""
    return DHTID.generate(source=peer_id.to_bytes())


class Company:
    """The peers that one node knows to be in. In the DHT process, on its loop.

    :param given: ids of the peers whose addresses were given
    """

    def __init__(
        self, given: Iterable[str] = (), monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._given = frozenset(given)
        self._monotonic = monotonic
        self._gates: dict[str, Gate] = {}
        self._others: dict[str, Gate] = {}
        self.admission = b""
        """This node's own."""
        self.is_client = False
        """It asks others not to ask it: they cannot call it."""
        self._strangers: OrderedDict[str, float] = OrderedDict()
        self.contributors: frozenset[str] = frozenset()
        """Peers whose work was found good lately."""

    # -- who is in

    def open(self, gates: Iterable[Gate]) -> None:
        """Let in the peers that are admitted to any of the runs that this node serves."""
        self._gates = {gate.run_id: gate for gate in gates}
        self._strangers.clear()

    def open_also(self, gates: Iterable[Gate]) -> None:
        """Let in the peers of a run that succeeds one of these, or that one of these succeeds."""
        for gate in gates:
            before = self._others.get(gate.run_id)
            if before is not None:
                gate.learn_from(before)
        self._others = {gate.run_id: gate for gate in gates}
        self._strangers.clear()

    def knows(self, peer_id: PeerID) -> bool:
        """Tell whether a peer was given, or has shown its admission."""
        peer = peer_id.to_base58()
        gates = (*self._gates.values(), *self._others.values())
        return peer in self._given or any(gate.admission_of(peer) is not None for gate in gates)

    def hears(self, peer_id: PeerID, said: bytes) -> bool:
        """Take note of what a peer says of itself; returns whether it is in."""
        admission = said[len(said) % ADMISSION_BYTES :]
        for gate in (*self._gates.values(), *self._others.values()) if admission else ():
            try:
                gate.check(peer_id.to_base58(), admission)
                break
            except (RecordError, ValueError):
                continue
        is_in = self.knows(peer_id)
        if not is_in:
            self._note_stranger(peer_id.to_base58())
        return is_in

    def was_strange(self, peer_id: PeerID) -> bool:
        """Tell whether a peer has shown no good admission a moment ago."""
        until_s = self._strangers.get(peer_id.to_base58())
        return until_s is not None and self._monotonic() < until_s

    def is_open(self) -> bool:
        """Tell whether this node knows a run, so that it can tell who is in."""
        return bool(self._gates)

    def _note_stranger(self, peer: str) -> None:
        self._strangers[peer] = self._monotonic() + _STRANGER_S
        self._strangers.move_to_end(peer)
        while len(self._strangers) > REMEMBERED_STRANGERS:
            self._strangers.popitem(last=False)

    # -- what this node says of itself

    def introduction(self, node_id: DHTID) -> dht_pb2.NodeInfo:
        """Return what stands in this node's requests and answers."""
        own = b"" if self.is_client else node_id.to_bytes()
        return dht_pb2.NodeInfo(node_id=own + self.admission)


def wants_to_be_asked(said: bytes) -> bool:
    """Tell whether what a peer says of itself has an id in it."""
    return len(said) % ADMISSION_BYTES == _NODE_ID_BYTES
