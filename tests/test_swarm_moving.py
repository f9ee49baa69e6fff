"""Design 4.5 with real processes: fewer peers than paths, so peers move and all paths progress."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from support.swarm import Swarm
from support.tiny_run import make_tiny_run

pytestmark = pytest.mark.swarm

PEERS, PATHS = 3, 8
# ceil(8 / 3) + 1
LONGEST_WAIT_ROUNDS = 4
JOIN_S = 45.0
DURATION_S = 7.0
ROUNDS = 9


@pytest.mark.timeout(240)
def test_three_peers_train_eight_paths(tmp_path: Path) -> None:
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(2, 4),
        inner_steps=2,
        duration_s=DURATION_S,
        start_s=time.time() + JOIN_S,
        # Late boundaries: a peer that moves has the first part of a round for it.
        rounds={
            "matchmaking_s": 0.8,
            "commit_window_s": 2.0,
            "dwell_rounds": 1,
            "level_offsets": (0.85, 1.0),
            "validation_sequences": 4,
        },
    )
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap) for _ in range(PEERS)]
        swarm.wait(peers, "training", timeout_s=60)
        swarm.wait(
            peers,
            "round",
            lambda event: event["round"] >= ROUNDS - 1,
            timeout_s=JOIN_S + (ROUNDS + 3) * DURATION_S,
        )
        trained: dict[int, set[int]] = {path: set() for path in range(PATHS)}
        for event in (event for peer in peers for event in peer.of("commit")):
            for path in event["paths"]:
                trained[path].add(event["round"])
        last = max(max(rounds, default=0) for rounds in trained.values())
        for path, rounds in trained.items():
            assert rounds, f"path {path} was never trained: {trained}"
            # Before its first round a path waits its turn too, and behind its last one.
            stops = [-1, *sorted(rounds), last + 1]
            waited = max(b - a - 1 for a, b in itertools.pairwise(stops))
            assert waited <= LONGEST_WAIT_ROUNDS, f"path {path} waited {waited} rounds: {trained}"
