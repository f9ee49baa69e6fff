"""`dipaco-replay`: play again what a peer decided.

dipaco-replay peer.jsonl
dipaco-replay peer.jsonl --trace L0.E1
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dipaco.modules.command_line import Command, Option, Settings


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """What `dipaco-replay` can be told."""

    file: Annotated[
        Path, Option("a recording made with dipaco-peer --record", "FILE", positional=True)
    ]
    trace: Annotated[
        str | None,
        Option("show the calls that mention this: a module, a peer, a kind of event", "TEXT"),
    ] = None


def run(settings: ReplaySettings) -> int:
    """Play a recording; 1 when a call gives other actions than were recorded."""
    # Importing the member takes a second; --help and mistakes should not.
    from .member.recording import play, read_recording, show

    if settings.trace is not None:
        _, calls = read_recording(settings.file)
        for number, call in calls:
            for line in show(number, call.now_s, call.event, call.actions, settings.trace):
                print(line)
        return 0
    played = play(settings.file)
    if played.difference is None:
        print(f"{played.calls:,} events gave {played.actions:,} actions, all as recorded")
        return 0
    found = played.difference
    print(f"line {found.line}: this version decides otherwise")
    for name, actions in (("recorded", found.recorded), ("played", found.played)):
        print(f"{name}:")
        for line in show(found.line, found.now_s, found.event, actions, ""):
            print(f"  {line}")
    return 1


COMMAND = Command(
    "dipaco-replay",
    ReplaySettings,
    run,
    description="Play what a peer recorded through the code of this version, and compare.",
    epilog="Example: dipaco-replay peer.jsonl --trace L0.E1 shows all that concerned a module. "
    "Exit code 1: this version decides otherwise somewhere; the others: docs/exit-codes.md.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
