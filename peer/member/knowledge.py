"""What the parts of a member share: what it has learned, and the list of what it wants done."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random

from dipaco.dht.agreement import round_of_others
from dipaco.dht.certificates import Certificate, CertificateBook
from dipaco.dht.policy import CANNOT_LEAD
from dipaco.dht.records import Claim, PeerRecord, Reachability, refresh_period_s
from dipaco.dht.view import SwarmView, plausible_state, present_round
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference

from .actions import Action, Call, Warn
from .descent import Descent
from .doubts import Doubts
from .events import CallAnswered, FetchFailed, StateFetched
from .rounds import RoundSchedule

# The measured clock moves by less; what goes back further was put back.
CLOCK_SLACK_S = 10.0
# Who has shown itself is called again after so many refresh periods.
CALL_PERIODS = 20
# What is believed of a clock, or of a silence, after so many rounds whatever the others say. A peer
# that reaches nobody commits nothing that others share for so long; after that the others count as
# gone. Its commits never outweigh theirs (`descent`).
ISOLATED_ROUNDS = 8
# Who is missing for so many refresh periods, while others are in sight, has crashed.
GONE_PERIODS = 2
# Offers to one peer that are remembered, and for how many refresh periods where it has shown since
# then that it holds another state: by then what it took would have shown.
GREATEST_OFFERED, OFFERED_PERIODS = 4, 4


def is_answer_to(event: StateFetched | FetchFailed, wanted: StateReference) -> bool:
    """Tell whether an event is what came of fetching a state.

    The digest of a genesis state is not known before it is here, and other states of its module may
    be on their way for other purposes.
    """
    if isinstance(event, FetchFailed):
        return (event.module, event.digest) == (wanted.module, wanted.digest)
    found = event.reference
    if wanted.version == 0:
        return (found.module, found.version) == (wanted.module, 0)
    return found.digest == wanted.digest


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
    """False when it is known from the start that nobody can; otherwise `Probed` tells."""
    follows: bool = True
    """Move to a successor of the run."""
    seed: str = ""
    """What its random waits depend on; the peer id, unless something else is said."""


@dataclass(slots=True)
class Stand:
    """Which state of a module another peer holds, as far as this one knows."""

    seen: str = ""
    """What it said that it holds, the last time that the chain of that was known."""
    offered: dict[str, float] = field(default_factory=dict)
    """What it was offered since then, and may have, whatever it answered; and what it said that
    it holds, while the chain of that is not known. With the time when."""


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
    sampled: tuple[int, ...] = ()
    """Buckets beside its own that the member looks into to choose a path."""
    now_s: float = 0.0
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = RoundSchedule(self.plan.rounds, self.grid, self.plan.start_s)
        by_invitation = self.plan.admission == "invitation"
        self.doubts = Doubts(self.settings.me, by_invitation=by_invitation)
        self.descent = Descent(self.book, self._weigh, self.standing_on)
        self.random = Random(self.settings.seed or self.settings.me)
        self.own_reachable: Reachability = "unknown" if self.settings.can_be_called else "outgoing"
        """How others call this peer, as it was tried last."""
        self._was_isolated = False
        self._put_back_s = 0.0
        """By how much the clock was put back, all in all."""
        self._leapt_s: float | None = None
        """When the clock leapt, until others say that so much time has passed."""
        self._view: SwarmView | None = None
        self._believed: SwarmView | None = None
        self.outlook: SwarmView | None = None
        """The newest view with the buckets that were sampled for it, if any were."""
        self._known: dict[str, PeerRecord | Claim] = {}
        """What each of the others said last that has not said goodbye since."""
        self._seen_s: dict[str, float] = {}
        """When these were in a view last."""
        self._company_s = -math.inf
        """When anybody was in a view last that was not about to leave."""
        self._stands: dict[str, dict[str, Stand]] = {}

    @property
    def me(self) -> str:
        """This peer's id."""
        return self.settings.me

    def do(self, *actions: Action) -> None:
        """Want something done, in order."""
        self.actions += actions

    def note_time(self, now_s: float) -> bool:
        """Go on to `now_s`; returns whether the clock was put back.

        One that leaps forward by a round was put forward, or the machine slept.
        """
        went_back = now_s < self.now_s - CLOCK_SLACK_S
        if went_back:
            self._leapt_s = None
            self._put_back_s += self.now_s - now_s
            # Nobody was seen later than now.
            self._seen_s = {peer: min(seen_s, now_s) for peer, seen_s in self._seen_s.items()}
            self._company_s = min(self._company_s, now_s)
        elif self.now_s and now_s > self.now_s + self.plan.rounds.duration_s:
            self._leapt_s = None if self.schedule.fixed_steps else now_s
        self.now_s = now_s
        return went_back

    @property
    def steady_s(self) -> float:
        """The time that waits are measured by: it does not go back when the clock is put back."""
        return self.now_s + self._put_back_s

    @property
    def is_clock_doubtful(self) -> bool:
        """Whether the clock leapt, and half of the others have not said yet that it is right.

        What is committed by a clock that is ahead nobody else may keep or take before that time
        has come.
        """
        if self._leapt_s is None or not any(map(self.doubts.has_shown_itself, self._known)):
            return False
        return self.now_s - self._leapt_s <= ISOLATED_ROUNDS * self.plan.rounds.duration_s

    def learn(self, view: SwarmView) -> None:
        """Take a new view; claims of peers that are doubted are left out of it."""
        self._view = view
        self._believed = None
        said: dict[str, PeerRecord | Claim] = {**view.peers}
        said |= {p: view.claims[p] for p in view.from_elsewhere if p in view.claims}
        if self._leapt_s is not None:
            rounds = [
                record.round
                for peer, record in said.items()
                if peer != self.me and self.doubts.has_shown_itself(peer)
            ]
            # What was said a while ago may be of the round before.
            if rounds and statistics.median_high(rounds) + 1 >= self.present_round:
                self._leapt_s = None
        self._known.update(said)
        self._seen_s.update(dict.fromkeys(said, view.now_s))
        leaving = {peer for peer, record in said.items() if record.state == "leaving"}
        if (said.keys() | view.from_elsewhere) - leaving - {self.me}:
            self._company_s = view.now_s
        self._lose_sight({self.me, *leaving})
        if view.scope is not None:
            # Who is out of sight because this member looks elsewhere is not missing.
            in_sight = view.scope.paths_in_sight(self.grid)
            self._lose_sight(
                peer
                for peer, record in list(self._known.items())
                if record.path not in in_sight and not view.scope.covers_peer(peer, record.path)
            )
        self._stands = {module: self._stands.get(module, {}) for module in self.anchors}
        gone = said.keys() - self._known.keys()
        for module, stands in self._stands.items():
            certified: set[str] = set()
            for holding in view.holdings.get(module, ()):
                peer, digest = holding.peer_id, holding.digest
                stand = stands.get(peer)
                if stand is None or stand.seen != digest or stand.offered:
                    self.note_holder(peer, module, digest, is_sure=True)
                elif digest not in certified:
                    self.note_holder(peer, module, digest, is_sure=True)
                    if self.book.get(module, digest) is not None:
                        certified.add(digest)
            for peer in gone:
                stands.pop(peer, None)
            self._note_who_may_follow(module)

    def _note_who_may_follow(self, module: str) -> None:
        """Note who of those that train a module, and are in sight, may have taken the anchor over:
        it is there for all to see, and what they hold is seen later."""
        anchor, trainers = self.anchors[module], self.trainers_seen(module)
        if not anchor.version:
            return
        for holding in self.whole_view.holdings.get(module, ()):
            peer, digest = holding.peer_id, holding.digest
            common = self.book.common_ancestor(module, digest, anchor.digest)
            if peer in trainers and common != anchor.digest:
                self.note_holder(peer, module, anchor.digest, is_sure=False)

    def _lose_sight(self, peers: Iterable[str]) -> None:
        for peer in peers:
            self._known.pop(peer, None)
            self._seen_s.pop(peer, None)

    def note_holder(self, peer: str, module: str, digest: str, *, is_sure: bool) -> None:
        """Note that another peer holds a state, or may have taken it: once it is out of sight, it
        may go on from there."""
        if peer == self.me or module not in self.anchors:
            return
        stands = self._stands.setdefault(module, {})
        stand = stands.get(peer)
        if stand is None:
            stand = stands[peer] = Stand()
        if not is_sure or self.book.get(module, digest) is None:
            # Of a state whose chain is not known yet, nobody can say where it parted.
            stand.offered[digest] = self.steady_s
            while len(stand.offered) > GREATEST_OFFERED:
                del stand.offered[next(iter(stand.offered))]
            return
        if digest in stand.offered:
            for earlier in list(itertools.takewhile(lambda d: d != digest, stand.offered)):
                del stand.offered[earlier]
            del stand.offered[digest]
        if stand.offered:
            since_s = self.steady_s - OFFERED_PERIODS * refresh_period_s(self.plan.rounds)
            stand.offered = {d: made_s for d, made_s in stand.offered.items() if made_s > since_s}
        stand.seen = digest

    def stands(self, module: str) -> dict[str, Stand]:
        """Return what others hold of a module in training: of those who have shown themselves, or
        train it and never can, as they cannot be called, and have not said goodbye."""
        shown, trainers = self.doubts.has_shown_itself, self.trainers_seen(module)
        return {
            peer: stand
            for peer, stand in self._stands.get(module, {}).items()
            if shown(peer) or (peer in trainers and not self.can_ever_answer(peer))
        }

    def _weigh(self, contributors: Collection[str]) -> int:
        """Return what contributors to a chain weigh together.

        Two peers that cannot be called never meet. So whoever cannot takes it from those that have
        shown themselves that one of the others is there, and each side of a fork counts alike.
        """
        weight = self.doubts.weigh(contributors)
        if not weight or self._view is None or self.own_reachable != "outgoing":
            return weight
        if self.plan.admission == "invitation":
            return weight
        shown = self.doubts.has_shown_itself
        return weight + any(not shown(p) and not self.can_ever_answer(p) for p in contributors)

    def standing_on(self, module: str, digests: Collection[str]) -> frozenset[str]:
        """Return who holds one of some states of a module in training: this peer, and those that
        have shown themselves. Nobody in a run by invitation, where the invited count.

        A keeper takes only what weighs something for it, so who made that has shown itself there.
        """
        if self.plan.admission == "invitation" or module not in self.anchors:
            return frozenset()
        shown, stands = self.doubts.has_shown_itself, self._stands.get(module, {})
        found = {p for p, stand in stands.items() if stand.seen in digests and shown(p)}
        if self.anchors[module].digest in digests:
            found.add(self.me)
        return frozenset(found)

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

    @property
    def choice(self) -> SwarmView:
        """What a path is chosen by: the newest view, with what was sampled for it."""
        if self.outlook is None:
            return self.view
        return self.doubts.believed(self.outlook).at(self.now_s)

    def is_here(self, peer: str) -> bool:
        """Tell whether another peer is in sight, as far as one can tell from here."""
        view = self.view
        if peer in view.peers:
            return True
        return peer in view.from_elsewhere and not self.doubts.is_doubted(peer)

    def is_staying(self, peer: str) -> bool:
        """Tell whether another peer is in sight and not seen leaving."""
        said = self.view.claims.get(peer) or self.view.peers.get(peer)
        return self.is_here(peer) and (said is None or said.state != "leaving")

    def forget_beliefs(self) -> None:
        """Work the believed view out again: somebody is doubted, or is not any more."""
        self._believed = None

    @property
    def present_round(self) -> int:
        """The round that the run is in."""
        return present_round(self.plan, self.view)

    def round_after_anchors(self) -> int:
        """Return the counted round after the newest in the anchors, or a later one of others.

        By the clock those say nothing: the first alone.
        """
        assert self.path is not None
        newest = max(anchor.last_round for anchor in self.anchors.values())
        if not self.schedule.fixed_steps:
            return newest + 1
        return max(newest + 1, round_of_others(self.view, self.grid, self.path, self.me))

    @property
    def is_isolated(self) -> bool:
        """Whether nobody is in sight any more of those who were, and who did not say goodbye.

        Who was missing before, while others were in sight, crashed: when these have said goodbye,
        nothing is wrong with the network of this peer.
        """
        if self._view is None:
            return False
        since_s = self._company_s - GONE_PERIODS * refresh_period_s(self.plan.rounds)
        if not any(seen_s > since_s for seen_s in self._seen_s.values()):
            return False
        view, only_me = self._view, {self.me}
        return view.peers.keys() <= only_me and view.from_elsewhere <= only_me

    def tell_isolation(self) -> None:
        """Warn once when nobody is in sight any more."""
        if self.is_isolated and not self._was_isolated:
            goes_on = "trains on alone" if self.settings.trains else "keeps what it has"
            self.do(Warn(f"isolated: none of the peers that were here is in sight; {goes_on}"))
        self._was_isolated = self.is_isolated

    @property
    def isolated_since_s(self) -> float:
        """When the last of the others was in sight."""
        return max(self._seen_s.values(), default=0.0)

    def last_seen_s(self, peer: str) -> float:
        """Return when a peer was in a view last that has not said goodbye since; -inf for never."""
        return self._seen_s.get(peer, float("-inf"))

    def trainers_seen(self, module: str) -> set[str]:
        """Return the others that trained a module when they were in a view last, and have not said
        goodbye since."""
        paths = set(self.grid.paths_of_module(module))
        return {peer for peer, record in self._known.items() if record.path in paths}

    def states(self, module: str) -> tuple[StateReference, ...]:
        """Return the announced states of a module, each once, genesis states left out."""
        announced = (state for state in self.view.distinct_states(module) if state.version)
        return tuple(sorted(announced, key=attrgetter("digest")))

    def holders(self, state: StateReference) -> tuple[str, ...]:
        """Return the others that announce a state, or said that they hold it.

        Who only announces it and cannot be called is left out if there are others.
        """
        told = self.told.get(state.digest, ())
        announced = self.view.holders(state) if self._view is not None else ()
        callable_ = (*told, *filter(self.can_serve, announced))
        found = [p for p in dict.fromkeys(callable_) if p != self.me]
        return tuple(found or (p for p in dict.fromkeys(announced) if p != self.me))

    def is_held(self, state: StateReference) -> bool:
        """Tell whether `holders` names anybody."""
        told = self.told.get(state.digest, ())
        announced = self.view.holders(state) if self._view is not None else ()
        return any(peer != self.me for peer in (*told, *announced))

    def reachable(self, peer: str) -> Reachability:
        """Return how others call a peer, this one too."""
        return self.own_reachable if peer == self.me else self.view.reachable(peer)

    def can_serve(self, peer: str) -> bool:
        """Tell whether others can fetch from a peer, if only through a relay."""
        return self.reachable(peer) != "outgoing"

    def can_ever_answer(self, peer: str) -> bool:
        """Tell whether a peer does not say that nobody can call it, doubted or not."""
        return self.whole_view.reachable(peer) != "outgoing"

    def can_lead(self, peer: str) -> bool:
        """Tell whether others can call a peer by an address of its own, as far as is known.

        Who cannot leads no group and reduces nothing.
        """
        return self.reachable(peer) not in CANNOT_LEAD

    def hear(self, state: StateReference, peer: str) -> None:
        """Remember that a peer said that it holds a state; nonsense is not remembered."""
        if not self.is_plausible(state):
            return
        holders = self.told.pop(state.digest, ())
        self.told[state.digest] = tuple(dict.fromkeys((*holders, peer)))
        while len(self.told) > 256:
            del self.told[next(iter(self.told))]

    def take_certificates(self, certificates: Iterable[Certificate]) -> None:
        """Take certificates whose signatures have been checked, of what can have happened by now.

        What this peer has signed did happen, however wrong its clock is.
        """
        for certificate in certificates:
            said = certificate.statement
            is_own = self.me in certificate.signers
            if not is_own and not self.is_plausible(certificate.reference):
                continue
            if self.book.add(certificate):
                self._meet_signers(said.module, said.digest)

    def recall(self, certificates: Iterable[Certificate]) -> None:
        """Take the certificates that lay on this peer's disk when it began.

        They were plausible when they were taken, and what the time is the member does not know yet.
        Without them it would stand on states of which it cannot say who made them.
        """
        for certificate in certificates:
            said = certificate.statement
            self.book.add(certificate)
            self._meet_signers(said.module, said.digest)

    def _meet_signers(self, module: str, digest: str) -> None:
        """Whoever has signed a commit together with this peer has shown itself."""
        certificate = self.book.get(module, digest)
        if certificate is not None and self.me in certificate.signers:
            self.meet(certificate.signers)

    def meet(self, peers: Iterable[str]) -> None:
        """Note who has answered, called or averaged with this peer: these are there."""
        if self.doubts.prove((peer for peer in peers if peer != self.me), self.steady_s):
            self.forget_beliefs()

    def is_plausible(self, state: StateReference) -> bool:
        """Tell whether a state can have got this far since the run began."""
        return plausible_state(state, self.plan, self.grid, self.now_s)

    def call_unknown(self) -> None:
        """See whether those are there who claim to be, a few at a time (design 4.5).

        First those that are waited for at boundaries, and those that may keep a path untrained.
        """
        view, latest = self.whole_view, self.present_round - 2
        paths = {path for path in view.paths(self.grid) if view.last_round(path) < latest}
        shared = set().union(*map(self.grid.paths_of_module, self.anchors))
        stale = {
            peer
            for peer, claim in view.claims.items()
            if claim.path in paths or (claim.path in shared and claim.state != "leaving")
        }
        since_s = self.steady_s - CALL_PERIODS * refresh_period_s(self.plan.rounds)
        peers = self.doubts.to_call(view, stale, since_s)
        if peers:
            self.do(Call(peers))

    def on_call_answered(self, event: CallAnswered) -> None:
        """Those that were called have answered, or have not."""
        answered = set(event.answered)
        self.meet(answered)
        if self.doubts.called_in_vain(set(event.called) - answered):
            self.forget_beliefs()

    def is_save_due(self, round_index: int) -> bool:
        """Tell whether states of a round are written to disk (design 4.6)."""
        return (round_index + 1) % self.plan.rounds.save_every_rounds == 0

    def serve(self, state: StateReference) -> None:
        """Note that a state is served here from now on."""
        self.held[state.module] = state
        self.book.keep(state.module, state.digest)
