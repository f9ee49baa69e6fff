"""The averagers of one peer: one process a level, alive for the whole session.

Averagers are forked, so they are made before CUDA is touched and before training starts. One that
died is replaced at the next boundary.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from dipaco.dht.admission import Gate
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.modules.grid import Grid
from dipaco.modules.outer import AveragingRule
from dipaco.modules.plan import RunPlan
from dipaco.peer.owner.uplink import Uplink

from .averager import ExactAverager
from .group import averager_prefix
from .verdicts import Signing

logger = logging.getLogger("dipaco.peer.averaging.pool")

# A member that sends nothing for this long has failed; within a share of the commit window.
LONGEST_SILENCE_S = 30.0
SILENCE_SHARE_OF_WINDOW = 0.25
# A process that is killed has ended by then.
ENDED_S = 5.0


class AveragingPool:
    """Makes, replaces and stops the averagers. Used by the session, on the main thread."""

    def __init__(
        self,
        dht: GuardedDHT,
        plan: RunPlan,
        grid: Grid,
        rule: AveragingRule,
        uplink: Uplink | None = None,
        signing: Signing | None = None,
        gate: Gate | None = None,
        admission: bytes = b"",
    ) -> None:
        self._dht = dht
        self._gate, self._admission = gate, admission
        self._signing = signing
        self._uplink = uplink or Uplink()
        self._plan = plan
        self._grid = grid
        self.rule = rule
        self._averagers: dict[str, ExactAverager] = {}
        for level in grid.level_names:
            self._averagers[level] = self._make(level)

    def _make(self, level: str, replaces: str = "") -> ExactAverager:
        grid, rounds = self._grid, self._plan.rounds
        modules = [module for module in grid.modules() if grid.level_of(module) == level]
        return ExactAverager(
            self._dht,
            prefix=averager_prefix(self._plan.run_id, level),
            size=grid.layout(level).size,
            rule=self.rule,
            matchmaking_s=rounds.matchmaking_s,
            paths_of_module={module: grid.paths_of_module(module) for module in modules},
            replaces=replaces,
            uplink=self._uplink,
            signing=self._signing,
            gate=self._gate,
            admission=self._admission,
            silence_s=max(1.0, min(LONGEST_SILENCE_S, SILENCE_SHARE_OF_WINDOW * rounds.window_s)),
        )

    def for_level(self, level: str) -> ExactAverager:
        """Return a living averager of `level`. Main thread only: it may have to fork one."""
        averager = self._averagers[level]
        if averager.hangs:
            logger.warning("the averager of %s hangs and is ended", level)
            averager.kill()
            averager.join(ENDED_S)
        if not averager.is_alive():
            logger.warning("the averager of %s had died and is started again", level)
            averager = self._averagers[level] = self._make(level, averager.listens_at)
        return averager

    def members_together(self, level: str) -> int:
        """Return how many members the group has that forms at `level`; 0: another peer knows."""
        return self._averagers[level].members_together

    def shutdown(self) -> None:
        """Stop all averagers at once; bounded."""
        with ThreadPoolExecutor(max_workers=len(self._averagers)) as threads:
            for averager in self._averagers.values():
                threads.submit(averager.shutdown)
