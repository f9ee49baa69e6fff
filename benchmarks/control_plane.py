"""What the control plane costs a peer: requests and bytes in a round, with real DHT nodes.

    python benchmarks/control_plane.py [--peers N] [--side M] [--rounds R] [--json]

N DHT nodes on loopback, each with its p2pd and the publisher of a peer, do one after the other what
the peers of a run do in R rounds: renew and read four times a round, commit their modules at the
boundaries, keep two copies for others. The grid has two levels of M modules, and private ones. Each
peer reads what a peer reads (design 4.7); beside it each reads everything, as a status tool does.
Counted are the calls of the DHT and the bytes of their messages, at the nodes that answer; a peer
sends and receives each of them once. `wire` are the bytes of the loopback interface, transport and
keep-alives included: true when nothing else uses it, as in
`unshare -n sh -c 'ip link set lo up; python benchmarks/control_plane.py'`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dipaco.dht import bounded_protocol, directory
from dipaco.dht.coverage import scope_of, whole_scope
from dipaco.dht.manifest import load_or_create_operator_key, sign_manifest
from dipaco.dht.records import ProgressEntry
from dipaco.modules.blobs import BlobStore
from dipaco.modules.config import GridConfig
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference
from dipaco.peer.background import Background
from dipaco.peer.exchange.clock import Clock
from dipaco.peer.member.rounds import RoundSchedule
from dipaco.peer.publisher import Activity, PeerStatus, Publisher
from hivemind.dht.protocol import DHTProtocol
from parts.common import Report, build_parser, ratio, scratch_folder
from support.dht_pair import TestNode, start_node
from support.fake_swarm import FakeExchange
from support.make_plan import make_plan

CALLS = ("rpc_ping", "rpc_store", "rpc_find")
COPIES = 2
REFRESHES = 4
PROGRESS: Any = {
    "tokens": 1000, "validation_nll": 1e2, "validation_tokens": 100, "train_loss": 2.5,
}  # fmt: skip
# A round goes by in no time: what is renewed after a share of its life is renewed after seconds.
RENEWED_AFTER, AT_ONCE = directory.RENEWED_AFTER, 1e-4
ROUND_S = 2400.0
# Of this process: what its node has answered.
_answered: Counter[str] = Counter()
# A node that is asked calls its own answer to a ping too, to note who asks: that costs nothing.
_asked = ContextVar("asked", default=False)


def count_answers() -> None:
    """Count what the nodes that are started from here on answer."""
    for name in CALLS:
        # Ours takes Hivemind's place in each DHT process.
        owner = bounded_protocol if hasattr(bounded_protocol, name) else DHTProtocol
        setattr(owner, name, _counted(name, getattr(owner, name)))


def _counted(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    async def counted(self: Any, request: Any, context: Any) -> Any:
        if _asked.get():
            return await answer(self, request, context)
        _asked.set(True)
        response = await answer(self, request, context)
        _answered[name] += 1
        _answered["bytes"] += request.ByteSize() + response.ByteSize()
        return response

    return counted


async def read_answered(_: Any) -> dict[str, int]:
    """Runs in a DHT process."""
    return dict(_answered)


def wire_bytes() -> int:
    """Return what has gone over the loopback interface of this namespace."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


@dataclass
class Peer:
    """A node with the publisher of a peer that trains a path."""

    number: int
    node: TestNode
    plan: RunPlan
    grid: Grid
    path: int
    held: dict[str, StateReference] = field(default_factory=dict)

    def begin(self, folder: Path, manifest: bytes) -> None:
        """Claim the path, hold its states and two copies, publish and read."""
        others = [m for m in self.grid.modules() if m not in self.modules]
        first = self.number * COPIES
        for module in (*self.modules, *(others[(first + n) % len(others)] for n in range(COPIES))):
            self.commit(module, 0)
        self.status = PeerStatus(device="NVIDIA GeForce RTX 4090", tokens_per_s=1000.0)
        self.status.addresses = (f"/ip4/203.0.113.5/tcp/31337/p2p/{self.node.peer_id}",)
        self.status.reachable = "direct"
        self.status.claim = Activity("training", self.path, time.time())
        exchange: Any = FakeExchange()
        states: Any = SimpleNamespace(all=lambda: tuple(self.held.values()))
        self.publisher = Publisher(
            self.node.directory,
            self.plan,
            self.grid,
            RoundSchedule(self.plan.rounds, self.grid, self.plan.start_s),
            Clock(),
            states,
            BlobStore(folder),
            self.status,
            me=self.node.peer_id,
            software="dipaco/benchmark",
            manifest=manifest,
            exchange=exchange,
            background=Background(),
        )
        # A run of so few paths has one bucket.
        self.publisher.watch(scope_of(self.held, (0,), self.grid))

    def refresh(self) -> None:
        """Renew all records and read, as a publisher does after a quarter of a round."""
        directory.RENEWED_AFTER = AT_ONCE
        self.publisher._publish()
        self.publisher._read(())

    def announce(self) -> None:
        """Publish what has changed, as a publisher does at once."""
        directory.RENEWED_AFTER = RENEWED_AFTER
        self.publisher._publish()

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.grid.modules_of_path(self.path))

    def commit(self, module: str, round_index: int) -> None:
        """Hold the state of a module after a round."""
        digest = f"{round_index:064x}"
        self.held[module] = StateReference(
            module, round_index + 1, digest, 1000 * (round_index + 1), round_index, 50_000_000
        )

    def end_level(self, level: str, round_index: int) -> None:
        """Commit what this peer trains or keeps of a level, and say so."""
        for module in self.held:
            if self.grid.level_of(module) == level:
                self.commit(module, round_index)
        if level == self.grid.level_names[-1]:
            entry = ProgressEntry(path=self.path, last_round=round_index, **PROGRESS)
            self.status.progress = {self.path: entry}


@dataclass
class Swarm:
    """All peers, and the rounds that have gone by."""

    peers: list[Peer]
    next_round: int = 0

    def measure(self, rounds: int) -> dict[str, float]:
        """Let rounds go by, after one to settle in; return what each cost a peer."""
        self._run(1)
        before, wire = self._counts(), wire_bytes()
        self._run(rounds)
        found = self._counts() - before
        times = len(self.peers) * rounds
        measured = {name.removeprefix("rpc_"): found[name] / times for name in CALLS}
        measured["requests"] = sum(found[name] for name in CALLS) / times
        # Each message is sent by one peer and received by another.
        measured["bytes"] = 2 * found["bytes"] / times
        measured["wire"] = 2 * (wire_bytes() - wire) / times
        measured["least_claims_seen"] = min(len(p.publisher.view.claims) for p in self.peers)
        return measured

    def _run(self, rounds: int) -> None:
        levels = self.peers[0].grid.level_names
        for _ in range(rounds):
            for part in range(REFRESHES):
                for peer in self.peers:
                    peer.refresh()
                if part < len(levels):
                    for peer in self.peers:
                        peer.end_level(levels[part], self.next_round)
                        peer.announce()
            self.next_round += 1

    def _counts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for peer in self.peers:
            total.update(peer.node.dht.call(read_answered))
        return total


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--peers", type=int, default=24, help="DHT nodes (24)")
    parser.add_argument("--side", type=int, default=4, help="modules of each of two levels (4)")
    parser.add_argument("--rounds", type=int, default=1, help="that are counted (1)")
    chosen = parser.parse_args()
    plan = make_plan(
        duration_s=ROUND_S,
        grid=GridConfig(modules_per_level=(chosen.side, chosen.side), private_head=True),
        start_s=time.time() - 10 * ROUND_S,
    )
    grid = Grid(plan.model, plan.grid)
    report = Report(
        f"control plane of {chosen.peers} peers on {grid.path_count} paths, per peer and round",
        ("", "requests", "stores", "finds", "kB of messages", "kB on the wire", "claims seen"),
    )
    count_answers()
    peers: list[Peer] = []
    with scratch_folder() as folder:
        manifest = sign_manifest(plan, load_or_create_operator_key(folder / "operator.pem"))
        try:
            for number in range(chosen.peers):
                entry = (peers[0].node.address,) if peers else ()
                node = start_node(folder / str(number), *entry, run_id=plan.run_id)
                peers.append(Peer(number, node, plan, grid, number % grid.path_count))
            for peer in peers:
                peer.begin(folder / f"blobs-{peer.number}", manifest)
            swarm = Swarm(peers)
            found = {"own scope": swarm.measure(chosen.rounds)}
            for peer in peers:
                peer.publisher.watch(whole_scope(grid))
            found["everything"] = swarm.measure(chosen.rounds)
        finally:
            for peer in peers:
                peer.node.close()
    for name, cost in found.items():
        kilobytes = (cost["bytes"] / 1000, cost["wire"] / 1000)
        seen = cost["least_claims_seen"]
        report.row(name, cost["requests"], cost["store"], cost["find"], *kilobytes, seen)
    share = ratio(found["own scope"]["bytes"], found["everything"]["bytes"])
    report.notes.append(f"own scope: {share:.2f} of the bytes of everything")
    report.figures = {**found, "bytes_ratio": share}
    report.print(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
