"""By which held-out rows a foreign state is judged (design 4.4).

Those of the path in training, if it has had its part in what is in doubt. A module that others have
trained fits the documents of their paths, and those of a path that has not trained it lately worse
than its genesis state does, by many nats: who judged it by these would refuse honest states, and
begin the module anew beside all others. So a path that has trained it has the last word, and is
scored as a whole, with the other modules of those who train it: beside modules of another path, or
of the other side of a split, even a good module looks spoiled. Rows and modules are fetched for
this, in the background, once they are needed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from dipaco.modules.errors import DipacoError, NetworkError
from dipaco.modules.grid import Grid
from dipaco.modules.state import ModuleState, StateReference

from .interfaces import StateFetcher, StateHolder, Swarm
from .member.adoption import MAX_LOSS_INCREASE
from .path_files import PathFiles
from .trainer import Comparison, PathTrainer

logger = logging.getLogger("dipaco.peer.state_checks")

LOSS_CHECK_SEQUENCES = 8
# A path has a part in a module that has so large a part of the tokens of the one that has most, and
# was in one of its last rounds.
LEAST_PART = 0.25
LATELY_ROUNDS = 2
# Rows of another path are waited for so long, and so many of those who train it are asked.
FETCH_LIMIT_S = 20.0
MOST_ASKED = 4


class OtherPeers(Protocol):
    """Whom to ask for another path's modules: the exchange."""

    def holdings(self, peer: str, module: str) -> StateReference | None:
        """Ask what a peer holds of a module. Raises a `DipacoError` without an answer."""
        ...


class PathStates:
    """Gets the newest states of paths that this peer does not train."""

    def __init__(
        self,
        me: str,
        swarm: Swarm,
        others: OtherPeers,
        fetcher: StateFetcher,
        held: StateHolder,
    ) -> None:
        self._me, self._swarm, self._others = me, swarm, others
        self._fetcher, self._held = fetcher, held

    def trainers(self, path: int) -> tuple[str, ...]:
        """Return others who train a path, those first that have for longest."""
        claims = self._swarm.view.claimants(path)
        return tuple(claim.peer_id for claim in claims if claim.peer_id != self._me)

    def find(self, path: int, module: str) -> ModuleState:
        """Return what one of the others who train the path holds, or else the copy held here.

        Modules of one path that parted from others together fit each other, and copies may be of
        either side. Raises a `DipacoError` when nobody gives it.
        """
        for peer in self.trainers(path)[:MOST_ASKED]:
            try:
                reference = self._others.holdings(peer, module)
                if reference is not None:
                    return self._fetcher.state(reference, (peer,))
            except DipacoError as error:
                logger.debug("%s of %s: %s", module, peer, error)
        held = self._held.load(module)
        if held is None:
            raise NetworkError(f"nobody else who trains path {path} gives its {module}")
        return held


@dataclass(frozen=True)
class _OtherPath:
    """A path that judges a state; without rows if it could not be had."""

    digest: str
    path: int
    rows: torch.Tensor | None = None
    states: Mapping[str, ModuleState] = field(default_factory=dict)


class StateChecks:
    """Compares states by rows that say something of them."""

    def __init__(self, files: PathFiles, states: PathStates, trainer: PathTrainer) -> None:
        self._files, self._states = files, states
        self._trainer = trainer
        self._grid: Grid = trainer.grid
        self._wanted: dict[str, _OtherPath] = {}
        """Of each module, by which path a state of it has to be judged."""
        self._ready: dict[str, _OtherPath] = {}

    def prepare(self, state: ModuleState) -> None:
        """Fetch what a state will be judged by, if a comparison of it was undecided; on the thread
        that has fetched it."""
        judge = self._wanted.pop(state.module, None)
        if judge is None or judge.digest != state.digest:
            return
        needed = [m for m in self._grid.modules_of_path(judge.path) if m != state.module]
        try:
            rows = self._files.held_out_rows(judge.path, FETCH_LIMIT_S)[:LOSS_CHECK_SEQUENCES]
            states = {m: self._states.find(judge.path, m) for m in needed}
            judge = _OtherPath(judge.digest, judge.path, rows, states)
        except DipacoError as error:
            logger.info("%s is judged by this path's documents only: %s", state.module, error)
        self._ready[state.module] = judge

    def compare(
        self, state: ModuleState, own_rows: torch.Tensor, *, is_rival: bool = False
    ) -> Comparison:
        """Score a state of a module in place of the anchor; `own_rows` [N, T] are of the path in
        training. With `is_rival` the anchor is in doubt, and not the state.

        Undecided where another path has to be scored that is not here: it is there once the state
        was fetched again.
        """
        module, trainer = state.module, self._trainer
        ready = self._ready.pop(module, None)
        own_rows = own_rows[:LOSS_CHECK_SEQUENCES]
        own = trainer.compare(module, state, own_rows) if len(own_rows) else Comparison()
        doubted = trainer.anchor(module) if is_rival else state
        looks_bad = _looks_bad(own, is_rival=is_rival)
        path = self._judging_path(doubted, looks_bad=looks_bad, is_anchor=is_rival)
        if path is None:
            return own
        if ready is None or (ready.digest, ready.path) != (state.digest, path):
            self._wanted[module] = _OtherPath(state.digest, path)
            return Comparison(is_undecided=True)
        if ready.rows is None or not len(ready.rows):
            return own
        return trainer.compare(module, state, ready.rows, path, ready.states)

    def _judging_path(
        self, doubted: ModuleState, *, looks_bad: bool, is_anchor: bool
    ) -> int | None:
        """Return the path whose rows say something of a state, beside the modules that others have
        of it; None for the one in training, beside its own.

        That can be the one in training, too: where two sides have trained it apart, the modules of
        each side fit each other. An anchor that a path has begun from is given up on two paths'
        word, where another has trained it lately: steps early in a run make a path's loss jump.
        """
        since_round = doubted.last_round - LATELY_ROUNDS
        own = self._trainer.path
        lately = {
            path: entry.tokens
            for path, entry in doubted.progress.items()
            if entry.last_round > since_round
        }
        others = {path: tokens for path, tokens in lately.items() if path != own}
        most = max(others, key=lambda path: (others[path], -path), default=None)
        if own is None or not lately:
            return None
        entry = doubted.progress.get(own)
        if most is not None and (entry is None or entry.tokens < LEAST_PART * others[most]):
            return most
        if not looks_bad:
            return None
        if own in lately and not is_anchor:
            return own if self._states.trainers(own) else None
        return most


def _looks_bad(found: Comparison, *, is_rival: bool) -> bool:
    """Tell whether what is in doubt would be refused by these losses."""
    pairs = ((found.before, found.after), (found.coasting_before, found.coasting_after))
    for before, after in pairs:
        if before is None or after is None:
            continue
        good, bad = (after, before) if is_rival else (before, after)
        if not (math.isfinite(bad) and bad <= good + MAX_LOSS_INCREASE):
            return True
    return False
