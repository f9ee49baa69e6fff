"""Design 4.8 with real processes: peers score for the operator, and move to a successor run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from dipaco.dht.coverage import whole_scope
from dipaco.dht.directory import Directory
from dipaco.dht.manifest import load_or_create_operator_key
from dipaco.dht.records import BlobRecord
from dipaco.dht.score_request import (
    ScoreRequest,
    SignedScoreRequest,
    sign_score_request,
    verify_score_request,
)
from dipaco.modules.errors import NetworkError
from dipaco.modules.files import canonical_json
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState, state_chunks
from dipaco.peer.node import Node, join_run
from dipaco.routing.document_scores import DocumentScores, RouterDocuments
from dipaco.routing.run_folder import RunFolder
from support.swarm import LIMIT_S, Swarm, command
from support.tiny_run import make_tiny_run, sign_tiny_run, tiny_documents

pytestmark = pytest.mark.swarm

PATHS = 4
DURATION_S = 6.0
RECORD_LIFE_S = 1800.0


def make_run(folder: Path, **changes: object) -> RunFolder:
    return make_tiny_run(
        folder,
        inner_steps=0,
        duration_s=DURATION_S,
        inner={"learning_rate": 1e-3},
        rounds={
            "matchmaking_s": 0.8,
            "commit_window_s": 2.0,
            "dwell_rounds": 50,
            "validation_sequences": 2,
        },
        **changes,  # type: ignore[arg-type]
    )


def request_scores(node: Node, run: RunFolder) -> tuple[RouterDocuments, SignedScoreRequest]:
    """Do as the operator: serve router documents, and ask for their scores."""
    tokenizer = run.tokenizer(node.plan)
    texts = tiny_documents(PATHS, 12, seed=5)
    documents = RouterDocuments.from_documents(
        [np.array(tokenizer.document_tokens(text)) for text in texts],
        node.plan.model.sequence_length,
        node.plan.routing.prefix_tokens,
    )
    sha256 = node.blobs.add_bytes(documents.to_bytes())
    size = node.blobs.path(sha256).stat().st_size
    node.directory.publish_blob(
        BlobRecord(peer_id=node.me, sha256=sha256, bytes=size), RECORD_LIFE_S
    )
    request = ScoreRequest(
        run_id=node.run_id,
        documents_sha256=sha256,
        documents=len(documents),
        made_s=node.clock.now(),
    )
    envelope = sign_score_request(request, load_or_create_operator_key(run.path / "operator.pem"))
    assert node.directory.store_score_request(envelope, RECORD_LIFE_S)
    return documents, verify_score_request(envelope)


def gather(node: Node, documents: RouterDocuments, request_id: str) -> dict[int, DocumentScores]:
    """Return the scores of all paths that are served."""
    found = {}
    for record in node.directory.scores(request_id):
        for entry in record.entries:
            if entry.sha256 is not None and entry.path not in found:
                try:
                    node.exchange.fetch(
                        entry.sha256, (record.peer_id,), node.blobs, max_bytes=2**20, timeout_s=30.0
                    )
                except NetworkError:
                    continue  # Its record outlives a peer that was killed for a few seconds.
                data = node.blobs.read(entry.sha256)
                scores = DocumentScores.from_bytes(
                    data, len(documents), request=request_id, path=entry.path
                )
                scores.check_documents(documents)
                found[entry.path] = scores
    return found


def make_successor(run: RunFolder, folder: Path, start_s: float) -> RunFolder:
    """Make a run of the same grid that goes on from the genesis of `run`, with other shards."""
    new = make_run(folder, seed=9, name="tiny-2")
    old_plan = run.plan()
    (new.path / "operator.pem").write_bytes((run.path / "operator.pem").read_bytes())
    digests = {}
    for module in run.grid(old_plan).modules():
        state: ModuleState = run.genesis_state(old_plan, module)
        digests[module] = new.blobs.add_bytes(b"".join(bytes(c) for c in state_chunks(state)))
        assert digests[module] == state.digest
    plan = new.plan()
    genesis = new.blobs.add_bytes(canonical_json(digests))
    plan = RunPlan.model_validate(
        {
            **plan.model_dump(),
            "start_s": start_s,
            "successor_of": old_plan.run_id,
            "blobs": {**plan.blobs.model_dump(), "genesis": genesis},
        }
    )
    sign_tiny_run(new, plan)
    return new


@pytest.mark.timeout(1500)
def test_peers_score_and_move_to_the_successor(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", start_s=time.time())
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap) for _ in range(2)]
        node = join_run(
            initial_peers=(bootstrap.address(),),
            run=None,
            cache_folder=tmp_path / "operator",
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
        )
        try:
            swarm.wait(peers, "training")
            documents, signed = request_scores(node, run)
            # The scores of a peer that is killed are scored again by the other one.
            swarm.wait(peers, "score", lambda event: event["state"] == "done")
            peers[0].kill()
            deadline = time.monotonic() + LIMIT_S
            while len(found := gather(node, documents, signed.request_id)) < PATHS or any(
                record.peer_id == peers[0].peer_id
                for record in node.directory.scores(signed.request_id)
            ):
                assert time.monotonic() < deadline, f"only {sorted(found)}\n{swarm.outputs()}"
                time.sleep(0.5)
            killed = {e["path"] for e in peers[0].of("score") if e["state"] == "done"}
            again = {e["path"] for e in peers[1].of("score") if e["state"] == "done"}
            assert killed <= again == set(range(PATHS))
            status = command("dipaco-status", "--initial-peers", peers[1].address(), "--json")
            shown = json.loads(status.stdout)["score_requests"]
            assert [one["done"] for one in shown] == [list(range(PATHS))], status.stdout

            # A peer that comes back remembers its scores, and follows too.
            back = swarm.start_peer(peers[1], name="peer0")
            # Who joins when the successor is already known begins there and moves nowhere.
            swarm.wait([back], "training")
            bootstrap.kill()
            new = make_successor(run, tmp_path / "new", start_s=time.time())
            swarm.run = new
            server = swarm.start_bootstrap("--initial-peers", peers[1].address(), name="successor")
            members = [peers[1], back]
            swarm.wait([server], "serving")
            moved = swarm.wait(members, "successor", lambda event: event["state"] == "moving")
            assert {event["run"] for event in moved} == {new.plan().run_id}
            for member, event in zip(members, moved, strict=True):
                swarm.wait_after(event, member, "training", "commit")
                assert not member.of("leaving")
            assert not killed & {event["path"] for event in back.of("score")}
            plan = new.plan()
            reader = Directory(node.dht, node.identity, plan.run_id)
            grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
            view = reader.read_view(plan, grid, time.time(), whole_scope(grid))
            assert set(view.claims) == {member.peer_id for member in members}
        finally:
            node.close()
            node.identity.release()
