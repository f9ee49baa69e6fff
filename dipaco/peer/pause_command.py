"""`dipaco-peer pause`, `resume` and `status`: tell the peer on this machine to stop and go
on, and ask what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from dipaco.base.command_line import Command
from dipaco.base.errors import NetworkError
from dipaco.base.settings import Option, Settings
from dipaco.peer.owner.pauses import activity_file, ask_to_pause, ask_to_resume
from dipaco.protocol.identity import KEY_FILE, is_in_use

from .peer_settings import default_cache_folder

# Publishing the last work takes a few seconds, after the inner step under way.
LIMIT_S = 60.0
_LOOK_S = 0.1
_ENDED = "the peer has ended"


@dataclass(frozen=True, kw_only=True)
class ControlSettings(Settings):
    """Selects the peer with this cache folder."""

    cache_folder: Annotated[
        Path, Option("the cache folder of the peer", "DIR", flag="--cache-dir")
    ] = field(default_factory=default_cache_folder)


def pause(settings: ControlSettings) -> int:
    """Make it stop training, and wait until it has stopped."""
    return max(_pause(one) for one in _peers(settings))


def _pause(settings: ControlSettings) -> int:
    ask_to_pause(settings.cache_folder)
    if not _is_running(settings):
        print(f"no peer is running with {settings.cache_folder}; the next one starts paused")
        return 0
    activity = _wait(settings, lambda activity: activity.startswith("paused"))
    if activity == _ENDED:
        print(f"{_ENDED}; the next one starts paused")
    else:
        print(f"{activity}; device and memory are free, its states are still served")
    return 0


def resume(settings: ControlSettings) -> int:
    """Make it train again, and wait until it has begun, or says why not."""
    return max(_resume(one) for one in _peers(settings))


def _resume(settings: ControlSettings) -> int:
    ask_to_resume(settings.cache_folder)
    if not _is_running(settings):
        print(f"no peer is running with {settings.cache_folder}; the next one trains at once")
        return 0
    print(_wait(settings, lambda activity: "by dipaco-peer pause" not in activity))
    return 0


def status(settings: ControlSettings) -> int:
    """Print what the peer does and what its owner has given."""
    # Imported here: what reads chains takes a second, and pausing is for those in a hurry.
    from .own_total import lines_about

    for line in lines_about(settings.cache_folder):
        print(line)
    return 0


def _peers(settings: ControlSettings) -> list[ControlSettings]:
    """Return the trainers of `--devices` that are running with this folder, or else the peer."""
    folders = sorted(settings.cache_folder.glob("trainer-*"))
    trainers = [replace(settings, cache_folder=folder) for folder in folders]
    return [one for one in trainers if _is_running(one)] or [settings]


def _is_running(settings: ControlSettings) -> bool:
    return is_in_use(settings.cache_folder / KEY_FILE)


def _wait(settings: ControlSettings, is_done: Callable[[str], bool]) -> str:
    """Return what the peer says that it does, once it is what was asked for, or it has ended."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        try:
            activity = activity_file(settings.cache_folder).read_text().strip()
        except OSError:
            activity = ""
        if activity and is_done(activity):
            return activity
        if not _is_running(settings):
            return _ENDED
        time.sleep(_LOOK_S)
    raise NetworkError(
        f"the peer did not do so within {LIMIT_S:.0f} s; it may still be joining, or be in a "
        "long inner step, and will do it after that"
    )


COMMANDS = {
    "pause": Command(
        "dipaco-peer pause",
        ControlSettings,
        pause,
        description="Pause the running peer until it is told to continue: it publishes its last "
        "work, gives up its path, frees the device and the memory, and still serves its states.",
        epilog="kill -USR1 and -USR2 with the peer's process id do the same.",
    ),
    "resume": Command(
        "dipaco-peer resume",
        ControlSettings,
        resume,
        description="Let a paused peer claim a path again.",
    ),
    "status": Command(
        "dipaco-peer status",
        ControlSettings,
        status,
        description="Say what the peer of this machine does, how many of its tokens are in the "
        "model, and what a friend types to join through it. It asks nobody.",
    ),
}
