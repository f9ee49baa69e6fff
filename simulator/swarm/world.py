"""What all machines of a history share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dipaco.dht.certificates import Certificate, CertificateBook
from dipaco.dht.coverage import bucket_count, home_bucket, scope_of
from dipaco.dht.records import ProgressEntry
from dipaco.dht.view import claimed_tokens
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference
from dipaco.peer.member.actions import Action, Adopt, Commit, Say
from dipaco.peer.member.events import Event

from .directory import SimulatedDirectory
from .engine import Engine
from .network import Link, Network
from .trace import Trace
from .work import ModuleWork, SimulatedState, Stock, is_signed, steps_in

START_S = 1000.0
# A replaced state is served for so long; and two states of a module lie on the disk.
RECENT_S, STATES_ON_DISK = 30.0, 2


class Decider(Protocol):
    """A member, or a stand-in in a test."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take an event, return what is to be done."""
        ...


MakeMember = Callable[["Body", CertificateBook, tuple[StateReference, ...]], Decider]


class Watch(Protocol):
    """Sees what happens; the invariants are one."""

    def started(self, machine: Body) -> None:
        """A machine begins to train a path."""
        ...

    def committed(self, machine: Body, action: Commit, state: SimulatedState) -> None:
        """A machine carries out a commit."""
        ...

    def adopted(self, machine: Body, action: Adopt, old: SimulatedState) -> None:
        """A machine is about to put a foreign state under its work."""
        ...

    def lost(self, machine: Body, module: str, why: str) -> None:
        """Work of a machine is gone: it crashed, left, moved or went back to its anchor."""
        ...

    def found_out(self, machine: Body, digest: str, table: tuple[Contribution, ...]) -> None:
        """A machine has found, or was shown, that an average of a group from a state is wrong."""
        ...

    def crashed(self, machine: Body) -> None:
        """A machine ends without a word."""
        ...

    def left(self, machine: Body) -> None:
        """A machine has left by itself."""
        ...

    def wrong(self, machine: Body, what: str) -> None:
        """A member did what the contract of actions and events forbids, or raised."""
        ...


@dataclass
class Conditions:
    """What goes wrong everywhere alike, at the moment."""

    look_s: tuple[float, float] = (0.2, 1.5)
    """How long reading the swarm takes."""
    look_fails: float = 0.0
    path_fails: float = 0.0
    """Share of the shards that cannot be had at first."""
    not_finite: float = 0.0
    """Share of the snapshots with a number that is none."""


@dataclass
class Disk:
    """What a restart finds."""

    states: dict[str, list[SimulatedState]] = field(default_factory=dict)
    """Of every module, the newest last."""
    chains: dict[str, tuple[Certificate, ...]] = field(default_factory=dict)
    """By digest, as they lay beside the states."""
    shards: set[int] = field(default_factory=set)

    def save(self, state: SimulatedState, chain: tuple[Certificate, ...]) -> None:
        """Write a state and its chain; an older one makes room."""
        kept = self.states.setdefault(state.reference.module, [])
        if state in kept:
            kept.remove(state)
        kept.append(state)
        self.chains[state.reference.digest] = chain
        for old in kept[:-STATES_ON_DISK]:
            kept.remove(old)
            self.chains.pop(old.reference.digest, None)

    def find(self, digest: str) -> SimulatedState | None:
        """Return a state that lies here."""
        found = (s for kept in self.states.values() for s in kept)
        return next((s for s in found if s.reference.digest == digest), None)


@dataclass
class World:
    """One history's plan, clock, network, directory, states and machines."""

    plan: RunPlan
    engine: Engine
    make_member: MakeMember
    trace: Trace
    state_bytes: int = 2_000_000
    machines: dict[str, Body] = field(default_factory=dict)
    reduces: dict[tuple[str, tuple[str, ...]], Any] = field(default_factory=dict)
    """Exchanges of groups under way, see `averaging`."""
    shard_holders: dict[int, dict[str, Body]] = field(default_factory=dict)
    """Who has had the shard of a path; it may have lost its disk since."""
    conditions: Conditions = field(default_factory=Conditions)
    tokens_per_step: int = 0
    """Of an inner step of any machine."""

    def __post_init__(self) -> None:
        self.grid = Grid(self.plan.model, self.plan.grid, self.plan.rounds.level_offsets)
        self.network = Network(self.engine)
        self.directory = SimulatedDirectory(self.engine, self.network, self.plan, self.grid)
        self.stock = Stock(self.plan, self.grid, self.state_bytes)
        self.watch: Watch
        inner = self.plan.inner
        self.tokens_per_step = inner.batch_sequences * self.plan.model.sequence_length

    @property
    def now_s(self) -> float:
        """The true time."""
        return self.engine.now_s

    def is_signed(self, certificate: Certificate, checked: Certificate | None = None) -> bool:
        """Tell whether a certificate is one that a peer takes: as it is checked when it comes.

        Who was revoked since has signed all the same.
        """
        guests = self.directory.guests
        if guests is not None and not certificate.signatures.keys() <= guests.keys():
            return False
        return is_signed(certificate, checked)

    def say(self, peer: str, kind: str, what: Any) -> None:
        """Write a line of the log."""
        self.trace.add(self.engine.now_s - START_S, peer, kind, what)


class Body(ABC):
    """What a machine has and does, as far as its parts and other machines see it."""

    is_honest = True
    spoils_reduces = False
    falsified_share = 0.0
    """Of the pieces that it averages: how many it averages wrongly."""

    def __init__(self, world: World, peer: str, link: Link) -> None:
        self.world, self.peer, self.link = world, peer, link
        self.clock_error_s = 0.0
        self.step_s = 0.0
        self.trains = True
        self.pinned: int | None = None
        self.disk = Disk()
        self.steps = 0
        """Inner steps ever taken here: the number of the next one."""
        self.handled = 0
        """Events that its members have handled."""
        self.number = len(world.machines)
        world.machines[peer] = self
        self.forget()

    def forget(self) -> None:
        """Be as after a start: nothing in memory."""
        self.book = CertificateBook()
        self.met: set[str] = set()
        """Peers that have answered this member, or averaged with it."""
        self.path: int | None = None
        self.round_index = 0
        self.works: dict[str, ModuleWork] = {}
        self.served: dict[str, SimulatedState] = {}
        self.recent: dict[str, tuple[float, SimulatedState]] = {}
        count = bucket_count(self.world.grid.path_count)
        self.scope = scope_of((), (home_bucket(self.peer, None, count),), self.world.grid)
        """What is read of the swarm."""
        self.claim = Say("joining", None, 0.0, "", False)
        self.progress: dict[int, ProgressEntry] = {}
        self.answers: deque[Event] = deque()
        """Of actions that are answered at once."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.link.is_up

    @property
    def is_awake(self) -> bool:
        """Whether it runs and is not suspended."""
        return self.link.is_up and self.link.awake_s <= self.world.now_s

    @property
    def believed_s(self) -> float:
        """The swarm time, as this machine believes it to be."""
        return self.world.engine.now_s + self.clock_error_s

    def true_s(self, believed_s: float) -> float:
        """Return when the machine's clock shows a time, as it goes now."""
        return believed_s - self.clock_error_s

    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """Do something in this life of the machine, when it is awake."""
        self.world.engine.after(
            delay_s, self.world.network.run, self.peer, self.link.life, what, *arguments
        )

    @abstractmethod
    def deliver(self, event: Event) -> None:
        """Report an event to the member: at once, or after the inner step under way."""

    @abstractmethod
    def publish(self) -> None:
        """Write all records that say something new or have grown old."""

    @abstractmethod
    def read(self, is_answer: bool, further: tuple[int, ...] = ()) -> None:
        """Read what the member watches, and `further` buckets, and tell it."""

    @abstractmethod
    def hear_call(self, *said: Any) -> None:
        """Take what the other side of a call of a meeting says."""

    @abstractmethod
    def hear_broken_call(self, *call: Any) -> None:
        """Take note that a call of a meeting broke."""

    @abstractmethod
    def hear_signature(self, certificate: Certificate) -> None:
        """Take the signature of another member of a group."""

    def have_shard(self, path: int) -> None:
        """Note that the shard of a path lies on the disk."""
        self.disk.shards.add(path)
        self.world.shard_holders.setdefault(path, {})[self.peer] = self

    def serve_state(self, state: SimulatedState) -> None:
        """Serve a state in place of the module's last one, which can be had for a while still."""
        module = state.reference.module
        before = self.served.get(module)
        if before is not None and before is not state:
            self.recent[before.reference.digest] = (self.world.now_s, before)
        self.served[module] = state

    def find(self, digest: str) -> SimulatedState | None:
        """Return a state that this machine can serve."""
        for state in self.served.values():
            if state.reference.digest == digest:
                return state
        came = self.recent.get(digest)
        if came is not None:
            if self.world.now_s - came[0] <= RECENT_S:
                return came[1]
            del self.recent[digest]
        return self.disk.find(digest)

    def claimed_tokens(self, work: ModuleWork, round_index: int) -> int:
        """Return what this machine says that it has trained since the anchor of a module."""
        tokens = steps_in(work.shift) * self.world.tokens_per_step
        return claimed_tokens(self.world.plan, tokens, round_index)

    def count_steps(self) -> None:
        """Bring what every module knows of the steps up to date."""
        for work in self.works.values():
            work.count(self.peer, self.steps)
