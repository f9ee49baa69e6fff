"""What a reader needs of a node and of its refresher: which run, which round, and who is there."""

from __future__ import annotations

from typing import Protocol

from dipaco.peer.exchange.contact.clock import Clock
from dipaco.protocol.grid import Grid
from dipaco.protocol.member.rounds import RoundSchedule
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.view import SwarmView


class JoinedRun(Protocol):
    """The run that a node has joined: a `Node`, or what stands in for one."""

    @property
    def me(self) -> str:
        """The id of the node's peer."""
        ...

    @property
    def plan(self) -> RunPlan: ...

    @property
    def grid(self) -> Grid: ...

    @property
    def schedule(self) -> RoundSchedule: ...

    @property
    def clock(self) -> Clock:
        """The swarm's time."""
        ...


class SeenSwarm(Protocol):
    """The swarm as it was read last: a `Refresher`."""

    @property
    def view(self) -> SwarmView:
        """The newest view. Raises NetworkError before the first."""
        ...
