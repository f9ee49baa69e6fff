"""Promise 5 where nobody who trains can be called: the bootstrap node is everybody's mailbox."""

import time

import pytest

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import BIN, LIMIT_S, LOOPBACK, Swarm
from support.wire.split_network import can_split, closed_homes

HOMES, ROUND_S, ROUNDS = 3, 12.0, 3
SHARED = "L0.E0"


@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_split(), reason="needs root and network namespaces")
def test_peers_that_nobody_can_call_make_one_chain(tmp_path):
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, HOMES),
        inner_steps=0,
        duration_s=ROUND_S,
        start_s=time.time(),
        rounds={"dwell_rounds": 50, "validation_sequences": 4},
    )
    with closed_homes(HOMES) as homes, Swarm(tmp_path, run) as swarm:
        bootstrap = swarm._add(
            "bootstrap",
            [
                *homes.prefix(None), str(BIN / "dipaco-bootstrap"), "serve", str(run.path),
                "--host-maddrs", f"/ip4/{homes.hub_address}/tcp/0",
            ],
        )  # fmt: skip
        peers = [
            swarm._add(
                f"peer{home}",
                [
                    *homes.prefix(home), str(BIN / "dipaco-peer"),
                    "--initial-peers", bootstrap.address(), "--host-maddrs", LOOPBACK,
                    "--path", str(home), "--threads", "1", "--nice", "0",
                    "--cache-dir", str(tmp_path / f"peer{home}-cache"),
                ],
            )
            for home in range(HOMES)
        ]  # fmt: skip
        swarm.wait(peers, "training")
        swarm.wait(peers, "reachable", lambda e: e["how"] == "outgoing")
        together = [
            swarm.wait(
                peers,
                "outer_step",
                lambda e, least=least: e["module"] == SHARED and len(e["group"]) == HOMES and e["round"] >= least,
                timeout_s=LIMIT_S,
            )
            for least in range(ROUNDS)
        ][-1]
        assert all(event["is_own_in"] for event in together)
        first = max(event["round"] for event in together)
        digests = [d for r in range(first + 1) for d in swarm.digests(r).get(SHARED, set())]
        taken = {e["version"]: e["digest"] for p in peers for e in p.of("outer_step")}
        assert len(digests) <= first + 1, (digests, taken)
