"""Promise 12: volunteers alone start a swarm again that has stopped, in any order."""

import socket
import time

import pytest

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import LIMIT_S, Swarm
from support.wire.exchange_nodes import NOBODY

PATHS = 2


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _together(swarm, peers):
    """Wait until all peers are in one step of the shared module, and return its versions."""
    found = swarm.wait(peers, "outer_step", lambda e: e["module"] == "L0.E0" and len(e["group"]) == PATHS)
    return [event["version"] for event in found]


def _stop(members):
    for member in members:
        member.interrupt()
    for member in members:
        assert member.popen.wait(LIMIT_S) == 0, member.output.read_text()


@pytest.mark.timeout(600)
def test_volunteers_start_a_stopped_swarm_again(tmp_path):
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, PATHS),
        inner_steps=0,
        duration_s=6.0,
        start_s=time.time(),
        rounds={"dwell_rounds": 50, "validation_sequences": 4},
    )
    listening = [("--host-maddrs", f"/ip4/127.0.0.1/tcp/{_free_port()}") for _ in range(PATHS)]
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        address = bootstrap.address()

        def start(number):
            return swarm.start_peer(address, *listening[number], name=f"peer{number}")

        peers = [start(number) for number in range(PATHS)]
        before = _together(swarm, peers)
        _stop([bootstrap, *peers])

        first = start(1)
        swarm.wait([first], "run")
        assert "starts the swarm again" in first.output.read_text()
        peers = [first, start(0)]
        assert min(_together(swarm, peers)) > max(before), "they go on from what they had"

        # Of a swarm in which this peer never was nothing is known.
        wrong = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
        stranger = swarm.start_peer(wrong, *listening[0], name="stranger")
        assert stranger.popen.wait(120) == 4, stranger.output.read_text()
