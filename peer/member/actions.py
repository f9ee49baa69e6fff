"""What a member can want done: all of it is carried out by a shell, which reports the outcome.

An action that is answered by an event says so; a shell answers each once, sooner or later, unless
the path was changed or the member has left in between. The others are done at once, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dipaco.dht.coverage import Scope
from dipaco.dht.records import ClaimState
from dipaco.modules.state import StateReference

Purpose = Literal["begin", "adopt", "keep"]


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
    kind: Literal["say"] = "say"


@dataclass(frozen=True)
class Watch:
    """Read this part of the swarm from now on, at every refresh and every `Look`."""

    scope: Scope
    kind: Literal["watch"] = "watch"


@dataclass(frozen=True)
class Look:
    """Publish, then read the swarm. Answered by `Viewed` or `LookFailed`."""

    further: tuple[int, ...] = ()
    """Buckets that are read this once, beside the scope."""
    kind: Literal["look"] = "look"


@dataclass(frozen=True)
class FetchPath:
    """Get the shard of a path and what goes with it. Answered by `PathReady` or `PathFailed`."""

    path: int
    kind: Literal["fetch_path"] = "fetch_path"


@dataclass(frozen=True)
class FetchState:
    """Get a state by its digest, checked. Answered by `StateFetched` or `FetchFailed`.

    What lies on this disk under the digest need not be fetched. A reference with version 0 is the
    module's genesis state, whose digest the member does not know.
    """

    reference: StateReference
    holders: tuple[str, ...]
    purpose: Purpose
    kind: Literal["fetch_state"] = "fetch_state"


@dataclass(frozen=True)
class FetchChain:
    """Get the certificates of a state and of those before it. Answered by `ChainFetched`."""

    reference: StateReference
    holders: tuple[str, ...]
    kind: Literal["fetch_chain"] = "fetch_chain"


@dataclass(frozen=True)
class StartPath:
    """Begin to train a path from states that were fetched; earlier work on a path is gone."""

    path: int
    states: tuple[StateReference, ...]
    """One of every module of the path, in level order."""
    kind: Literal["start_path"] = "start_path"


@dataclass(frozen=True)
class TakeSnapshot:
    """Copy a module as it is now, and cut its work: what was done since the last cut is a part,
    named by the round. Answered by `SnapshotTaken` at once.

    The copy is kept until it is committed or forgotten.
    """

    module: str
    round_index: int
    boundary_s: float
    """When the round ended, in swarm time: how late its steps are is measured from here."""
    kind: Literal["take_snapshot"] = "take_snapshot"


@dataclass(frozen=True)
class ForgetSnapshot:
    """The copy of a round is needed no more; its work stays in the local parameters."""

    module: str
    round_index: int
    keeps_part: bool
    """Others may have merged it, so the work up to here stays apart; otherwise the cut is undone
    and the part goes on growing."""
    kind: Literal["forget_snapshot"] = "forget_snapshot"


@dataclass(frozen=True)
class JoinParts:
    """Keep two parts of a module's work as one, under the name of the newer."""

    module: str
    older: int
    newer: int
    kind: Literal["join_parts"] = "join_parts"


@dataclass(frozen=True)
class DropPart:
    """Remember a part of a module's work no more: it is in the anchor."""

    module: str
    part: int
    kind: Literal["drop_part"] = "drop_part"


@dataclass(frozen=True)
class Average:
    """Meet the others and average the snapshot of a round with theirs.

    Answered by `Averaged` or `AverageFailed`, at the latest at `end_s`, or at `latest_s` by a group
    whose rows say that its reduce takes that long.
    """

    module: str
    round_index: int
    attempt: int
    anchor: str
    """Digest of the state that the outer gradient is taken from."""
    candidates: tuple[str, ...]
    """Who may come, this peer included, in the order in which they are asked to lead."""
    begin_s: float
    """When the others come, in swarm time: who comes earlier waits with calling them."""
    close_s: float
    """When the group closes."""
    end_s: float
    """When the reduce has to be done."""
    excluded: tuple[str, ...] = ()
    """Not admitted when this peer leads."""
    awaited: frozenset[str] | None = None
    """With fixed steps: the group closes once these have come, see `Await`; None by the clock."""
    undialable: tuple[str, ...] = ()
    """Candidates that others cannot call by an address of theirs: they never lead, and reduce
    nothing."""
    latest_s: float = 0.0
    """When the reduce of a group with slow lines has to be done, if that is later than `end_s`."""
    kind: Literal["average"] = "average"


@dataclass(frozen=True)
class Await:
    """With fixed steps: the meeting under way waits for these; None: for nobody any more, so it
    fails at once unless its group has closed."""

    module: str
    peers: frozenset[str] | None
    kind: Literal["await"] = "await"


@dataclass(frozen=True)
class Ask:
    """Ask peers what they hold of a module. Answered by `Answered` within seconds."""

    module: str
    round_index: int
    peers: tuple[str, ...]
    kind: Literal["ask"] = "ask"


@dataclass(frozen=True)
class Call:
    """See whether peers are there at all. Answered by `CallAnswered` within seconds."""

    peers: tuple[str, ...]
    kind: Literal["call"] = "call"


@dataclass(frozen=True)
class TakeOuterStep:
    """Compute the state after an outer step. Answered by `OuterStepped` or `OuterStepFailed`."""

    module: str
    round_index: int
    alone: bool
    """From the own snapshot alone, and not from what `Average` brought."""
    kind: Literal["take_outer_step"] = "take_outer_step"


@dataclass(frozen=True)
class Commit:
    """Make the state that `TakeOuterStep` computed the anchor, serve it, share its certificate."""

    module: str
    reference: StateReference
    round_index: int
    attempt: int
    expected: int
    """How many peers count, for the person who reads the log."""
    save: bool
    """Write it to disk too."""
    kind: Literal["commit"] = "commit"


@dataclass(frozen=True)
class CarryOn:
    """A round of a module ended without a commit here: say so."""

    module: str
    round_index: int
    reason: str
    expected: int
    kind: Literal["carry_on"] = "carry_on"


@dataclass(frozen=True)
class Discard:
    """Go back to the anchor: the local parameters of a module are no longer numbers."""

    module: str
    kind: Literal["discard"] = "discard"


@dataclass(frozen=True)
class CheckState:
    """Score a fetched state on held-out documents in place of the anchor. Answered by
    `Checked` at once."""

    module: str
    digest: str
    is_rival: bool = False
    """It is the anchor that is in doubt, and not this state."""
    kind: Literal["check_state"] = "check_state"


@dataclass(frozen=True)
class Adopt:
    """Put a fetched state under the unmerged work of a module, and serve it."""

    module: str
    reference: StateReference
    on_top: tuple[int, ...]
    """Parts of own work that are not in it. They are put on top, with what came after the last
    cut; the other parts are in it."""
    is_merged: bool
    """Whether own work is in it that was not in the anchor."""
    weight: float
    """How much of the work's length stays: less than 1 for work of long ago."""
    save: bool
    kind: Literal["adopt"] = "adopt"


@dataclass(frozen=True)
class Keep:
    """Serve a fetched state as a copy, from the disk."""

    reference: StateReference
    kind: Literal["keep"] = "keep"


@dataclass(frozen=True)
class Drop:
    """Stop to serve a copy, and remove it from the disk."""

    module: str
    kind: Literal["drop"] = "drop"


@dataclass(frozen=True)
class Offer:
    """Ask a peer to keep a copy of a state held here. Answered by `OfferAnswered`."""

    reference: StateReference
    peer: str
    limit_s: float
    """Seconds after which the answer is no."""
    kind: Literal["offer"] = "offer"


@dataclass(frozen=True)
class EndRound:
    """A round has ended here: score, report, save what is due."""

    round_index: int
    next_round: int
    save: bool
    kind: Literal["end_round"] = "end_round"


@dataclass(frozen=True)
class Move:
    """The member goes to another path: keep what a return needs."""

    from_path: int
    to_path: int
    reason: str
    kind: Literal["move"] = "move"


@dataclass(frozen=True)
class Stay:
    """A move did not succeed: the path in training goes on."""

    path: int
    reason: str
    kind: Literal["stay"] = "stay"


@dataclass(frozen=True)
class Pause:
    """Nothing is trained until further notice: keep what a return needs, and free the device."""

    path: int | None
    """What was in training; None for nothing."""
    reason: str
    kind: Literal["pause"] = "pause"


@dataclass(frozen=True)
class Begun:
    """The path is in training: say so."""

    path: int
    round_index: int
    kind: Literal["begun"] = "begun"


@dataclass(frozen=True)
class Warn:
    """Tell the person at the machine, in one line."""

    text: str
    kind: Literal["warn"] = "warn"


@dataclass(frozen=True)
class TakeStep:
    """Take an inner step."""

    slack_s: float
    """How long other work may keep it waiting."""
    rank: int | None = None
    """At the first step of a round: this peer's place among the trainers of the path, the oldest
    claim first. Replicas draw different batches."""
    kind: Literal["take_step"] = "take_step"


@dataclass(frozen=True)
class Wait:
    """Wait for an event, for a quarter of a second at most, then ask again."""

    what: str
    """What is waited for, with the numbers that say how far it is."""
    limit_s: float
    """How long it will be waited for at most; 0 where the answer itself has a limit."""
    slack_s: float = 0.0
    """For how long other work may be done meanwhile."""
    kind: Literal["wait"] = "wait"


@dataclass(frozen=True)
class SaveAll:
    """Write what is only in memory to disk, before the peer leaves."""

    kind: Literal["save_all"] = "save_all"


@dataclass(frozen=True)
class Left:
    """The member has left the run: stop."""

    handed_over: tuple[str, ...]
    """Modules whose newest states other peers hold."""
    to_successor: bool
    error: str = ""
    """Why it could not begin, if that is why it left."""
    kind: Literal["left"] = "left"


Action = (
    Say
    | Watch
    | Look
    | FetchPath
    | FetchState
    | FetchChain
    | StartPath
    | TakeSnapshot
    | ForgetSnapshot
    | JoinParts
    | DropPart
    | Average
    | Await
    | Ask
    | Call
    | TakeOuterStep
    | Commit
    | CarryOn
    | Discard
    | CheckState
    | Adopt
    | Keep
    | Drop
    | Offer
    | EndRound
    | Move
    | Stay
    | Pause
    | Begun
    | Warn
    | TakeStep
    | Wait
    | SaveAll
    | Left
)
