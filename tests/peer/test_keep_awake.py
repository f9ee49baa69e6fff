"""While a peer trains, the machine does not go to sleep; afterwards it does, whatever ended it."""

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from dipaco.peer.owner.keep_awake import KeepAwake

# Stands for systemd-inhibit: runs its last word, and writes down from when to when.
INHIBIT = """#!/bin/bash
echo taken >> {log}
"${{@: -1}}"
echo given back >> {log}
"""
LIMIT_S = 120.0


def install(folder, monkeypatch, text):
    program = folder / "systemd-inhibit"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def wait_for_lines(log, lines):
    until_s = time.monotonic() + LIMIT_S
    while not log.exists() or log.read_text().splitlines() != lines:
        assert time.monotonic() < until_s, log.read_text() if log.exists() else "nothing"
        time.sleep(0.02)


def test_the_lock_is_held_while_a_peer_trains(tmp_path, monkeypatch):
    log = tmp_path / "log"
    install(tmp_path, monkeypatch, INHIBIT.format(log=log))
    awake = KeepAwake()
    awake.on_event("claimed", {})
    awake.on_event("training", {})
    awake.on_event("training", {})
    awake.on_event("inner", {})
    wait_for_lines(log, ["taken"])
    awake.on_event("paused", {})
    awake.on_event("paused", {})
    wait_for_lines(log, ["taken", "given back"])
    awake.on_event("training", {})
    wait_for_lines(log, ["taken", "given back", "taken"])
    awake.on_event("leaving", {})
    awake.release()
    wait_for_lines(log, ["taken", "given back", "taken", "given back"])


def test_the_lock_ends_with_a_peer_that_is_killed(tmp_path, monkeypatch):
    log = tmp_path / "log"
    install(tmp_path, monkeypatch, INHIBIT.format(log=log))
    program = (
        "import time; from dipaco.peer.owner.keep_awake import KeepAwake\n"
        "awake = KeepAwake(); awake.on_event('training', {}); time.sleep(600)"
    )
    peer = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for_lines(log, ["taken"])
    finally:
        peer.kill()
        peer.wait()
    wait_for_lines(log, ["taken", "given back"])


@pytest.mark.parametrize("text", ["#!/bin/sh\necho Access denied >&2; exit 1", None])
def test_without_such_a_lock_a_peer_trains_and_says_so_once(text, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "dipaco.peer.owner.keep_awake")
    if text is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        install(tmp_path, monkeypatch, text)
    awake = KeepAwake()
    awake.on_event("training", {})
    until_s = time.monotonic() + LIMIT_S
    while not caplog.records:
        assert time.monotonic() < until_s
        threading.Event().wait(0.02)
        awake.on_event("inner", {})
    awake.on_event("training", {})
    awake.on_event("inner", {})
    awake.on_event("leaving", {})
    [record] = caplog.records
    assert record.levelno == logging.DEBUG
    assert ("Access denied" if text else "No such file") in record.getMessage()


def test_a_lock_that_is_killed_holds_nobody_up(tmp_path, monkeypatch, caplog):
    """What it has started then still has its output open, and ends only with its input."""
    caplog.set_level(logging.DEBUG, "dipaco.peer.owner.keep_awake")
    install(tmp_path, monkeypatch, '#!/bin/bash\n"${@: -1}" <&0 &\nkill -KILL $$\n')
    awake = KeepAwake()
    awake.on_event("training", {})

    def train():
        while not caplog.records:
            threading.Event().wait(0.02)
            awake.on_event("inner", {})

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(LIMIT_S / 4)
    assert not training.is_alive()
    awake.release()
