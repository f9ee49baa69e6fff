"""What a member can want done; a shell carries out all of it, and reports the outcome.

An action that is answered by an event says so; a shell answers each once, sooner or later, by that
event or by `Failed`, unless the path was changed or the member has left in between. The others are
done at once, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.coverage import Scope
from dipaco.protocol.records import ClaimState


class Action:
    """Something that the shell has to do."""


@dataclass(frozen=True)
class Say(Action):
    """Publish a claim in place of the last one."""

    state: ClaimState
    path: int | None
    since_s: float
    """Since when the path is claimed, in swarm time. Only a claim of another path changes it."""
    reason: str
    """Why this path, for the person at the machine."""
    pinned: bool


@dataclass(frozen=True)
class Watch(Action):
    """Read this part of the swarm from now on, at every refresh and every `Look`."""

    scope: Scope


@dataclass(frozen=True)
class Look(Action):
    """Publish, then read the swarm. Answered by `Viewed`."""

    further: tuple[int, ...] = ()
    """Buckets that are read this once, beside the scope."""


@dataclass(frozen=True)
class Tell(Action):
    """Tell peers of rows and steps. What does not arrive is not reported."""

    peers: tuple[str, ...]
    module: str
    rows: tuple[Row, ...] = ()
    steps: tuple[Step, ...] = ()
    keep: bool = False
    """Ask them to keep a copy of the state of the last step, too."""


@dataclass(frozen=True)
class Ask(Action):
    """Ask a peer which steps come after some, and which rows it knows. Answered by `Answered`."""

    peer: str
    module: str
    locator: tuple[str, ...]
    """Names of steps in this peer's chain, newest first (`ChainBook.locator`)."""


@dataclass(frozen=True)
class Put(Action):
    """Push the file of this peer's row to mailboxes, because nobody can call it: to the first
    ones that take it. One that has died is still in view for a while."""

    peers: tuple[str, ...]
    row: Row
    copies: int
    """How many of them should take it."""


@dataclass(frozen=True)
class Gather(Action):
    """Get the files of rows and check them; one that is here, or on its way, is not fetched twice.
    Answered by a `Gathered` or `Failed` each; a `Failed` may also come later, of a file that is
    gone from the disk."""

    module: str
    rows: tuple[Row, ...]
    others: tuple[str, ...] = ()
    """Peers that may have the files, besides their owners, who are asked first."""


@dataclass(frozen=True)
class Serve(Action):
    """Answer those who ask for a module's chain with the one to this step from now on."""

    module: str
    step: str
    steps: tuple[Step, ...] = ()
    """The steps of it that were not served yet, oldest first; an earlier process may have served
    some."""


@dataclass(frozen=True)
class FetchPath(Action):
    """Get the shard of a path and what goes with it. Answered by `PathReady`."""

    path: int


@dataclass(frozen=True)
class Score(Action):
    """Score the states that a path is about to begin with on its held-out texts: all of them, and
    with the genesis in place of each of some modules. Answered by `Scored` at once."""

    path: int
    heads: tuple[Head, ...]
    """One of every module of the path, in level order."""
    modules: tuple[str, ...]
    """The modules whose states this peer has not trained itself."""


@dataclass(frozen=True)
class StartPath(Action):
    """Begin to train a path from states that were fetched; earlier work on a path is gone."""

    path: int
    heads: tuple[Head, ...]
    """One of every module of the path, in level order."""


@dataclass(frozen=True)
class Begun(Action):
    """The path is in training, or goes on after a move failed: say so."""

    round_index: int


@dataclass(frozen=True)
class Move(Action):
    """Keep what a return needs, because the member goes to another path."""

    path: int
    reason: str


@dataclass(frozen=True)
class Pause(Action):
    """Train nothing until further notice: keep what a return needs, and free the device."""

    reason: str


@dataclass(frozen=True)
class Publish(Action):
    """Take a snapshot of a module at its boundary, and encode and sign what was trained.

    The snapshot is taken at once, in place of an earlier one; the rest is done meanwhile. Answered
    by `Published`.
    """

    module: str
    round_index: int
    parent: str
    """Name of the step whose state the anchor is."""
    state: str
    """Digest of the anchor, which the row vouches for."""
    boundary_s: float
    """When the round ended, in swarm time: how late the step comes is measured from here."""


@dataclass(frozen=True)
class Compute(Action):
    """Compute the state after steps, whose files are here, from one that is held. It fails where a
    step names another state than the one before it, and where a file is gone from the disk, which
    `Failed` of a `Gather` has said before. Nothing changes before `Adopt`. Answered by
    `StateHere`."""

    module: str
    base: Head
    """The state that is held."""
    steps: tuple[Step, ...]
    """On top of it, oldest first."""


@dataclass(frozen=True)
class FetchState(Action):
    """Get a state by its digest, checked. Answered by `StateHere`.

    What lies on this disk under the digest need not be fetched. A head of version 0 is the
    module's genesis, whose digest the member does not know (it is empty). How many bytes it has is
    not known either.
    """

    head: Head
    holders: tuple[str, ...]

    @property
    def module(self) -> str:
        """The module whose state it is."""
        return self.head.module


@dataclass(frozen=True)
class Check(Action):
    """Score a state that was computed or fetched on held-out documents of the path in training,
    in place of the anchor. Answered by `Checked` at once."""

    module: str
    step: str


@dataclass(frozen=True)
class Adopt(Action):
    """Serve a state that was computed or fetched, and keep it on the disk.

    Of a path in training it becomes the anchor. What was trained since the snapshot goes on top of
    it; what was trained before is in it, or lost (design 4.5, lost).
    """

    head: Head
    """The head, with the digest of the state here."""
    step: Step | None
    """The step that made it; None for a genesis."""
    is_round: bool
    """Whether it ends the outer round that is under way."""
    expected: int
    """How many rows were awaited, for the person who reads the log."""
    is_own_in: bool
    """Whether this peer's contribution is in it, also for the log."""


@dataclass(frozen=True)
class Forget(Action):
    """Drop a state that was computed or fetched: it is not wanted."""

    module: str
    step: str


@dataclass(frozen=True)
class CarryOn(Action):
    """Say that a round of a module ended without a step here."""

    module: str
    round_index: int
    reason: str
    expected: int


@dataclass(frozen=True)
class Discard(Action):
    """Go back to the anchor: the local parameters of a module are no longer numbers."""

    module: str


@dataclass(frozen=True)
class Drop(Action):
    """Stop to serve a copy, and remove it from the disk."""

    module: str


@dataclass(frozen=True)
class EndRound(Action):
    """Score, report and save what is due, because a round has ended here."""

    round_index: int
    next_round: int


@dataclass(frozen=True)
class Warn(Action):
    """Warn the person at the machine, in one line."""

    text: str


@dataclass(frozen=True)
class TakeStep(Action):
    """Take an inner step."""

    rank: int | None = None
    """At the first step of a round: this peer's place among the trainers of the path, the oldest
    claim first. Replicas draw different batches."""


@dataclass(frozen=True)
class Wait(Action):
    """Wait for an event, for a quarter of a second at most, then ask again."""

    what: str
    """What is waited for, with the numbers that say how far it is."""
    limit_s: float
    """How long it will be waited for at most; 0 where the answer itself has a limit."""


@dataclass(frozen=True)
class SaveAll(Action):
    """Write what is only in memory to disk, before the peer leaves."""


@dataclass(frozen=True)
class Left(Action):
    """Stop, because the member has left the run."""

    to_successor: bool
    error: str = ""
    """Why it could not begin or go on, if it left for that reason."""
    is_machine: bool = False
    """The error is one of this machine."""
