"""Taking over a heavier state of a module that other peers committed (design 4.4).

A peer falls behind when its group failed here and committed elsewhere, when a network split
heals, or when it slept. It then fetches the state with more tokens behind it by digest, checks
that it does not wreck the held-out loss, and puts its own unmerged work on top.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from dipaco.dht.agreement import expected_group, winning_state
from dipaco.dht.repetition import RecentFailures
from dipaco.modules.errors import DipacoError
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState, StateReference, heaviest

from .events import EventLog
from .interfaces import StateFetcher, Swarm
from .outer_round import Answers, CommittedElsewhere
from .trainer import PathTrainer, Snapshot

logger = logging.getLogger("dipaco.peer.adoption")

# A foreign state that makes the held-out loss worse by more nats than this is not believed.
MAX_LOSS_INCREASE = 1.0
LOSS_CHECK_SEQUENCES = 8
# Rounds without a commit of its own after which a peer no longer insists on its state.
PATIENCE_ROUNDS = 4
# Refresh periods for which a state that could not be fetched is left alone.
RETRY_PERIODS = 5


@dataclass(frozen=True)
class _Fetch:
    """A state on its way here."""

    snapshot: Snapshot | None
    """Own work that the state may contain."""
    holders: tuple[str, ...]
    future: Future[ModuleState | None]


class Adoptions:
    """Fetches in the background, applies on the session's thread, between two inner steps.

    `ask` asks a peer what it holds of a module, `hold` takes a new anchor.
    """

    def __init__(
        self,
        plan: RunPlan,
        grid: Grid,
        swarm: Swarm,
        fetcher: StateFetcher,
        trainer: PathTrainer,
        events: EventLog,
        *,
        me: str,
        ask: Callable[[str, str], StateReference | None],
        round_now: Callable[[], int],
        executor: Executor,
        wake: threading.Event,
        hold: Callable[[ModuleState], None],
    ) -> None:
        self._plan = plan
        self._grid = grid
        self._swarm = swarm
        self._fetcher = fetcher
        self._trainer = trainer
        self._me = me
        self._ask = ask
        self._round_now = round_now
        self._executor = executor
        self._wake = wake
        self._hold = hold
        self._events = events
        self._fetching: dict[str, _Fetch] = {}
        self._refused_digests: set[str] = set()
        self._unavailable = RecentFailures[str](RETRY_PERIODS * swarm.period_s)
        self._uncommitted: dict[str, Snapshot] = {}
        self._looked_s = 0.0
        self.validation = torch.empty(0, 0, dtype=torch.int64)
        """Held-out rows of the path in training, [sequences, length]."""

    def clear(self) -> None:
        """Forget what is being fetched: the peer moves to another path."""
        self._fetching.clear()
        self._uncommitted.clear()

    def ask_others(self, module: str, anchor: ModuleState, peers: frozenset[str]) -> Answers:
        """Ask peers, all at once, whether they hold a heavier state than `anchor`.

        Called by an outer round, on its thread, when its group failed.
        """
        alive = set()
        winners: dict[str, StateReference] = {}
        with ThreadPoolExecutor(max_workers=max(1, min(len(peers), 16))) as pool:
            asked = [(peer, pool.submit(self._ask, peer, module)) for peer in sorted(peers)]
            for peer, future in asked:
                try:
                    held = future.result()
                except DipacoError as error:
                    logger.debug("%s does not answer: %s", peer, error)
                    continue
                alive.add(peer)
                if held is not None and held.wins_over(anchor.reference):
                    winners[peer] = held
        best = heaviest(winners.values())
        if best is None:
            return Answers(frozenset(alive))
        holders = tuple(peer for peer, held in winners.items() if held.digest == best.digest)
        return Answers(
            frozenset(alive),
            CommittedElsewhere(best, holders, "the group committed without this peer"),
        )

    def remember(self, snapshot: Snapshot) -> None:
        """Keep the work of a failed outer round: a state that turns up later may contain it."""
        self._uncommitted[snapshot.module] = snapshot

    def forget(self, module: str) -> None:
        """The work of the last failed outer round is in an anchor, or in a newer snapshot."""
        self._uncommitted.pop(module, None)

    def catch_up(self, now: float, running: Collection[str]) -> None:
        """Look, once a refresh, whether a heavier state of a module is announced."""
        if now - self._looked_s < self._swarm.period_s:
            return
        self._looked_s = now
        view = self._swarm.view
        for module in self._trainer.modules:
            if self._grid.level_of(module) in running or module in self._fetching:
                continue
            best = winning_state(
                [s for s in view.states(module) if s.digest not in self._refused_digests],
                own=self._trainer.anchor(module).reference,
                view=view,
                grid=self._grid,
                plan=self._plan,
            )
            if best is not None:
                self.start(best, view.holders(best), self._uncommitted.get(module))

    def is_fetching(self, module: str) -> bool:
        """Tell whether a state of a module is on its way here, or about to be put under."""
        return module in self._fetching

    def start(
        self, wanted: StateReference, holders: tuple[str, ...], snapshot: Snapshot | None
    ) -> None:
        """Fetch a state in the background; `snapshot` is the work that it may contain."""
        if wanted.module in self._fetching or wanted.digest in self._refused_digests:
            return
        if wanted.digest in self._unavailable:
            return
        future = self._executor.submit(self._fetch_or_none, wanted, holders)
        future.add_done_callback(lambda _: self._wake.set())
        self._fetching[wanted.module] = _Fetch(snapshot, holders, future)

    def _fetch_or_none(
        self, wanted: StateReference, holders: tuple[str, ...]
    ) -> ModuleState | None:
        try:
            return self._fetcher.state(wanted, holders)
        except DipacoError as error:
            logger.warning("state %s of %s: %s", wanted.digest[:12], wanted.module, error)
            self._unavailable.add(wanted.digest)
            return None

    def finish(self, running: Collection[str]) -> None:
        """Apply what has arrived, for levels that have no outer round `running`."""
        for module, fetch in list(self._fetching.items()):
            if not fetch.future.done() or self._grid.level_of(module) in running:
                continue
            del self._fetching[module]
            state = fetch.future.result()
            if state is None or module not in self._trainer.modules:
                continue
            if not state.reference.wins_over(self._trainer.anchor(module).reference):
                continue
            if not self._outvoted(module, fetch.holders) and not self._believable(state):
                self._refused_digests.add(state.digest)
                continue
            merged = self._trainer.adopt(module, state, fetch.snapshot)
            if merged:
                self.forget(module)
            self._hold(state)
            self._events.emit(
                "adopt",
                module=module,
                version=state.version,
                digest=state.digest,
                tokens=state.tokens,
                own_work_merged=merged,
            )

    def _outvoted(self, module: str, holders: tuple[str, ...]) -> bool:
        """Tell whether the others have settled on a state, so that refusing it helps nobody.

        After a fork the modules of a path fit each other and the other side's fit badly, so that
        an honest state can look wrong. One that at least two peers and most of the trainers hold
        is taken whatever the held-out loss says, and so is any by a peer that has been left
        behind for rounds: what it trains by itself is not used by anybody.
        """
        others = expected_group(self._swarm.view, self._grid, module) - {self._me}
        agreeing = len(others & set(holders))
        if agreeing >= 2 and 2 * agreeing > len(others):
            return True
        anchor = self._trainer.anchor(module).reference
        return self._round_now() - anchor.last_round > PATIENCE_ROUNDS

    def _believable(self, state: ModuleState) -> bool:
        """Check that a foreign state does not wreck the held-out loss (design 4.4)."""
        if len(self.validation) == 0:
            return True
        rows = self.validation[:LOSS_CHECK_SEQUENCES]
        skip = self._plan.routing.prefix_tokens
        before = self._trainer.loss_of_anchors(rows, skip).loss
        after = self._trainer.loss_of_anchors(rows, skip, {state.module: state}).loss
        if before is None or after is None or after <= before + MAX_LOSS_INCREASE:
            return True
        logger.warning(
            "refused state %s of %s: held-out loss would go from %.3f to %.3f",
            state.digest[:12],
            state.module,
            before,
            after,
        )
        return False
