"""The network processes of a peer, all of them real, hang or are killed, and it trains on.

A busy machine does that: p2pd is silent for minutes, or the kernel takes it for its memory.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import LIMIT_S, Swarm
from support.waiting import wait_until

SHARED = "L0.E0"


def network_processes(member):
    """Return the ids of a member's DHT process and p2pd."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"p2pd") and str(member.cache).encode() in b" ".join(words):
                return parent_of(int(entry.name)), int(entry.name)
    return None


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_shared_step(swarm, members, since_s):
    """Wait until all have taken a step, of a round that began after `since_s`, with work of all of them."""
    everybody = {member.peer_id for member in members}
    swarm.wait(
        members,
        "outer_step",
        lambda e: e["module"] == SHARED and e["time_s"] > since_s and everybody <= set(e["group"]),
    )


@pytest.mark.timeout(600)
def test_a_peer_outlives_its_network_processes(tmp_path):
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, 2),
        inner_steps=0,
        duration_s=6.0,
        start_s=time.time(),
        rounds={"dwell_rounds": 50, "validation_sequences": 4},
    )
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        # The others are more: while the victim hears nobody it steps alone, and then takes their chain.
        victim, *_ = members = [swarm.start_peer(bootstrap) for _ in range(3)]
        wait_for_shared_step(swarm, members, 0.0)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for which in range(2):
                processes = wait_until(lambda: network_processes(victim), LIMIT_S)
                happened_s = time.time()
                os.kill(processes[which], number)
                # One that hangs for longer than is waited for it is replaced; if it wakes, it is alone.
                wait_until(lambda old=processes: network_processes(victim) not in (None, old), LIMIT_S)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(processes[which], signal.SIGCONT)
                assert any(e["time_s"] > happened_s for e in victim.of("inner")), swarm.outputs()
                wait_for_shared_step(swarm, members, time.time() + 6.0)
        assert victim.alive, swarm.outputs()
        assert victim.output.read_text().count("the DHT process was started again") == 4
