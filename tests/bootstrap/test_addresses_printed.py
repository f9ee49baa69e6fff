"""What a bootstrap node tells volunteers to paste, on machines with other networks."""

import os
import shutil
import signal
import subprocess
import threading

import pytest

from support.swarms.swarm import BIN, ENVIRONMENT, LIMIT_S

ONLY_IPV6 = (
    "ip link add va type veth peer name vb; ip link set va up; ip link set vb up; "
    "ip -6 addr add fd00:77::1/64 dev va nodad"
)


@pytest.mark.parametrize(
    ("network", "printed", "warned"),
    [(ONLY_IPV6, "dipaco-peer /ip6/fd00:77::1/tcp/", False), ("true", "dipaco-peer /ip4/127.0.0.1/tcp/", True)],
)
def test_a_machine_without_ipv4(shared_run, network, printed, warned, tmp_path):
    script = f'ip link set lo up; {network}; exec "$@"'
    run = shutil.copytree(shared_run.path, tmp_path / "run")
    node = subprocess.Popen(
        ["unshare", "-rn", "sh", "-c", script, "sh", str(BIN / "dipaco-bootstrap"), "serve", str(run)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(LIMIT_S, node.kill)
    limit.start()
    said = []
    try:
        for line in node.stdout:
            said.append(line)
            if line.startswith("dipaco-peer "):
                break
    finally:
        limit.cancel()
        os.killpg(node.pid, signal.SIGINT)
        node.communicate(timeout=LIMIT_S)
    assert said[-1].startswith(printed), said
    assert said[-2].endswith("volunteers paste this:\n"), said
    assert any("only this machine can call" in line for line in said) == warned
