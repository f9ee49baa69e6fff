"""What became of the work. Every trained token has a number, so each can be looked for.

Inner steps of a machine count its tokens up. A contribution to a module holds the tokens from one
count to another, and the winning chain of the module names contributions. A token that is in none
of them is *on top* of a living peer's anchor; or it is *gone* with a crash, a leave, a move or a
pause before the next step; or else it is *lost*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .machine import Machine
from .world import World

_Spans = list[tuple[int, int]]


def _merged(spans: Iterable[tuple[int, int]]) -> _Spans:
    """Return the same tokens as spans in order that do not overlap."""
    found: _Spans = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many tokens are in spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def _without(spans: _Spans, others: _Spans) -> _Spans:
    """Return what is in some spans and not in others. Both are merged."""
    found: _Spans = []
    for begin, end in spans:
        for low, high in others:
            if high <= begin or low >= end:
                continue
            if low > begin:
                found.append((begin, low))
            begin = max(begin, high)
        if begin < end:
            found.append((begin, end))
    return found


@dataclass
class _Stay:
    """A time in which a peer trained a module."""

    begin: int
    end: int | None = None
    gone_from: int = 0
    """Once it has ended: tokens from this count on were in no contribution that this peer knew to
    be in a step."""
    why: str = ""


class Accounts:
    """What each peer trained, in one history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stays: dict[tuple[str, str], list[_Stay]] = {}

    def open(self, machine: Machine, module: str) -> bool:
        """Begin a stay, unless one is under way; tells whether."""
        stays = self._stays.setdefault((machine.peer, module), [])
        if stays and stays[-1].end is None:
            return False
        stays.append(_Stay(machine.tokens))
        return True

    def close(self, machine: Machine, module: str, why: str) -> None:
        """End a stay."""
        stay = self._stays[machine.peer, module][-1]
        stay.end, stay.gone_from = machine.tokens, machine.works[module].base
        stay.why = why

    def balance(self, finals: dict[str, str]) -> Counter[str]:
        """Count the tokens of honest peers, by what became of them.

        `finals`: the step in which the winning chain of each module ends.
        """
        found: Counter[str] = Counter()
        inside = self._contributed(finals)
        for place, stays in self._stays.items():
            machine, module = self._world.machines[place[0]], place[1]
            if not machine.is_honest:
                continue
            trained = _merged((s.begin, machine.tokens if s.end is None else s.end) for s in stays)
            missing = _without(trained, inside.get(place, []))
            found["trained"] += _length(trained)
            found["kept"] += _length(trained) - _length(missing)
            work = machine.works.get(module)
            if work is not None:
                rest = _without(missing, [(work.base, machine.tokens)])
                found["on_top"] += _length(missing) - _length(rest)
                missing = rest
            for stay in stays:
                if stay.end is not None:
                    rest = _without(missing, [(stay.gone_from, stay.end)])
                    found["gone"] += _length(missing) - _length(rest)
                    found[f"gone by {stay.why}"] += _length(missing) - _length(rest)
                    missing = rest
            found["lost"] += _length(missing)
            for begin, end in missing:
                self._say_lost(place, begin, end)
        return found

    def _say_lost(self, place: tuple[str, str], begin: int, end: int) -> None:
        """Say in the log which contributions had the tokens that are lost."""
        files = self._world.files.values() if self._world.log is not None else ()
        rows = [
            f"r{file.row.round_index} on {file.row.parent[:8]}"
            for file in files
            if (file.row.peer, file.row.module) == place and file.begin < end and file.end > begin
        ]
        what = f"lost of {place[1]}: {begin} to {end}, in {', '.join(rows) or 'no row'}"
        self._world.say(place[0], "!", what)

    def _contributed(self, finals: dict[str, str]) -> dict[tuple[str, str], _Spans]:
        """Return which tokens of each peer are in the winning chain of each module."""
        found: dict[tuple[str, str], _Spans] = {}
        for module, final in finals.items():
            for link in self._world.book.back_from(final):
                rows = link.step.rows if link.step is not None else ()
                for row in rows:
                    file = self._world.files[row.file]
                    found.setdefault((row.peer, module), []).append((file.begin, file.end))
        return {place: _merged(spans) for place, spans in found.items()}
