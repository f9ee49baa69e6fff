"""Copies of states, so that each lives on several peers (design 4.6).

One peer looks after the copies of a module: the one that has trained it longest, or, of an orphan,
a holder that rendezvous hashing names. It offers the state to the other peers in their rendezvous
order and walks on past those that do not take it, until enough have shown that they hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dipaco.dht.agreement import expected_group
from dipaco.dht.keeping import keepers
from dipaco.dht.policy import seniority
from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference

from .actions import Drop, FetchState, Keep, Offer
from .chains import Chains
from .events import FetchFailed, OfferAnswered, Offered, StateFetched
from .knowledge import Knowledge

# An offer is taken by those whose place in the rendezvous order is below this many times the
# copies: views differ a little, and some of those before may be gone.
GREATEST_PLACE = 4
OFFER_LIMIT_S = 60.0
# Once as many have refused in a row as there should be copies, each further one lets one more offer
# be made at a time, up to so many: names that only answer would hold the copies up for as long as
# all of them take to refuse, one after the other.
MOST_MORE_OFFERS = 6
# Offers that a peer makes in a round, over all modules: it may look after many orphans where many
# names only answer.
OFFERS_PER_ROUND = 240
# Who did not take an offer is passed over for a refresh period, since it may have been busy, but
# not for longer than this at first; then for twice as long each time, up to so many periods.
FIRST_PASSED_OVER_S = 20.0
PASSED_OVER_PERIODS = 8
# States that others offered and that are looked into at the same time.
GREATEST_OFFERS = 64
# A state on its way here for so long makes room for another one that is offered.
SLOW_FETCH_S = 45.0
# Between two looks whether others hold enough copies of what this peer need not keep.
DROP_EVERY_S = 60.0
# Who has shown that it holds a copy announces that within so many refresh periods: who does not any
# more has lost its disk in a crash.
ANNOUNCED_PERIODS = 3
# Peers that a leaving peer offers each state to.
HANDED_TO = 4


@dataclass
class _Care:
    """What is known of the copies of one module."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    """Peer to the last round of the state that it has shown to hold."""
    acknowledged_s: dict[str, float] = field(default_factory=dict)
    """Peer to when it has shown that."""
    offered: dict[str, float] = field(default_factory=dict)
    """Peer to when its answer must have come."""
    passed_over: dict[str, float] = field(default_factory=dict)
    """Peer to when it may be asked again."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Peer to how many offers it did not take since it last took one."""
    refused_in_a_row: int = 0
    """By anybody, since somebody took one."""


@dataclass
class _HandOver:
    """What a leaving peer still waits for, of one module."""

    asked: set[str]
    """Peers whose answers are on their way."""
    missing: int
    """Copies by which others hold fewer than the run wants."""


class Keeping:
    """Gives copies to others, and takes those that others offer."""

    def __init__(self, knowledge: Knowledge, chains: Chains) -> None:
        self._known = knowledge
        self._chains = chains
        self._care: dict[str, _Care] = {}
        self._offers: dict[str, StateReference] = {}
        self._fetching: dict[str, dict[str, float]] = {}
        """Of a module, the digests of what is on its way here, and since when."""
        self._looked_s = -math.inf
        self._made_since_s = -math.inf
        self._made_offers = 0
        """Offers made in the refresh period that began then."""
        self._first = ""
        """Where to begin: the module for which no offer was left."""
        self._handing_over: dict[str, _HandOver] | None = None
        self.handed_over: set[str] = set()
        """Modules whose newest states others hold, while the member leaves."""

    # -- giving

    def on_view(self) -> None:
        """Look after the copies of what is held here."""
        known = self._known
        if self._handing_over is not None:
            return
        for module in sorted(known.held, key=lambda name: (name < self._first, name)):
            self._look_after(module, known.held[module])
        self._take_offers()
        self._drop_unneeded()

    def _is_mine_to_care_for(self, module: str, state: StateReference) -> bool:
        known, view = self._known, self._known.view
        trainers = expected_group(view, known.grid, module)
        # Who signed it has it for sure: not one that only claims to train, nor one that is behind.
        certificate = known.book.get(module, state.digest)
        if certificate is not None:
            trainers = (trainers & certificate.signers) or self._standing_on(state, trainers)
        if trainers:
            mine = seniority(view, known.me, known.me)
            is_first = not any(seniority(view, known.me, peer) < mine for peer in trainers)
            return known.me in trainers and is_first
        holders = {known.me, *view.holders(state)}
        here = {peer for peer in holders if peer == known.me or known.is_here(peer)}
        return keepers(module, here, 1) == (known.me,)

    def _standing_on(self, state: StateReference, trainers: frozenset[str]) -> frozenset[str]:
        """Return which trainers hold a state that others made, or one that wins over it.

        To claim a module is not to look after what nobody who made it trains any more.
        """
        known = self._known
        announced = known.view.holdings.get(state.module, ())
        standing = {
            held.peer_id
            for held in announced
            if held.peer_id in trainers
            and (held.digest == state.digest or known.descent.wins(held.reference, state))
        }
        return trainers & {known.me, *standing}

    def on_commit(self, module: str) -> None:
        """There is a new state of a module: others should have it soon, if only this peer does."""
        known = self._known
        if self._handing_over is not None or not known.has_view:
            return
        if not expected_group(known.view, known.grid, module) - {known.me}:
            self._look_after(module, known.held[module])

    def _look_after(self, module: str, state: StateReference) -> None:
        known, view = self._known, self._known.view
        if state.version == 0 or not view.covers_module(module):
            return
        if not self._is_mine_to_care_for(module, state):
            return
        rounds = known.plan.rounds
        care = self._care.setdefault(module, _Care())
        care.offered = {
            p: until_s for p, until_s in care.offered.items() if until_s > known.steady_s
        }
        trainers = expected_group(view, known.grid, module) | {known.me}
        # A copy where nobody can fetch it counts for nothing.
        holders = {known.me} | (self._holders(state) & trainers)
        holders = set(filter(known.can_serve, holders))
        fresh = {
            peer
            for peer, round_index in care.acknowledged.items()
            if known.is_here(peer)
            and state.last_round < round_index + max(1, rounds.replication_every_rounds)
            and self._has_copy(peer, module, care)
        }
        missing = rounds.copies - len(holders | fresh)
        if missing > 0:
            more = min(max(0, care.refused_in_a_row - rounds.copies), MOST_MORE_OFFERS)
            missing += more - len(care.offered)
        others = self._order(module) if missing > 0 else ()
        for peer in others:
            if missing <= 0:
                break
            if peer in trainers | fresh | frozenset(care.offered):
                continue
            if known.steady_s < care.passed_over.get(peer, -math.inf):
                continue
            if not self._may_offer():
                self._first = module
                break
            care.offered[peer] = known.steady_s + OFFER_LIMIT_S
            known.note_holder(peer, state.module, state.digest, is_sure=False)
            known.do(Offer(state, peer, OFFER_LIMIT_S))
            missing -= 1

    def _may_offer(self) -> bool:
        """Count an offer, or tell that there were enough of them in this refresh period."""
        rounds, steady_s = self._known.plan.rounds, self._known.steady_s
        period_s = refresh_period_s(rounds)
        if steady_s - self._made_since_s >= period_s:
            self._made_since_s, self._made_offers = steady_s, 0
        most = max(1, round(OFFERS_PER_ROUND * period_s / rounds.duration_s))
        if self._made_offers >= most:
            return False
        self._made_offers += 1
        return True

    def _has_copy(self, peer: str, module: str, care: _Care) -> bool:
        """Tell whether a peer that has shown to hold a copy still announces one, or has not had the
        time to."""
        known = self._known
        since_s = known.steady_s - ANNOUNCED_PERIODS * refresh_period_s(known.plan.rounds)
        announced = known.view.holdings.get(module, ())
        return care.acknowledged_s[peer] >= since_s or any(h.peer_id == peer for h in announced)

    def _holders(self, state: StateReference) -> set[str]:
        """Return who has signed a state, or announces one of its chain that is hardly older."""
        known = self._known
        certificate = known.book.get(state.module, state.digest)
        every = max(1, known.plan.rounds.replication_every_rounds)
        signers = certificate.signers if certificate is not None else frozenset[str]()
        announced = {
            held.peer_id: held.reference
            for held in known.view.holdings.get(state.module, ())
            if state.last_round < held.reference.last_round + every
        }
        # What parted from it is no copy of it, however new.
        near = {
            other.digest
            for other in set(announced.values())
            if known.descent.is_certified(other) and known.descent.are_of_one_chain(other, state)
        }
        return set(signers) | {peer for peer, other in announced.items() if other.digest in near}

    def _order(self, module: str) -> tuple[str, ...]:
        """Return the other peers in the order in which they are asked to keep a module.

        Those that have not answered yet come last. Of the near ones, who take offers, those come
        first that refused the fewest: of silent ones the first may be asked again by the time that
        the last has let its offer run out, and nobody else would ever be.
        """
        known, view = self._known, self._known.view
        trainers = expected_group(view, known.grid, module)
        others = [
            peer
            for peer, record in view.peers.items()
            if peer != known.me
            and peer not in trainers
            and record.state != "leaving"
            and known.can_serve(peer)
        ]
        has_shown_itself = known.doubts.has_shown_itself
        order = sorted(keepers(module, others, len(others)), key=lambda p: not has_shown_itself(p))
        refusals = self._care[module].refusals if module in self._care else {}
        most = GREATEST_PLACE * known.plan.rounds.copies
        near = sorted(order[:most], key=lambda p: (not has_shown_itself(p), refusals.get(p, 0)))
        return (*near, *order[most:])

    def on_offer_answered(self, event: OfferAnswered) -> None:
        """A peer has shown that it holds a copy, or it has not in time."""
        known = self._known
        care = self._care.setdefault(event.module, _Care())
        care.offered.pop(event.peer, None)
        state = known.held.get(event.module)
        certificate = known.book.get(event.module, event.digest)
        if event.is_kept and certificate is not None:
            care.acknowledged[event.peer] = certificate.statement.round_index
            care.acknowledged_s[event.peer] = known.steady_s
            care.refusals.pop(event.peer, None)
            care.refused_in_a_row = 0
            known.note_holder(event.peer, event.module, event.digest, is_sure=True)
        elif not event.is_kept:
            care.refused_in_a_row += 1
            refusals = care.refusals[event.peer] = care.refusals.get(event.peer, 0) + 1
            period_s = refresh_period_s(known.plan.rounds)
            wait_s = min(FIRST_PASSED_OVER_S, period_s) * 2 ** (min(refusals, 16) - 1)
            wait_s = min(wait_s, PASSED_OVER_PERIODS * period_s)
            care.passed_over[event.peer] = known.steady_s + wait_s
        if self._handing_over is not None:
            waiting = self._handing_over.get(event.module)
            if waiting is not None and event.peer in waiting.asked:
                waiting.asked.remove(event.peer)
                waiting.missing -= event.is_kept
            if event.is_kept:
                self.handed_over.add(event.module)
        elif not event.is_kept and known.has_view and state is not None:
            self.on_view()

    def acknowledged(self, module: str) -> tuple[str, ...]:
        """Return who has shown to hold a copy of a module, of whatever age."""
        care = self._care.get(module)
        return tuple(sorted(care.acknowledged)) if care is not None else ()

    # -- taking

    def on_offered(self, event: Offered) -> None:
        """Another peer wants this one to hold a state: only a keeper does, and never blindly."""
        known, state = self._known, event.reference
        if self._handing_over is not None:
            return
        if state.module not in known.grid.modules() or state.version == 0:
            return
        if not known.is_plausible(state):
            return
        if state.module in known.anchors or not known.has_view:
            return
        held = known.held.get(state.module)
        if held is not None and held.digest == state.digest:
            return
        known.hear(state, event.peer)
        trainers = expected_group(known.view, known.grid, state.module)
        # Names that never answered take nobody's place.
        others = [
            peer
            for peer in {known.me, *known.view.peers}
            if peer not in trainers
            and known.can_serve(peer)
            and known.doubts.has_shown_itself(peer)
        ]
        most = GREATEST_PLACE * known.plan.rounds.copies
        if known.me not in keepers(state.module, others, most):
            return
        if len(self._offers) < GREATEST_OFFERS:
            self._offers[state.digest] = state
            self._take_offers()

    def _take_offers(self) -> None:
        """Fetch what is offered, certified and better than what is held."""
        known = self._known
        for digest, state in list(self._offers.items()):
            held = known.held.get(state.module)
            if self._chains.learn([state], held):
                continue
            del self._offers[digest]
            if state.module in known.anchors or not self._has_room_for(state):
                continue
            if known.descent.wins(state, held or StateReference.untrained(state.module)):
                self._fetching.setdefault(state.module, {})[digest] = known.steady_s
                known.do(FetchState(state, known.holders(state), "keep"))

    def _has_room_for(self, state: StateReference) -> bool:
        """Tell whether a state may be fetched beside what is on its way of its module."""
        coming = self._fetching.get(state.module, {})
        latest_s = max(coming.values(), default=-math.inf)
        return state.digest not in coming and self._known.steady_s - latest_s > SLOW_FETCH_S

    def on_chain(self) -> None:
        """Certificates came: an offer may be waiting for them."""
        self._take_offers()

    def on_state(self, event: StateFetched | FetchFailed) -> None:
        """What was offered is here, or could not be had.

        Also what took so long that another one was fetched beside it: on lines on which a state
        takes longer than a round, there would be no copy ever.
        """
        module = event.module if isinstance(event, FetchFailed) else event.reference.module
        digest = event.digest if isinstance(event, FetchFailed) else event.reference.digest
        if self._fetching.get(module, {}).pop(digest, None) is None:
            return
        known = self._known
        if isinstance(event, FetchFailed) or module in known.anchors:
            return
        if not known.is_plausible(event.reference):
            return
        known.take_certificates(event.certificates)
        held = known.held.get(module) or StateReference.untrained(module)
        if known.descent.wins(event.reference, held):
            known.serve(event.reference)
            known.do(Keep(event.reference))

    def _drop_unneeded(self) -> None:
        """Now and then, drop one copy that is not this peer's to keep and that others have."""
        known = self._known
        if known.steady_s - self._looked_s < DROP_EVERY_S:
            return
        self._looked_s = known.steady_s
        copies = known.plan.rounds.copies
        for module, state in sorted(known.held.items()):
            if module in known.anchors or state.version == 0:
                continue
            able = filter(known.can_serve, (known.me, *known.view.peers))
            shown = filter(known.doubts.has_shown_itself, able)
            if known.me in keepers(module, shown, GREATEST_PLACE * copies):
                continue
            others = [
                held
                for held in known.view.holdings.get(module, ())
                if held.peer_id != known.me
                and known.is_here(held.peer_id)
                and known.doubts.has_shown_itself(held.peer_id)
                and known.can_serve(held.peer_id)
                and known.descent.is_certified(held.reference)
                and held.version >= state.version
            ]
            if len(others) >= copies:
                del known.held[module]
                known.do(Drop(module))
                return

    # -- leaving

    def hand_over(self, limit_s: float) -> None:
        """Offer to others what they hold too few copies of, before this peer leaves.

        Others may be about to leave too, each believing that the next one stays: so one that took
        a state is not enough. A copy that nobody else holds is handed on like what was trained.
        """
        known = self._known
        self._handing_over = {}
        if not known.has_view:
            return
        for module, state in known.held.items():
            if state.version == 0:
                continue
            holders = self._other_holders(module, state)
            is_own = module in known.anchors or not known.settings.trains
            if holders and is_own:
                self.handed_over.add(module)
            missing = known.plan.rounds.copies - len(holders)
            if missing <= 0 or (holders and not is_own):
                continue
            trainers = sorted(expected_group(known.view, known.grid, module) - {known.me})
            others = [p for p in (*trainers, *self._order(module)) if p not in holders]
            self._handing_over[module] = _HandOver(set(others[:HANDED_TO]), missing)
            known.do(*(Offer(state, peer, limit_s) for peer in others[:HANDED_TO]))

    def _other_holders(self, module: str, state: StateReference) -> set[str]:
        """Return who else holds a state and is not seen leaving."""
        known = self._known
        holders = set(known.view.holders(state))
        care = self._care.get(module)
        if care is not None:
            newest = (p for p, last in care.acknowledged.items() if last >= state.last_round)
            holders.update(newest)
        return {peer for peer in holders - {known.me} if known.is_staying(peer)}

    @property
    def is_handing_over(self) -> bool:
        """Whether an answer is waited for that could still make a difference."""
        waiting = (self._handing_over or {}).values()
        return any(module.asked and module.missing > 0 for module in waiting)

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Modules whose newest states nobody took over."""
        return tuple(sorted((self._handing_over or {}).keys() - self.handed_over))
