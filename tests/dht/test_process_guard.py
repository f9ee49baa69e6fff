"""No process of a peer outlives it, and Ctrl+C in the terminal spares p2pd."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.processes import is_running
from support.waiting import wait_until
from support.wire.dht_pair import LOOPBACK

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux ends children with their parent"
)

OWNER = f"""
import signal, sys
from dipaco.dht.guarded_dht import GuardedDHT
signal.signal(signal.SIGTERM, lambda *_: print("asked to leave", flush=True))
dht = GuardedDHT(startup_timeout=60, host_maddrs=["{LOOPBACK}"])
dht.start()
print(dht.pid, flush=True)
sys.stdin.read()
dht.shutdown()
"""


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def owner():
    """A process with a DHT, and the ids of its DHT process and of p2pd."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        dht = int(process.stdout.readline())
        daemons = [pid for pid in children(dht) if "p2pd" in Path(f"/proc/{pid}/comm").read_text()]
        assert len(daemons) == 1
        yield process, dht, daemons[0]
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_sigkill_of_the_owner_ends_the_dht_and_p2pd(owner):
    process, dht, daemon = owner
    assert is_running(dht)
    assert is_running(daemon)
    process.kill()
    process.wait(60)
    wait_until(lambda: not is_running(dht) and not is_running(daemon))


def test_sigkill_of_the_dht_ends_p2pd(owner):
    _, dht, daemon = owner
    os.kill(dht, 9)
    wait_until(lambda: not is_running(daemon))


def test_p2pd_is_out_of_the_terminals_reach_and_ends_in_order(owner):
    process, dht, daemon = owner
    assert os.getsid(daemon) == daemon
    assert os.getsid(dht) != daemon
    process.stdin.close()
    assert process.wait(60) == 0
    wait_until(lambda: not is_running(dht) and not is_running(daemon))
    process.stdin = None


def test_a_signal_for_the_whole_group_leaves_the_dht_until_the_peer_has_left(owner):
    """As `timeout`, Slurm and the end of a desktop's session send it."""
    process, dht, daemon = owner
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "asked to leave\n"
    assert is_running(dht)
    assert is_running(daemon)
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdin = None
