"""Exchanges of admitted peers and strangers, with rows and steps to tell each other.

`Peers` makes as many as a test needs on a `MemoryNetwork`; `real` ones take another transport.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dipaco.modules.layout import layout_of
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.exchange import Exchange
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.exchange.served_run import ServedRun
from dipaco.peer.exchange.streams.transport import Transport
from dipaco.peer.exchange.verify import RowCheck
from dipaco.peer.owner.uplink import Uplink
from dipaco.protocol.admission import Gate
from dipaco.protocol.chain import MARK_BYTES, Row, Step, genesis_name, sign_row
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import raw_public_key
from dipaco.protocol.invitations import Terms, make_invitation
from dipaco.protocol.member.events import Told
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


def admission(number: int, invitation: Any = INVITATION) -> bytes:
    found: bytes = invitation.admit(raw_public_key(key(number)), NOW_S)
    return found


def new_gate() -> Gate:
    return Gate(RUN, raw_public_key(OPERATOR))


def new_check(gate: Gate | None = None, max_bytes: int = 2**25) -> RowCheck:
    return RowCheck(
        PLAN,
        GRID,
        gate or new_gate(),
        # As that of a node, which knows the run's modules alone.
        max_bytes=lambda module: min(max_bytes, layout_of(GRID, module).size * 2**30),
        now=lambda: NOW_S,
    )


def row_of(
    number: int,
    round_index: int = 0,
    parent: str = GENESIS,
    data: bytes = b"data",
    signer: Any = None,
    **fields: Any,
) -> Row:
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


def file_of(row: Row, data: bytes) -> bytes:
    """Return the file of a row."""
    return row.mark + data


def chain_of(
    length: int, peers: Sequence[int] = (0,), parent: str = GENESIS, begin: int = 0
) -> list[Step]:
    """Return steps on top of each other, with a row of each peer in them."""
    steps = []
    for round_index in range(begin, begin + length):
        steps.append(Step.of(row_of(number, round_index, parent) for number in peers))
        parent = steps[-1].name
    return steps


def rows_in(chains: ChainStore, module: str) -> tuple[Row, ...]:
    return chains._modules[module].rows.newest(10**6)


class Held:
    """Content by its hash, in memory or in files."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = {hashlib.sha256(data).hexdigest(): data for data in contents}

    def lookup(self, sha256: str) -> Path | tuple[bytes, ...] | None:
        found = self.contents.get(sha256)
        return None if found is None else (found,)


class Node:
    """One exchange with what it serves."""

    def __init__(
        self, transport: Transport, folder: Path, number: int, *, is_in: bool, held: Held
    ) -> None:
        self.number, self.held, self.told = number, held, list[Told]()
        self.gate = new_gate()
        self.chains = ChainStore(RUN, GRID.modules(), folder / "chains")
        self.files = ContributionFiles(folder / "contributions", max_bytes=2**27)
        self.exchange = Exchange(transport)
        self.exchange.start()
        self.run = ServedRun(
            RUN,
            held,
            self.chains,
            new_check(self.gate),
            self.files,
            admission(number) if is_in else None,
        )
        self.exchange.serve_run(self.run)
        self.exchange.listen(self.told.append)

    @property
    def peer(self) -> str:
        return self.exchange.peer_id


class Peers:
    """Makes nodes on one network, and stops them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.network = folder, MemoryNetwork()
        self.nodes: list[Node] = []

    def __call__(
        self,
        *contents: bytes,
        is_in: bool = True,
        uplink: Uplink | None = None,
        knows: Sequence[Node] = (),
    ) -> Node:
        number = len(self.nodes)
        transport = MemoryTransport(self.network, peer(number), uplink)
        node = Node(transport, self.folder / str(number), number, is_in=is_in, held=Held(*contents))
        self.nodes.append(node)
        for other in knows:
            meet(node, other)
        return node

    def stop(self) -> None:
        for node in self.nodes:
            node.exchange.stop()


def meet(one: Node, other: Node) -> None:
    """Let two nodes know each other's admissions, as by the records of the DHT."""
    one.gate.check(other.peer, admission(other.number))
    other.gate.check(one.peer, admission(one.number))


def wait_for(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.01)
