"""`--when-idle`: who uses the machine is asked of logind, which hears it from the desktop."""

import pytest

from dipaco.base.errors import ConfigurationError
from dipaco.peer.owner import idle
from dipaco.peer.owner.idle import idle_s, in_use, sessions

NOW_S = 5000.0
IN_USE = "Type=wayland\nState=active\nIdleHint=no\nIdleSinceHintMonotonic=0\n"
REMOTE = "Type=tty\nState=active\nIdleHint=no\nIdleSinceHintMonotonic=0\n"


def desktop(idle_for_s, kind="x11", state="active"):
    since = int((NOW_S - idle_for_s) * 1e6)
    return f"Type={kind}\nState={state}\nIdleHint=yes\nIdleSinceHintMonotonic={since}\n"


def told(*blocks):
    """Return what is read of sessions about which loginctl prints these blocks."""
    words = []

    def ask(asked):
        words.append(asked)
        if asked[0] == "list-sessions":
            return "".join(f"{number:>7} 1000 ann seat0 tty2\n" for number in range(len(blocks)))
        return "\n".join(blocks)

    found = sessions(ask)
    assert not blocks or words[1][1 : 1 + len(blocks)] == tuple(map(str, range(len(blocks))))
    return found


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((), None),
        # Somebody who came in over the network sits at no keyboard of this machine.
        ((REMOTE,), None),
        ((IN_USE,), 0.0),
        ((desktop(600),), 600.0),
        ((desktop(600), desktop(90, "wayland"), REMOTE), 90.0),
        ((desktop(600), IN_USE), 0.0),
        ((desktop(600), desktop(5, state="closing")), 600.0),
    ],
)
def test_for_how_long_nobody_has_used_a_desktop(blocks, expected):
    assert idle_s(told(*blocks), NOW_S) == expected


def test_a_peer_pauses_while_somebody_is_at_the_desktop(monkeypatch):
    now = [idle.time.monotonic()]
    monkeypatch.setattr(idle.time, "monotonic", lambda: now[0])
    shown = [{"Type": "x11", "State": "active", "IdleHint": "no"}]
    monkeypatch.setattr(idle, "sessions", lambda: shown)
    monkeypatch.setattr(idle, "Aside", lambda reason: reason)
    reason = in_use(10.0)
    assert reason() == "somebody uses this machine, until it has been idle for 10 minutes (--when-idle)"
    shown[0] |= {"IdleHint": "yes", "IdleSinceHintMonotonic": str(int(now[0] * 1e6))}
    now[0] += 599.0
    assert "somebody" in reason()
    now[0] += 2.0
    assert reason() == ""
    # Everybody has logged out.
    shown.clear()
    assert reason() == ""


def test_where_nobody_knows_the_flag_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="knows of no desktop; give --hours"):
        in_use(10.0)
