"""`dipaco-bootstrap prepare --from RUN --initial-peers`, with a live swarm of real processes."""

import json
import time

import pytest

from dipaco.routing.run_folder import RunFolder
from support.runs.tiny_run import make_tiny_run, tiny_documents
from support.swarms.swarm import LIMIT_S, Swarm, command

NEW = """
name = "scored"
[data]
train = "train.jsonl"
held_out_fraction = 0.15
[router]
kind = "discriminative"
prefix_tokens = 8
training_documents = 120
[inner]
learning_rate = 1e-3
batch_sequences = 2
[rounds]
duration_s = 6.0
validation_sequences = 2
"""


@pytest.mark.timeout(1500)
def test_a_live_swarm_gives_its_states_and_its_peers_go_to_the_successor(tmp_path):
    run = make_tiny_run(
        tmp_path / "run", inner_steps=0, duration_s=6.0, start_s=time.time(), private_blocks=(1,),
        rounds={"validation_sequences": 2},
    )  # fmt: skip
    lines = [json.dumps({"text": text}) for text in tiny_documents(4, 40, seed=0)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "NEW.toml").write_text(NEW)
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap) for _ in range(2)]
        swarm.wait(peers, "outer_step")
        prepare = [
            "prepare", str(tmp_path / "NEW.toml"), "--out", str(tmp_path / "next"),
            "--from", str(run.path), "--initial-peers", bootstrap.address(),
            "--allow-genesis", "--device", "cpu", "--threads", "1",
        ]  # fmt: skip
        result = command("dipaco-bootstrap", *prepare, timeout_s=2 * LIMIT_S)
        assert result.returncode == 0, result.stderr + result.stdout + swarm.outputs()
        assert "modules were fetched from the swarm" in result.stdout

        new, plan = RunFolder(tmp_path / "next"), RunFolder(tmp_path / "next").plan()
        assert plan.successor_of == run.plan().run_id
        assert plan.model == run.plan().model
        assert len(list((new.path / "work/scores").glob("*/P*.npy"))) == 4
        # What was trained is carried over: parameters, and the outer momentum.
        states = [new.genesis_state(plan, module) for module in new.grid(plan).modules()]
        assert any(bool(state.momentum.any()) for state in states)

        # The same command finds everything done, without the swarm's help.
        again = command("dipaco-bootstrap", *prepare)
        assert "Everything is done already" in again.stdout, again.stdout + again.stderr

        successor = swarm.start_bootstrap
        swarm.run = new
        server = successor("--initial-peers", bootstrap.address(), name="successor")
        swarm.wait([server], "serving")
        moved = swarm.wait(peers, "successor", lambda e: e["state"] == "moving")
        assert {event["run"] for event in moved} == {plan.run_id}
        for peer, event in zip(peers, moved, strict=True):
            swarm.wait_after(event, peer, "training", "outer_step")
