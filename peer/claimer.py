"""Claiming a path (design 4.5): look, claim, look again, give way, and say why."""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import replace
from typing import Literal

from dipaco.dht.policy import Decision, choose_path, resolve_collision
from dipaco.modules.grid import Grid

from .events import EventLog
from .exchange.clock import Clock
from .interfaces import Swarm
from .publisher import Claim, PeerStatus

logger = logging.getLogger("dipaco.peer.claimer")

MAX_LOOKS = 5


class Claimer:
    """Publishes and withdraws this peer's claim."""

    def __init__(
        self,
        grid: Grid,
        swarm: Swarm,
        status: PeerStatus,
        clock: Clock,
        events: EventLog,
        *,
        me: str,
        pinned: int | None,
    ) -> None:
        self._grid = grid
        self._swarm = swarm
        self._status = status
        self._clock = clock
        self._events = events
        self._me = me
        self._pinned = pinned
        # Two newcomers must not wait equally long; nothing that is trained depends on this.
        self._random = random.Random(me)

    def claim(self, stopping: threading.Event, decision: Decision | None = None) -> Decision:
        """Claim a path: `decision`, if given (a move), otherwise the least served one.

        Publishes the claim, looks again after a short random wait, and gives way at most
        `MAX_LOOKS` times. The status says `joining` until the session begins to train.
        """
        if decision is None:
            view = self._swarm.refresh()
            decision = choose_path(view, self._grid, self._me, pinned=self._pinned)
        for _ in range(MAX_LOOKS):
            self._take(decision)
            self._swarm.refresh()
            stopping.wait(self._random.uniform(0.2, 0.8))
            view = self._swarm.refresh()
            if stopping.is_set() or self._pinned is not None:
                break
            better = resolve_collision(view, self._grid, self._me)
            if better is None:
                break
            logger.info("gave way on path %d: %s", decision.path, better.reason)
            decision = better
        self._events.emit("claimed", path=decision.path, reason=decision.reason)
        return decision

    def _take(self, decision: Decision) -> None:
        self._status.claim = Claim(
            "joining",
            decision.path,
            since_s=self._clock.now(),
            reason=decision.reason,
            pinned=self._pinned is not None,
        )
        self._swarm.announce()

    def say(self, state: Literal["training", "leaving"]) -> None:
        """Go on with the claim: the path is in training, or the peer leaves."""
        self._status.claim = replace(self._status.claim, state=state)
        self._swarm.announce()

    def take_back(self, path: int) -> None:
        """Claim the path in training again, after a move that did not succeed."""
        self._status.claim = Claim(
            "training",
            path,
            since_s=self._clock.now(),
            reason="the move to another path failed",
            pinned=self._pinned is not None,
        )
        self._swarm.announce()
