"""Taking over a state that others made, when it wins over the own one (design 4.4).

A peer falls behind when its group failed here and committed elsewhere, when a split heals, or
when it slept. Certificates say whether a state wins and what of the own work is in it; held-out
documents say whether it is one that a model can stand on. A peer that begins a path has nothing
to compare with: what it was given is compared with the module's genesis state, and with the best
chain that parted from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference

from .actions import Adopt, CheckState, FetchState, Warn
from .chains import Chains
from .events import Checked, FetchFailed, StateFetched
from .knowledge import Knowledge, is_answer_to
from .ledger import Ledger
from .quorum import RECENT_ROUNDS, is_majority

# A foreign state that makes the held-out loss worse by more nats than this is not believed.
MAX_LOSS_INCREASE = 1.0
# ... unless it lies where outer steps can lead, each at most so many times as long as is usual:
# one of a peer that was alone is longer than one of many. A long chain excuses no more than a
# few steps, or it would excuse anything.
GREATEST_STEP, MOST_STEPS = 4.0, 4
# Refresh periods for which a state that could not be fetched is left alone.
RETRY_PERIODS = 5
# Who fails to serve again and again is asked last for twice as long each time, so often at most.
MOST_DOUBLINGS = 4
# Of so many states and peers it is remembered that they are to be left alone.
MOST_LEFT_ALONE = 256
# No other state that those who made the last step to a refused one made alone is taken for so many
# rounds.
DISBELIEVED_ROUNDS = 4
# Chains that an anchor from the beginning is compared with, beside the genesis state.
MOST_RIVALS = 2


@dataclass
class _Fetch:
    """A state on its way here, or here and waiting for its turn."""

    reference: StateReference
    is_rival: bool = False
    """It is taken only if the anchor, which nobody has checked yet, is worse."""
    is_here: bool = False
    is_checking: bool = False


class Adoption:
    """For the modules of the path in training."""

    def __init__(self, knowledge: Knowledge, chains: Chains) -> None:
        self._known = knowledge
        self._chains = chains
        self._fetching: dict[str, _Fetch] = {}
        # States that are not believed, and whose word they were: all who contributed to them
        # since they parted from the own anchor.
        self._refused: dict[str, frozenset[str]] = {}
        # Until which round what goes on from them on the same word is not tried either.
        self._refused_until: dict[str, int] = {}
        self._unavailable: dict[str, float] = {}
        # Who could not serve a state that it was said to hold, and whose states are not believed,
        # until when: an inventor has a new one each time.
        self._unserved: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        """How often they could not, since one of them last did so alone."""
        self._disbelieved: dict[str, int] = {}
        self._unchecked: dict[str, set[str]] = {}
        """Modules whose anchor was taken at the beginning, and the rivals that it was better than;
        a genesis state is named by the empty digest."""
        self.ledgers: dict[str, Ledger] = {}

    def begin_path(self) -> None:
        """The path in training has changed."""
        known = self._known
        self._fetching.clear()
        self._unchecked = {m: set() for m, anchor in known.anchors.items() if anchor.version}
        self.ledgers = {m: Ledger(anchor, known.me) for m, anchor in known.anchors.items()}
        for module in known.anchors:
            self._compare(module)

    def clock_went_back(self) -> None:
        """Forget until which round states are left alone."""
        self._disbelieved.clear()
        self._refused_until = dict.fromkeys(self._refused, 0)

    def is_fetching(self, module: str) -> bool:
        """Tell whether a state of a module is on its way here, or about to be put under."""
        return module in self._fetching

    @property
    def is_checking(self) -> bool:
        """Whether a held-out loss is being scored: the answer comes before anything else."""
        return any(fetch.is_checking for fetch in self._fetching.values())

    def winner(self, module: str) -> StateReference | None:
        """Return the state that should replace the anchor of a module, as far as is known."""
        known = self._known
        candidates, anchor = self._candidates(module), known.anchors[module]
        served = list(filter(self._is_served, candidates))
        best = known.descent.best(served, anchor)
        if best is None and len(served) < len(candidates):
            best = known.descent.best(candidates, anchor)
        return best

    def _wins(self, state: StateReference, anchor: StateReference) -> bool:
        """Tell whether a state that is here should replace the anchor: among those that are served,
        as `winner` chose it, or among all.

        One from which others of these go on has to win by itself: what is on top may be invented.
        """
        candidates, descent = self._candidates(state.module), self._known.descent
        served = list(filter(self._is_served, candidates))

        def wins_among(states: Collection[StateReference]) -> bool:
            if not descent.wins(state, anchor, states):
                return False
            is_last = not any(descent.goes_on_from(one, state) for one in states)
            return is_last or descent.wins(state, anchor)

        return wins_among(served) or wins_among(candidates)

    def _is_served(self, state: StateReference) -> bool:
        """Tell whether a state has a holder that has not just failed to serve what it was said to
        hold."""
        known = self._known
        failing = {p for p, until_s in self._unserved.items() if until_s > known.steady_s}
        if not failing:
            return known.is_held(state)
        return not failing.issuperset(known.holders(state))

    def word(self, state: StateReference) -> frozenset[str]:
        """Return whose word it is that a state should replace the anchor: those who have shown
        themselves of its contributors since it and the anchor parted."""
        known = self._known
        parted = known.descent.parted(state, known.anchors[state.module])
        return frozenset(peer for peer in parted if known.doubts.has_shown_itself(peer))

    def _candidates(self, module: str) -> list[StateReference]:
        """Return the states of a module that are said to be held, and may be had."""
        known = self._known
        told = [
            certificate.statement.digest
            for certificate in known.book.all_of(module)
            if certificate.statement.digest in known.told
        ]
        candidates = {state.digest: state for state in known.states(module)}
        for digest in told:
            candidates.setdefault(digest, known.book.reference(module, digest))
        return [
            state
            for state in candidates.values()
            if not self._is_refused(state)
            and known.steady_s >= self._unavailable.get(state.digest, 0.0)
            and self._chains.is_seen(state, known.anchors[module])
        ]

    def look(self, running: Mapping[str, int]) -> None:
        """See whether a state of a module wins over its anchor.

        `running` are the levels with a round under way, and its index. What that round may come to
        itself waits for its end. All else is fetched meanwhile, and applied then: a slow peer is in
        a round nearly always.
        """
        known = self._known
        for module, anchor in known.anchors.items():
            if module in self._fetching:
                continue
            under_way = running.get(known.grid.level_of(module))
            states = [
                state
                for state in known.states(module)
                if state.digest not in self._refused and state.last_round != under_way
            ]
            self._chains.learn(states, anchor)
            self._start_beside(module, under_way)

    def on_chain(self, module: str, running: Mapping[str, int]) -> None:
        """Certificates of a module came: once all are here that are on their way, see who wins."""
        if module in self._known.anchors and not self._chains.is_wanted(module):
            self._start_beside(module, running.get(self._known.grid.level_of(module)))

    def _start_beside(self, module: str, under_way: int | None) -> None:
        """Fetch the state that wins, unless the round `under_way` may come to it itself."""
        if under_way is not None:
            best, anchor = self.winner(module), self._known.anchors[module]
            if best is None:
                return
            common = self._known.book.common_ancestor(module, best.digest, anchor.digest)
            if best.last_round == under_way and common == anchor.digest:
                return
        self.start(module)

    def start(self, module: str) -> bool:
        """Fetch the state that wins, if one does. Returns whether one is on its way."""
        if module in self._fetching:
            return not self._fetching[module].is_rival
        best = self.winner(module)
        if best is None:
            self._compare(module)
            return False
        self._fetching[module] = _Fetch(best)
        self._known.do(FetchState(best, self._known.holders(best), "adopt"))
        return True

    def catch_up(self, module: str, counting: Collection[str] | None) -> bool:
        """Fetch the state that others committed without this peer, as its round ends.

        Only one that can be had, as far as is known: who has a new one each time, and serves none,
        would end every round. With `counting`, those who count, only one that they can have
        committed: what a few have made is looked into beside the rounds. With fixed steps, without.
        """
        fetch, best = self._fetching.get(module), self.winner(module)
        if counting is None:
            wanted = fetch.reference if fetch is not None else best
            return wanted is not None and self._is_served(wanted) and self.start(module)
        if best is None or not self._is_served(best):
            return False
        if not is_majority(self.word(best), counting):
            return False
        return self.start(module) if fetch is None else fetch.reference.digest == best.digest

    def _compare(self, module: str) -> None:
        """Fetch the next state that an anchor from the beginning is to be compared with."""
        done = self._unchecked.get(module)
        if done is None:
            return
        known, anchor = self._known, self._known.anchors[module]
        rival: StateReference | None = StateReference.untrained(module)
        if "" in done:
            line = known.book.ancestors(module, anchor.digest)
            apart = [
                state
                for state in self._candidates(module)
                if state.digest not in done
                and state.digest not in line
                and known.descent.weigh(known.descent.parted(state, anchor)) > 0
            ]
            rival = known.descent.best(apart, StateReference.untrained(module))
        if rival is None or len(done) > MOST_RIVALS:
            del self._unchecked[module]
            return
        done.add(rival.digest)
        self._fetching[module] = _Fetch(rival, is_rival=True)
        known.do(FetchState(rival, known.holders(rival), "adopt"))

    def on_state(self, event: StateFetched | FetchFailed) -> None:
        """A state is here, or its holders could not serve it."""
        module = event.module if isinstance(event, FetchFailed) else event.reference.module
        digest = event.digest if isinstance(event, FetchFailed) else event.reference.digest
        fetch = self._fetching.get(module)
        if fetch is None or not is_answer_to(event, fetch.reference):
            return
        known = self._known
        holders = known.holders(fetch.reference)
        if isinstance(event, StateFetched) and known.is_plausible(event.reference):
            if len(holders) == 1:
                self._failures.pop(holders[0], None)
            known.take_certificates(event.certificates)
            fetch.reference, fetch.is_here = event.reference, True
            return
        del self._fetching[module]
        if not fetch.is_rival:
            self._leave_alone(digest, holders)

    def _leave_alone(self, digest: str, holders: Collection[str]) -> None:
        """Note that a state could not be had of those who were said to hold it."""
        known = self._known
        retry_s = RETRY_PERIODS * refresh_period_s(known.plan.rounds)
        self._unavailable[digest] = known.steady_s + retry_s
        for peer in holders:
            doublings = min(self._failures[peer], MOST_DOUBLINGS)
            self._failures[peer] += 1
            self._unserved[peer] = known.steady_s + retry_s * 2**doublings
        remembered: dict[str, Any]
        for remembered in (self._unavailable, self._unserved, self._failures):
            while len(remembered) > MOST_LEFT_ALONE:
                del remembered[next(iter(remembered))]

    def apply(self, running: Collection[str]) -> None:
        """Put what is here under the work of modules whose level has no round under way."""
        known = self._known
        for module, fetch in list(self._fetching.items()):
            if not fetch.is_here or fetch.is_checking or known.grid.level_of(module) in running:
                continue
            anchor = known.anchors[module]
            if fetch.is_rival and module in self._unchecked:
                fetch.is_checking = True
                known.do(CheckState(module, fetch.reference.digest, is_rival=True))
            elif not self._wins(fetch.reference, anchor):
                del self._fetching[module]
            elif self._is_settled(fetch.reference):
                self._adopt(fetch.reference)
            else:
                fetch.is_checking = True
                known.do(CheckState(module, fetch.reference.digest))

    def on_checked(self, event: Checked, running: Collection[str]) -> None:
        """The held-out loss with a state in place of the anchor is known."""
        fetch = self._fetching.get(event.module)
        if fetch is None or fetch.reference.digest != event.digest:
            return
        fetch.is_checking = False
        if event.is_undecided:
            fetch.is_here = False
            holders = self._known.holders(fetch.reference)
            self._known.do(FetchState(fetch.reference, holders, "adopt"))
            return
        before, after = event.loss_before, event.loss_after
        if fetch.is_rival:
            del self._fetching[event.module]
            is_free = self._known.grid.level_of(event.module) not in running
            if is_free and self._is_wrecked(fetch.reference, event, is_anchor=True):
                self._replace(fetch.reference, event)
            return
        if self._is_wrecked(fetch.reference, event):
            del self._fetching[event.module]
            self._refuse(fetch.reference, self._known.anchors[event.module])
            self._known.do(
                Warn(
                    f"refused state {event.digest[:12]} of {event.module}: held-out loss would go "
                    f"from {before:.3f} to {after:.3f}{_shown_coasting(event)}"
                )
            )
        elif self._known.grid.level_of(event.module) not in running:
            self._adopt(fetch.reference)

    def _is_wrecked(
        self, state: StateReference, checked: Checked, *, is_anchor: bool = False
    ) -> bool:
        """Tell whether a held-out loss with `state` is not what honest training made of the one
        with the anchor, or the other way round; never when it could not be scored."""
        for before, after in (
            (checked.loss_before, checked.loss_after),
            (checked.coasting_before, checked.coasting_after),
        ):
            good, bad = (after, before) if is_anchor else (before, after)
            if good is None or bad is None or bad <= good + MAX_LOSS_INCREASE:
                continue
            if not (math.isfinite(bad) and self._has_drifted(state, checked)):
                return True
        return False

    def _has_drifted(self, state: StateReference, checked: Checked) -> bool:
        """Tell whether a state is no further away than honest steps may have led since the fork.

        Who trains a module alone for some rounds pulls it away from the other paths through it:
        their loss gets worse by nats, and is mended when they train it again. What wrecks a model
        for good lies further away. Nobody gains by it what a member of the group could not do.
        """
        known, book = self._known, self._known.book
        anchor = known.anchors[state.module]
        ancestor = book.common_ancestor(state.module, state.digest, anchor.digest)
        if ancestor is None or checked.steps_apart is None:
            return False
        taken = sum(
            book.ancestors(state.module, side.digest).index(ancestor) for side in (state, anchor)
        )
        return checked.steps_apart <= GREATEST_STEP * min(taken, MOST_STEPS)

    def _replace(self, rival: StateReference, event: Checked) -> None:
        """Refuse the anchor that this path began from, and take a rival of it."""
        anchor = self._known.anchors[event.module]
        self._refuse(anchor, rival)
        self._known.do(
            Warn(
                f"refused state {anchor.digest[:12]} of {event.module}, which this path began "
                f"from: held-out loss {event.loss_before:.3f}, with another {event.loss_after:.3f}"
            )
        )
        self._adopt(rival)

    def _refuse(self, state: StateReference, instead_of: StateReference) -> None:
        known = self._known
        chain = known.book.chain(state.module, state.digest)
        refusals = sum(one.statement.digest in self._refused_until for one in chain)
        rounds = DISBELIEVED_ROUNDS * 2 ** min(refusals, MOST_DOUBLINGS)
        self._refused[state.digest] = known.descent.parted(state, instead_of)
        self._refused_until[state.digest] = known.present_round + rounds
        until_round = known.present_round + DISBELIEVED_ROUNDS
        self._disbelieved.update(dict.fromkeys(self._makers(state) - {known.me}, until_round))
        while len(self._disbelieved) > MOST_LEFT_ALONE:
            del self._disbelieved[next(iter(self._disbelieved))]
        while len(self._refused) > MOST_LEFT_ALONE:
            oldest = next(iter(self._refused))
            del self._refused[oldest], self._refused_until[oldest]

    def _makers(self, state: StateReference) -> frozenset[str]:
        """Return those who signed a state and have shown themselves, or, if none has, who trains
        on it: it is believed on their word.

        Where only keepers hold it, the module stands for all of them. They cannot judge what they
        keep, so nothing else of theirs is to be doubted for it.
        """
        known = self._known
        certificate = known.book.get(state.module, state.digest)
        signers = certificate.signers if certificate is not None else frozenset[str]()
        shown = frozenset(peer for peer in signers if known.doubts.has_shown_itself(peer))
        standing = known.standing_on(state.module, (state.digest,))
        training = {known.me, *known.trainers_seen(state.module)}
        return shown or standing & training or frozenset({state.module})

    def _is_refused(self, state: StateReference) -> bool:
        """Tell whether a state is one that was refused, or goes on from it on the same word.

        Who goes on alone from a refused state makes a new one each round. If each was tried, the
        rounds of those who refuse it would end with waiting for it, and never with a commit. One is
        tried now and then, after twice as long each time: they may be right.
        """
        known, book = self._known, self._known.book
        if state.digest in self._refused or not self._refused:
            return state.digest in self._refused
        present = known.present_round
        disbelieved = {peer for peer, until in self._disbelieved.items() if until > present}
        # Whose chain it goes on from says nothing: an inventor goes on from the best there is.
        if disbelieved and known.descent.is_certified(state) and self._makers(state) <= disbelieved:
            return True
        for certificate in book.chain(state.module, state.digest):
            earlier = certificate.statement.digest
            if earlier in self._refused:
                if present >= self._refused_until[earlier]:
                    return False
                since = book.contributors_since(state.module, state.digest, earlier)
                return since <= self._refused[earlier]
        return False

    def _is_settled(self, state: StateReference) -> bool:
        """Tell whether most of those who train a module have signed a state's chain lately, or
        most of those who made the last state that it and the anchor have in common.

        After a fork the modules of a path fit each other, and the other side's fit badly, so that
        an honest state can look wrong: what the majority stands on is taken all the same, but not
        what others have put on top of it. After a long one the other side is far away, too.
        """
        known, book, anchor = self._known, self._known.book, self._known.anchors[state.module]
        newest = book.get(state.module, state.digest)
        since = known.descent.parted(state, anchor) - {known.me}
        if newest is None or known.descent.weigh(since) < 2:
            return False
        last_rounds = {anchor.digest: anchor.last_round}
        fork = book.common_ancestor(state.module, state.digest, anchor.digest)
        common = book.get(state.module, fork) if fork is not None else None
        if common is not None:
            last_rounds[common.statement.digest] = common.statement.round_index
        for digest, last_round in last_rounds.items():
            since_round = last_round + 1 - RECENT_ROUNDS
            makers = book.recent_contributors(state.module, digest, since_round) - {known.me}
            if newest.signers & makers and 2 * len(since & makers) >= len(makers):
                return True
        return False

    def _adopt(self, state: StateReference) -> None:
        """Make a state the anchor, with the work that it lacks on top."""
        known, module = self._known, state.module
        self._fetching.pop(module, None)
        self._unchecked.pop(module, None)
        ledger = self.ledgers[module]
        reckoning = ledger.adopt(state, known.anchors[module], known.descent)
        known.anchors[module] = state
        known.serve(state)
        known.do(
            Adopt(
                module,
                state,
                reckoning.on_top,
                reckoning.is_merged,
                reckoning.weight,
                save=known.is_save_due(state.last_round),
            )
        )


def _shown_coasting(checked: Checked) -> str:
    """Say what the momentum would do, where it could be scored."""
    if checked.coasting_before is None or checked.coasting_after is None:
        return ""
    return f", and one step on from {checked.coasting_before:.3f} to {checked.coasting_after:.3f}"
