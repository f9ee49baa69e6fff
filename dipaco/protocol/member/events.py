"""What can happen to a member: everything that it ever learns, as values.

The shell (`dipaco.peer.shell`, or a swarm in the simulator) reports these, one after the other,
each with its swarm time. A member knows no clock, network or tensor. What comes from other peers
was checked by the shell: rows are signed, of admitted peers, plausible and of this run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.view import SwarmView

from .actions import Action


class Event:
    """Something that happened to the member or around it."""


@dataclass(frozen=True)
class Failed(Event):
    """An action has failed that another event would have answered."""

    action: Action
    reason: str
    is_final: bool = False
    """It need not be tried again: the file came and is no contribution, the local parameters are
    no longer numbers, or nobody can compute the last of the steps."""


@dataclass(frozen=True)
class Viewed(Event):
    """The swarm was read. Answers `Look`, and comes by itself once a refresh period."""

    view: SwarmView
    is_answer: bool = False
    """Whether it was read after the last `Look`."""


@dataclass(frozen=True)
class Told(Event):
    """A peer tells of rows and steps, unasked."""

    peer: str
    module: str
    rows: tuple[Row, ...] = ()
    steps: tuple[Step, ...] = ()
    """Oldest first, each on top of the one before."""
    keep: bool = False
    """Whether this peer is asked to keep a copy of the state of the last step."""


@dataclass(frozen=True)
class Answered(Event):
    """Answers `Ask`. A peer that does not answer within seconds has `Failed`."""

    peer: str
    module: str
    steps: tuple[Step, ...] = ()
    """Of the chain that the peer serves, behind the newest of the locator's names that is on it;
    oldest first."""
    rows: tuple[Row, ...] = ()
    """The rows of the last rounds, as far as the peer knows them."""
    has_more: bool = False
    """Whether more steps follow: ask again from the last. A peer that says so without end is not
    believed (`exchange.pages`)."""
    held: Head | None = None
    """The state that it says it can serve: where one might be fetched, and nothing more."""
    trains: bool = False
    """Whether it says that it trains the module."""


@dataclass(frozen=True)
class Gathered(Event):
    """Answers `Gather`, once for each row: its file is here, and a contribution to the module."""

    module: str
    row: Row


@dataclass(frozen=True)
class Turn(Event):
    """The shell is between two inner steps and asks what to do; at least four times a second. The
    answer has exactly one of `TakeStep`, `Wait` and `Left` in it."""

    step_s: float = 0.0
    """Seconds of an inner step, without waiting; 0 before the first one."""


@dataclass(frozen=True)
class Meanwhile(Event):
    """Time has passed while an inner step is taken; at least four times a second. Events go on to
    happen then, but boundaries wait for the next turn."""


@dataclass(frozen=True)
class Stepped(Event):
    """An inner step was taken."""


@dataclass(frozen=True)
class PathReady(Event):
    """Answers `FetchPath`: the shard of the path is here."""

    path: int


@dataclass(frozen=True)
class Scored(Event):
    """Answers `Score`: the held-out loss with all states, and with the genesis in place of each
    module's. None and nothing where there is nothing to score with."""

    heads: tuple[Head, ...]
    loss: float | None
    with_genesis: Mapping[str, float]


@dataclass(frozen=True)
class Published(Event):
    """Answers `Publish`: the file is in the content store, and this row names it."""

    module: str
    row: Row


@dataclass(frozen=True)
class StateHere(Event):
    """Answers `Compute` and `FetchState`: the state is here; nothing is changed yet."""

    module: str
    head: Head
    """The head with its digest, even if it is a genesis."""


@dataclass(frozen=True)
class Checked(Event):
    """Answers `Check`: the held-out loss with the anchors, with the state in place of one, and,
    where that is much worse, with the genesis in its place. None where there is nothing to score
    with."""

    module: str
    step: str
    loss_before: float | None
    loss_after: float | None
    loss_of_genesis: float | None = None


@dataclass(frozen=True)
class SuccessorReady(Event):
    """The run has a successor, and all that everybody needs of it is here."""


@dataclass(frozen=True)
class PauseWanted(Event):
    """The machine is needed, or may not train now, until there is no reason any more."""

    reason: str
    """What the person at the machine is told; empty if the machine may train again."""


@dataclass(frozen=True)
class LeaveWanted(Event):
    """Somebody pressed Ctrl+C, or the machine is needed."""
