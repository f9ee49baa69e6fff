"""Fewer peers than paths, so peers move and all paths progress (design 4.6, moves).

With real processes.
"""

import itertools
import time

import pytest

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import Swarm

PEERS, PATHS = 3, 8
# ceil(8 / 3) + 2: a round takes a second here, and peers choose by views that are older.
LONGEST_WAIT_ROUNDS = 5
# A limit: rounds end when everybody is done.
LIMIT_S = 30.0
STINTS = 30


@pytest.mark.timeout(900)
def test_three_peers_train_eight_paths(tmp_path):
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(2, 4),
        inner_steps=2,
        duration_s=LIMIT_S,
        # The first round of fewer peers than paths begins a duration after the start.
        start_s=time.time() - LIMIT_S,
        rounds={"gather_s": 4.0, "grace_s": 1.0, "dwell_rounds": 1, "validation_sequences": 4},
    )
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap) for _ in range(PEERS)]
        swarm.wait(peers, "training")
        deadline = time.monotonic() + 500
        while len(stints(peers)) < STINTS:
            assert time.monotonic() < deadline, f"{stints(peers)}\n{swarm.outputs()}"
            time.sleep(0.1)
        trained = stints(peers)[:STINTS]
        for path in range(PATHS):
            waited = longest_wait(trained, path, {True, False})
            assert waited <= LONGEST_WAIT_ROUNDS * PEERS, f"path {path} waited {waited}: {trained}"
            # A stint may end without a step, for example when its group met without it.
            waited = longest_wait(trained, path, {True})
            assert waited <= 2 * LONGEST_WAIT_ROUNDS * PEERS, f"path {path}: {waited}, {trained}"


def longest_wait(trained, path, kinds):
    """Return for how many stints of others a path waited, before its first and behind its last
    too."""
    turns = (turn for turn, (found, kind) in enumerate(trained) if found == path and kind in kinds)
    at = [-1, *turns, len(trained)]
    return max(b - a - 1 for a, b in itertools.pairwise(at))


def stints(peers):
    """Return the paths in the order in which some peer's round on them ended, and whether it
    took a step."""
    found = []
    for peer in peers:
        has_stepped = False
        for event in peer.read():
            has_stepped = has_stepped or event["event"] == "outer_step"
            if event["event"] == "round":
                found.append((event["time_s"], event["path"], has_stepped))
                has_stepped = False
    return [(path, has_stepped) for _, path, has_stepped in sorted(found)]
