"""Promise 3 with real processes: a swarm has the digests of a single process, bit for bit."""

import json
import time

import pytest

from dipaco.base.errors import AdmissionError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.protocol.config import AdaptersConfig
from support.runs.foreign_base import make_foreign_base
from support.runs.tiny_run import invited_tiny_run, make_tiny_run
from support.swarms.swarm import BIN, Swarm, command

LIMIT_S = 300.0
ROUNDS, STEPS = 4, 3


def simulated(run_folder, out):
    """Return what `dipaco-simulate` reports of every round."""
    done = command(
        "dipaco-simulate", str(run_folder), "--rounds", str(ROUNDS), "--json", "--threads", "1",
        "--out", str(out), timeout_s=2 * LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("codec", "private_blocks", "is_open", "optimizer"),
    [("float32", (), False, "adamw"), ("int4", (0, 3), True, "adamw"), ("sign", (0, 3), True, "muon")],
    ids=["float32-invited", "int4-private", "sign-private-muon"],
)
def test_four_peers_equal_the_reference(tmp_path, codec, private_blocks, is_open, optimizer):
    run = make_tiny_run(
        tmp_path / "run",
        codec=codec,
        private_blocks=private_blocks,
        inner_steps=STEPS,
        inner={"optimizer": optimizer},
        # A limit: rounds end when everybody is done, however long that takes.
        duration_s=LIMIT_S,
        rounds={"validation_sequences": 4},
    )
    # First of all: the swarm leaves it no time.
    reports = simulated(run.path, tmp_path / "simulated")
    invited = ()
    if not is_open:
        invited = ("--invitation", invited_tiny_run(run, places=4, start_s=time.time()))
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap, "--path", str(path), *invited) for path in range(4)]
        started = swarm.wait(peers, "training", timeout_s=LIMIT_S)
        assert {event["round"] for event in started} == {0}
        outsiders = start_outsiders(swarm, bootstrap, invited) if invited else {}
        check_digests(swarm, peers, reports)
        for said, peer in outsiders.items():
            assert peer.popen.wait(LIMIT_S) == AdmissionError.exit_code, swarm.outputs()
            assert said in peer.output.read_text().splitlines()[-1]


def check_digests(swarm, peers, reports):
    """Wait for the last round and compare all that peers said of theirs with the reference."""
    swarm.wait(peers, "round", lambda event: event["round"] == ROUNDS - 1, timeout_s=LIMIT_S)
    for round_index, report in enumerate(reports):
        found = swarm.digests(round_index)
        assert found == {m: {d} for m, d in report["digests"].items()}, round_index


@pytest.mark.timeout(1000)
def test_adapters_equal_the_reference(tmp_path):
    """Over a frozen base, which one peer makes of the checkpoint in its hub's cache."""
    cache = tmp_path / "hub"
    checkpoint = cache / "models--OWNER--tiny" / "snapshots" / "1"
    make_foreign_base(checkpoint, "smollm2", num_hidden_layers=4)
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, 4),
        imported=ImportedBase(checkpoint),
        adapters=AdaptersConfig(rank=4),
        inner_steps=STEPS,
        duration_s=LIMIT_S,
        rounds={"validation_sequences": 4},
    )
    reports = simulated(run.path, tmp_path / "simulated")
    assert reports[-1]["perplexity"] < reports[0]["perplexity"]
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        program = str(BIN / "dipaco-peer")
        caches = (cache, *[tmp_path / "empty"] * 3)
        peers = [
            swarm.start_peer(bootstrap, "--path", str(path), program=("env", f"HF_HUB_CACHE={hub}", program))
            for path, hub in enumerate(caches)
        ]
        check_digests(swarm, peers, reports)
        assert "in the hub's cache" in peers[0].output.read_text()
        assert "in the hub's cache" not in peers[1].output.read_text()


def start_outsiders(swarm, bootstrap, invited):
    """Start a peer without an invitation, and one with that whose places are taken.

    Returns each with what it says in its last line.
    """
    return {
        "is by invitation; ask": swarm.start_peer(bootstrap, name="uninvited"),
        "all places of the invitation": swarm.start_peer(bootstrap, *invited, name="fifth"),
    }
