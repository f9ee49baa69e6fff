"""Getting what a path needs before it can be trained: its shard, and a state of every module.

Of each module the best certified state is taken, or what lies on this disk, or the genesis state;
who moves keeps its own state of a module that both paths go through.
What cannot be had is tried again: under churn a holder that has just gone is ordinary. What is on
its way is waited for: a model may take long on a slow line.
"""

from __future__ import annotations

import math

from dipaco.modules.state import StateReference

from .actions import FetchPath, FetchState, StartPath
from .chains import Chains
from .events import FetchFailed, PathFailed, PathReady, StateFetched
from .knowledge import Knowledge, is_answer_to

# How long what does not come is waited for before a member gives up on a path, and how long where
# it may take another one.
LIMIT_S, WITH_OTHERS_LIMIT_S = 300.0, 60.0
# How long all may take that comes. An attempt that has taken so long is one at which something
# comes: holders that are silent are given up before.
LONGEST_S, LONG_S = 3600.0, 60.0
# A member that has a path to train waits no longer than this for another one; while all that is
# missing is on its way, up to this share of a round, or a slow line would never let it move.
MOVE_LIMIT_S, MOVE_SHARE = 20.0, 0.5
RETRY_S = 3.0
SHARD = "shard"
# A state that could not be fetched is left alone for so long.
UNAVAILABLE_S = 15.0


class Beginning:
    """One path at a time; `is_ready` once everything is here."""

    def __init__(self, knowledge: Knowledge, chains: Chains) -> None:
        self._known = knowledge
        self._chains = chains
        self.path: int | None = None
        """The path that is being prepared."""
        self.reason = ""
        """What went wrong last."""
        self._has_shard = False
        self._shard_wanted = False
        self._retry_s = 0.0
        self._until_s = self._latest_s = self._limit_of_one_s = 0.0
        self._fetching: dict[str, StateReference] = {}
        self._ready: dict[str, StateReference] = {}
        self._unavailable: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}
        """Of what is on its way, since when."""
        self._failed: set[str] = set()
        """What could not be had at first."""

    def begin(self, path: int, *, has_others: bool = False) -> None:
        """Start to get what `path` needs; `has_others`: there are other paths to train."""
        self.path = path
        self.reason = ""
        self._has_shard = self._shard_wanted = False
        self._retry_s = 0.0
        known = self._known
        if known.path is not None:
            self._limit_of_one_s = MOVE_LIMIT_S
            self._latest_s = known.steady_s + MOVE_SHARE * known.plan.rounds.duration_s
        else:
            self._limit_of_one_s = WITH_OTHERS_LIMIT_S if has_others else LIMIT_S
            self._latest_s = known.steady_s + LONGEST_S
        self._until_s = known.steady_s + self._limit_of_one_s
        self._latest_s = max(self._until_s, self._latest_s)
        self._fetching, self._ready, self._unavailable, self._asked_s = {}, {}, {}, {}
        self._failed.clear()
        self.on_turn()

    def stop(self) -> None:
        """Want nothing any more."""
        self.path = None

    @property
    def is_under_way(self) -> bool:
        """Whether content is waited for."""
        return self.path is not None

    @property
    def has_failed(self) -> bool:
        """Whether the limit has passed."""
        return self.path is not None and self._known.steady_s > self._limit_s

    @property
    def left_s(self) -> float:
        """How long it will be tried still."""
        return max(0.0, self._limit_s - self._known.steady_s)

    @property
    def _limit_s(self) -> float:
        """When it is given up: later if all that is missing is on its way."""
        modules = self._known.grid.modules_of_path(self.path or 0)
        missing = [module for module in modules if module not in self._ready]
        if not self._has_shard:
            missing.append(SHARD)
        return self._latest_s if all(map(self._is_coming, missing)) else self._until_s

    def _is_coming(self, what: str) -> bool:
        """Tell whether something is on its way: what failed before, only once it takes long."""
        is_asked = self._shard_wanted if what == SHARD else what in self._fetching
        took_s = self._known.steady_s - self._asked_s.get(what, math.inf)
        return is_asked and (what not in self._failed or took_s >= LONG_S)

    @property
    def waits_for(self) -> str:
        """What is missing."""
        if not self._has_shard:
            return f"the shard of path {self.path}"
        modules = self._known.grid.modules_of_path(self.path or 0)
        missing = [module for module in modules if module not in self._ready]
        return f"the state of {', '.join(missing)}: have {len(self._ready)} of {len(modules)}"

    @property
    def is_ready(self) -> bool:
        """Whether the path can be trained."""
        if self.path is None or not self._has_shard:
            return False
        return all(m in self._ready for m in self._known.grid.modules_of_path(self.path))

    def start(self) -> None:
        """Train from what was fetched."""
        assert self.path is not None
        known = self._known
        known.path = self.path
        known.anchors = {m: self._ready[m] for m in known.grid.modules_of_path(self.path)}
        for state in known.anchors.values():
            known.serve(state)
        known.do(StartPath(self.path, tuple(known.anchors.values())))
        self.path = None

    def on_turn(self) -> None:
        """Ask for what is missing and not on its way."""
        known = self._known
        if self.path is None or known.steady_s < self._retry_s:
            return
        if not self._has_shard and not self._shard_wanted:
            self._shard_wanted = True
            self._asked_s[SHARD] = known.steady_s
            known.do(FetchPath(self.path))
        for module in known.grid.modules_of_path(self.path):
            if module not in self._ready and module not in self._fetching:
                self._choose(module)

    def _choose(self, module: str) -> None:
        """Fetch the best state of a module that is known of."""
        known = self._known
        if not known.view.covers_module(module):
            return  # Who holds what of it is read with the next view.
        own = known.held.get(module)
        if own is not None and own.version and own == known.anchors.get(module):
            # It stays in training. What wins over it is compared with it there, and here with
            # nothing: an invented state would take its place.
            self._fetch(own, ())
            return
        announced = known.states(module)
        if self._chains.learn(announced, own):
            return
        untrained = StateReference.untrained(module)
        best = known.descent.best(announced, own or untrained)
        if best is None:
            self._fetch(own or untrained, ())
        elif known.steady_s >= self._unavailable.get(best.digest, 0.0):
            self._fetch(best, known.holders(best))
        else:
            others = [
                s for s in announced if known.steady_s >= self._unavailable.get(s.digest, 0.0)
            ]
            second = known.descent.best(others, own or untrained)
            if second is not None:
                self._fetch(second, known.holders(second))
            else:
                self.reason = self.reason or f"nobody who announces {module} could serve it"

    def _fetch(self, state: StateReference, holders: tuple[str, ...]) -> None:
        self._fetching[state.module] = state
        self._asked_s[state.module] = self._known.steady_s
        self._known.do(FetchState(state, holders, "begin"))

    def on_path(self, event: PathReady | PathFailed) -> None:
        """The shard is here, or nobody has it at the moment."""
        if event.path != self.path:
            return
        self._shard_wanted = False
        if isinstance(event, PathReady):
            self._has_shard = True
        else:
            self._try_later(SHARD, event.reason)

    def on_state(self, event: StateFetched | FetchFailed) -> None:
        """A state is here, or its holders could not serve it."""
        module = event.module if isinstance(event, FetchFailed) else event.reference.module
        digest = event.digest if isinstance(event, FetchFailed) else event.reference.digest
        wanted = self._fetching.get(module)
        if self.path is None or wanted is None or not is_answer_to(event, wanted):
            return
        del self._fetching[module]
        if isinstance(event, FetchFailed):
            self._unavailable[digest] = self._known.steady_s + UNAVAILABLE_S
            if wanted == self._known.held.get(module):
                del self._known.held[module]  # It is not on this disk any more.
            self._try_later(module, event.reason)
        else:
            self._known.take_certificates(event.certificates)
            self._ready[module] = event.reference

    def _try_later(self, what: str, reason: str) -> None:
        steady_s = self._known.steady_s
        self.reason = reason
        self._retry_s = steady_s + RETRY_S
        self._failed.add(what)
        if steady_s - self._asked_s[what] >= LONG_S:
            # What has come in so long a time is kept, and the next attempt goes on from there.
            until_s = max(self._until_s, steady_s + self._limit_of_one_s)
            self._until_s = min(until_s, self._latest_s)
