"""A command does not depend on the reader of its output: a closed terminal, a pipe, no stream."""

import io
import os
import pty
import signal
import sys
import time

import pytest

from dipaco.base import output
from support.programs.processes import ran
from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import BIN, ENVIRONMENT, LIMIT_S, Swarm

# It prints one line, and has nothing to import.
SAYS_A_LINE = f"{BIN / 'dipaco-peer'} pause --cache-dir"


def shell(line):
    return ran("bash", "-c", f"set -o pipefail; {line}", env=ENVIRONMENT)


@pytest.mark.parametrize(
    "line",
    [
        "{} {} | (exec <&-; sleep 0.1)",
        "{} {} >&-",
        "{} {} 2>&- >&- <&-",
        f"{BIN / 'dipaco-peer'} --help | (exec <&-; sleep 0.1)",
    ],
)
def test_a_command_ends_well_whoever_reads(line, tmp_path):
    done = shell(line.format(SAYS_A_LINE, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_told(tmp_path):
    done = shell(f"{SAYS_A_LINE} {tmp_path} > /dev/full")
    assert done.returncode == 9
    assert "No space left on device" in done.stderr


def test_peers_and_nodes_outlive_their_terminal(tmp_path):
    run = make_tiny_run(tmp_path / "run", start_s=time.time(), modules_per_level=(1, 1))
    master, slave = pty.openpty()
    # Under nohup it is ignored, and what is started there keeps that.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Swarm(tmp_path, run) as swarm:
        node = swarm.start_bootstrap(terminal=slave)
        peer = swarm.start_peer(node, terminal=slave)
        os.close(slave)
        seen = b""
        while b"training path" not in seen:
            seen += os.read(master, 65536)
        os.close(master)
        [last] = swarm.wait([peer], "outer_step", lambda e, now=time.time(): e["time_s"] > now)
        swarm.wait_after(last, peer, "outer_step", "validation", "outer_step")
        assert node.alive
        # A terminal that is closed sends this to the command in its foreground.
        for member in (peer, node):
            os.kill(member.popen.pid, signal.SIGHUP)
            # Leaving has a limit, which a busy machine may reach.
            assert member.popen.wait(LIMIT_S) in (0, 130)
        assert peer.of("leaving")
    signal.signal(signal.SIGHUP, before)


def test_what_only_prints_ends_with_its_reader(monkeypatch):
    read, write = os.pipe()
    stream = output._Stream(write, "w")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, line_buffering=True))
    print("a line")
    assert not output.is_unread()
    os.close(read)
    print("another")
    assert output.is_unread()
    monkeypatch.undo()
    stream.close()
