"""The status of a swarm: its keys, what counts as a problem, and the command on a real DHT."""

import json
import math
import time

import pytest

from dipaco.peer.node.guests import admit
from dipaco.protocol.admission import Gate
from dipaco.protocol.identity import raw_public_key
from dipaco.protocol.invitations import opened
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest, verify_manifest
from dipaco.protocol.records import ProgressRecord
from dipaco.status.screen import notes_of, problem_lines
from dipaco.status.summary import with_what_was_known
from support.runs.make_plan import make_plan
from support.swarms.big_swarm import status_at
from support.swarms.swarm import command
from support.swarms.swarm_views import healthy_swarm, peer_name, plan_of
from support.wire.dht_pair import publish, publish_manifest, start_node


@pytest.fixture
def records():
    """Four peers, one on each path, in the middle of round 6."""
    return healthy_swarm(*plan_of(2, 2), peers=4, round_index=6)


def test_the_status_of_a_healthy_swarm(records):
    for path, entry in records.progress.items():
        records.progress[path] = entry.model_copy(update={"validation_nll": 20.0 + path, "shard_sequences": 1 + path})
    status, plan = status_at(records), records.plan
    assert status["run"] == {
        "id": plan.run_id,
        "name": plan.name,
        "fingerprint": plan.fingerprint,
        "start_s": plan.start_s,
        "about": "",
    }
    assert status["time_s"] == plan.start_s + 6.5 * plan.rounds.duration_s
    assert status["round"] == 6
    assert (status["healthy"], status["problems"]) == (True, [])
    assert len(status["paths"]) == 4
    path = status["paths"][2]
    assert {
        "path": 2,
        "modules": ["L0.E1", "L1.E0"],
        "peers": [peer_name(2)],
        "last_round": 5,
        "state": "training",
        "tokens_per_s": 100.0,
        "validation_loss": pytest.approx(2.2),
    }.items() <= path.items()
    module = status["modules"][0]
    assert (module["module"], module["version"], module["agree"]) == ("L0.E0", 6, True)
    assert {peer_name(0), peer_name(1)} <= set(module["holders"])
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
    assert problem_lines(status)[0].plain == "all is well: 4 of 4 parts of the model are being trained by 4 machines"


def test_the_losses_on_own_texts_are_told_apart_where_the_run_allows_these(records):
    before = status_at(records)["validation"]
    for place, loss in enumerate((2.7, 3.5)):
        peer = peer_name(place)
        records.peers[peer] = records.peers[peer].model_copy(update={"own_texts_loss": loss})
    said = "held-out loss on own texts, as their owners say"
    assert [peer["own_texts_loss"] for peer in status_at(records)["peers"]] == [None] * 4
    assert said not in " ".join(note.plain for note in notes_of(status_at(records)))
    records.plan = records.plan.model_copy(update={"own_texts": "yes"})
    status = status_at(records)
    assert [peer["own_texts_loss"] for peer in status["peers"]] == [2.7, 3.5, None, None]
    assert status["validation"] == before
    [*_, note] = notes_of(status)
    assert note.plain.startswith(f"{said}: 2.7 (")
    assert peer_name(1)[-8:] in note.plain


def test_an_empty_swarm_has_a_problem_and_no_perplexity(records):
    for kind in (records.claims, records.peers, records.holdings, records.progress):
        kind.clear()
    status = status_at(records)
    assert not status["healthy"]
    assert status["problems"][0]["kind"] == "untrained"
    assert status["validation"]["perplexity"] is None
    assert status["paths"][0]["state"] == "unserved"
    assert status["paths"][0]["validation_loss"] is None
    json.dumps(status, allow_nan=False)


def test_what_was_known_of_a_path_stays(records):
    before = status_at(records)
    records.progress.clear()
    gone = status_at(records)
    assert gone["validation"]["loss"] is None
    assert (gone["validation"]["paths_reporting"], gone["validation"]["paths"]) == (0, 4)
    kept = with_what_was_known(gone, before)
    assert (kept["paths"], kept["validation"]) == (before["paths"], before["validation"])


def test_what_one_peer_invented_does_not_outlast_the_next_round(records):
    """Also where tokens were lost: a path is no further than its newest round says."""
    true = records.progress[0]
    records.progress[0] = true.model_copy(update={"tokens": 2**50})
    before = status_at(records)
    records.progress[0] = true.model_copy(update={"last_round": true.last_round + 1})
    now = status_at(records)
    assert with_what_was_known(now, before)["paths"] == now["paths"]
    # What is said of an earlier round is no news.
    records.progress[0] = true.model_copy(update={"last_round": true.last_round - 1, "tokens": 2**51})
    later = with_what_was_known(status_at(records), now)
    assert (later["paths"][0]["tokens"], later["paths"][0]["last_round"]) == (true.tokens, true.last_round + 1)


def test_a_run_that_everybody_left_for_its_successor_is_finished(records):
    successor = records.plan.model_copy(update={"name": "then"})
    assert not status_at(records, successor)["finished"]
    records.claims.clear()
    finished = status_at(records, successor)
    assert (finished["finished"], finished["healthy"], finished["problems"]) == (True, True, [])
    text = " ".join(line.plain for line in problem_lines(finished))
    assert text == f"finished, continued as run then: --run {successor.run_id}"


# -- the command


def test_the_command_on_a_real_swarm(tmp_path, records):
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    plan = opened(make_plan(name="live", start_s=time.time() - 650.0), key)
    node = start_node(tmp_path / "node", run_id=plan.run_id, operator_key=raw_public_key(key))
    try:
        manifest = verify_manifest(sign_manifest(plan, key))
        publish_manifest(node.directory, manifest.envelope, 600.0)
        asked = command("dipaco-status", "--initial-peers", node.address, "--json")
        found = json.loads(asked.stdout)
        assert (asked.returncode, found["healthy"], found["peers"]) == (1, False, [])
        assert found["run"]["id"] == plan.run_id

        me = node.peer_id
        peer = records.peers[peer_name(0)].model_copy(update={"peer_id": me})
        # Without an admission nobody is seen.
        node.directory.admission = None
        publish(node.directory, "peers", "0", peer, 300.0)
        asked = command("dipaco-status", "--initial-peers", node.address, "--json")
        assert json.loads(asked.stdout)["peers"] == []
        assert "no admission" in asked.stderr

        gate = Gate.of(manifest)
        node.directory.admission = admit(gate, node.identity, manifest, time.time(), None)
        publish(node.directory, "peers", "0", peer, 300.0)
        progress = ProgressRecord(peer_id=me, entries=tuple(records.progress.values()))
        publish(node.directory, "progress", "0", progress, 300.0)
        asked = command("dipaco-status", "--initial-peers", node.address, "--json", "--run", "live")
        found = json.loads(asked.stdout)
        assert "no admission" not in asked.stderr
        assert found["paths"][0]["peers"] == [me]
        assert found["peers"][0]["device"] == "cpu x1"
        assert [i["peers"] for i in found["admission"]["invitations"]] == [1]

        shown = command("dipaco-status", "--initial-peers", node.address)
        assert "run live" in shown.stdout
    finally:
        node.close()
