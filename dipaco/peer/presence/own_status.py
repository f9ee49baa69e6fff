"""What this peer does, as others and the person at the machine are shown it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dipaco.protocol.records import ClaimState, ProgressEntry, Reachability


@dataclass(frozen=True)
class Activity:
    """What this peer does, and on which path. A value, replaced whole: it is signed on another
    thread, and a new path must never go out with the state or the time of the old one."""

    state: ClaimState = "joining"
    path: int | None = None
    since_s: float = 0.0
    reason: str = ""
    """Why this path, for the person at the machine."""
    pinned: bool = False
    """Whether the path was asked for, so that this peer never moves."""


@dataclass
class PeerStatus:
    """What this peer says about itself. The session writes it, and what publishes or shows it reads
    it."""

    claim: Activity = field(default_factory=Activity)
    device: str = "cpu"
    name: str = ""
    """What the owner calls this peer."""
    team: str = ""
    """The team that the owner trains for."""
    tokens_per_s: float = 0.0
    reachable: Reachability = "unknown"
    addresses: tuple[str, ...] = ()
    progress: dict[int, ProgressEntry] = field(default_factory=dict)
    round_index: int = 0
    """With fixed steps, the round that this peer is in."""
    waiting_for: str = ""
    validation_loss: float = float("nan")
    own_texts_loss: float | None = None
    """The held-out loss of the owner's texts; None without them, and until they are scored."""
