"""What can happen to a member: everything that it ever learns, as values.

The shell (`dipaco.peer.session`, or a swarm in the simulator) reports these, one after the other,
each with the swarm time at which it happened. A member knows nothing else: not a clock, not the
network, not a tensor. What comes from other peers was checked by the shell: rows are signed, of
peers that are admitted, plausible and of this run.
"""

from __future__ import annotations

from dataclasses import dataclass

from dipaco.dht.chain import Head, Row, Step
from dipaco.dht.records import Reachability
from dipaco.dht.view import SwarmView

# -- the swarm


@dataclass(frozen=True)
class Viewed:
    """The swarm was read. Answers `Look`, and comes by itself once a refresh period."""

    view: SwarmView
    is_answer: bool = False
    """It was read after the last `Look`."""


@dataclass(frozen=True)
class LookFailed:
    """The DHT did not answer a `Look` within its limit."""

    reason: str


@dataclass(frozen=True)
class Probed:
    """Other peers have tried to call this one: how they reach it."""

    reachable: Reachability


# -- the wire


@dataclass(frozen=True)
class Told:
    """A peer tells of rows and steps, unasked."""

    peer: str
    module: str
    rows: tuple[Row, ...] = ()
    steps: tuple[Step, ...] = ()
    """Oldest first, each on top of the one before."""
    keep: bool = False
    """This peer is asked to keep a copy of the state of the last step."""


@dataclass(frozen=True)
class Answered:
    """Answers `Ask`. A peer that does not answer within seconds has `is_silent`."""

    peer: str
    module: str
    steps: tuple[Step, ...] = ()
    """Of the chain that the peer serves, behind the newest of the locator's names that is on it;
    oldest first."""
    rows: tuple[Row, ...] = ()
    """Of the last rounds, as many as it knows."""
    has_more: bool = False
    """Whether more steps follow; ask again from the last."""
    held: Head | None = None
    """The state that it can serve, if it can."""
    is_silent: bool = False


@dataclass(frozen=True)
class Gathered:
    """Answers `Gather`: a file is here, and it is a contribution to the module."""

    module: str
    file: str


@dataclass(frozen=True)
class GatherFailed:
    """Answers `Gather`: nobody gave the file, or it is not what a row may name."""

    module: str
    file: str
    reason: str
    is_refused: bool
    """The file came and is no contribution: it need not be asked for again."""


# -- the loop


@dataclass(frozen=True)
class Turn:
    """The shell is between two inner steps and asks what to do; at least four times a second.

    The answer has exactly one of `TakeStep`, `Wait` and `Left` in it.
    """

    step_s: float = 0.0
    """What an inner step takes, waiting not included; 0 before the first."""


@dataclass(frozen=True)
class Stepped:
    """An inner step was taken."""

    tokens: int


@dataclass(frozen=True)
class PathReady:
    """Answers `FetchPath`: the shard of the path is here."""

    path: int


@dataclass(frozen=True)
class PathFailed:
    """Answers `FetchPath`: nobody could give the shard of the path."""

    path: int
    reason: str


# -- states


@dataclass(frozen=True)
class Published:
    """Answers `Publish`: the file is in the content store, and this row names it."""

    row: Row


@dataclass(frozen=True)
class PublishFailed:
    """Answers `Publish`: there is nothing to contribute."""

    module: str
    round_index: int
    reason: str
    is_finite: bool = True
    """False: the local parameters are no longer numbers."""


@dataclass(frozen=True)
class Computed:
    """Answers `Compute`: this is the state that comes out; nothing is changed yet."""

    head: Head


@dataclass(frozen=True)
class ComputeFailed:
    """Answers `Compute`: no state can be made of these files, or the base is gone."""

    module: str
    step: str
    reason: str


@dataclass(frozen=True)
class StateFetched:
    """Answers `FetchState`: the state is here. The head has its digest, also of a genesis."""

    head: Head


@dataclass(frozen=True)
class FetchFailed:
    """Answers `FetchState`: nobody could give the state, or it was not what was announced."""

    module: str
    step: str
    reason: str


@dataclass(frozen=True)
class Checked:
    """Answers `Check`: the held-out loss with the anchors, and with the state in place of one.

    None where there is nothing to score with.
    """

    module: str
    step: str
    loss_before: float | None
    loss_after: float | None


# -- what its owner wants


@dataclass(frozen=True)
class SuccessorReady:
    """The run has a successor, and all that everybody needs of it is here."""

    run_id: str


@dataclass(frozen=True)
class PauseWanted:
    """The machine is needed, or may not train now: until `ResumeWanted`."""

    reason: str
    """For the person at the machine; not empty."""


@dataclass(frozen=True)
class ResumeWanted:
    """The machine may train again."""


@dataclass(frozen=True)
class LeaveWanted:
    """Somebody pressed Ctrl+C, or the machine is needed."""

    reason: str = ""


Event = (
    Viewed
    | LookFailed
    | Probed
    | Told
    | Answered
    | Gathered
    | GatherFailed
    | Turn
    | Stepped
    | PathReady
    | PathFailed
    | Published
    | PublishFailed
    | Computed
    | ComputeFailed
    | StateFetched
    | FetchFailed
    | Checked
    | SuccessorReady
    | PauseWanted
    | ResumeWanted
    | LeaveWanted
)
