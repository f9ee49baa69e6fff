"""Promise 3 with real processes: a swarm has the digests of a single process, bit for bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.swarm import Member, Swarm, command
from support.tiny_run import invited_tiny_run, make_tiny_run

from dipaco.base.errors import AdmissionError

LIMIT_S = 300.0
ROUNDS, STEPS = 4, 3


def simulated(run_folder: Path, out: Path) -> list[dict[str, Any]]:
    """Return what `dipaco-simulate` reports of every round."""
    done = command(
        "dipaco-simulate", str(run_folder), "--rounds", str(ROUNDS), "--json", "--threads", "1",
        "--out", str(out), timeout_s=2 * LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("codec", "private", "is_open", "optimizer"),
    [
        ("float32", None, False, "adamw"),
        ("int4", "int8", True, "adamw"),
        ("sign", "int2", True, "muon"),
    ],
    ids=["float32-invited", "int4-private-int8", "sign-private-int2-muon"],
)
def test_four_peers_equal_the_reference(
    tmp_path: Path, codec: str, private: str | None, is_open: bool, optimizer: str
) -> None:
    run = make_tiny_run(
        tmp_path / "run",
        codec=codec,
        private_blocks=() if private is None else (0, 3),
        contributions={} if private is None else {"private_codec": private},
        inner_steps=STEPS,
        inner={"optimizer": optimizer},
        # A limit: rounds end when everybody is done, however long that takes.
        duration_s=LIMIT_S,
        rounds={"validation_sequences": 4},
    )
    # First of all: the swarm leaves it no time.
    reports = simulated(run.path, tmp_path / "simulated")
    invited: tuple[str, ...] = ()
    if not is_open:
        invited = ("--invitation", invited_tiny_run(run, places=4, start_s=time.time()))
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap, "--path", str(path), *invited) for path in range(4)]
        started = swarm.wait(peers, "training", timeout_s=LIMIT_S)
        assert {event["round"] for event in started} == {0}
        outsiders = start_outsiders(swarm, bootstrap, invited) if invited else {}
        swarm.wait(peers, "round", lambda event: event["round"] == ROUNDS - 1, timeout_s=LIMIT_S)
        for round_index, report in enumerate(reports):
            found = swarm.digests(round_index)
            assert found == {m: {d} for m, d in report["digests"].items()}, round_index
        for said, peer in outsiders.items():
            assert peer.popen.wait(LIMIT_S) == AdmissionError.exit_code, swarm.outputs()
            assert said in peer.output.read_text().splitlines()[-1]


def start_outsiders(swarm: Swarm, bootstrap: Member, invited: tuple[str, ...]) -> dict[str, Member]:
    """Start a peer without an invitation, and one with that whose places are taken.

    Returns each with what it says in its last line.
    """
    return {
        "is by invitation: ask": swarm.start_peer(bootstrap, name="uninvited"),
        "all places of the invitation": swarm.start_peer(bootstrap, *invited, name="fifth"),
    }
