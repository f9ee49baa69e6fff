"""Calls that are made to a peer: for the meeting that it is in, and for others. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .calls import Absent, CallerMessage, Group, Heard, Invite, Join, Refused

# Members of a group, which so commits with up to as many others away. The leader sends the list of
# them to each: docs/design.md says what more would take.
GREATEST_GROUP = 256
# Calls that are held, and meetings that are remembered as over.
GREATEST_HELD = 2 * GREATEST_GROUP
GREATEST_REMEMBERED = 64


@dataclass
class Caller:
    """A peer that wants to be led by this one, or is."""

    number: int
    row: bytes
    view: bytes
    confirmed: bool = False


class Callers(dict[str, Caller]):
    """The calls to one peer in one meeting that stand."""

    def find(self, peer: str, number: int) -> Caller | None:
        """Return a peer's call if it has this number."""
        caller = self.get(peer)
        return caller if caller is not None and caller.number == number else None

    def drop(self, peer: str, number: int) -> None:
        """Forget a peer's call if it has this number."""
        if self.find(peer, number) is not None:
            del self[peer]

    def have_room_for(self, peer: str, candidates: Collection[str]) -> bool:
        """Tell whether one more may be in the group. A stranger gets no candidate's place."""
        if peer in self:
            return True
        others = self.keys() if peer in candidates else {*self, *candidates}
        return len(others) + (peer in candidates) < GREATEST_GROUP

    def group(self, own: Mapping[str, bytes], order: Collection[str]) -> Group:
        """Return the group of `own` and those who confirmed, in this order, then the others."""
        rows = {**own, **{peer: caller.row for peer, caller in self.items() if caller.confirmed}}
        peers = [peer for peer in order if peer in rows]
        peers += sorted(rows.keys() - set(peers))
        return Group(tuple(peers), tuple(rows[peer] for peer in peers))


@dataclass
class Reception:
    """Holds calls for meetings to come, and answers those for meetings that are over.

    Peers come to a boundary at different times, so a call can come before the meeting that it is
    for. One call of each peer and meeting is held; with too many, the oldest goes first. A shell
    asks this whenever a call is not for the meeting under way, whatever network it stands on.

    Meetings are named by any text that is the same on every peer.
    """

    _held: OrderedDict[tuple[str, str], Heard] = field(default_factory=OrderedDict)
    _over: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def hold(
        self, key: str, peer: str, number: int, message: CallerMessage
    ) -> Absent | Refused | None:
        """Take a call for a meeting that is not under way; return what the caller is told."""
        if key in self._over:
            return Refused("the group has closed")
        if not isinstance(message, (Join, Invite)):
            self.lost(key, peer, number)
            return None
        self._held[key, peer] = Heard(peer, number, False, message)
        self._held.move_to_end((key, peer))
        if len(self._held) > GREATEST_HELD:
            self._held.popitem(last=False)
        return Absent()

    def lost(self, key: str, peer: str, number: int) -> None:
        """Forget a held call that broke."""
        held = self._held.get((key, peer))
        if held is not None and held.number == number:
            del self._held[key, peer]

    def begin(self, key: str) -> list[Heard]:
        """Return the calls held for a meeting that begins, the earliest first."""
        self._over.pop(key, None)
        return [self._held.pop(place) for place in list(self._held) if place[0] == key]

    def end(self, key: str) -> None:
        """Remember that a meeting is over here."""
        self._over[key] = None
        if len(self._over) > GREATEST_REMEMBERED:
            self._over.popitem(last=False)


def note(lines: dict[str, str], peer: str, line: str) -> None:
    """Keep the first line about a peer, of a bounded number of peers."""
    if len(lines) < GREATEST_GROUP:
        lines.setdefault(peer, line)
