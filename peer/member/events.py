"""What can happen to a member: everything that it ever learns, as values.

The shell (`dipaco.peer.session`, or a swarm in the simulator) reports these, one after the other,
each with the swarm time at which it happened. A member knows nothing else: not a clock, not the
network, not a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dipaco.dht.admission import Admission
from dipaco.dht.certificates import Certificate
from dipaco.dht.records import Reachability
from dipaco.dht.view import SwarmView
from dipaco.modules.outer import Contribution
from dipaco.modules.state import PathProgress, StateReference

from .actions import Purpose


@dataclass(frozen=True)
class Viewed:
    """The swarm was read. Answers `Look`, and comes by itself once a refresh period."""

    view: SwarmView
    is_answer: bool = False
    """It was read after the last `Look`."""
    kind: Literal["viewed"] = "viewed"


@dataclass(frozen=True)
class LookFailed:
    """The DHT did not answer a `Look` within its limit."""

    reason: str
    kind: Literal["look_failed"] = "look_failed"


@dataclass(frozen=True)
class Probed:
    """Other peers have tried to call this one: how they reach it."""

    reachable: Reachability
    kind: Literal["probed"] = "probed"


@dataclass(frozen=True)
class Admitted:
    """In a run by invitation: a peer is in. Reported before anything else that it said."""

    peer: str
    admission: Admission
    kind: Literal["admitted"] = "admitted"


@dataclass(frozen=True)
class Revoked:
    """In a run by invitation: the operator has ended these, and no others."""

    invitations: tuple[str, ...]
    kind: Literal["revoked"] = "revoked"


@dataclass(frozen=True)
class Turn:
    """The shell is between two inner steps and asks what to do; at least four times a second.

    The answer has exactly one of `TakeStep`, `Wait` and `Left` in it.
    """

    step_s: float = 0.0
    """What an inner step takes, waiting not included; 0 before the first."""
    together: Mapping[str, int] = field(default_factory=dict)
    """Members that a group of a level has here, as it forms. Only shown."""
    kind: Literal["turn"] = "turn"


@dataclass(frozen=True)
class Stepped:
    """An inner step was taken."""

    tokens: int
    kind: Literal["stepped"] = "stepped"


@dataclass(frozen=True)
class PathReady:
    """Answers `FetchPath`: the shard of the path is here."""

    path: int
    kind: Literal["path_ready"] = "path_ready"


@dataclass(frozen=True)
class PathFailed:
    """Answers `FetchPath`: nobody could give the shard of the path."""

    path: int
    reason: str
    kind: Literal["path_failed"] = "path_failed"


@dataclass(frozen=True)
class StateFetched:
    """Answers `FetchState`: the state is here, with what is known of its descent."""

    reference: StateReference
    progress: Mapping[int, PathProgress]
    """What each path has contributed to it since the run began."""
    certificates: tuple[Certificate, ...]
    """Its chain, the newest first, checked; empty for a genesis state."""
    purpose: Purpose
    """What it was wanted for: the same state can be on its way for two."""
    kind: Literal["state_fetched"] = "state_fetched"


@dataclass(frozen=True)
class FetchFailed:
    """Answers `FetchState`: nobody could give the state, or it was not what was announced."""

    module: str
    digest: str
    reason: str
    purpose: Purpose
    kind: Literal["fetch_failed"] = "fetch_failed"


@dataclass(frozen=True)
class ChainFetched:
    """Answers `FetchChain`, and comes by itself when co-members of a group have signed.

    Without certificates the holders had none that could be checked.
    """

    reference: StateReference
    certificates: tuple[Certificate, ...]
    kind: Literal["chain_fetched"] = "chain_fetched"


@dataclass(frozen=True)
class SnapshotTaken:
    """Answers `TakeSnapshot`, before the next inner step."""

    module: str
    round_index: int
    tokens: int
    """Tokens trained since the anchor: what a contribution of this snapshot weighs."""
    is_finite: bool
    kind: Literal["snapshot_taken"] = "snapshot_taken"


@dataclass(frozen=True)
class Averaged:
    """Answers `Average`: the group holds one average of its contributions."""

    module: str
    round_index: int
    attempt: int
    table: tuple[Contribution, ...]
    """The canonical rows of the group."""
    culprits: tuple[str, ...] = ()
    """Members that accused a reducer falsely."""
    kind: Literal["averaged"] = "averaged"


@dataclass(frozen=True)
class AverageFailed:
    """Answers `Average`: nothing was averaged here; it may have been elsewhere."""

    module: str
    round_index: int
    attempt: int
    reason: str
    culprits: tuple[str, ...] = ()
    """Members that made the reduce fail."""
    members: tuple[str, ...] = ()
    """The group that had formed; empty when none had."""
    is_proven: bool = False
    """The culprits averaged wrongly, as this peer has computed itself."""
    kind: Literal["average_failed"] = "average_failed"


@dataclass(frozen=True)
class Answered:
    """Answers `Ask`: who answered, and what they hold of the module."""

    module: str
    round_index: int
    holdings: Mapping[str, StateReference | None]
    """What each peer that answered holds; None for nothing."""
    kind: Literal["answered"] = "answered"


@dataclass(frozen=True)
class CallAnswered:
    """Answers `Call`: who of those that were called has answered."""

    called: tuple[str, ...]
    answered: tuple[str, ...]
    kind: Literal["call_answered"] = "call_answered"


@dataclass(frozen=True)
class OuterStepped:
    """Answers `TakeOuterStep`: this is the state that comes out; nothing is changed yet."""

    module: str
    reference: StateReference
    certificate: Certificate
    """The statement of this commit, signed by this peer and whoever of the group has so far."""
    kind: Literal["outer_stepped"] = "outer_stepped"


@dataclass(frozen=True)
class OuterStepFailed:
    """Answers `TakeOuterStep`: the average is not one that a state can be made of."""

    module: str
    round_index: int
    reason: str
    kind: Literal["outer_step_failed"] = "outer_step_failed"


@dataclass(frozen=True)
class Checked:
    """Answers `CheckState`: the held-out loss with the anchors and with the state in place of one.

    None where there is nothing to score with. The loss is of the documents of the path in training,
    or, where these say nothing of what is in doubt, of those of a path that has trained it.
    """

    module: str
    digest: str
    loss_before: float | None
    loss_after: float | None
    steps_apart: float | None = None
    """How far the state is from the anchor, in outer steps of the length that is usual here; also
    after one more without a gradient. None as long as that length is not known."""
    coasting_before: float | None = None
    """As `loss_before`, of the anchor after one more outer step without a gradient."""
    coasting_after: float | None = None
    is_undecided: bool = False
    """Another path has to be scored, and its states are not here: they come with the state, if it
    is fetched again."""
    kind: Literal["checked"] = "checked"


@dataclass(frozen=True)
class Offered:
    """Another peer offers a state that this peer should keep a copy of."""

    peer: str
    reference: StateReference
    kind: Literal["offered"] = "offered"


@dataclass(frozen=True)
class OfferAnswered:
    """Answers `Offer`: whether the peer has taken the state, and by now holds it."""

    module: str
    digest: str
    peer: str
    is_kept: bool
    kind: Literal["offer_answered"] = "offer_answered"


@dataclass(frozen=True)
class SuccessorReady:
    """The run has a successor, and all that everybody needs of it is here."""

    run_id: str
    kind: Literal["successor_ready"] = "successor_ready"


@dataclass(frozen=True)
class PauseWanted:
    """The machine is needed, or may not train now: until `ResumeWanted`."""

    reason: str
    """For the person at the machine; not empty."""
    kind: Literal["pause_wanted"] = "pause_wanted"


@dataclass(frozen=True)
class ResumeWanted:
    """The machine may train again."""

    kind: Literal["resume_wanted"] = "resume_wanted"


@dataclass(frozen=True)
class LeaveWanted:
    """Somebody pressed Ctrl+C, or the machine is needed."""

    reason: str = ""
    kind: Literal["leave_wanted"] = "leave_wanted"


Event = (
    Viewed
    | LookFailed
    | Probed
    | Admitted
    | Revoked
    | Turn
    | Stepped
    | PathReady
    | PathFailed
    | StateFetched
    | FetchFailed
    | ChainFetched
    | SnapshotTaken
    | Averaged
    | AverageFailed
    | Answered
    | CallAnswered
    | OuterStepped
    | OuterStepFailed
    | Checked
    | Offered
    | OfferAnswered
    | SuccessorReady
    | PauseWanted
    | ResumeWanted
    | LeaveWanted
)
