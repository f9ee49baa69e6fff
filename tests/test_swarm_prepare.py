"""`dipaco-bootstrap prepare --from RUN --initial-peers`, with a live swarm of real processes."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from dipaco.routing.document_scores import DocumentScores
from dipaco.routing.run_folder import RunFolder
from support.swarm import LIMIT_S, Swarm, command
from support.tiny_run import make_tiny_run, tiny_documents

pytestmark = pytest.mark.swarm

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
matchmaking_s = 0.8
commit_window_s = 2.0
validation_sequences = 2
"""

# A peer that says of every other document that its path is good at it, and bad at the rest.
LIAR = """
import dataclasses, sys
import numpy as np
from dipaco.peer.scoring.job import ScoreJob
honest = ScoreJob.scores
def lie(job):
    scores = honest(job)
    factors = np.where(np.arange(len(scores.nll)) % 2, 1.5, 0.5)
    return dataclasses.replace(scores, nll=scores.nll * factors)
ScoreJob.scores = lie
from dipaco.peer.cli import main
sys.exit(main())
"""


@pytest.mark.timeout(1500)
def test_peers_score_for_a_successor_and_go_there(tmp_path: Path) -> None:
    """One of three lies about what it scored."""
    run = make_tiny_run(
        tmp_path / "run", inner_steps=0, duration_s=6.0, start_s=time.time(), private_blocks=(1,),
        rounds={"matchmaking_s": 0.8, "commit_window_s": 2.0, "validation_sequences": 2},
        # On a fast machine a round is so much training that scores of the one before do not fit.
        inner={"learning_rate": 1e-6},
    )  # fmt: skip
    lines = [json.dumps({"text": text}) for text in tiny_documents(4, 40, seed=0)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "NEW.toml").write_text(NEW)
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap) for _ in range(2)]
        liar = swarm.start_peer(bootstrap, name="liar", program=(sys.executable, "-c", LIAR))
        swarm.wait([*peers, liar], "commit")
        prepare = [
            "prepare", str(tmp_path / "NEW.toml"), "--out", str(tmp_path / "next"),
            "--from", str(run.path), "--initial-peers", bootstrap.address(),
            "--score-wait-s", str(LIMIT_S), "--allow-genesis", "--device", "cpu", "--threads", "1",
        ]  # fmt: skip
        result = command("dipaco-bootstrap", *prepare, timeout_s=2 * LIMIT_S)
        assert result.returncode == 0, result.stderr + result.stdout + swarm.outputs()
        assert "scores: have 4, need 4 scores: complete" in result.stdout, result.stdout
        assert "modules were fetched from the swarm" in result.stdout
        lies = [event["sha256"] for event in liar.of("score") if event["sha256"]]
        assert lies
        named = f"by {liar.peer_id[-8:]} do not agree with a sample scored here"
        assert named in result.stdout, result.stdout

        new, plan = RunFolder(tmp_path / "next"), RunFolder(tmp_path / "next").plan()
        assert plan.successor_of == run.plan().run_id
        assert plan.model == run.plan().model
        files = sorted((new.path / "work/scores").glob("*/checked-*.safetensors"))
        scores = [DocumentScores.from_bytes(file.read_bytes(), 120) for file in files]
        assert sorted(one.path for one in scores) == [0, 1, 2, 3]
        done = {e["sha256"] for peer in peers for e in peer.of("score") if e["sha256"]}
        taken = {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        assert taken & done
        assert not taken & set(lies)
        assert np.stack([one.nll for one in scores]).std(axis=0).any()
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
            swarm.wait_after(event, peer, "training", "commit")
