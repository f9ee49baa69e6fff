"""What the parts of a member share: what it has learned, and the list of what it wants done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from dipaco.dht.certificates import Certificate, CertificateBook
from dipaco.dht.view import SwarmView, present_round
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference

from .actions import Action
from .descent import Descent
from .doubts import Doubts
from .rounds import RoundSchedule


@dataclass(frozen=True)
class MemberSettings:
    """Who a member is and what its owner wants."""

    me: str
    """The peer id."""
    pinned: int | None = None
    """Train this path and no other."""
    max_rounds: int | None = None
    """Leave after so many rounds."""
    trains: bool = True
    """A bootstrap node trains nothing; it keeps copies."""
    can_be_called: bool = True
    """Whether others can open a connection to this peer."""
    follows: bool = True
    """Move to a successor of the run."""
    seed: str = ""
    """What its random waits depend on; the peer id, unless something else is said."""


@dataclass
class Knowledge:
    """Shared by the parts of one member, which call each other through `Member` alone."""

    settings: MemberSettings
    plan: RunPlan
    grid: Grid
    book: CertificateBook
    held: dict[str, StateReference] = field(default_factory=dict)
    """The state of each module that this peer serves: anchors and copies."""
    path: int | None = None
    """The path in training."""
    anchors: dict[str, StateReference] = field(default_factory=dict)
    """The last committed state of every module of the path in training."""
    told: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Holders of states by digest, as they said when they were asked."""
    now_s: float = 0.0
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = RoundSchedule(self.plan.rounds, self.grid, self.plan.start_s)
        self.descent = Descent(self.book)
        self.doubts = Doubts(self.settings.me)
        self.random = Random(self.settings.seed or self.settings.me)
        self._view: SwarmView | None = None
        self._believed: SwarmView | None = None
        self._known: dict[str, float] = {}

    @property
    def me(self) -> str:
        """This peer's id."""
        return self.settings.me

    def do(self, *actions: Action) -> None:
        """Want something done, in order."""
        self.actions += actions

    def learn(self, view: SwarmView) -> None:
        """Take a new view; claims of peers that are doubted are left out of it."""
        self._view = view
        self._believed = None
        for peer, record in view.peers.items():
            if record.state == "leaving":
                self._known.pop(peer, None)
            elif peer != self.me:
                self._known[peer] = view.now_s

    @property
    def has_view(self) -> bool:
        """Whether the swarm has been read."""
        return self._view is not None

    @property
    def view(self) -> SwarmView:
        """The newest view, at the present time, without those who are doubted."""
        assert self._view is not None
        if self._believed is None:
            self._believed = self.doubts.believed(self._view)
        if self._believed.now_s != self.now_s:
            self._believed = self._believed.at(self.now_s)
        return self._believed

    @property
    def whole_view(self) -> SwarmView:
        """The newest view with everybody in it."""
        assert self._view is not None
        return self._view

    def forget_beliefs(self) -> None:
        """Work the believed view out again: somebody is doubted, or is not any more."""
        self._believed = None

    @property
    def present_round(self) -> int:
        """The round that the run is in."""
        return present_round(self.plan, self.view)

    @property
    def is_isolated(self) -> bool:
        """Whether nobody is in sight any more of those who were, and who did not say goodbye."""
        if self._view is None or not self._known:
            return False
        return not (self._view.peers.keys() - {self.me})

    @property
    def isolated_since_s(self) -> float:
        """When the last of the others was in sight."""
        return max(self._known.values(), default=0.0)

    def last_seen_s(self, peer: str) -> float:
        """Return when a peer was in a view last that has not said goodbye since; -inf for never."""
        return self._known.get(peer, float("-inf"))

    def states(self, module: str) -> tuple[StateReference, ...]:
        """Return the announced states of a module, each once, genesis states left out."""
        announced = {state.digest: state for state in self.view.states(module) if state.version}
        return tuple(state for _, state in sorted(announced.items()))

    def holders(self, state: StateReference) -> tuple[str, ...]:
        """Return the others that announce a state, or said that they hold it."""
        told = self.told.get(state.digest, ())
        announced = self.view.holders(state) if self._view is not None else ()
        return tuple(dict.fromkeys(p for p in (*told, *announced) if p != self.me))

    def hear(self, state: StateReference, peer: str) -> None:
        """Remember that a peer said that it holds a state."""
        holders = self.told.pop(state.digest, ())
        self.told[state.digest] = tuple(dict.fromkeys((*holders, peer)))
        while len(self.told) > 256:
            del self.told[next(iter(self.told))]

    def take_certificates(self, certificates: Iterable[Certificate]) -> None:
        """Take checked certificates; who has signed one has shown that it trains."""
        for certificate in certificates:
            if self.book.add(certificate) and self.doubts.prove(certificate.signers, self.now_s):
                self.forget_beliefs()

    def is_save_due(self, round_index: int) -> bool:
        """Tell whether states of a round are written to disk (design 4.6)."""
        return (round_index + 1) % self.plan.rounds.save_every_rounds == 0

    def serve(self, state: StateReference) -> None:
        """Note that a state is served here from now on."""
        self.held[state.module] = state
        self.book.keep(state.module, state.digest)
