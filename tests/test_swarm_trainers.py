"""One command, two trainers: they average with each other, and have one copy of everything."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.swarm import LIMIT_S, Swarm
from support.tiny_run import make_tiny_run

pytestmark = pytest.mark.swarm

ROUNDS = 3


@pytest.mark.timeout(900)
def test_two_devices_of_one_machine(tmp_path: Path) -> None:
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, 2),
        inner_steps=2,
        duration_s=LIMIT_S,
        start_s=time.time(),
        rounds={"matchmaking_s": 0.8, "validation_sequences": 4},
    )
    with Swarm(tmp_path, run) as swarm:
        node = swarm.start_peer(
            swarm.start_bootstrap(), "--devices", "cpu", "cpu", "--max-rounds", str(ROUNDS),
            name="node",
        )  # fmt: skip
        assert node.popen.wait(LIMIT_S) == 0, swarm.outputs()
        output = node.output.read_text()
        assert "[0 cpu] " in output
        assert "[1 cpu] " in output
        commits = [
            {
                (event["module"], event["round"]): event["digest"]
                for line in (tmp_path / f"node-{number}.jsonl").read_text().splitlines()
                if (event := json.loads(line))["event"] == "commit"
            }
            for number in range(2)
        ]
        shared = commits[0].keys() & commits[1].keys()
        assert shared == {("L0.E0", round_index) for round_index in range(ROUNDS)}
        assert all(commits[0][which] == commits[1][which] for which in shared)
    cache = tmp_path / "node-cache"
    first, second = (cache / f"trainer-{number}" / run.plan().run_id for number in range(2))
    blobs = [file.relative_to(first) for file in (first / "blobs").glob("??/*")]
    common = [blob for blob in blobs if (second / blob).exists()]
    assert len(common) >= 2
    assert all((first / blob).samefile(second / blob) for blob in common)
    digest = commits[0]["L0.E0", ROUNDS - 1]
    (one,), (other,) = (
        list((folder / "states" / "L0.E0").glob(f"*-{digest}.safetensors"))
        for folder in (first, second)
    )
    assert one.samefile(other)
