"""A path more in a finished run, with real processes: node, peers, status, evaluation, export.

See design 4.9, successor.
"""

import json

import pytest

from dipaco.routing.run_folder import RunFolder
from support.runs.tiny_run import make_tiny_run, tiny_documents
from support.swarms.swarm import LIMIT_S, Swarm, command

ROUNDS = 2


def ran(program, *arguments):
    done = command(program, *map(str, arguments), timeout_s=2 * LIMIT_S)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.timeout(1000)
def test_peers_train_an_added_path_as_the_reference_does(tmp_path):
    old = make_tiny_run(
        tmp_path / "old", modules_per_level=(1, 2), inner_steps=3, duration_s=LIMIT_S,
        private_blocks=(1,), rounds={"validation_sequences": 4},
    ).path  # fmt: skip
    ran("dipaco-simulate", old, "--out", old, "--rounds", "1", "--threads", "1")
    documents = tmp_path / "third.jsonl"
    texts = tiny_documents(3, 40, seed=5)[80:]
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    next_run = tmp_path / "next"
    ran("dipaco-bootstrap", "prepare", "--from", old, "--add-path", documents,
        "--out", next_run, "--device", "cpu", "--threads", "1",
        "--set", "data.held_out_fraction=0.2")  # fmt: skip
    run = RunFolder(next_run)
    plan = run.plan()
    rounds = ("--rounds", str(ROUNDS), "--threads", "1", "--json")
    simulated = ran("dipaco-simulate", next_run, "--out", tmp_path / "simulated", *rounds)
    reports = [json.loads(line) for line in simulated.splitlines()]
    with Swarm(tmp_path, run) as swarm:
        node = swarm.start_bootstrap()
        peers = [swarm.start_peer(node, "--path", path) for path in ("0", "1", "2")]
        swarm.wait(peers, "round", lambda event: event["round"] == ROUNDS - 1)
        for round_index, report in enumerate(reports):
            assert {"L0.E1", "L1.E2", "P2"} <= set(report["digests"])
            expected = {module: {digest} for module, digest in report["digests"].items()}
            assert swarm.digests(round_index) == expected
        # Copies of the newest heads may just be on their way, which status says and ends with 1.
        told = command("dipaco-status", "--initial-peers", node.address(), "--json")
        assert told.returncode in (0, 1), told.stderr
        status = json.loads(told.stdout)
        assert [path["path"] for path in status["paths"] if path["peers"]] == [0, 1, 2]
        assert {m["module"] for m in status["modules"]} == set(run.grid(plan).modules())

    states = ("--state-dir", tmp_path / "simulated")
    scored = json.loads(ran("dipaco-eval", *states, "--data", documents, "--json"))
    [best] = [row for row in scored["paths"] if row["path"] == 2]
    assert best["documents"] > 30
    assert best["perplexity"] < best["base_perplexity"]
    ran("dipaco-export", "--all", "--out", tmp_path / "export", *states)
    assert (tmp_path / "export/paths/00002/config.json").is_file()
    assert "1 x 2 + 1, 3 paths" in (tmp_path / "export/README.md").read_text()
