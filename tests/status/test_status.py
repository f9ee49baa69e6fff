"""The status of a swarm: its keys, what counts as a problem, and the command on a real DHT."""

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dipaco.dht.directory import Directory
from dipaco.peer.node.guests import admit
from dipaco.protocol.admission import Gate
from dipaco.protocol.chain import Head
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import raw_public_key
from dipaco.protocol.invitations import opened
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest, verify_manifest
from dipaco.protocol.records import Claim, Holding, PeerRecord, ProgressEntry, ProgressRecord
from dipaco.protocol.view import build_view
from dipaco.status.screen import problem_lines
from dipaco.status.summary import status_of, with_what_was_known
from support.runs.make_plan import make_plan
from support.wire.dht_pair import start_node

PEERS = tuple("Qm" + "1" * 43 + letter for letter in "ABCDE")
COMMAND = Path(sys.executable).parent / "dipaco-status"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    key = load_or_create_operator_key(tmp_path_factory.mktemp("operator") / "operator.pem")
    return verify_manifest(sign_manifest(make_plan(), key))


@pytest.fixture(scope="module")
def grid(manifest):
    return Grid(manifest.plan.model, manifest.plan.grid)


def claim(peer, path, state="training"):
    return Claim(peer_id=peer, path=path, state=state, since_s=1000.0, round=6)


def peer(peer_id, path, state="training"):
    return PeerRecord(
        peer_id=peer_id,
        protocol=1,
        software="dipaco/test",
        device="cpu x1",
        state=state,
        path=path,
        tokens_per_s=100.0,
        round=6,
        reachable="direct",
        addresses=("/ip4/203.0.113.5/tcp/31337",),
        bytes_up=1,
        bytes_down=2,
    )


def holding(peer_id, module, version=5, digest="a" * 64):
    step = hashlib.sha256(f"{module} {version}".encode()).hexdigest()
    return Holding(peer_id, Head(module, step, version, 2 * version, 5, digest, 1000))


def progress(peer_id, path, last_round=5):
    entry = ProgressEntry(
        path=path,
        last_round=last_round,
        tokens=1000,
        validation_nll=20.0 + path,
        validation_tokens=10,
        shard_sequences=1 + path,
        train_loss=2.0,
    )
    return ProgressRecord(peer_id=peer_id, entries=(entry,))


def view_of(manifest, grid, *, claims=(), holdings=(), progress=(), peers=()):
    """Return a view in the middle of round 6."""
    held = {module: [] for module in grid.modules()}
    for record in holdings:
        held[record.head.module].append(record)
    return build_view(
        now_s=manifest.plan.start_s + 6.5 * manifest.plan.rounds.duration_s,
        plan=manifest.plan,
        grid=grid,
        claims=claims,
        peers=peers,
        holdings=held,
        progress=progress,
    )


def healthy_parts(grid):
    """Four peers, one on each path, and one that serves; all hold the modules they need."""
    return {
        "claims": [claim(PEERS[path], path) for path in range(4)],
        "peers": [*(peer(PEERS[path], path) for path in range(4)), peer(PEERS[4], None, state="serving")],
        "progress": [progress(PEERS[path], path) for path in range(4)],
        "holdings": [
            *(holding(PEERS[path], module) for path in range(4) for module in grid.modules_of_path(path)),
            *(holding(PEERS[4], module) for module in grid.modules()),
        ],
    }


def shown(view, manifest, grid):
    return status_of(view, manifest, grid, gate=Gate.of(manifest))


def problems(manifest, grid, **changes):
    status = shown(view_of(manifest, grid, **{**healthy_parts(grid), **changes}), manifest, grid)
    assert status["healthy"] is (not status["problems"])
    return [problem["text"] for problem in status["problems"]]


def test_the_status_of_a_healthy_swarm(manifest, grid):
    status = shown(view_of(manifest, grid, **healthy_parts(grid)), manifest, grid)
    plan = manifest.plan
    assert status["run"] == {
        "id": plan.run_id,
        "name": "test",
        "fingerprint": plan.fingerprint,
        "start_s": plan.start_s,
    }
    assert status["time_s"] == plan.start_s + 6.5 * plan.rounds.duration_s
    assert status["round"] == 6
    assert status["healthy"] is True
    assert status["problems"] == []
    assert len(status["paths"]) == 4
    path = status["paths"][2]
    assert {
        "path": 2,
        "modules": ["L0.E1", "L1.E0"],
        "peers": [PEERS[2]],
        "last_round": 5,
        "state": "training",
        "tokens_per_s": 100.0,
        "validation_loss": pytest.approx(2.2),
    }.items() <= path.items()
    module = status["modules"][0]
    assert {
        "module": "L0.E0",
        "version": 5,
        "digest": "a" * 64,
        "holders": [PEERS[0], PEERS[1], PEERS[4]],
        "agree": True,
    }.items() <= module.items()
    said = {"team", "peer_id", "path", "state", "tokens_per_s", "waits_for", "device", "reachable"}
    assert said <= set(status["peers"][0])
    # Weighted by the shards: 2.0, 2.1, 2.2 and 2.3 of 1, 2, 3 and 4 sequences.
    assert status["validation"] == {
        "loss": pytest.approx(2.2),
        "perplexity": pytest.approx(math.exp(2.2)),
        "paths_reporting": 4,
        "paths": 4,
    }
    json.dumps(status, allow_nan=False)


def test_an_empty_swarm_has_a_problem_and_no_perplexity(manifest, grid):
    status = shown(view_of(manifest, grid), manifest, grid)
    assert not status["healthy"]
    assert status["problems"][0]["kind"] == "untrained"
    assert status["validation"]["perplexity"] is None
    assert status["paths"][0]["state"] == "unserved"
    assert status["paths"][0]["validation_loss"] is None
    json.dumps(status, allow_nan=False)


def test_what_was_known_of_a_path_stays(manifest, grid):
    parts = healthy_parts(grid)
    before = shown(view_of(manifest, grid, **parts), manifest, grid)
    gone = shown(view_of(manifest, grid, **parts | {"progress": []}), manifest, grid)
    assert gone["validation"]["loss"] is None
    assert (gone["validation"]["paths_reporting"], gone["validation"]["paths"]) == (0, 4)
    kept = with_what_was_known(gone, before)
    assert (kept["paths"], kept["validation"]) == (before["paths"], before["validation"])


def test_a_run_that_everybody_left_for_its_successor_is_finished(manifest, grid):
    parts = healthy_parts(grid)
    gate = Gate.of(manifest)
    moving = status_of(view_of(manifest, grid, **parts), manifest, grid, successor=manifest, gate=gate)
    assert not moving["finished"]
    empty = view_of(manifest, grid, progress=parts["progress"])
    finished = status_of(empty, manifest, grid, successor=manifest, gate=gate)
    assert finished["finished"]
    assert (finished["healthy"], finished["problems"]) == (True, [])
    text = " ".join(line.plain for line in problem_lines(finished))
    assert text == f"finished, continued as run test: --run {manifest.plan.run_id}"


# -- the command


def status(*arguments):
    return subprocess.run(
        [str(COMMAND), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_command_on_a_real_swarm(tmp_path, grid):
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    plan = opened(make_plan(name="live", start_s=time.time() - 650.0), key)
    node = start_node(tmp_path / "node", run_id=plan.run_id, operator_key=raw_public_key(key))
    try:
        manifest = verify_manifest(sign_manifest(plan, key))
        node.directory.publish_manifest(manifest.envelope, 600.0)
        asked = status("--initial-peers", node.address, "--json")
        found = json.loads(asked.stdout)
        assert (asked.returncode, found["healthy"], found["peers"]) == (1, False, [])
        assert found["run"]["id"] == plan.run_id

        me = node.peer_id
        # Without an admission nobody is seen.
        node.directory.admission = None
        node.directory.publish_peer(peer(me, 0), 0, 300.0)
        asked = status("--initial-peers", node.address, "--json")
        assert json.loads(asked.stdout)["peers"] == []
        assert "no admission" in asked.stderr

        gate = Gate.of(manifest)
        node.directory.admission = admit(gate, node.identity, manifest, time.time(), None)
        node.directory.publish_peer(peer(me, 0), 0, 300.0)
        for path in range(4):
            node.directory.publish_progress(progress(me, path), 0, 300.0)
        asked = status("--initial-peers", node.address, "--json", "--run", "live")
        found = json.loads(asked.stdout)
        assert asked.stderr == ""
        assert found["paths"][0]["peers"] == [me]
        assert found["peers"][0]["device"] == "cpu x1"
        assert [i["peers"] for i in found["admission"]["invitations"]] == [1]

        shown = status("--initial-peers", node.address)
        assert "run live" in shown.stdout

        other = make_plan(name="second", seed=5)
        Directory(node.dht, node.identity, other.run_id).publish_manifest(sign_manifest(other, key), 600.0)
        asked = status("--initial-peers", node.address)
        assert asked.returncode == 5
        assert asked.stderr.startswith("error: this DHT holds several runs")
        assert asked.stderr.count("\n") == 1
    finally:
        node.close()
