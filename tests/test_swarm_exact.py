"""Promises 3 and 5 with real processes: a swarm's digests are the single process's, bit for bit,
and so are the best states of its paths, which outlive the peers that found them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from dipaco.bootstrap.invite import invite, invite_own_nodes
from dipaco.dht.admission import Gate
from dipaco.dht.certificate_check import verify_certificate
from dipaco.dht.manifest import load_or_create_operator_key, verify_manifest
from dipaco.modules.errors import AdmissionError
from dipaco.modules.files import sha256_of_file
from dipaco.peer.exchange.certificate_files import CertificateFiles
from dipaco.routing.run_folder import RunFolder
from support.swarm import Member, Swarm, command
from support.tiny_run import make_tiny_run, sign_tiny_run, tiny_documents

pytestmark = pytest.mark.swarm

LIMIT_S = 300.0
ROUNDS, STEPS = 5, 4


def simulated(run_folder: Path, out: Path) -> list[dict[str, Any]]:
    """Return what `dipaco-simulate` reports of every round; its best states are under `out`."""
    done = command(
        "dipaco-simulate", str(run_folder), "--rounds", str(ROUNDS), "--json", "--threads", "1",
        "--out", str(out), timeout_s=2 * LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("codec", "private_blocks"),
    [("none", ()), ("float16", (0, 3))],
    ids=["fp32-invited", "fp16-private"],
)
def test_four_peers_equal_the_reference(
    tmp_path: Path, codec: str, private_blocks: tuple[int, ...]
) -> None:
    run = make_tiny_run(
        tmp_path / "run",
        codec=codec,
        private_blocks=private_blocks,
        inner_steps=STEPS,
        # So few documents are soon known by heart: the best states are not the newest.
        documents_per_path=3 if private_blocks else 40,
        # From then on nothing changes, so that the best states can be fetched in peace.
        inner=(
            {"learning_rate": 0.05, "decay_steps": ROUNDS * STEPS, "floor_ratio": 0.0}
            if private_blocks
            else None
        ),
        outer={"decay_steps": ROUNDS, "floor_ratio": 0.0} if private_blocks else None,
        # A limit: rounds end when everybody is done, however long that takes.
        duration_s=LIMIT_S,
        # Everybody keeps everything, the bootstrap node too.
        rounds={"matchmaking_s": 0.9, "copies": 5},
    )
    # First of all: the swarm leaves it no time.
    reports = simulated(run.path, tmp_path / "simulated")
    run = begun_now(run, by_invitation=not private_blocks)
    invited = () if private_blocks else ("--invitation", invite(run.path, 4))
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap, "--path", str(path), *invited) for path in range(4)]
        started = swarm.wait(peers, "training", timeout_s=LIMIT_S)
        assert {event["round"] for event in started} == {0}
        uninvited = start_uninvited(swarm, bootstrap, invited) if invited else {}
        swarm.wait(peers, "round", lambda event: event["round"] == ROUNDS - 1, timeout_s=LIMIT_S)
        for round_index, report in enumerate(reports):
            found = swarm.digests(round_index)
            assert found == {m: {d} for m, d in report["digests"].items()}, round_index
        check_certificates(swarm, run, peers)
        if private_blocks:
            check_best_paths(swarm, bootstrap, peers, reports[-1]["paths"])
        for said, peer in uninvited.items():
            assert peer.popen.wait(LIMIT_S) == AdmissionError.exit_code, swarm.outputs()
            assert said in peer.output.read_text().splitlines()[-1]


def begun_now(run: RunFolder, *, by_invitation: bool) -> RunFolder:
    """Return the run, signed again to start now: the first round waits `LIMIT_S` for all peers."""
    changes: dict[str, Any] = {"start_s": time.time()}
    if by_invitation:
        changes["admission"] = "invitation"
    plan = run.plan().model_copy(update=changes)
    sign_tiny_run(run, plan)
    if by_invitation:
        key = load_or_create_operator_key(run.path / "operator.pem")
        invite_own_nodes(run.path, plan, key, print)
    return run


def start_uninvited(swarm: Swarm, bootstrap: Member, invited: tuple[str, ...]) -> dict[str, Member]:
    """Start a peer without an invitation, and one with that whose places are taken.

    Returns each with what it says in its last line.
    """
    return {
        "is by invitation: ask": swarm.start_peer(bootstrap, name="uninvited"),
        "all places of the invitation": swarm.start_peer(bootstrap, *invited, name="fifth"),
    }


def check_certificates(swarm: Swarm, run: RunFolder, peers: list[Member]) -> None:
    """What each peer committed in the last round is soon signed by all members of its group."""
    grid, run_id = run.grid(run.plan()), run.plan().run_id
    gate = Gate.of(verify_manifest(run.manifest_path.read_bytes()))
    deadline = time.monotonic() + LIMIT_S
    for peer in peers:
        folder = peer.cache / run_id / "certificates"
        files = CertificateFiles(folder, run_id, grid)
        commits = [e for e in peer.of("commit") if e["round"] == ROUNDS - 1]
        assert commits
        for commit in commits:
            while True:
                known = [c for c in files.load() if c.statement.digest == commit["digest"]]
                if known and known[0].signers == set(commit["group"]):
                    break
                assert time.monotonic() < deadline, (known, commit, swarm.outputs())
                time.sleep(0.1)
            verify_certificate(known[0], run_id, grid, gate=gate)
            assert known[0].statement.round_index == commit["round"]


def check_best_paths(
    swarm: Swarm, bootstrap: Member, peers: list[Member], paths: list[dict[str, Any]]
) -> None:
    """The best states are the simulator's, another process keeps them, and evaluation takes them.

    They still are where their finders left: only the bootstrap node is asked.
    """
    best = swarm.folder / "simulated" / "best"
    expected = {
        path["path"]: sha256_of_file(best / f"P{path['path']:05d}.safetensors") for path in paths
    }
    until_round = {path["path"]: path["best"]["round"] for path in paths}
    for path, peer in enumerate(peers):
        found = [e for e in peer.of("best_path") if e["round"] <= until_round[path]]
        assert found[-1]["sha256"] == expected[path], f"path {path}"
        swarm.wait(
            [bootstrap], "kept_best", lambda e, path=path: e["path"] == path, timeout_s=LIMIT_S
        )
    data = swarm.folder / "documents.jsonl"
    texts = tiny_documents(4, 2, seed=3)
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    reports = {}
    for flag in ("--current", ""):
        if not flag:
            for peer in peers:
                peer.interrupt()
            for peer in peers:
                peer.popen.wait(LIMIT_S)
        done = command(
            "dipaco-eval", "--initial-peers", bootstrap.address(), "--data", str(data), "--json",
            "--no-base", "--threads", "1", *([flag] if flag else []), timeout_s=2 * LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        reports[flag] = json.loads(done.stdout)
    scored = len(reports[""]["paths"])
    assert reports[""]["states"] == {"best": scored, "current": 0}
    assert reports["--current"]["states"] == {"best": 0, "current": scored}, swarm.outputs()
    assert scored == 4
