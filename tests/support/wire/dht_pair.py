"""Real DHT nodes on loopback, each with an identity of its own. For tests of `dht/`."""

import contextlib
import time
from dataclasses import dataclass

from dipaco.dht.dht_node import join_dht
from dipaco.dht.directory import Directory
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.protocol.config import GridConfig
from dipaco.protocol.coverage import whole_scope
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import Identity, load_or_create_identity
from dipaco.protocol.invitations import ADMISSION_BYTES
from dipaco.protocol.records import PeerRecord
from support.runs.make_plan import make_plan

from .peers import OpenGate

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
RUN_ID = "0123456789abcdef"
# Of the run that the views of these tests are of: 64 paths, one bucket.
PLAN = make_plan(grid=GridConfig(modules_per_level=(8, 8)))
GRID = Grid(PLAN.model, PLAN.grid)

ADMISSION = bytes(ADMISSION_BYTES)


@dataclass
class TestNode:
    """One node: its identity, DHT process and directory of the test's run."""

    __test__ = False

    identity: Identity
    dht: GuardedDHT
    directory: Directory

    @property
    def address(self):
        """An address that others can join through."""
        return str(self.dht.get_visible_maddrs()[0])

    @property
    def peer_id(self):
        return self.identity.peer_id

    def close(self):
        self.dht.shutdown()
        self.identity.release()


def publish(directory, kind, item, record, life_s):
    """Store one record; None withdraws what was said there. Returns whether a node took it."""
    return directory.store([directory.entry(kind, item, record, life_s)])


def publish_manifest(directory, envelope, life_s):
    """Store a run's manifest."""
    return directory.store([directory.manifest_entry(envelope, life_s)])


def start_node(folder, *initial_peers, client_mode=False, run_id=RUN_ID, operator_key=bytes(32)):
    """Start a node whose key is kept in `folder`."""
    identity = load_or_create_identity(folder / "identity.key")
    dht = join_dht(initial_peers, identity=identity, host_maddrs=(LOOPBACK,), client_mode=client_mode)
    node = TestNode(identity, dht, Directory(dht, identity, None))
    if run_id is not None:
        node.directory = directory_of(node, run_id, operator_key)
        if not client_mode:
            node.directory.be_admitted(ADMISSION)
    return node


def directory_of(node, run_id, operator_key=bytes(32), **options):
    """Return a directory of another run in which everybody is in."""
    directory = Directory(node.dht, node.identity, run_id, OpenGate(run_id, operator_key), **options)
    directory.serve(GRID)
    directory.admission = ADMISSION
    return directory


@contextlib.contextmanager
def node_pair(folder):
    """Two nodes that know each other."""
    first = start_node(folder / "first")
    try:
        second = start_node(folder / "second", first.address)
        try:
            yield first, second
        finally:
            second.close()
    finally:
        first.close()


def peer_record(peer, path):
    """Return what a peer says that trains a path."""
    return PeerRecord(
        peer_id=peer,
        protocol=3,
        software="dipaco/test",
        device="cpu x1",
        state="training",
        path=path,
        since_s=5.0,
        tokens_per_s=1.0,
        round=0,
        reachable="direct",
        addresses=("/ip4/203.0.113.5/tcp/31337",),
        bytes_up=0,
        bytes_down=0,
    )


def view_by(directory, scope=None):
    """Return the swarm as a directory shows it, all of it unless `scope` says otherwise."""
    return directory.read_view(PLAN, GRID, time.time(), scope or whole_scope(GRID))


def paths_of(directory):
    """Return who claims which path."""
    return {peer: claim.path for peer, claim in view_by(directory).claims.items()}
