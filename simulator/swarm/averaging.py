"""Meetings and reduces: how the members of a group find each other, and average.

The meeting is the real one (`dipaco.peer.member.meeting`) over simulated calls. The reduce is
modelled: when all members have come, each sends its parts to those that can be called, which takes
what the slowest link takes; then each gets the averaged parts from all of them. A member that is
missing in the first half makes it fail for all, and a reducer that is missing in the second half
for those that had not got its part: some may end with the average, and others without. A reducer
that averages wrongly is found out by each other member by chance, as it draws pieces, and by all
whom a member that found it can tell: they fail, and name it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dipaco.dht.view import greatest_contribution
from dipaco.modules.outer import Contribution, Usual, bounded_table, canonical_table, sections
from dipaco.peer.member import calls, events
from dipaco.peer.member.actions import Average, Await
from dipaco.peer.member.gathering import meeting_times, takes_long
from dipaco.peer.member.meeting import Meeting
from dipaco.peer.member.reception import Reception

from .network import CALL_BYTES, MEETINGS, REDUCES
from .work import Content, Snapshot
from .world import Body

# How long a reduce waits for a member that says nothing, as a share of the commit window.
STALL_SHARE = 0.15
# How many pieces a member checks of what others have averaged.
CHECKED_PIECES = 8
WRONG = "averaged wrongly"
# The numbers of a machine's calls, for each meeting.
NUMBERS = 10_000

OnAveraged = Callable[[Average, tuple[Contribution, ...], dict[str, Content]], None]


class _Average:
    """One action under way: first the meeting, then the reduce."""

    def __init__(self, action: Average, key: str, snapshot: Snapshot) -> None:
        self.action, self.key, self.snapshot = action, key, snapshot
        self.meeting: Meeting | None = None
        self.group: tuple[str, ...] = ()
        self.waking = 0
        self.is_over = False
        self.is_slow = False


class Averaging:
    """Of one life of one machine."""

    def __init__(self, machine: Body, on_averaged: OnAveraged) -> None:
        self._machine = machine
        self._world = machine.world
        self._on_averaged = on_averaged
        self._under_way: dict[str, _Average] = {}
        """By the key of the meeting."""
        self._reception = Reception()
        self._calls: dict[tuple[str, int, bool], str] = {}
        """Open calls: the other side, the caller's number, whether made here; and the key."""
        self._meetings = 0

    # -- actions

    def begin(self, action: Average) -> None:
        """Meet the others."""
        machine = self._machine
        work = machine.works.get(action.module)
        snapshot = work.snapshots.get(action.round_index) if work is not None else None
        if snapshot is None:
            self._world.watch.wrong(machine, f"averages {action.module} without a snapshot")
            return
        key = f"{action.module}/{action.round_index}/{action.attempt}/{action.anchor}"
        average = _Average(action, key, snapshot)
        rounds = self._world.plan.rounds
        now_s = self._world.now_s
        close_s = machine.true_s(action.close_s)
        is_counted = rounds.inner_steps > 0
        start_s, give_up_s = meeting_times(
            close_s,
            machine.true_s(action.end_s),
            action.attempt,
            rounds.matchmaking_s,
            is_awaited=is_counted,
        )
        self._meetings += 1
        average.meeting = Meeting(
            machine.peer,
            action.candidates,
            self._row(average),
            lambda peer, row: self._objection(average, peer, row),
            now_s=now_s,
            window_s=rounds.matchmaking_s,
            start_s=start_s,
            close_s=close_s,
            give_up_s=give_up_s,
            awaited=action.awaited,
            excluded=action.excluded,
            undialable=action.undialable,
            first_number=self._meetings * NUMBERS,
        )
        self._under_way[key] = average
        machine.later(max(0.0, machine.true_s(action.end_s) - now_s), self._time_is_up, average)
        self._step(average, calls.Passed())
        for heard in self._reception.begin(key):
            self._step(average, heard)

    def await_peers(self, action: Await) -> None:
        """Tell the meeting of a module whom it waits for."""
        for average in list(self._under_way.values()):
            if average.action.module == action.module:
                self._step(average, calls.Awaiting(action.peers))

    def end(self) -> None:
        """The path in training has changed, or the machine is down: all calls break."""
        for average in self._under_way.values():
            average.is_over = True
        self._under_way.clear()
        world, me = self._world, self._machine.peer
        if not self._machine.link.hangs:
            for (peer, number, mine), key in list(self._calls.items()):
                other = world.machines.get(peer)
                if other is not None and world.network.links[peer].side == self._machine.link.side:
                    world.engine.after(
                        0.1,
                        world.network.run,
                        peer,
                        other.link.life,
                        other.hear_broken_call,
                        me,
                        number,
                        not mine,
                        key,
                    )
        self._calls.clear()

    # -- the meeting

    def _row(self, average: _Average) -> bytes:
        path, tokens = self._machine.path, average.snapshot.tokens
        return json.dumps([path, self._machine.peer, tokens]).encode()

    def _objection(self, average: _Average, peer: str, row: bytes) -> str | None:
        """Say why a row is refused, as the group of the real averager does."""
        path, name, tokens = json.loads(row)
        world, module = self._world, average.action.module
        if not world.directory.is_in(peer):
            return "it has no admission"
        if name != peer or path not in world.grid.paths_of_module(module):
            return f"its row names {name} and path {path}"
        now_s = self._machine.believed_s
        greatest = greatest_contribution(world.plan, now_s, average.action.round_index)
        if not 0 < tokens <= greatest:
            return f"{tokens} tokens are impossible"
        return None

    def _step(self, average: _Average, event: calls.MeetingEvent) -> None:
        meeting = average.meeting
        if meeting is None or average.is_over:
            return
        for action in meeting.step(self._world.now_s, event):
            if isinstance(action, calls.Call):
                self._open(average.key, action)
            elif isinstance(action, calls.Tell):
                self._tell(average.key, action)
            elif isinstance(action, calls.Met):
                self._met(average, action)
                return
            else:
                self._fail(average, action.reason)
                return
        average.waking += 1
        delay_s = max(0.01, meeting.wake_s - self._world.now_s)
        self._machine.later(delay_s, self._wake, average, average.waking)

    def _wake(self, average: _Average, number: int) -> None:
        if number == average.waking:
            self._step(average, calls.Passed())

    def _open(self, key: str, action: calls.Call) -> None:
        world, me = self._world, self._machine.peer
        network, peer = world.network, action.peer
        self._machine.link.traffic.ask(MEETINGS)
        self._calls[peer, action.number, True] = key
        other = world.machines.get(peer)
        if other is not None and network.can_call(me, peer):
            said = (me, action.number, False, key, action.message)
            network.tell(me, peer, other.hear_call, *said, kind=MEETINGS)
            return
        link = network.links.get(peer)
        if link is not None and (link.hangs or link.side != self._machine.link.side):
            return  # Silence.
        self._machine.later(0.2, self.call_broke, peer, action.number, True, key)

    def _tell(self, key: str, action: calls.Tell) -> None:
        other = self._world.machines.get(action.peer)
        if isinstance(action.message, calls.LAST_MESSAGES):
            self._calls.pop((action.peer, action.number, action.mine), None)
        if other is not None:
            me = self._machine.peer
            self._world.network.tell(
                me,
                action.peer,
                other.hear_call,
                me,
                action.number,
                not action.mine,
                key,
                action.message,
                size=CALL_BYTES + _list_bytes(action.message),
                kind=MEETINGS,
            )

    def hear(self, peer: str, number: int, mine: bool, key: str, message: calls.Message) -> None:
        """The other side of a call has said something; `mine`: this machine made the call."""
        if isinstance(message, calls.LAST_MESSAGES):
            self._calls.pop((peer, number, mine), None)
        elif not mine:
            self._calls[peer, number, mine] = key
        average = self._under_way.get(key)
        if average is not None and average.meeting is not None:
            self._step(average, calls.Heard(peer, number, mine, message))
        elif not mine:
            assert isinstance(message, calls.CallerMessage)
            answer = self._reception.hold(key, peer, number, message)
            if answer is not None:
                self._tell(key, calls.Tell(peer, number, False, answer))

    def call_broke(self, peer: str, number: int, mine: bool, key: str) -> None:
        """The other side of a call is gone."""
        if self._calls.pop((peer, number, mine), None) is None:
            return
        average = self._under_way.get(key)
        if average is not None:
            self._step(average, calls.Lost(peer, number, mine))
        elif not mine:
            self._reception.lost(key, peer, number)

    # -- how it ends

    def _met(self, average: _Average, met: calls.Met) -> None:
        """The group is closed: reduce, if its leader's list is one that others could be told."""
        average.meeting, group = None, met.group
        self._reception.end(average.key)
        for peer, row in zip(group.peers, group.rows, strict=True):
            objection = self._objection(average, peer, row)
            if objection is not None:
                candidates = average.action.candidates
                average.group = tuple(p for p in group.peers if p in candidates)
                culprits = tuple(dict.fromkeys((met.leader, peer)))
                self._fail(average, f"group refused: peer {peer}: {objection}", culprits)
                return
        average.group = group.peers
        place = (average.key, group.peers)
        reduces, machine = self._world.reduces, self._machine
        if place not in reduces:
            rows = [json.loads(row) for row in group.rows]
            anchor = average.snapshot.anchor
            usual = Usual.of(anchor.progress, anchor.reference.version)
            gathered = [Contribution(path, peer, tokens) for path, peer, tokens in rows]
            table = bounded_table(canonical_table(gathered), usual)
            reduces[place] = Reduce(machine, table, lambda: reduces.pop(place, None))
        table = reduces[place].table
        action = average.action
        average.is_slow = takes_long(action.close_s, action.end_s, reduces[place].needs_s)
        if self._world.trace.keep:
            self._world.say(machine.peer, "meets", f"{average.key[:20]} {','.join(group.peers)}")

        def done(shifts: dict[str, Content] | None, reason: str, culprits: tuple[str, ...]) -> None:
            if average.is_over:
                return
            if shifts is None:
                is_proven = reason.endswith(WRONG)
                if is_proven:
                    self._world.watch.found_out(machine, action.anchor, table)
                self._fail(average, reason, culprits, is_proven)
                return
            self._close(average)
            self._on_averaged(action, table, shifts)
            machine.deliver(
                events.Averaged(action.module, action.round_index, action.attempt, table)
            )

        reduces[place].come(machine, average.snapshot.shift, done)

    def _time_is_up(self, average: _Average) -> None:
        if average.is_over:
            return
        latest_s = self._machine.true_s(average.action.latest_s) - self._world.now_s
        if average.is_slow and latest_s > 0:
            self._machine.later(latest_s, self._time_is_up, average)
        else:
            self._fail(average, "the window has passed")

    def _fail(
        self,
        average: _Average,
        reason: str,
        culprits: tuple[str, ...] = (),
        is_proven: bool = False,
    ) -> None:
        if average.is_over:
            return
        self._close(average)
        action, members = average.action, average.group
        self._machine.deliver(
            events.AverageFailed(
                action.module,
                action.round_index,
                action.attempt,
                reason,
                culprits,
                members,
                is_proven,
            )
        )

    def _close(self, average: _Average) -> None:
        average.is_over = True
        self._under_way.pop(average.key, None)


def _list_bytes(message: calls.Message) -> int:
    """Return what a message has beyond a call: the leader's list."""
    return sum(map(len, message.rows)) if isinstance(message, calls.Group) else 0


class Reduce:
    """The exchange of one group, seen from above."""

    def __init__(
        self, first: Body, table: tuple[Contribution, ...], forget: Callable[[], object]
    ) -> None:
        self._world = first.world
        self.table = table
        self._forget = forget
        self._peers = [row.peer for row in table]
        self._lives: dict[str, int] = {}
        self._done: dict[str, Callable[..., None]] = {}
        self._shifts: dict[str, Content] = {}
        self._found: dict[str, str] = {}
        """Who has found out a reducer by itself, and which."""
        self._half_s = self._needs_s()
        self.needs_s = 2 * self._half_s
        stall_s = STALL_SHARE * self._world.plan.rounds.window_s
        self._patience_s = max(3.0, stall_s)
        self._world.engine.after(self._patience_s, self._nobody_else_comes)

    def _needs_s(self) -> float:
        """Return what one half takes over the slowest link, and count the bytes."""
        world, count = self._world, len(self._peers)
        links = [world.network.links[peer] for peer in self._peers]
        reducers = max(1, sum(link.can_be_called for link in links))
        levels = len(sections(count))
        size = world.state_bytes / 4  # Half of the state is parameters, sent in 16 bits.
        slowest = 0.0
        for link in links:
            reduces = link.can_be_called
            sent = size * (reducers - reduces) / reducers
            received = size * (count - levels) / reducers if reduces else 0.0
            # In two levels sums go to the roots, in 32 bits, and averages come back.
            sums = 2 * size * (levels - 1) / reducers if reduces else 0.0
            link.traffic.move(REDUCES, 2 * (sent + received) + 3 * sums)
            slowest = max(slowest, (sent + sums) / link.uplink, (received + sums) / link.downlink)
        return slowest + 2 * max(link.latency_s for link in links)

    def come(self, machine: Body, shift: Content, done: Callable[..., None]) -> None:
        """A member is ready; `done` gets everybody's contribution, or why there is none."""
        peer = machine.peer
        self._lives[peer] = machine.link.life
        self._shifts[peer] = shift
        self._done[peer] = done
        if len(self._lives) == len(self._peers):
            self._world.engine.after(self._half_s, self._half)

    def _nobody_else_comes(self) -> None:
        missing = tuple(peer for peer in self._peers if peer not in self._lives)
        if missing:
            for peer in list(self._done):
                self._fail(peer, "did not come to the reduce", missing)

    def _is_there(self, peer: str) -> bool:
        link = self._world.network.links[peer]
        awake = link.awake_s <= self._world.now_s
        return link.is_up and link.life == self._lives[peer] and awake

    def _reaches(self, one: str, other: str) -> bool:
        """Tell whether two members can exchange what they have to."""
        if one == other:
            return True
        links = self._world.network.links
        if not (links[one].can_be_called or links[other].can_be_called):
            return True  # Neither reduces a part for the other.
        return self._is_there(other) and self._world.network.can_talk(one, other)

    def _all_are_there(self) -> bool:
        """Tell whether nobody is missing, to anybody."""
        now_s, links, lives = self._world.now_s, self._world.network.links, self._lives
        side = links[self._peers[0]].side
        for peer in self._peers:
            link = links[peer]
            if not link.is_up or link.life != lives[peer]:
                return False
            if link.awake_s > now_s or link.side != side:
                return False
        return True

    def _broken(self) -> dict[str, tuple[str, ...]]:
        """Return whose parts each member lacks."""
        saboteurs = [p for p in self._peers if self._world.machines[p].spoils_reduces]
        if not saboteurs and self._all_are_there():
            return {}
        return {
            peer: tuple(p for p in self._peers if not self._reaches(peer, p) or p in saboteurs)
            for peer in self._peers
        }

    def _half(self) -> None:
        """Everybody has sent its parts, or not."""
        broken, engine = self._broken(), self._world.engine
        is_broken = any(broken.values())
        if not is_broken:
            self._check()
        for peer in self._peers:
            if is_broken:
                # Who is not there itself learns of it, if ever, when it is back.
                missing = broken[peer] or tuple(p for p in self._peers if broken[p])[:1]
                why = "did not send its parts"
                delay_s = engine.between(0.3, 1.0) * self._patience_s
                engine.after(delay_s, self._fail, peer, why, missing)
            else:
                delay_s = self._half_s + engine.between(0.0, 1.0)
                engine.after(delay_s, self._finish, peer)

    def _finish(self, peer: str) -> None:
        """A member has got all averaged parts, or not."""
        links = self._world.network.links
        missing: tuple[str, ...] = ()
        if not self._all_are_there():
            missing = tuple(
                other
                for other in self._peers
                if links[other].can_be_called and not self._reaches(peer, other)
            )
        liars = self._found_out_by(peer)
        if missing:
            self._fail(peer, "did not send its averaged part", missing)
        elif liars:
            self._fail(peer, WRONG, liars)
        else:
            self._end(peer, self._shifts, "", ())

    def _check(self) -> None:
        """Let each member check some pieces of what others that can be called have averaged.

        In two levels nobody can: a reducer averages sums there, which nobody has committed to.
        """
        machines, links = self._world.machines, self._world.network.links
        for liar in self._peers if len(sections(len(self._peers))) == 1 else ():
            share = machines[liar].falsified_share
            if not share or not links[liar].can_be_called:
                continue
            reducers = sum(links[peer].can_be_called for peer in self._peers)
            # Of the pieces that others have averaged, so many are this one's.
            is_drawn = share / max(1, reducers - 1)
            for peer in self._peers:
                is_honest = machines[peer].is_honest
                if is_honest and self._world.engine.chance(1 - (1 - is_drawn) ** CHECKED_PIECES):
                    self._found.setdefault(peer, liar)

    def _found_out_by(self, peer: str) -> tuple[str, ...]:
        """Return the reducers that a member has found out, or was told of, and asked itself.

        Two that cannot be called hear of each other from those that can.
        """
        links, machines = self._world.network.links, self._world.machines
        relayed = any(links[p].can_be_called and machines[p].is_honest for p in self._peers)
        found = set()
        for finder, liar in self._found.items():
            exchanges = relayed or links[peer].can_be_called or links[finder].can_be_called
            if finder == peer or (exchanges and self._reaches(peer, finder)):
                found.add(liar)
        return tuple(sorted(found))

    def _fail(self, peer: str, why: str, missing: tuple[str, ...]) -> None:
        culprits = tuple(other for other in missing if other != peer)
        self._end(peer, None, f"peer {', '.join(culprits) or 'nobody'} {why}", culprits)

    def _end(self, peer: str, *result: Any) -> None:
        done = self._done.pop(peer, None)
        if done is not None:
            self._world.network.run(peer, self._lives[peer], done, *result)
        if not self._done and len(self._lives) == len(self._peers):
            self._forget()
