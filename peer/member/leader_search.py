"""Whom a peer calls at a meeting to find its leader, and what it knows of each of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from .calls import (
    Absent,
    Call,
    Closing,
    Gathering,
    Invite,
    Join,
    Leave,
    MeetingAction,
    Message,
    Redirect,
    Refused,
    Searching,
    Standing,
    Tell,
)

# Calls to peers that are asked one after the other and have not answered yet.
GREATEST_ASKED = 4
# How often one peer is called, unless it admitted this one.
GREATEST_TRIES = 3
# Who cannot lead, and has no leader, asks a peer that never answers every second time, then every
# fourth, and so on, but at least so often: of what invented identities claim, none ever does.
SELDOMEST_ASKED = 4
# Redirects to peers that are no candidates.
GREATEST_STRANGERS = 8
# Of the seconds in which a group is to form: how long a call may go without an answer, but at
# least so many seconds, in which an answer comes from the other side of the world.
PATIENCE_SHARE, LEAST_PATIENCE_S = 0.25, 0.5
# Of these seconds: a leader speaks so often; with members that come at any time, less often.
BEAT_SHARE, AWAITED_BEAT_SHARE = 0.25, 1.0
# Beats that a member can miss.
MISSED_BEATS = 2.4
# Of these seconds: how long a peer that has no leader looks for one when its group should have
# closed, or when its leader went away after that.
SEARCH_SHARE = 2.0


class Pace:
    """How long one side of a call waits for the other, as follows from `window_s`."""

    def __init__(self, window_s: float, *, is_awaited: bool) -> None:
        self.patience_s = max(PATIENCE_SHARE * window_s, min(LEAST_PATIENCE_S, 0.5 * window_s))
        self.beat_s = window_s * (AWAITED_BEAT_SHARE if is_awaited else BEAT_SHARE)
        self.silence_s = MISSED_BEATS * self.beat_s + self.patience_s
        self.closing_s = max(self.patience_s, LEAST_PATIENCE_S)
        self.search_s = SEARCH_SHARE * window_s


class Status(Enum):
    """What is known of a peer that was called."""

    PENDING = auto()
    SILENT = auto()
    ABSENT = auto()
    SEARCHING = auto()
    GATHERING = auto()
    REDIRECTS = auto()
    OVER = auto()


UNHEARD = (Status.PENDING, Status.ABSENT, Status.SEARCHING)


@dataclass
class Called:
    """A call that this peer made."""

    number: int
    called_s: float
    heard_s: float
    status: Status = Status.PENDING
    leader: Standing | None = None
    """Who leads, if that is known, or the called peer itself, which may have to."""

    def set(self, status: Status, leader: Standing | None = None) -> None:
        """Note what the called peer has said."""
        self.status, self.leader = status, leader


class LeaderSearch:
    """The calls that a `Meeting` makes.

    :param own: this peer's standing
    :param join: what it says first
    :param candidates: who may come
    :param asked: those that this peer asks for a leader, in order
    :param earlier: those of them that stand before it
    :param asks_all: several are asked at once, for any of them may lead already
    :param absent_is_no: who is not there has no right to be waited for
    :param patience_s: how long an answer may take
    :param act: takes the actions
    """

    def __init__(
        self,
        own: Standing,
        join: Join,
        candidates: Sequence[str],
        asked: Sequence[str],
        earlier: frozenset[str],
        *,
        asks_all: bool,
        absent_is_no: bool,
        patience_s: float,
        first_number: int,
        act: Callable[[MeetingAction], None],
    ) -> None:
        self._own, self._join = own, join
        self._place = {peer: place for place, peer in enumerate(candidates)}
        self._asked, self._earlier = tuple(asked), earlier
        self._asks_all, self._absent_is_no = asks_all, absent_is_no
        self._patience_s = patience_s
        self._number = first_number
        self._act = act
        self._calls: dict[str, Called] = {}
        self._tries: dict[str, int] = {}
        self._better: set[Standing] = set()
        self._strangers: set[str] = set()
        self._invited_by: set[str] = set()
        self._next_ask_s = float("-inf")
        self._times_again = 0
        self._pauses: dict[str, tuple[int, int]] = {}
        """Of peers that have not answered: when they are asked again, and after how many times."""

    def call(self, peer: str, message: Join | Invite) -> int:
        """Open a call and return its number."""
        number = self._number
        self._number += 1
        self._act(Call(peer, number, message))
        return number

    # What the called peers say.

    def find(self, peer: str, number: int | None = None) -> Called | None:
        """Return the call to a peer that stands, if it has this number."""
        call = self._calls.get(peer)
        if call is None or call.status is Status.OVER:
            return None
        return call if number is None or call.number == number else None

    def answered(self, call: Called, peer: str, message: Message) -> None:
        """Note an answer on a call that stands."""
        self._pauses.pop(peer, None)
        if isinstance(message, (Gathering, Closing)):
            call.set(Status.GATHERING, message.leader)
            self._tries[peer] = 0
        elif isinstance(message, Refused):
            call.set(Status.OVER)
            self._better = {leader for leader in self._better if leader.peer != peer}
        elif isinstance(message, Redirect):
            call.set(Status.REDIRECTS, message.leader)
        elif isinstance(message, Searching):
            call.set(Status.SEARCHING, message.standing)
        elif isinstance(message, Absent):
            call.set(Status.ABSENT)

    def best(self) -> Standing | None:
        """Return the best of the leaders that have admitted this peer."""
        leaders = (c.leader for c in self._calls.values() if c.status is Status.GATHERING)
        return min((leader for leader in leaders if leader is not None), default=None)

    def hear_of(self, leader: Standing) -> None:
        """Somebody says that a better peer leads: it will be called."""
        if leader.peer not in self._place:
            self._strangers.add(leader.peer)
            if len(self._strangers) > GREATEST_STRANGERS:
                return
        self._better = {known for known in self._better if known.peer != leader.peer}
        self._better.add(leader)

    def invited_by(self, peer: str) -> None:
        """A candidate has reached this peer, so it can be reached, whatever was before."""
        if peer in self._place and peer not in self._invited_by:
            self._invited_by.add(peer)
            self._tries[peer] = 0

    # Whom it calls.

    def ask_next(self, now_s: float) -> None:
        """Call the next peers on the list, as many at a time as there is patience for."""
        for peer in self._asked:
            if peer in self._calls:
                continue
            if self._tries.get(peer, 0) >= GREATEST_TRIES:
                self._calls[peer] = Called(-1, now_s, now_s, Status.OVER)
                continue
            unheard = sum(
                call.status in UNHEARD and not self._is_given_up(called, now_s)
                for called, call in self._calls.items()
            )
            if self._asks_all:
                if unheard >= GREATEST_ASKED:
                    return
            elif unheard and now_s < self._next_ask_s:
                return
            # The first one gets all the patience, so that a healthy meeting has one call each.
            self._next_ask_s = now_s + self._patience_s * (0.5 if self._calls else 1.0)
            self._call_to_join(peer, now_s)

    def call_better(self, now_s: float, present: Standing | None) -> None:
        """Call the leaders that others spoke of and that are better than the present one."""
        self._better = {
            leader
            for leader in self._better
            if self._tries.get(leader.peer, 0) < GREATEST_TRIES
            and (present is None or leader < present)
        }
        for leader in sorted(self._better):
            if self.find(leader.peer) is None:
                self._call_to_join(leader.peer, now_s)

    def _call_to_join(self, peer: str, now_s: float) -> None:
        self._tries[peer] = self._tries.get(peer, 0) + 1
        self._calls[peer] = Called(self.call(peer, self._join), now_s, now_s)

    def notice_silence(self, now_s: float) -> None:
        """Lose patience with those that have not answered; they still may."""
        for call in self._calls.values():
            if call.status is Status.PENDING and now_s >= call.called_s + self._patience_s:
                call.set(Status.SILENT)

    def nobody_leads(self, now_s: float) -> bool:
        """Tell whether none of those that were asked leads or may be about to."""
        return all(self._is_given_up(peer, now_s) for peer in self._asked)

    def _is_given_up(self, peer: str, now_s: float) -> bool:
        call = self._calls.get(peer)
        if call is None:
            return False
        waited_s = now_s - call.called_s
        if call.status in (Status.OVER, Status.SILENT):
            return True
        if call.status is Status.ABSENT:
            return self._absent_is_no or waited_s >= self._patience_s
        if call.status is Status.SEARCHING:
            is_behind = call.leader is not None and self._own < call.leader
            return is_behind or waited_s >= 2 * self._patience_s
        if call.status is Status.REDIRECTS and call.leader is not None:
            if call.leader.peer == self._own.peer:
                return True
            target = self._calls.get(call.leader.peer)
            is_vain = target is None or target.status in (Status.OVER, Status.SILENT)
            return is_vain and waited_s >= 2 * self._patience_s
        return False

    # Ending calls, and beginning anew.

    def hang_up(self, peers: Iterable[str], present: Standing | None) -> None:
        """End calls; who was called hears who leads this peer."""
        for peer in peers:
            call = self.find(peer)
            if call is not None:
                call.set(Status.OVER)
                self._act(Tell(peer, call.number, True, Leave(present)))

    def hang_up_all(self, present: Standing | None) -> None:
        """End all calls."""
        self.hang_up(list(self._calls), present)

    def hang_up_all_but_earlier(self, present: Standing | None) -> None:
        """Keep only calls to those that stand before this peer, and may still come."""
        self.hang_up([peer for peer in self._calls if peer not in self._earlier], present)

    def hang_up_all_but_better(self, present: Standing) -> None:
        """Keep the call to the leader, and those to peers that may come and lead in its place."""
        may_lead = [
            peer
            for peer, call in self._calls.items()
            if self._place.get(peer, len(self._place)) < present.rank
            and call.status not in (Status.GATHERING, Status.REDIRECTS)
        ]
        kept = {present.peer, *may_lead}
        self.hang_up([peer for peer in self._calls if peer not in kept], present)

    def begin_again(self, lost: str | None) -> None:
        """Ask everybody anew, but for a leader that was lost."""
        self._tries = {peer: tries for peer, tries in self._tries.items() if peer == lost}
        self._better.clear()
        self._calls = {
            peer: call
            for peer, call in self._calls.items()
            if peer == lost or call.status is not Status.OVER
        }
        self._next_ask_s = float("-inf")

    def ask_again(self) -> None:
        """Nobody led and this peer cannot: ask those again that have not answered."""
        self._times_again += 1
        unanswered = [
            peer
            for peer in self._asked
            if peer in self._calls
            and self._calls[peer].status in (Status.OVER, Status.SILENT)
            and self._pauses.get(peer, (0, 0))[0] <= self._times_again
        ]
        self.hang_up(unanswered, None)
        for peer in unanswered:
            _, pause = self._pauses.get(peer, (0, 0))
            pause = min(2 * pause, SELDOMEST_ASKED) if pause else 1
            self._pauses[peer] = self._times_again + pause, pause
            del self._calls[peer]
            self._tries.pop(peer, None)
        self._next_ask_s = float("-inf")

    def deadlines(self) -> list[float]:
        """Return the times at which something is given up or asked."""
        times = [self._next_ask_s]
        for call in self._calls.values():
            times += [call.called_s + self._patience_s, call.called_s + 2 * self._patience_s]
        return times
