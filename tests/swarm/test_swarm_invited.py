"""Runs by invitation with real processes: who is revoked ends, also in a run's successor."""

import json
import time

import pytest

from dipaco.base.errors import AdmissionError
from dipaco.base.files import canonical_json
from dipaco.bootstrap.invite import LIST_FILE, invite, note_admission, revoke
from dipaco.modules.state import state_chunks
from dipaco.protocol.manifest import load_or_create_operator_key
from dipaco.protocol.plan import RunPlan
from dipaco.routing.run_folder import RunFolder
from support.runs.tiny_run import make_tiny_run, sign_tiny_run
from support.swarms.swarm import LIMIT_S, Swarm


def make_run(folder, operator=None, **changes):
    """Make a run by invitation that begins now; with `operator`, of the one who has that key."""
    run = make_tiny_run(
        folder,
        modules_per_level=(1, 2),
        inner_steps=0,
        duration_s=6.0,
        name=folder.name,
        rounds={"dwell_rounds": 50, "validation_sequences": 2},
    )
    if operator is not None:
        (run.path / "operator.pem").write_bytes(operator.read_bytes())
    values = {**run.plan().model_dump(), "admission": None, "start_s": time.time()}
    blobs = {**values["blobs"], **changes.pop("blobs", {})}
    plan = RunPlan.model_validate({**values, **changes, "blobs": blobs})
    sign_tiny_run(run, plan, by_invitation=True)
    key = load_or_create_operator_key(run.path / "operator.pem")
    note_admission(run.path, plan, key, print)
    return run


def make_successor(run, folder):
    """Make a successor by the same invitations, which begins with the genesis of `run`."""
    plan, digests = run.plan(), {}
    index = RunFolder(folder)
    for module in run.grid(plan).modules():
        state = run.genesis_state(plan, module)
        digests[module] = index.blobs.add_bytes(b"".join(bytes(c) for c in state_chunks(state)))
    genesis = index.blobs.add_bytes(canonical_json(digests))
    return make_run(
        folder,
        run.path / "operator.pem",
        successor_of=plan.run_id,
        invitations_of=plan.run_id,
        blobs={"genesis": genesis},
    )


def steps_after(swarm, members, *, together):
    """Wait until all have taken a step from now on, in a group of these and no others."""
    now_s, ids = time.time(), {member.peer_id for member in members}
    swarm.wait(members, "outer_step", lambda e: e["time_s"] > now_s and (not together or set(e["group"]) == ids))


@pytest.mark.timeout(1500)
def test_who_is_revoked_ends_and_the_invited_move_on_without_outsiders(tmp_path):
    run = make_run(tmp_path / "old")
    own, leaked = invite(run.path, 2, name="own"), invite(run.path, 2, name="leaked")
    listed = [json.loads(line) for line in (run.path / LIST_FILE).read_text().splitlines()]
    (leaked_id,) = (one["id"] for one in listed if one["name"] == "leaked")
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap, "--invitation", own, "--path", str(path)) for path in range(2)]
        guest = swarm.start_peer(bootstrap, "--invitation", leaked, name="guest")
        swarm.wait([*peers, guest], "outer_step")

        revoke(run.path, [leaked_id])
        assert guest.popen.wait(LIMIT_S) == AdmissionError.exit_code, swarm.outputs()
        assert "revoked" in guest.output.read_text().splitlines()[-1]
        steps_after(swarm, peers, together=True)

        swarm.run = new = make_successor(run, tmp_path / "new")
        swarm.start_bootstrap("--initial-peers", peers[0].address(), name="successor")
        moved = swarm.wait(peers, "successor", lambda event: event["state"] == "moving")
        assert {event["run"] for event in moved} == {new.plan().run_id}
        for member, event in zip(peers, moved, strict=True):
            swarm.wait_after(event, member, "training", "outer_step")
        outsiders = {
            "is by invitation": swarm.start_peer(peers[0], name="stranger"),
            "revoked": swarm.start_peer(peers[0], "--invitation", leaked, name="guest"),
        }
        for said, outsider in outsiders.items():
            assert outsider.popen.wait(LIMIT_S) == AdmissionError.exit_code, swarm.outputs()
            assert said in outsider.output.read_text().splitlines()[-1]
            assert not outsider.of("training")
        steps_after(swarm, peers, together=True)
