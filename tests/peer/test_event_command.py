"""A command of the owner's hears what becomes of the peer, and never holds the peer up."""

import logging
import os
import subprocess
import sys
import time

import pytest

from dipaco.base.errors import ConfigurationError
from dipaco.peer.reporting import event_command
from dipaco.peer.reporting.event_command import MAX_WAITING, EventCommand
from dipaco.peer.reporting.event_log import EventLog

RUN = {"run": "a1b2", "plan": {"name": "tiny"}}
LIMIT_S = 120.0


def script(folder, text):
    """Write a program, and return a command with a word of its own."""
    program = folder / "a command"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return f"'{program}' mine"


def test_events_arrive_in_order_as_words(tmp_path):
    log = tmp_path / "log"
    command = EventCommand(script(tmp_path, f'echo "$#|$1|$2|$3" >> {log}'))
    events = EventLog()
    events.add_listener(command.on_event)
    events.emit("run", **RUN)
    events.emit("training", path=1)
    events.emit("disk", what="the disk is nearly full")
    events.emit("update", what="install '$(touch gone)'; \x1b[31m; `reboot`")
    events.emit("leaving", path=1)
    command.ends_with(ConfigurationError("--path 7: this run\nhas fewer"))
    until_s = time.monotonic() + LIMIT_S
    while not log.exists() or len(log.read_text().splitlines()) < 5:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    command.close()
    assert log.read_text().splitlines() == [
        "3|mine|joined|joined run 'tiny' (a1b2)",
        "3|mine|disk|the disk is nearly full",
        "3|mine|update|install '$(touch gone)'; ?[31m; `reboot`",
        "3|mine|left|left run 'tiny' (a1b2)",
        "3|mine|error|the peer ends: --path 7: this run has fewer",
    ]


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "dipaco.peer.reporting.event_command")
    log = tmp_path / "log"
    hangs = f"echo $2 >> {log}; [ $2 = error ] && (sleep 600; echo late >> {log}) ; true"
    command = EventCommand(script(tmp_path, hangs), limit_s=0.5)
    command.tell("error", "x")
    command.tell("left", "x")
    until_s = time.monotonic() + LIMIT_S
    while not log.exists() or "left" not in log.read_text():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    command.close()
    assert log.read_text().split() == ["error", "left"]
    assert "it took too long" in caplog.text


def test_too_many_are_dropped_and_close_does_not_wait_for_them(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "dipaco.peer.reporting.event_command")
    monkeypatch.setattr("dipaco.peer.reporting.event_command.CLOSE_LIMIT_S", 0.2)
    command = EventCommand(script(tmp_path, "sleep 600"), limit_s=600)
    for number in range(MAX_WAITING + 3):
        command.tell("error", f"number {number}")
    assert f"not told: number {MAX_WAITING + 2}" in caplog.text
    command.close()


def test_a_command_that_fails_is_told_and_no_more(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "dipaco.peer.reporting.event_command")
    command = EventCommand(script(tmp_path, "exit 7"))
    command.tell("error", "x")
    until_s = time.monotonic() + LIMIT_S
    while "exit code 7" not in caplog.text:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    command.close()


def test_a_command_that_cannot_be_ended_does_not_end_the_telling(tmp_path, caplog, monkeypatch):
    """It may run as another user, like sudo."""

    def refuse(process, number):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(event_command.os, "killpg", refuse)
    caplog.set_level(logging.WARNING, "dipaco.peer.reporting.event_command")
    log = tmp_path / "log"
    text = f'echo $2 >> {log}; [ "$2" = disk ] && exec sleep 5; true'
    command = EventCommand(script(tmp_path, text), limit_s=0.5)
    command.tell("disk", "x")
    command.tell("left", "x")
    until_s = time.monotonic() + LIMIT_S
    while not log.exists() or "left" not in log.read_text():
        assert time.monotonic() < until_s, caplog.text
        time.sleep(0.02)
    command.close()
    assert "Operation not permitted" in caplog.text


def test_letters_that_the_locale_has_not_hinder_nothing(tmp_path):
    log = tmp_path / "log"
    program = (
        "import sys; from dipaco.peer.reporting.event_command import EventCommand\n"
        "command = EventCommand(sys.argv[1]); command.tell('joined', 'run \\u2192')\n"
        "command.tell('left', 'run'); command.close()"
    )
    words = [sys.executable, "-c", program, script(tmp_path, f'echo "$2 $3" >> {log}')]
    ascii_alone = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(words, env={**os.environ, **ascii_alone}, check=True, timeout=LIMIT_S)
    assert log.read_text().splitlines() == ["joined run ?", "left run"]


@pytest.mark.parametrize("command", ["", "  ", "no-such-program-here x", "echo 'open"])
def test_what_cannot_be_run_is_refused_at_the_start(command):
    with pytest.raises(ConfigurationError, match=r"--on-event"):
        EventCommand(command)
