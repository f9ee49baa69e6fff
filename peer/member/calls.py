"""What peers say to each other while they meet, and how that reaches a `Meeting` and leaves it.

Peers talk over calls. A call is opened by one peer with a first message; then both sides may say
something at any time, in order, until one of them ends it or it breaks. So a peer that cannot be
called hears everything on the calls that it made itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Standing:
    """How good a peer's right to lead is; of two leaders, the one with the smaller standing leads.

    A leader states its own, so that peers with different views still agree about it.
    """

    rank: int
    """Its place among the candidates as it sees them; who came late stands behind all of them."""
    peer: str


# What a caller says.


@dataclass(frozen=True)
class Join:
    """The first message of a call: lead me, if you lead."""

    row: bytes
    view: bytes
    """A hash of the candidates that the caller sees."""


@dataclass(frozen=True)
class Invite:
    """The first message of another call: I lead, so call me. Answered by `Redirect`, or not."""

    leader: Standing


@dataclass(frozen=True)
class Confirm:
    """The caller is still there, and will be in no other group."""


@dataclass(frozen=True)
class Leave:
    """The caller ends the call; `leader` leads it now, if anybody does."""

    leader: Standing | None = None


# What the called peer answers.


@dataclass(frozen=True)
class Absent:
    """This peer has not come to the meeting; it will answer when it does."""


@dataclass(frozen=True)
class Searching:
    """This peer has come and knows no leader yet; `standing` is its own, if it should lead."""

    standing: Standing


@dataclass(frozen=True)
class Gathering:
    """This peer leads, and the caller is in. Repeated, so that its silence can be noticed."""

    leader: Standing
    together: int


@dataclass(frozen=True)
class Redirect:
    """Another peer leads."""

    leader: Standing


@dataclass(frozen=True)
class Refused:
    """The caller is not admitted. Ends the call."""

    reason: str


@dataclass(frozen=True)
class Closing:
    """This peer leads, and the group closes now: is the caller still there?"""

    leader: Standing


@dataclass(frozen=True)
class Group:
    """The closed group, in the order in which parts are assigned. Ends the call."""

    peers: tuple[str, ...]
    rows: tuple[bytes, ...]


CallerMessage = Join | Invite | Confirm | Leave
Answer = Absent | Searching | Gathering | Redirect | Refused | Closing | Group
Message = CallerMessage | Answer
LAST_MESSAGES = (Leave, Refused, Group)


# What happens to a meeting. `mine` tells the calls that this peer made from those made to it; the
# number of a call is the caller's.


@dataclass(frozen=True)
class Heard:
    """The other side of a call said something."""

    peer: str
    number: int
    mine: bool
    message: Message


@dataclass(frozen=True)
class Lost:
    """A call broke, or could not be made."""

    peer: str
    number: int
    mine: bool


@dataclass(frozen=True)
class Awaiting:
    """The group is complete when these are in it; None: this peer gives up."""

    peers: frozenset[str] | None


@dataclass(frozen=True)
class Passed:
    """Time has passed: `Meeting.wake_s` has come."""


MeetingEvent = Heard | Lost | Awaiting | Passed


# What a meeting wants done.


@dataclass(frozen=True)
class Call:
    """Open a call."""

    peer: str
    number: int
    message: Join | Invite


@dataclass(frozen=True)
class Tell:
    """Say something on a call. One of LAST_MESSAGES also ends it."""

    peer: str
    number: int
    mine: bool
    message: Message


@dataclass(frozen=True)
class Met:
    """The meeting is over: this peer is in this group."""

    group: Group
    leader: str
    """Who admitted the members: this peer, or the one that told it."""


@dataclass(frozen=True)
class Missed:
    """The meeting is over: there is no group with this peer in it that it knows of."""

    reason: str


MeetingAction = Call | Tell | Met | Missed
