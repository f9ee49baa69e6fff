"""Promises 3 and 5 with real processes: a swarm's digests are the single process's, bit for bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from swarm import Swarm, command
from tiny_run import make_tiny_run

pytestmark = pytest.mark.swarm

JOIN_S = 45.0
ROUNDS = 5


def reference_digests(run_directory: Path, rounds: int, *extra: str) -> list[dict[str, str]]:
    """Return the digests of every round that `dipaco-simulate` computes."""
    done = command(
        "dipaco-simulate", str(run_directory), "--rounds", str(rounds), "--json", "--threads", "1",
        "--validation-sequences", "0", *extra,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return [report["digests"] for report in reports]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("codec", "private_blocks"), [("none", ()), ("float16", (0, 3))], ids=["fp32", "fp16-private"]
)
def test_four_peers_equal_the_reference(
    tmp_path: Path, codec: str, private_blocks: tuple[int, ...]
) -> None:
    run = make_tiny_run(
        tmp_path / "run",
        codec=codec,
        private_blocks=private_blocks,
        inner_steps=4,
        duration_s=6.0,
        start_s=time.time() + JOIN_S,
        rounds={"matchmaking_s": 0.9},
    )
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap, "--path", str(path)) for path in range(4)]
        started = swarm.wait(peers, "training", timeout_s=60)
        assert {event["round"] for event in started} == {0}, "joining took longer than planned"
        swarm.wait(peers, "round", lambda event: event["round"] == ROUNDS - 1, timeout_s=120)
        expected = reference_digests(run.path, ROUNDS)
        for round_index in range(ROUNDS):
            found = swarm.digests(round_index)
            assert found == {m: {d} for m, d in expected[round_index].items()}, round_index
