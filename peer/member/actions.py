"""What a member can want done: all of it is carried out by a shell, which reports the outcome.

An action that is answered by an event says so; a shell answers each once, sooner or later, unless
the path was changed or the member has left in between. The others are done at once, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dipaco.dht.chain import Head, Row, Step
from dipaco.dht.coverage import Scope
from dipaco.dht.records import ClaimState

# -- the swarm


@dataclass(frozen=True)
class Say:
    """Publish a claim in place of the last one."""

    state: ClaimState
    path: int | None
    since_s: float
    """Since when, in swarm time. Changed by a claim of another path only."""
    reason: str
    """Why this path, for the person at the machine."""
    pinned: bool


@dataclass(frozen=True)
class Watch:
    """Read this part of the swarm from now on, at every refresh and every `Look`."""

    scope: Scope


@dataclass(frozen=True)
class Look:
    """Publish, then read the swarm. Answered by `Viewed` or `LookFailed`."""

    further: tuple[int, ...] = ()
    """Buckets that are read this once, beside the scope."""


# -- the wire


@dataclass(frozen=True)
class Tell:
    """Tell peers of rows and steps. What does not arrive is not reported."""

    peers: tuple[str, ...]
    module: str
    rows: tuple[Row, ...] = ()
    steps: tuple[Step, ...] = ()
    keep: bool = False
    """Ask them to keep a copy of the state of the last step, too."""


@dataclass(frozen=True)
class Ask:
    """Ask a peer which steps come after some, and which rows it knows. Answered by `Answered`."""

    peer: str
    module: str
    locator: tuple[str, ...]
    """Names of the own chain, newest first (`ChainBook.locator`)."""


@dataclass(frozen=True)
class Put:
    """Push the file of the own row to mailboxes, because nobody can call this peer."""

    peers: tuple[str, ...]
    row: Row


@dataclass(frozen=True)
class Gather:
    """Get the files of rows and check them. Answered by a `Gathered` or `GatherFailed` each.

    A file that is here, or on its way, is not fetched twice.
    """

    module: str
    rows: tuple[Row, ...]
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By file: peers that may have it beside its owner, who is asked first."""


@dataclass(frozen=True)
class Serve:
    """Answer those who ask for a module's chain with the one to this step from now on."""

    module: str
    step: str


# -- a path


@dataclass(frozen=True)
class FetchPath:
    """Get the shard of a path and what goes with it. Answered by `PathReady` or `PathFailed`."""

    path: int


@dataclass(frozen=True)
class StartPath:
    """Begin to train a path from states that were fetched; earlier work on a path is gone."""

    path: int
    heads: tuple[Head, ...]
    """One of every module of the path, in level order."""


@dataclass(frozen=True)
class Begun:
    """The path is in training: say so."""

    path: int
    round_index: int


@dataclass(frozen=True)
class Move:
    """The member goes to another path: keep what a return needs."""

    from_path: int
    to_path: int
    reason: str


@dataclass(frozen=True)
class Stay:
    """A move did not succeed: the path in training goes on."""

    path: int
    reason: str


@dataclass(frozen=True)
class Pause:
    """Nothing is trained until further notice: keep what a return needs, and free the device."""

    path: int | None
    """What was in training; None for nothing."""
    reason: str


# -- states


@dataclass(frozen=True)
class Publish:
    """Take a snapshot of a module at its boundary, and encode and sign what was trained.

    The snapshot is taken at once, in place of an earlier one; the rest is done meanwhile. Answered
    by `Published` or `PublishFailed`.
    """

    module: str
    round_index: int
    parent: str
    """Name of the step that the anchor is of."""
    boundary_s: float
    """When the round ended, in swarm time: how late the step comes is measured from here."""


@dataclass(frozen=True)
class Compute:
    """Compute the state after steps, whose files are here, from one that is held.

    Answered by `Computed` or `ComputeFailed`. Nothing changes before `Adopt` or `Keep`.
    """

    module: str
    base: str
    """Name of the step whose state is held."""
    steps: tuple[Step, ...]
    """On top of it, oldest first."""


@dataclass(frozen=True)
class FetchState:
    """Get a state by its digest, checked. Answered by `StateFetched` or `FetchFailed`.

    What lies on this disk under the digest need not be fetched. A head of version 0 is the
    module's genesis, whose digest the member does not know (it is empty).
    """

    head: Head
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """Score a state that was computed or fetched on held-out documents of the path in training,
    in place of the anchor; before there is an anchor, in place of the genesis.

    Answered by `Checked` at once.
    """

    module: str
    step: str


@dataclass(frozen=True)
class Adopt:
    """Make a state that was computed or fetched the anchor of a module, and serve it.

    What was trained since the snapshot goes on top of it; what was trained before is in it, or
    lost (design 4.5). The state before is kept too, on the disk.
    """

    head: Head
    """What is adopted; its digest is that of the state here."""
    round_index: int
    """Of the outer round that this ends; -1 beside one."""
    rows: int
    """In the step."""
    expected: int
    """How many were waited for, for the person who reads the log."""
    is_own_in: bool
    """Whether this peer's contribution is in it, for the same."""
    save: bool
    """Write it to disk too."""


@dataclass(frozen=True)
class Forget:
    """A state that was computed or fetched is not wanted."""

    module: str
    step: str


@dataclass(frozen=True)
class CarryOn:
    """A round of a module ended without a step here: say so."""

    module: str
    round_index: int
    reason: str
    expected: int


@dataclass(frozen=True)
class Discard:
    """Go back to the anchor: the local parameters of a module are no longer numbers."""

    module: str


@dataclass(frozen=True)
class Keep:
    """Serve a state that was computed or fetched as a copy, from the disk."""

    head: Head


@dataclass(frozen=True)
class Drop:
    """Stop to serve a copy, and remove it from the disk."""

    module: str


# -- the loop


@dataclass(frozen=True)
class EndRound:
    """A round has ended here: score, report, save what is due."""

    round_index: int
    next_round: int
    save: bool


@dataclass(frozen=True)
class Warn:
    """Tell the person at the machine, in one line."""

    text: str


@dataclass(frozen=True)
class TakeStep:
    """Take an inner step."""

    slack_s: float
    """How long other work may keep it waiting."""
    rank: int | None = None
    """At the first step of a round: this peer's place among the trainers of the path, the oldest
    claim first. Replicas draw different batches."""


@dataclass(frozen=True)
class Wait:
    """Wait for an event, for a quarter of a second at most, then ask again."""

    what: str
    """What is waited for, with the numbers that say how far it is."""
    limit_s: float
    """How long it will be waited for at most; 0 where the answer itself has a limit."""
    slack_s: float = 0.0
    """For how long other work may be done meanwhile."""


@dataclass(frozen=True)
class SaveAll:
    """Write what is only in memory to disk, before the peer leaves."""


@dataclass(frozen=True)
class Left:
    """The member has left the run: stop."""

    handed_over: tuple[str, ...]
    """Modules whose newest states other peers hold."""
    to_successor: bool
    error: str = ""
    """Why it could not begin, if that is why it left."""


Action = (
    Say
    | Watch
    | Look
    | Tell
    | Ask
    | Put
    | Gather
    | Serve
    | FetchPath
    | StartPath
    | Begun
    | Move
    | Stay
    | Pause
    | Publish
    | Compute
    | FetchState
    | Check
    | Adopt
    | Forget
    | CarryOn
    | Discard
    | Keep
    | Drop
    | EndRound
    | Warn
    | TakeStep
    | Wait
    | SaveAll
    | Left
)
