"""What went into a member and what came out, as lines of JSON that can be played again.

The first line says who the member is and what it knew; every further one is a call: time, event,
actions. A volunteer's recording (`dipaco-peer --record FILE`) is a bug report that anybody can step
through, and once the bug is mended it is a test.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, TypeVar

from dipaco.dht.certificates import Certificate
from dipaco.dht.view import SwarmView
from dipaco.modules.errors import IntegrityError, StorageError
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from .actions import Action
from .events import Event
from .knowledge import MemberSettings
from .member import Member

logger = logging.getLogger("dipaco.peer.member.recording")

_JSON = ConfigDict(
    ser_json_bytes="base64",
    val_json_bytes="base64",
    ser_json_inf_nan="constants",
    arbitrary_types_allowed=True,
)


class _Begin(BaseModel):
    """The first line of a recording."""

    model_config = _JSON

    format: Literal["dipaco-record/1"] = "dipaco-record/1"
    settings: MemberSettings
    plan: RunPlan
    held: tuple[StateReference, ...]
    certificates: tuple[Certificate, ...]


class _Call(BaseModel):
    """One call of the member."""

    model_config = _JSON

    now_s: float
    event: Annotated[Event, Field(discriminator="kind")]
    actions: list[Annotated[Action, Field(discriminator="kind")]]


_Model = TypeVar("_Model")
_BEGIN = TypeAdapter(_Begin)
_CALL = TypeAdapter(_Call)


def start_member(
    settings: MemberSettings,
    plan: RunPlan,
    held: tuple[StateReference, ...] = (),
    certificates: Iterable[Certificate] = (),
) -> Member:
    """Return a member as it is at its start: for its shells and for playing it again.

    `held` are the states on its disk, and `certificates` what lies beside them.
    """
    grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
    member = Member(settings, plan, grid, held=held)
    member.known.recall(certificates)
    return member


class RecordFile:
    """Writes a recording. Used by the shell of a peer, on its thread.

    A full disk ends the recording, with one line, and nothing else. Raises `StorageError` when the
    file cannot be made.
    """

    def __init__(
        self,
        path: Path,
        settings: MemberSettings,
        plan: RunPlan,
        held: tuple[StateReference, ...],
        certificates: tuple[Certificate, ...],
    ) -> None:
        self._path = path
        begin = _Begin(settings=settings, plan=plan, held=held, certificates=certificates)
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise StorageError(
                f"cannot write the recording {path}: {error.strerror}; choose another --record"
            ) from None
        self._write(_BEGIN.dump_json(begin))

    def record(self, now_s: float, event: Event, actions: Iterable[Action]) -> None:
        """Write one call of the member."""
        call = _Call.model_construct(now_s=now_s, event=event, actions=list(actions))
        self._write(_CALL.dump_json(call))

    def _write(self, line: bytes) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            logger.warning("the recording %s ends here: %s", self._path, error)
            with contextlib.suppress(OSError):
                self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Difference:
    """A call that gave other actions than were recorded."""

    line: int
    """Of the file, the first being 1."""
    now_s: float
    event: Event
    recorded: tuple[Action, ...]
    played: tuple[Action, ...]


@dataclass(frozen=True)
class Played:
    """How playing a recording went."""

    calls: int
    actions: int
    difference: Difference | None
    """The first, if there is one; nothing is played after it."""


def read_recording(path: Path) -> tuple[Member, Iterator[tuple[int, _Call]]]:
    """Return the member of a recording at its start, and its calls with their line numbers.

    Raises `StorageError`, and `IntegrityError` for what is no recording. A last line that was cut
    off, by a crash say, is left out.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None
    begin = _parse(_BEGIN, path, 1, lines[0])
    member = start_member(begin.settings, begin.plan, begin.held, begin.certificates)
    return member, (
        (number, _parse(_CALL, path, number, line))
        for number, line in enumerate(lines[1:-1], start=2)
    )


def _parse(adapter: TypeAdapter[_Model], path: Path, number: int, line: bytes) -> _Model:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise IntegrityError(
            f"{path}, line {number}: no recording of this version: {where}: {first['msg']}"
        ) from None


def play(path: Path) -> Played:
    """Play a recording again, until a call gives other actions than were recorded."""
    member, calls = read_recording(path)
    count = actions = 0
    for number, call in calls:
        played = member.handle(call.event, call.now_s)
        count += 1
        actions += len(played)
        if played != call.actions:
            return Played(
                count,
                actions,
                Difference(number, call.now_s, call.event, tuple(call.actions), tuple(played)),
            )
    return Played(count, actions, None)


def show(
    line: int, now_s: float, event: Event, actions: Iterable[Action], text: str
) -> Iterator[str]:
    """Yield lines about a call for people, if it mentions `text`."""
    shown = [f"{line:6} {now_s:.3f} {_brief(event)}", *(f"       -> {_brief(a)}" for a in actions)]
    if any(text in part for part in shown):
        yield from shown


def _brief(value: Event | Action) -> str:
    """Return an event or action on one line; a view as the numbers of what is in it."""
    parts = []
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, SwarmView):
            part = f"{len(part.peers)} peers, {len(part.claims)} claims"
        elif isinstance(part, StateReference):
            part = f"{part.module} version {part.version} {part.digest[:12]}"
        elif isinstance(part, tuple) and part and isinstance(part[0], Certificate):
            part = f"{len(part)} certificates"
        if field.name != "kind":
            parts.append(f"{field.name}={part}")
    return f"{type(value).__name__}({', '.join(parts)})"
