"""The reason to pause that somebody uses this machine (`--when-idle MINUTES`).

Keyboard and mouse are watched by the desktop, under X11 and Wayland alike, which tells logind since
when nobody has touched them (`IdleHint` of a session). A program can only ask.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from dipaco.base.errors import ConfigurationError

from .pause_reasons import Aside, Reason

_ANSWER_LIMIT_S = 5.0
# Sessions in which somebody sits at the machine, or could.
_GRAPHICAL = ("x11", "wayland", "mir")
_ASKED = ("Type", "State", "IdleHint", "IdleSinceHintMonotonic")


def in_use(minutes: float) -> Reason:
    """Return the reason that somebody has used this machine in the last so many minutes.

    Raises ConfigurationError where nobody says so.
    """
    if idle_s(sessions(), time.monotonic()) is None:
        raise ConfigurationError(
            "--when-idle: nobody says here when the machine was last used, because logind "
            "(loginctl) knows of no desktop; give --hours or --pause-while"
        )

    def reason() -> str:
        idle = idle_s(sessions(), time.monotonic())
        if idle is None or idle >= 60.0 * minutes:
            return ""
        return (
            f"somebody uses this machine, until it has been idle for {minutes:g} minutes "
            "(--when-idle)"
        )

    return Aside(reason)


def idle_s(found: Sequence[Mapping[str, str]], now_s: float) -> float | None:
    """Return for how long nobody has used any desktop; 0 while somebody does, None without one.

    `found` are the properties of sessions, `now_s` is seconds of the monotonic clock, in which
    logind counts microseconds. A session that has ended counts for nothing.
    """
    desktops = [
        one for one in found if one.get("Type") in _GRAPHICAL and one.get("State") != "closing"
    ]
    if not desktops:
        return None
    return min(
        now_s - int(one.get("IdleSinceHintMonotonic") or 0) / 1e6
        if one.get("IdleHint") == "yes"
        else 0.0
        for one in desktops
    )


def sessions(ask: Callable[[Sequence[str]], str] | None = None) -> list[dict[str, str]]:
    """Return the properties of all sessions that logind knows, none where it does not answer."""
    ask = ask or _loginctl
    names = [
        line.split()[0]
        for line in ask(("list-sessions", "--no-legend")).splitlines()
        if line.split()
    ]
    if not names:
        return []
    told = ask(("show-session", *names, *(f"--property={name}" for name in _ASKED)))
    return [
        dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        for block in told.split("\n\n")
    ]


def _loginctl(words: Sequence[str]) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["loginctl", *words],
            capture_output=True,
            text=True,
            timeout=_ANSWER_LIMIT_S,
            check=False,
        )
        return done.stdout
    return ""
