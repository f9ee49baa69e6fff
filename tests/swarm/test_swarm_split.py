"""Promise 7: after a network split heals, all peers hold one state again within two rounds.

Two network namespaces are the two sides; the cable between them is cut for a few rounds.
"""

import time

import pytest

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import BIN, Swarm
from support.wire.split_network import can_split, split_network

# Of a round, by the clock, in which also the claims of the other side expire: rounds that end when
# all are done pass faster than views are read.
DURATION_S = 12.0
# Rounds that anybody ends between the first sign of the other side and a state that all have held since,
# behind the one that was under way when it came.
HEALING_ROUNDS = 2
SHARED = "L0.E0"


def _start(swarm, network, side, program, name, *arguments):
    listen = ["--host-maddrs", f"/ip4/{network.addresses[side]}/tcp/0"]
    return swarm._add(name, [*network.prefix(side), str(BIN / program), *arguments, *listen])


def _peer(swarm, network, side, entry, path, name):
    return _start(
        swarm, network, side, "dipaco-peer", name, "--initial-peers", entry.address(),
        "--path", str(path), "--threads", "1",
        "--cache-dir", str(swarm.folder / f"{name}-cache"),
    )  # fmt: skip


def _states(members):
    """Return per module the (version, digest) that members hold now."""
    found = {}
    for member in members:
        own = {e["module"]: e for e in member.read() if e["event"] in ("outer_step", "adopt")}
        for module, event in own.items():
            found.setdefault(module, set()).add((event["version"], event["digest"]))
    return found


def _states_since(member, since_s):
    """Return when a member first held each (version, digest) of the shared module after `since_s`."""
    events = [e for e in member.read() if e["event"] in ("outer_step", "adopt") and e["module"] == SHARED]
    return {(e["version"], e["digest"]): e["time_s"] for e in reversed(events) if e["time_s"] > since_s}


@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_split(), reason="needs root and network namespaces")
@pytest.mark.parametrize(
    ("sides", "split_durations"),
    [
        pytest.param(((0, 1), (0, 1)), 2, id="both paths on each side"),
        # What they share fits the other path no more.
        pytest.param(((0, 0), (1, 1)), 5, id="a path on each side"),
    ],
)
def test_a_split_heals_within_two_rounds(sides, split_durations, tmp_path):
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, 2),
        inner_steps=0,
        duration_s=DURATION_S,
        start_s=time.time(),
        rounds={"gather_s": 3.0, "grace_s": 1.0, "validation_sequences": 4},
    )
    with split_network() as network, Swarm(tmp_path, run) as swarm:
        bootstrap = _start(swarm, network, 0, "dipaco-bootstrap", "bootstrap", "serve", str(run.path))
        peers = [
            _peer(swarm, network, side, bootstrap, path, f"peer{2 * side + place}")
            for side, paths in enumerate(sides)
            for place, path in enumerate(paths)
        ]
        swarm.wait(peers, "training")
        swarm.wait(peers, "outer_step", lambda e: len(e["group"]) == 4)

        network.cut()
        cut_s = time.time()
        # Both sides go on by themselves.
        swarm.wait(peers, "outer_step", lambda e: e["module"] == SHARED and e["time_s"] > cut_s and len(e["group"]) < 4)
        time.sleep(max(0.0, cut_s + split_durations * DURATION_S - time.time()))
        assert len(_states(peers)[SHARED]) > 1, "the two sides did not part"

        network.mend()
        mended_s = time.time()
        # A busy machine leaves one or the other out of a step, and all have its state.
        swarm.wait(peers, "outer_step", lambda e: e["time_s"] > mended_s and len(e["group"]) == 4)
        found = {peer: _states_since(peer, mended_s) for peer in peers}
        common = set.intersection(*map(set, found.values()))
        together = {peer: min(held[state] for state in common) for peer, held in found.items()}
        # Until the claims of the other side have been read, rounds go on without it.
        steps = [e for peer in peers for e in peer.of("outer_step") if e["time_s"] > mended_s]
        met_s = min(e["time_s"] for e in steps if e["module"] == SHARED and len(e["group"]) > 2)
        for peer, together_s in together.items():
            ended = [e for e in peer.of("round") if met_s < e["time_s"] < together_s]
            assert len(ended) <= HEALING_ROUNDS + 1, (peer.name, met_s, together, ended)
        assert all(member.alive for member in peers)
