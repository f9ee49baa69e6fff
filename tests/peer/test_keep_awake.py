"""While a peer trains, the machine does not go to sleep; afterwards it does, whatever ended it."""

import os
import subprocess
import sys

import pytest

from dipaco.peer.owner.keep_awake import KeepAwake
from support.waiting import wait_until

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
    wait_until(lambda: log.exists() and log.read_text().splitlines() == lines, LIMIT_S)


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


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1", None])
def test_without_such_a_lock_a_peer_trains(text, tmp_path, monkeypatch):
    if text is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        install(tmp_path, monkeypatch, text)
    awake = KeepAwake()
    for kind in ("training", "inner", "training", "leaving"):
        awake.on_event(kind, {})
