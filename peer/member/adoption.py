"""Taking over a state that others made, when it wins over the own one (design 4.4).

A peer falls behind when its group failed here and committed elsewhere, when a split heals, or
when it slept. Certificates say whether a state wins and what of the own work is in it; held-out
documents say whether it is one that a model can stand on.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference

from .actions import Adopt, CheckState, FetchState, Warn
from .chains import Chains
from .events import Checked, FetchFailed, StateFetched
from .knowledge import Knowledge
from .ledger import Ledger
from .quorum import RECENT_ROUNDS

# A foreign state that makes the held-out loss worse by more nats than this is not believed.
MAX_LOSS_INCREASE = 1.0
# ... unless it lies where outer steps can lead, each at most so many times as long as is usual:
# one of a peer that was alone is longer than one of many. A long chain excuses no more than a
# few steps, or it would excuse anything.
GREATEST_STEP, MOST_STEPS = 4.0, 4
# Refresh periods for which a state that could not be fetched is left alone.
RETRY_PERIODS = 5


@dataclass
class _Fetch:
    """A state on its way here, or here and waiting for its turn."""

    reference: StateReference
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
        self._unavailable: dict[str, float] = {}
        self.ledgers: dict[str, Ledger] = {}

    def begin_path(self) -> None:
        """The path in training has changed."""
        known = self._known
        self._fetching.clear()
        self.ledgers = {m: Ledger(anchor, known.me) for m, anchor in known.anchors.items()}

    def is_fetching(self, module: str) -> bool:
        """Tell whether a state of a module is on its way here, or about to be put under."""
        return module in self._fetching

    def winner(self, module: str) -> StateReference | None:
        """Return the state that should replace the anchor of a module, as far as is known."""
        known = self._known
        return known.descent.best(self._candidates(module), known.anchors[module])

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
            and known.now_s >= self._unavailable.get(state.digest, 0.0)
        ]

    def look(self, running: Collection[str]) -> None:
        """See whether a state of a module wins over its anchor; levels that are `running` wait."""
        known = self._known
        for module, anchor in known.anchors.items():
            if module in self._fetching or known.grid.level_of(module) in running:
                continue
            states = [s for s in known.states(module) if not self._is_refused(s)]
            self._chains.learn(states, anchor)
            self.start(module)

    def on_chain(self, module: str, running: Collection[str]) -> None:
        """Certificates of a module came: once all are here that are on their way, see who wins."""
        known = self._known
        if module not in known.anchors or known.grid.level_of(module) in running:
            return
        if not self._chains.is_wanted(module):
            self.start(module)

    def start(self, module: str) -> bool:
        """Fetch the state that wins, if one does. Returns whether one is on its way."""
        if module in self._fetching:
            return True
        best = self.winner(module)
        if best is None:
            return False
        self._fetching[module] = _Fetch(best)
        self._known.do(FetchState(best, self._known.holders(best), "adopt"))
        return True

    def on_state(self, event: StateFetched | FetchFailed) -> None:
        """A state is here, or its holders could not serve it."""
        module = event.module if isinstance(event, FetchFailed) else event.reference.module
        digest = event.digest if isinstance(event, FetchFailed) else event.reference.digest
        fetch = self._fetching.get(module)
        if fetch is None or fetch.reference.digest != digest:
            return
        known = self._known
        if isinstance(event, StateFetched):
            known.take_certificates(event.certificates)
            fetch.reference, fetch.is_here = event.reference, True
            return
        del self._fetching[module]
        period_s = refresh_period_s(known.plan.rounds.duration_s)
        self._unavailable[digest] = known.now_s + RETRY_PERIODS * period_s
        while len(self._unavailable) > 256:
            del self._unavailable[next(iter(self._unavailable))]

    def apply(self, running: Collection[str]) -> None:
        """Put what is here under the work of modules whose level has no round under way."""
        known = self._known
        for module, fetch in list(self._fetching.items()):
            if not fetch.is_here or fetch.is_checking or known.grid.level_of(module) in running:
                continue
            anchor = known.anchors[module]
            if not known.descent.wins(fetch.reference, anchor, self._candidates(module)):
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
        before, after = event.loss_before, event.loss_after
        if (
            before is not None
            and after is not None
            and not after <= before + MAX_LOSS_INCREASE
            and not (math.isfinite(after) and self._has_drifted(fetch.reference, event))
        ):
            del self._fetching[event.module]
            self._refuse(fetch.reference)
            self._known.do(
                Warn(
                    f"refused state {event.digest[:12]} of {event.module}: held-out loss would go "
                    f"from {before:.3f} to {after:.3f}"
                )
            )
        elif self._known.grid.level_of(event.module) not in running:
            self._adopt(fetch.reference)

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

    def _refuse(self, state: StateReference) -> None:
        known, book = self._known, self._known.book
        anchor = known.anchors[state.module].digest
        ancestor = book.common_ancestor(state.module, state.digest, anchor)
        whose = book.contributors_since(state.module, state.digest, ancestor)
        self._refused[state.digest] = frozenset(whose)
        while len(self._refused) > 256:
            del self._refused[next(iter(self._refused))]

    def _is_refused(self, state: StateReference) -> bool:
        """Tell whether a state is one that was refused, or goes on from it on the same word.

        Who goes on alone from a refused state makes a new one each round. If each was tried, the
        rounds of those who refuse it would end with waiting for it, and never with a commit.
        """
        book = self._known.book
        if state.digest in self._refused or not self._refused:
            return state.digest in self._refused
        for certificate in book.chain(state.module, state.digest):
            earlier = certificate.statement.digest
            if earlier in self._refused:
                since = book.contributors_since(state.module, state.digest, earlier)
                return since <= self._refused[earlier]
        return False

    def _is_settled(self, state: StateReference) -> bool:
        """Tell whether most of those who train a module have signed a state's chain lately.

        After a fork the modules of a path fit each other, and the other side's fit badly, so that
        an honest state can look wrong: what the majority stands on is taken all the same.
        """
        known = self._known
        anchor = known.anchors[state.module]
        book = known.book
        ancestor = book.common_ancestor(state.module, state.digest, anchor.digest)
        since = book.contributors_since(state.module, state.digest, ancestor) - {known.me}
        own = book.recent_contributors(
            anchor.module, anchor.digest, anchor.last_round + 1 - RECENT_ROUNDS
        ) - {known.me}
        shared = since & own
        return len(since) >= 2 and bool(shared) and 2 * len(shared) >= len(own)

    def _adopt(self, state: StateReference) -> None:
        """Make a state the anchor, with the work that it lacks on top."""
        known, module = self._known, state.module
        del self._fetching[module]
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
