"""How the peers that share a module find each other at a boundary: one meeting, at one peer. Pure.

Everybody has the candidates in the same order, the leading order, or nearly so. The first leads and
calls nobody. Everybody else calls the first, and the next ones too when it does not answer in time;
calls stay open, so a slow leader is found as soon as it speaks. Whoever finds nobody before it that
could lead, leads.

    member               leader
      Join(row)   ->
                  <-     Gathering        the caller is in; said again and again until it closes
                  <-     Closing          are you still there?
      Confirm     ->                      the member is bound: it will be in no other group
                  <-     Group(rows)      of those who confirmed; the others are Refused

A peer that does not lead answers `Searching` or `Redirect(leader)`, one that has not come yet
`Absent` (its shell says that for it, see `Reception`), and it answers on the same call again when
that changes. A leader that learns of a better one (`Standing`) calls it, and once admitted sends
its members there. It learns of it from the better leader's `Invite`, which goes to the candidates
that have not come, from the `Leave` of a member that found the better one, or from a `Redirect`.
A group that closes hands nobody over, so a peer is in one group at most, however much is lost.
When a leader goes away its members search again, except those that are bound: they may be in its
group.

By the clock (`start_s` is given) all come at nearly the same time. The group closes when all
candidates are in and its members all see the same ones, or at `close_s`. A peer that comes early
waits for `start_s`; one that comes late looks for a leader among all candidates, and stands behind
the others if there is none. Without `start_s` peers come at any time, and each does as the late
one: who came first leads. With `awaited` the group is complete when these are in it.

All waits are shares of `window_s`, the seconds in which a group is to form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

from .calls import (
    Awaiting,
    Closing,
    Confirm,
    Gathering,
    Group,
    Heard,
    Invite,
    Join,
    Leave,
    Lost,
    MeetingAction,
    MeetingEvent,
    Message,
    Met,
    Missed,
    Redirect,
    Refused,
    Searching,
    Standing,
    Tell,
)
from .leader_search import LeaderSearch, Pace, Status
from .reception import GREATEST_GROUP, Caller, Callers, note

# Between two times that a peer which cannot lead asks everybody; the first is window_s.
LONGEST_PAUSE_S = 30.0
# Of window_s: after this a leader invites those that have not called it.
INVITE_SHARE = 0.35


class _Phase(Enum):
    EARLY = auto()
    SEARCHING = auto()
    FOLLOWING = auto()
    LEADING = auto()
    CLOSING = auto()
    BOUND = auto()
    OVER = auto()


class Meeting:
    """One attempt of one peer to be in a group; see the module's text.

    :param me: this peer, one of `candidates`
    :param candidates: who may come, in leading order; the same on every peer, or nearly so
    :param row: what this peer tells its group
    :param check: says why a caller's row is bad, or returns None
    :param now_s: when this peer came; all times are on one clock of this machine
    :param window_s: seconds in which a group is to form
    :param start_s: by the clock: when all come; None when they come at any time
    :param close_s: when the group closes, whoever is missing; its list is there a moment later
    :param give_up_s: when this peer stops to wait, whoever leads; sooner when nobody does
    :param awaited: the group is complete when these are in it; None: when all candidates are
    :param excluded: peers that are neither called nor admitted
    :param undialable: candidates that cannot be called: they never lead
    :param first_number: of this peer's calls, larger than in any earlier meeting of it
    """

    def __init__(
        self,
        me: str,
        candidates: Sequence[str],
        row: bytes,
        check: Callable[[str, bytes], str | None],
        *,
        now_s: float,
        window_s: float,
        close_s: float,
        give_up_s: float,
        start_s: float | None = None,
        awaited: frozenset[str] | None = None,
        excluded: Collection[str] = (),
        undialable: Collection[str] = (),
        first_number: int = 0,
    ) -> None:
        if me not in candidates or len(set(candidates)) != len(candidates):
            raise ValueError("the candidates repeat a peer or lack this one")
        self._me, self._row, self._check = me, row, check
        self._excluded = frozenset(excluded) - {me}
        self._candidates = [peer for peer in candidates if peer not in self._excluded]
        self._undialable = frozenset(undialable)
        self._awaited = awaited
        self._pace = pace = Pace(window_s, is_awaited=awaited is not None)
        self._begin_s = now_s if start_s is None else max(now_s, start_s)
        self._is_in_time = start_s is not None and now_s <= start_s + pace.patience_s
        self._invite_s = self._begin_s + INVITE_SHARE * window_s
        self._again_s = max(window_s, 2 * pace.patience_s)
        self._close_s, self._give_up_s = close_s, give_up_s
        self._starts_together = start_s is not None
        self._view = hashlib.sha256("\n".join(sorted(candidates)).encode()).digest()[:8]
        place = self._candidates.index(me)
        late = start_s is not None and not self._is_in_time
        self._standing = Standing(place + (len(self._candidates) if late else 0), me)
        others = [peer for peer in self._candidates if peer != me and peer not in self._undialable]
        earlier = frozenset(self._candidates[:place]) & frozenset(others)
        asks_all = not self._is_in_time or me in self._undialable
        self._calls = LeaderSearch(
            self._standing,
            Join(row, self._view),
            self._candidates,
            [peer for peer in others if asks_all or peer in earlier],
            earlier,
            asks_all=asks_all,
            absent_is_no=not self._is_in_time,
            patience_s=pace.patience_s,
            first_number=first_number,
            act=lambda action: self._actions.append(action),
        )

        self._phase = _Phase.EARLY
        self._leader: Standing | None = None
        self._callers = Callers()
        self._invited: dict[str, int] = {}
        self._searched_s = self._heard_s = now_s
        self._search_until_s = give_up_s
        self._next_beat_s = self._limit_s = float("inf")
        self._notices: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._group_size = 0
        self._now = now_s
        self._actions: list[MeetingAction] = []

    # What others read.

    @property
    def together(self) -> int:
        """Members of the group so far; 0 as long as there is none."""
        if self._phase in (_Phase.LEADING, _Phase.CLOSING):
            return 1 + len(self._callers)
        return self._group_size if self._phase in (_Phase.FOLLOWING, _Phase.BOUND) else 0

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines about peers that were not admitted, for the person who reads the log."""
        return tuple(self._notices.values())

    @property
    def wake_s(self) -> float:
        """When `Passed` is due, if nothing else happens before."""
        times, phase = [self._give_up_s], self._phase
        if phase is _Phase.EARLY:
            times.append(self._begin_s)
        if phase is _Phase.SEARCHING:
            times += [self._searched_s + self._again_s, self._search_until_s]
        if phase in (_Phase.SEARCHING, _Phase.FOLLOWING, _Phase.LEADING):
            times += self._calls.deadlines()
        if phase is _Phase.FOLLOWING:
            times.append(self._heard_s + self._pace.silence_s)
        if phase is _Phase.LEADING:
            times += [self._next_beat_s, self._close_s]
            if self._is_in_time:
                times.append(self._invite_s)
        if phase is _Phase.CLOSING:
            times.append(self._limit_s)
        return min((time for time in times if time > self._now), default=self._give_up_s)

    # What happens.

    def step(self, now_s: float, event: MeetingEvent) -> list[MeetingAction]:
        """Take note of an event and return what is to be done, in order."""
        self._now, self._actions = max(now_s, self._now), []
        if self._phase is not _Phase.OVER:
            if isinstance(event, Heard):
                take = self._answered if event.mine else self._called
                take(event.peer, event.number, event.message)
            elif isinstance(event, Lost):
                self._lost(event)
            elif isinstance(event, Awaiting):
                self._await(event.peers)
            self._go_on()
        return self._actions

    def _await(self, peers: frozenset[str] | None) -> None:
        if peers is None and self._phase not in (_Phase.CLOSING, _Phase.BOUND):
            self._end(Missed("nobody is waited for any more"))
        elif peers is not None:
            self._awaited = peers

    def _lost(self, event: Lost) -> None:
        if not event.mine:
            self._callers.drop(event.peer, event.number)
            return
        call = self._calls.find(event.peer, event.number)
        if call is None:
            return
        call.set(Status.OVER)
        if self._phase is _Phase.BOUND and self._leads_me(event.peer):
            self._end(Missed(f"peer {event.peer} went away while it closed the group"))

    def _answered(self, peer: str, number: int, message: Message) -> None:
        """Take an answer on a call that this peer made."""
        if self._invited.get(peer) == number:
            if isinstance(message, Redirect):
                self._hear_of(message.leader)
            return
        call = self._calls.find(peer, number)
        if call is None or (
            isinstance(message, (Gathering, Closing)) and message.leader.peer != peer
        ):
            return
        leads_me = self._leads_me(peer)
        if leads_me:
            self._heard_s = self._now
        if self._phase is _Phase.BOUND and leads_me:
            if isinstance(message, Group):
                self._end(Met(message, peer))
            elif isinstance(message, Refused):
                # It is not in that group, so it may be in another.
                self._calls.answered(call, peer, message)
                note(self._refusals, peer, f"peer {peer} refused: {message.reason}")
                self._search()
            return
        self._calls.answered(call, peer, message)
        if isinstance(message, Gathering) and leads_me:
            self._group_size = message.together
        elif isinstance(message, Refused):
            note(self._refusals, peer, f"peer {peer} refused: {message.reason}")
        elif isinstance(message, Redirect):
            self._hear_of(message.leader)
        elif isinstance(message, Closing):
            self._confirm(message.leader, number)

    def _confirm(self, leader: Standing, number: int) -> None:
        """Bind this peer to a leader that closes, unless a better one has admitted it."""
        if self._phase not in (_Phase.SEARCHING, _Phase.FOLLOWING):
            return
        if self._leader is not None and self._leader < leader:
            return
        if not self._leads_me(leader.peer):
            self._follow(leader)
        self._phase = _Phase.BOUND
        self._tell(leader.peer, number, Confirm(), mine=True)

    def _called(self, peer: str, number: int, message: Message) -> None:
        """Take what a caller says."""
        if isinstance(message, Join):
            self._joined(peer, number, message)
            return
        if isinstance(message, Invite):
            if message.leader.peer == peer and peer not in self._excluded:
                self._calls.invited_by(peer)
                self._hear_of(message.leader)
                leader = self._present_leader
                if leader is not None:
                    self._tell(peer, number, Redirect(leader))
            return
        caller = self._callers.find(peer, number)
        if caller is None:
            return
        if isinstance(message, Confirm):
            caller.confirmed = self._phase is _Phase.CLOSING
        elif isinstance(message, Leave):
            del self._callers[peer]
            if message.leader is not None:
                self._hear_of(message.leader)

    def _joined(self, peer: str, number: int, join: Join) -> None:
        """Admit a caller, or refuse it."""
        known = self._callers.get(peer)
        if known is not None and known.number > number:
            return  # An older call, overtaken on the way.
        reason = None
        if peer in self._excluded:
            reason = "it failed in an earlier attempt"
        elif not self._callers.have_room_for(peer, self._candidates):
            reason = f"the group is full, with {GREATEST_GROUP} peers"
        else:
            reason = self._check(peer, join.row)
            if reason is not None:
                note(self._notices, peer, f"not admitted to the group: peer {peer}: {reason}")
        if reason is not None:
            self._callers.pop(peer, None)
            self._tell(peer, number, Refused(reason))
            return
        self._callers[peer] = Caller(number, join.row, join.view)
        self._tell_state(peer)

    # What this peer does next.

    def _go_on(self) -> None:
        phase = None
        while phase is not self._phase:
            phase = self._phase
            until_s = self._search_until_s if phase is _Phase.SEARCHING else self._give_up_s
            if phase is not _Phase.OVER and self._now >= min(until_s, self._give_up_s):
                self._end(Missed(self._why_alone()))
            elif phase is _Phase.EARLY and self._now >= self._begin_s:
                self._search()
            elif phase is _Phase.SEARCHING:
                self._go_on_searching()
            elif phase is _Phase.FOLLOWING:
                self._go_on_following()
            elif phase is _Phase.LEADING:
                self._go_on_leading()
            elif phase is _Phase.CLOSING:
                self._go_on_closing()

    def _search(self) -> None:
        """Begin to look for a leader, with none of the earlier answers but those that stand."""
        if self._leader is not None:
            self._calls.begin_again(self._leader.peer)
        self._phase, self._leader = _Phase.SEARCHING, None
        self._searched_s = self._now
        self._search_until_s = max(self._now, self._close_s) + self._pace.search_s
        for peer in self._callers:
            self._tell_state(peer)

    def _go_on_searching(self) -> None:
        calls = self._calls
        calls.notice_silence(self._now)
        best = calls.best()
        if best is not None:
            self._follow(best)
            return
        calls.call_better(self._now, None)
        calls.ask_next(self._now)
        if self._me not in self._undialable and calls.nobody_leads(self._now):
            self._lead()
        elif self._now >= self._searched_s + self._again_s:
            self._searched_s = self._now
            self._again_s = min(2 * self._again_s, LONGEST_PAUSE_S)
            calls.ask_again()
            calls.ask_next(self._now)

    def _go_on_following(self) -> None:
        assert self._leader is not None
        call = self._calls.find(self._leader.peer)
        if call is not None and self._now >= self._heard_s + self._pace.silence_s:
            call.set(Status.SILENT)
        if call is None or call.status is not Status.GATHERING:
            self._search()
            return
        self._calls.call_better(self._now, self._leader)
        best = self._calls.best()
        if best is not None and best < self._leader:
            self._follow(best)

    def _go_on_leading(self) -> None:
        best = self._calls.best()
        if best is not None and best < self._standing:
            self._follow(best)
            return
        self._calls.call_better(self._now, self._standing)
        complete = self._complete()
        if self._callers and (complete or self._now >= self._close_s):
            self._close()
        elif self._now >= self._close_s:
            self._end(Missed(self._why_alone()))
        elif self._now >= self._next_beat_s:
            self._beat()
        if self._phase is _Phase.LEADING and self._is_in_time and self._now >= self._invite_s:
            self._invite(*self._candidates)

    def _complete(self) -> bool:
        expected = self._awaited if self._awaited is not None else self._candidates
        if self._starts_together and any(c.view != self._view for c in self._callers.values()):
            return False
        return all(
            peer == self._me or peer in self._callers or peer in self._excluded for peer in expected
        )

    def _go_on_closing(self) -> None:
        if self._now < self._limit_s and not all(c.confirmed for c in self._callers.values()):
            return
        group = self._callers.group({self._me: self._row}, self._candidates)
        for peer, caller in self._callers.items():
            if not caller.confirmed:
                self._tell(peer, caller.number, Refused("it did not confirm in time"))
            elif len(group.peers) > 1:
                self._tell(peer, caller.number, group)
        self._callers.clear()
        self._end(Met(group, self._me) if len(group.peers) > 1 else Missed(self._why_alone()))

    # Leading and being led.

    def _lead(self) -> None:
        self._phase, self._leader = _Phase.LEADING, None
        self._beat()
        self._calls.hang_up_all_but_earlier(self._standing)

    def _beat(self) -> None:
        self._next_beat_s = self._now + self._pace.beat_s
        for peer in self._callers:
            self._tell_state(peer)

    def _invite(self, *peers: str) -> None:
        """Tell candidates that have not called who leads, once each."""
        for peer in peers:
            if peer == self._me or peer in self._callers or peer in self._invited:
                continue
            if peer in self._candidates and peer not in self._undialable:
                self._invited[peer] = self._calls.call(peer, Invite(self._standing))

    def _follow(self, leader: Standing) -> None:
        """Be led by a peer that has admitted this one; its own members are sent there."""
        self._phase, self._leader, self._heard_s = _Phase.FOLLOWING, leader, self._now
        self._group_size = max(self._group_size, 2)
        for peer in self._callers:
            self._tell_state(peer)
        self._calls.hang_up_all_but_better(leader)

    def _close(self) -> None:
        """Ask the members whether they are still there; nobody comes or goes any more."""
        self._phase = _Phase.CLOSING
        self._limit_s = self._now + self._pace.closing_s
        self._calls.hang_up_all(self._present_leader)
        for peer in self._callers:
            self._tell_state(peer)

    def _end(self, outcome: Met | Missed) -> None:
        self._phase = _Phase.OVER
        self._calls.hang_up_all(self._present_leader)
        for peer, caller in self._callers.items():
            self._tell(peer, caller.number, Refused("the meeting is over"))
        self._callers.clear()
        self._actions.append(outcome)

    # Small things.

    @property
    def _present_leader(self) -> Standing | None:
        if self._phase in (_Phase.LEADING, _Phase.CLOSING):
            return self._standing
        return self._leader

    def _hear_of(self, leader: Standing) -> None:
        """Somebody says that a peer leads: go there if it is better, tell it if it is worse."""
        if leader.peer == self._me or leader.peer in self._excluded or leader.rank < 0:
            return
        present = self._present_leader
        if present is not None and leader.peer == present.peer:
            return
        if present is None or leader < present:
            self._calls.hear_of(leader)
        elif self._phase is _Phase.LEADING:
            self._invite(leader.peer)

    def _leads_me(self, peer: str) -> bool:
        return self._leader is not None and self._leader.peer == peer

    def _tell_state(self, peer: str) -> None:
        """Tell a caller where this peer stands."""
        number = self._callers[peer].number
        if self._phase is _Phase.LEADING:
            answer: Message = Gathering(self._standing, 1 + len(self._callers))
        elif self._phase is _Phase.CLOSING:
            answer = Closing(self._standing)
        elif self._leader is not None:
            answer = Redirect(self._leader)
        else:
            answer = Searching(self._standing)
        self._tell(peer, number, answer)

    def _tell(self, peer: str, number: int, message: Message, *, mine: bool = False) -> None:
        self._actions.append(Tell(peer, number, mine, message))

    def _why_alone(self) -> str:
        """Say why there is no group, for the person who reads the log."""
        if self._phase is _Phase.BOUND and self._leader is not None:
            return f"peer {self._leader.peer} did not say who is in its group"
        if self._leader is not None:
            return f"peer {self._leader.peer} did not close its group"
        refusals = list(self._refusals.values())[:2]
        return "; ".join(["no other peer came to the group", *refusals])
