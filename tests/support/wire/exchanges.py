"""Exchanges of admitted peers and strangers, with rows and steps to tell each other.

`Peers` makes as many as a test needs on a `MemoryNetwork`; `real` ones take another transport.
"""

import dataclasses
import hashlib

from dipaco.base.kept_files import KeptFiles
from dipaco.modules.layout import layout_of
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.exchange import Exchange
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.exchange.served_run import ServedRun
from dipaco.peer.exchange.verify import RowCheck
from dipaco.protocol.admission import Gate
from dipaco.protocol.chain.steps import MARK_BYTES, Row, Step, genesis_name, sign_row
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import raw_public_key
from dipaco.protocol.invitations import Terms, make_invitation
from support.runs.make_plan import make_plan

from .memory_transport import MemoryNetwork, MemoryTransport
from .peers import RUN, key, peer

OPERATOR = key(1000)
PLAN = make_plan()
GRID = Grid(PLAN.model, PLAN.grid, PLAN.rounds.level_offsets)
NOW_S = PLAN.start_s + 1e6
MODULE = "L0.E1"
PATH = GRID.paths_of_module(MODULE)[0]
GENESIS = genesis_name(RUN, MODULE)
LIMIT_S = 60.0
INVITATION = make_invitation(Terms(RUN, 16, 0), OPERATOR)


def admission(number, invitation=INVITATION):
    return invitation.admit(key(number), NOW_S)


def new_gate(run_id=RUN):
    return Gate(run_id, raw_public_key(OPERATOR))


def new_check(gate=None, max_bytes=2**25, plan=PLAN):
    return RowCheck(
        plan,
        GRID,
        gate or new_gate(),
        # As that of a node, which knows the run's modules alone.
        max_bytes=lambda module: min(max_bytes, layout_of(GRID, module).size * 2**30),
        now=lambda: NOW_S,
    )


def row_of(number, round_index=0, parent=GENESIS, data=b"data", signer=None, **fields):
    """Return a row of the file that has its mark and then `data`."""
    values = {
        "module": MODULE,
        "round_index": round_index,
        "parent": parent,
        "state": hashlib.sha256(parent.encode()).hexdigest(),
        "path": PATH,
        "peer": peer(number),
        "tokens": 100,
        "file": "",
        "bytes": MARK_BYTES + len(data),
        **fields,
    }
    row = Row(**values)
    file = fields.get("file", hashlib.sha256(file_of(row, data)).hexdigest())
    return sign_row(dataclasses.replace(row, file=file), signer or key(number))


def file_of(row, data):
    """Return the file of a row."""
    return row.mark + data


def chain_of(length, peers=(0,), parent=GENESIS, begin=0):
    """Return steps on top of each other, with a row of each peer in them."""
    steps = []
    for round_index in range(begin, begin + length):
        steps.append(Step.of(row_of(number, round_index, parent) for number in peers))
        parent = steps[-1].name
    return steps


def rows_in(chains, module):
    return chains._modules[module].rows.newest(10**6)


class Held:
    """Content by its hash, in memory or in files."""

    def __init__(self, *contents):
        self.contents = {hashlib.sha256(data).hexdigest(): data for data in contents}

    def lookup(self, sha256):
        found = self.contents.get(sha256)
        return None if found is None else (found,)


class Node:
    """One exchange with what it serves."""

    def __init__(self, transport, folder, number, *, is_in, held):
        self.number, self.held, self.told = number, held, []
        self.gate = new_gate()
        kept = KeptFiles(folder / "store")
        kept.max_bytes = 2**27
        kept.tidy()
        self.chains, self.files = ChainStore(RUN, GRID.modules(), kept.index), ContributionFiles(kept)
        self.exchange = Exchange(transport)
        self.exchange.start()
        self.run = ServedRun(
            RUN, held, self.chains, new_check(self.gate), self.files, admission(number) if is_in else None
        )
        self.exchange.serve_run(self.run)
        self.exchange.listen(self.told.append)

    @property
    def peer(self):
        return self.exchange.peer_id


class Peers:
    """Makes nodes on one network, and stops them."""

    def __init__(self, folder):
        self.folder, self.network = folder, MemoryNetwork()
        self.nodes = []

    def __call__(self, *contents, is_in=True, uplink=None, knows=(), net=0):
        """`net`: which network it is seen to come from."""
        number = len(self.nodes)
        transport = MemoryTransport(self.network, peer(number), uplink, f"10.0.{net}.0/24")
        node = Node(transport, self.folder / str(number), number, is_in=is_in, held=Held(*contents))
        self.nodes.append(node)
        for other in knows:
            meet(node, other)
        return node

    def stop(self):
        for node in self.nodes:
            node.exchange.stop()


def meet(one, other):
    """Let two nodes know each other's admissions, as by the records of the DHT."""
    one.gate.check(other.peer, admission(other.number))
    other.gate.check(one.peer, admission(one.number))
