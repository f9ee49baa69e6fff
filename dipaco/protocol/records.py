"""The records that the swarm publishes: what they say, and the bounds of every field.

Records are small msgpack maps, checked field by field by every node that stores them
(`record_validator`) and by every reader. Where they stand in the DHT is in `record_keys`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
)

from .chain.steps import Head
from .config import RoundsConfig
from .record_errors import MAX_COUNT

MAX_ENTRIES = 64
# The greatest loss of all held-out documents of a path together, in nats.
MAX_NLL = 1e15
DAY_S = 86_400.0
# A record lives for this many refresh periods: one or two lost refreshes don't drop a claim.
LIFE_PERIODS = 3.5
# A record with unchanged content is written again after this share of its life.
RENEWED_AFTER = 1 / 6
PROGRESS_LIFE_S = DAY_S


def refresh_period_s(rounds: RoundsConfig) -> float:
    """Return how often records are renewed and read: four times a round, 1 to 600 seconds.

    Rounds of fixed steps end when everybody is done, and their duration is only a limit: there a
    peer that has gone must be missed sooner.
    """
    longest_s = 20.0 if rounds.inner_steps else 600.0
    return min(longest_s, max(1.0, rounds.duration_s / 4))


def record_life_s(period_s: float) -> float:
    """Return how long the records live that are renewed every `period_s`."""
    return LIFE_PERIODS * period_s + 2.0


def _check(pattern: str) -> Any:
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"must match {pattern}")
        return value

    return AfterValidator(check)


PeerId = Annotated[str, _check(r"[1-9A-HJ-NP-Za-km-z]{32,64}")]
ModuleName = Annotated[str, _check(r"L[0-9]{1,4}\.E[0-9]{1,5}|P[0-9]{1,8}")]
Sha256 = Annotated[str, _check(r"[0-9a-f]{64}")]
# Printable, and without brackets, which many a display takes for its own markup.
Text = Annotated[str, _check(r"[ -Z\\^-~]{0,96}")]
_NAME_PATTERN = r"[ -Z\\^-~]{0,32}"
Name = Annotated[str, _check(_NAME_PATTERN)]
# The longest: an IPv6 relay's address with both peer ids.
AddressText = Annotated[str, _check(r"/[ -Z\\^-~]{0,191}")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PathNumber = Annotated[int, Field(ge=0, lt=2**31)]
TimeS = Annotated[float, Field(ge=0, le=1e11)]
Rate = Annotated[float, Field(ge=0, le=1e12)]


def _check_loss(value: float) -> float:
    if not (math.isnan(value) or abs(value) <= 1e6):
        raise ValueError("must be a loss, or not a number when there is none yet")
    return value


Loss = Annotated[float, AfterValidator(_check_loss)]


def clean_text(text: str) -> str:
    """Return `text` as a record can hold it: cut, and "?" for what may not stand in a record.

    For names that come from a driver or an operating system.
    """
    return "".join(c if " " <= c <= "~" and c not in "[]" else "?" for c in text[:96])


class Record(BaseModel):
    """Base of all records: strict types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    passing: ClassVar[frozenset[str]] = frozenset()
    """Fields that change all the time: a record is not written anew for them alone."""

    peer_id: PeerId


# How others call a peer, as two of them have tried: by an address of its own, or not at all, so
# that it calls them. Unknown until that was tried.
Reachability = Literal["direct", "outgoing", "unknown"]


class Claim(Record):
    """This peer trains a path, or is about to: in other records, and what views are made of."""

    path: PathNumber
    state: Literal["joining", "training", "leaving"]
    since_s: TimeS
    round: Count
    pinned: bool = False
    """This peer was told to train this path and never moves, or it moves only among paths that it
    has texts of its owner for: so nobody waits for it to."""
    reachable: Reachability = "unknown"


ClaimState = Literal["joining", "training", "leaving", "serving", "paused"]
_AGES = {"joining": 0, "serving": 1, "paused": 1, "training": 1, "leaving": 2}


class _Standing(Record):
    """What a peer does: said in its peer record, and again under the key of each of its modules."""

    state: ClaimState
    path: PathNumber | None
    since_s: TimeS = 0.0
    """Since when the peer is on this path."""
    round: Count
    pinned: bool = False
    reachable: Reachability

    emptied: ClassVar[Mapping[str, Any]] = {}
    """The fields that a goodbye leaves out, besides the standing."""

    def goodbye(self) -> Self:
        """Return what stands here until it expires, once its peer has left.

        A reader learns that the peer was not lost: the last one there would believe itself
        cut off.
        """
        gone = {"state": "leaving", "reachable": "outgoing"}
        return self.model_copy(update={**gone, **self.emptied})

    @functools.cached_property
    def claim(self) -> Claim | None:
        """The claim in it; None when the peer trains no path."""
        if self.path is None or self.state == "serving" or self.state == "paused":
            return None
        return Claim.model_construct(**{name: getattr(self, name) for name in Claim.model_fields})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields; what was worked out of the old ones is not kept."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @functools.cached_property
    def age(self) -> tuple[float, int, int]:
        """The key that orders the records of one peer: the greatest is the newest."""
        return self.since_s, self.round, _AGES[self.state]


class HeldState(BaseModel):
    """A `Head` as module records spell it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    step: Sha256
    version: Count
    weight: Count
    round: Count
    """The last round in it; 0 for a genesis too."""
    digest: Sha256
    bytes: Count

    @classmethod
    def of(cls, head: Head) -> Self:
        """Return the record about a state."""
        return cls(
            step=head.step,
            version=head.version,
            weight=head.weight,
            round=max(0, head.round_index),
            digest=head.digest,
            bytes=head.bytes,
        )

    def head(self, module: str) -> Head:
        """Return the head that the record is about."""
        return Head(
            module=module,
            step=self.step,
            version=self.version,
            weight=self.weight,
            round_index=self.round if self.version else -1,
            digest=self.digest,
            bytes=self.bytes,
        )


class Holding(NamedTuple):
    """This peer can serve a module state: part of a module record, and what views are made of."""

    peer_id: str
    head: Head


class ModuleRecord(_Standing):
    """A peer's part in a module: it trains a path through it, keeps a copy, or both."""

    emptied = {"held": None}

    module: ModuleName
    held: HeldState | None
    """The state that it can serve, if any."""

    @functools.cached_property
    def holding(self) -> Holding | None:
        """The holding in it, if there is one."""
        return None if self.held is None else Holding(self.peer_id, self.held.head(self.module))


class PeerRecord(_Standing):
    """What a peer says about itself."""

    passing = frozenset({"tokens_per_s", "waits_for", "bytes_up", "bytes_down"})
    emptied = {"addresses": (), "waits_for": ""}

    protocol: Annotated[int, Field(ge=0, le=2**31)]
    software: Text
    device: Text
    name: Name = ""
    """What its owner calls it."""
    team: Name = ""
    """The team that its owner trains for."""
    tokens_per_s: Rate
    waits_for: Text = ""
    """What it waited for when this was written; empty if it waited for nothing."""
    addresses: Annotated[tuple[AddressText, ...], Field(max_length=4)]
    bytes_up: Count
    bytes_down: Count
    own_texts_loss: Loss | None = None
    """The held-out loss of its owner's texts, as the peer says; nothing is decided by it."""

    @property
    def has_left(self) -> bool:
        """Whether this is a goodbye: a peer that is about to leave can still be reached, if only
        through the connections that it made."""
        return self.state == "leaving" and self.reachable == "outgoing" and not self.addresses


class ProgressEntry(BaseModel):
    """How far a path is, as its trainer last saw it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    path: PathNumber
    last_round: Count
    tokens: Count
    validation_nll: Annotated[float, Field(ge=0, le=MAX_NLL)]
    validation_tokens: Count
    shard_sequences: Count = 1
    """The weight of the path's held-out loss in the average of all paths."""
    train_loss: Loss

    @property
    def validation_loss(self) -> float | None:
        """Mean negative log-likelihood in nats of the held-out split; None if not scored."""
        return self.validation_nll / self.validation_tokens if self.validation_tokens else None

    def scored_as(self, other: ProgressEntry) -> ProgressEntry:
        """Return this with the held-out score of another entry of the path."""
        if other is self:
            return self
        score = {name: getattr(other, name) for name in ("validation_nll", "validation_tokens")}
        return self.model_copy(update=score)


class ProgressRecord(Record):
    """The paths that this peer trained, the latest first."""

    entries: Annotated[tuple[ProgressEntry, ...], Field(max_length=MAX_ENTRIES)]


class BlobRecord(Record):
    """This peer can serve a blob."""

    sha256: Sha256
    bytes: Count
