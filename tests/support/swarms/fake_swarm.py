"""The parts around a peer's glue, in memory: directory, view, clock. No network, no real time."""

from pathlib import Path

from dipaco.base.errors import NetworkError
from dipaco.peer.exchange.contact.clock import Clock
from dipaco.peer.owner.uplink import Uplink
from dipaco.protocol.chain.steps import Head
from dipaco.protocol.grid import Grid
from dipaco.protocol.member.rounds import RoundSchedule
from dipaco.protocol.records import PeerRecord
from dipaco.protocol.view import SwarmView

ME = "Qm" + "a" * 44


def peer_id(number):
    """Return the id of another peer."""
    digits = "".join("ABCDEFGHJK"[int(digit)] for digit in str(number))
    return "Qm" + digits.rjust(44, "1")


class FakeTime:
    """Swarm time that stands still until a test moves it; `on_look` is called at each look."""

    def __init__(self, now_s=1000.0):
        self.now_s = now_s
        self.on_look = lambda: None
        self.clock = Clock(system_time=self._look)

    def _look(self):
        self.on_look()
        return self.now_s


class FakeRun:
    """A run that was joined: what a reader of a node needs."""

    def __init__(self, plan, clock, me=ME):
        self.me, self.plan, self.clock = me, plan, clock
        self.grid = Grid(plan.model, plan.grid)
        self.schedule = RoundSchedule(plan.rounds, self.grid, plan.start_s)


class FakeEvents:
    """Remembers what was emitted."""

    def __init__(self):
        self.events = []

    def emit(self, kind, **values):
        self.events.append((kind, values))

    def of(self, kind):
        return [values for name, values in self.events if name == kind]


class FakeDirectory:
    """The DHT as one peer uses it: what it published, and what others did.

    `error` is raised by the next read, and by all that follow.
    """

    def __init__(self):
        self.others = SwarmView(now_s=0.0)
        self.peers = []
        """Everything that this peer said of itself, None for a withdrawal."""
        self.modules = {}
        self.scopes = []
        self.manifests = []
        self.blobs = []
        self.called = []
        self.reads = 0
        self.anew = 0
        self.error = None
        self.failure = None

    @property
    def claims(self):
        """Everything that was said of the claim, None for none."""
        return [record.claim if record.state != "leaving" else None for record in self.peers]

    @property
    def holdings(self):
        return {m: said.holding for m, said in self.modules.items() if said.holding is not None}

    def read_view(self, plan, grid, now_s, scope):
        self.reads += 1
        self.scopes.append(scope)
        if self.error is not None:
            raise self.error
        claims = dict(self.others.claims)
        mine = self.claims[-1] if self.peers else None
        if mine is not None:
            claims[mine.peer_id] = mine
        return SwarmView(
            now_s=now_s,
            claims=claims,
            peers=self.others.peers,
            holdings=self.others.holdings,
            progress=self.others.progress,
            duration_s=plan.rounds.duration_s,
            scope=scope,
        )

    def call_peers(self, peers, patience_s=0.0):
        self.called += peers

    def note_contributors(self, peers):
        pass

    def say_all_again(self):
        self.anew += 1

    def entry(self, kind, item, record, life_s):
        if kind == "peers":
            self.peers.append(record)
        elif kind == "blobs":
            self.blobs.append(item)
        elif kind == "modules" and record is not None:
            self.modules[item] = record
        elif kind == "modules":
            self.modules.pop(item, None)

    def manifest_entry(self, envelope, life_s):
        self.manifests.append(envelope)

    def store(self, said):
        assert not any(said)


class FakeExchange:
    """Counts no bytes and knows no neighbours."""

    uplink = Uplink()

    def connected_peers(self):
        return ()

    def clock_samples(self, peers, count, timeout_s):
        return {}


class FakeSwarm:
    """A view that a test sets, and a count of what was announced: the refresher for others."""

    period_s = 500.0

    def __init__(self, view=None):
        self.view = view or SwarmView(now_s=0.0)
        self.announced = 0
        self.on_refresh = lambda: None

    def watch(self, scope): ...

    def on_view(self, listener): ...

    def refresh(self, further=()):
        self.on_refresh()
        return self.view

    def announce(self):
        self.announced += 1

    def announce_blobs(self):
        self.announced += 1


class FakeFetcher:
    """Serves the blobs that a test puts in; all else fails."""

    def __init__(self):
        self.run_blobs = ()
        self.served_blobs = set()
        self.blobs_here = set()
        self.asked = []
        """Hashes, in order."""

    def all_blobs(self):
        return self.run_blobs

    def has(self, sha256):
        return sha256 in self.blobs_here

    def blob(self, sha256):
        self.asked.append(sha256)
        if sha256 not in self.served_blobs:
            raise NetworkError("nobody has it")
        self.blobs_here.add(sha256)
        return Path(sha256)


def peer_record(peer, state="serving"):
    """Return what a peer says of itself."""
    return PeerRecord(
        peer_id=peer,
        protocol=1,
        software="dipaco/test",
        device="cpu",
        state=state,
        path=None,
        tokens_per_s=0.0,
        round=0,
        reachable="direct",
        addresses=(),
        bytes_up=0,
        bytes_down=0,
    )


def head(module, version=1, step="5", digest="d"):
    """Return a state that a peer holds."""
    return Head(module, step * 64, version, version, version - 1, digest * 64, 1000)
