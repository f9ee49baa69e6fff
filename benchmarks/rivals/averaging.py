"""Four peers average 20 M values: Hivemind's `DecentralizedAverager`, beside our outer round."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import outer_round
from outer_round import Group
from parts.common import Report, process_tree, scratch_folder, steady_peer
from parts.home_lines import Homes, homes
from parts.outer_memory import BLOCK_MILLIONS, SHAPE
from parts.synthetic_run import make_synthetic_run
from support.swarms.swarm import Event, Member, Swarm

from dipaco.modules.layout import parameter_counts
from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.grid import Grid
from rivals.turns import Figures, Turns, Worker, told

MEMBERS, MILLIONS = 4, 20
MODEL = ModelConfig(**SHAPE, block_count=MILLIONS // BLOCK_MILLIONS)
SIZE = parameter_counts(Grid(MODEL, GridConfig(modules_per_level=(1,))))["path"]
COMPRESSIONS = ("none", "float16", "uniform8bit")
# Those that know how many they are begin when all are there; others at the time they agreed on.
THEIRS = (*((name, True) for name in COMPRESSIONS), ("float16", False))
OUR_CODECS = ("int4",)
ROUNDS = 4
STEP_LIMIT_S = 90.0
# Without these, which is its default, the others of a group wait for one that is gone for ever.
CHUNK_S, ALLREDUCE_S = 5.0, 30.0
EVERY_S = 15.0
"""Between two rounds of theirs after a loss, in which a peer would train."""
LATE_LIMIT_S = 150.0
OUR_ROUND_S = 20.0
LEAST_STEP_S = 1.0


def compare(report: Report, times: int) -> None:
    """Add what a round takes, ours and theirs in turns."""
    found: dict[str, list[Figures]] = {}

    def note(name: str, figures: Figures) -> None:
        found.setdefault(name, []).append(figures)
        print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)

    for _ in range(times):
        for compression, knows in THEIRS:
            name = f"Hivemind, {compression}" + ("" if knows else ", of any number")
            with their_peers(SIZE, compression, knows=knows) as (network, peers):
                note(name, their_rounds(network, peers))
        for codec in OUR_CODECS:
            with scratch_folder() as folder:
                ours = Group(folder, MODEL, codec, MEMBERS, "cpu").measure(ROUNDS - 1)
            note(f"ours, {codec}", {**ours, "seconds": [ours["seconds_median"]]})
    for name, several in found.items():
        seconds = [value for one in several for value in one["seconds"]]
        received, peak = (
            statistics.median(one[key] for one in several) for key in ("received", "peak_mib")
        )
        report.row(
            "averaging", name, f"{received:.2f} B a value", f"{told(seconds)} s", round(peak)
        )
        report.figures[name] = several


@contextmanager
def their_peers(
    size: int, compression: str, *, knows: bool = True
) -> Iterator[tuple[Homes, list[Worker]]]:
    """Start Hivemind's peers, at sites of their own; they know how many they are, or not."""
    with homes(*[0] * MEMBERS) as network, ExitStack() as stack:
        peers: list[Worker] = []
        for site in range(MEMBERS):
            peer = their_peer(network, site, size, compression, peers, knows=knows)
            peers.append(stack.enter_context(peer))
        yield network, peers


def their_peer(
    network: Homes,
    site: int,
    size: int,
    compression: str,
    others: list[Worker],
    *,
    knows: bool = True,
) -> Worker:
    """Start a peer that joins through the first of the others."""
    words = ["--size", str(size), "--compression", compression, "--host", network.address(site)]
    words += ["--knows"] if knows else []
    if others:
        words += ["--join", others[0].turn("address")["address"]]
    return Worker("rivals.averaging", *words, prefix=network.prefix(site))


def their_rounds(network: Homes, peers: list[Worker]) -> Figures:
    """Average some times; the first is not told."""
    peak: dict[int, float] = {}
    over = threading.Event()

    def watch() -> None:
        trees = {p.pid: [one.pid for one in process_tree(p.pid)] for p in peers}
        while not over.wait(outer_round.SAMPLE_S):
            for root, pids in trees.items():
                used = sum(map(outer_round._main_memory_mib, pids))
                peak[root] = max(used, peak.get(root, 0.0))

    together(peers, "step")
    watcher = threading.Thread(target=watch)
    watcher.start()
    before = [outer_round._traffic(network, site) for site in range(MEMBERS)]
    steps = [together(peers, "step") for _ in range(ROUNDS - 1)]
    after = [outer_round._traffic(network, site) for site in range(MEMBERS)]
    over.set()
    watcher.join()
    received, sent = (
        statistics.mean(b[way] - a[way] for a, b in zip(before, after, strict=True))
        / (SIZE * len(steps))
        for way in (0, 1)
    )
    seconds = [one["seconds"] for step in steps for one in step]
    return {
        "received": round(received, 3),
        "sent": round(sent, 3),
        "seconds": [statistics.median(seconds)],
        "greatest": max(seconds),
        "after_schedule": [one["after_schedule_s"] for step in steps for one in step],
        "peak_mib": statistics.mean(peak.values()),
        "groups": [one["group"] for step in steps for one in step],
    }


def together(peers: list[Worker], command: str) -> list[Figures]:
    """Let all do a turn at the same time."""
    for peer in peers:
        peer.tell(command)
    return [peer.answer() for peer in peers]


def compare_loss(report: Report) -> None:
    """Add what follows when one of four is killed in a round, and another comes later."""
    theirs, ours = their_loss(), our_loss()
    for key in ("round of the loss, s", "the round after it, s", "a late one takes part after, s"):
        report.row("one killed", key, "", str(ours[key]), str(theirs[key]))
    report.figures["one killed"] = {"ours": ours, "Hivemind": theirs}


def their_loss() -> Figures:
    """Kill one of theirs in an all-reduce, and let a late one look for a group."""
    with their_peers(SIZE, "float16") as (network, peers), ExitStack() as stack:
        together(peers, "step")
        others = peers[:-1]
        for peer in others:
            peer.tell("step")
        peers[-1].tell("die in a step")
        lost = [peer.answer() for peer in others]
        after = together(others, "step")
        began = time.monotonic()
        late = stack.enter_context(their_peer(network, MEMBERS - 1, SIZE, "float16", others))
        late.tell("step")
        heard: list[Figures] = []
        waiter = threading.Thread(target=_wait_for_group, args=(late, heard), daemon=True)
        waiter.start()
        rounds: list[list[int]] = []
        while not heard and time.monotonic() - began < LATE_LIMIT_S:
            rounds.append([one["group"] for one in together(others, "step")])
            waiter.join(EVERY_S)
        seconds = time.monotonic() - began
        return {
            "round of the loss, s": [one["seconds"] for one in lost],
            "groups of it": [one["group"] for one in lost],
            "the round after it, s": [one["seconds"] for one in after],
            "groups after it": [one["group"] for one in after],
            "a late one takes part after, s": round(seconds, 1) if heard else None,
            "groups of the others meanwhile": rounds,
            "late": heard,
        }


def _wait_for_group(late: Worker, heard: list[Figures]) -> None:
    while True:
        try:
            found = late.answer()
        except RuntimeError:
            return
        if found["group"] > 1:
            heard.append(found)
            return
        late.tell("step")


def our_loss() -> Figures:
    """Kill one of ours between a boundary and the step, and let another come later."""
    with scratch_folder() as folder:
        run = make_synthetic_run(
            folder / "run", MODEL, modules_per_level=(1,), batch_sequences=1, train_sequences=64,
            validation_sequences=1, start_s=time.time() + 45.0, duration_s=OUR_ROUND_S,
        )  # fmt: skip
        with Swarm(folder, run) as swarm:
            node = swarm.start_bootstrap()
            program = steady_peer(LEAST_STEP_S)
            peers = [swarm.start_peer(node, "--path", "0", program=program) for _ in range(MEMBERS)]
            full = swarm.wait(peers, "outer_step", lambda e: len(e["group"]) == MEMBERS)
            known = max(event["round"] for event in full)
            [boundary] = swarm.wait(peers[-1:], "outer_round", lambda e: e["round"] > known)
            peers[-1].kill()
            lost, others = boundary["round"], peers[:-1]
            of_loss = _after_boundaries(swarm, others, lost)
            after = _after_boundaries(swarm, others, lost + 1)
            began = time.time()
            late = swarm.start_peer(node, "--path", "0", program=program)
            name = late.peer_id
            taken = swarm.wait(others, "outer_step", lambda e: name in e["group"])
            return {
                "round_s": OUR_ROUND_S,
                "round of the loss, s": [seconds for seconds, _ in of_loss],
                "groups of it": [group for _, group in of_loss],
                "the round after it, s": [seconds for seconds, _ in after],
                "groups after it": [group for _, group in after],
                "a late one takes part after, s": round(taken[0]["time_s"] - began, 1),
            }


def _after_boundaries(swarm: Swarm, peers: list[Member], index: int) -> list[tuple[float, int]]:
    """Return how long after its boundary each had the step of a round, and of how many it is."""
    boundaries = swarm.wait(peers, "outer_round", lambda e: e["round"] == index)
    steps: list[Event] = swarm.wait(peers, "outer_step", lambda e: e["round"] >= index)
    return [
        (round(step["time_s"] - boundary["time_s"], 2), len(step["group"]))
        for boundary, step in zip(boundaries, steps, strict=True)
    ]


def main() -> None:
    """Be one of Hivemind's peers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--compression", choices=COMPRESSIONS, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--join")
    parser.add_argument("--knows", action="store_true", help="how many peers there are")
    chosen = parser.parse_args()
    turns = Turns()
    import hivemind
    import torch
    from hivemind import compression
    from hivemind.averaging.control import AveragingStage
    from hivemind.utils import get_dht_time

    torch.set_num_threads(1)
    compressions = {
        "none": compression.NoCompression,
        "float16": compression.Float16Compression,
        "uniform8bit": compression.Uniform8BitQuantization,
    }
    join = [chosen.join] if chosen.join else []
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{chosen.host}/tcp/0"], initial_peers=join, start=True)
    values = torch.randn(chosen.size)
    averager = hivemind.DecentralizedAverager(
        [values], dht, start=True, prefix="beside",
        target_group_size=MEMBERS if chosen.knows else None,
        compression=compressions[chosen.compression](), next_chunk_timeout=CHUNK_S,
        allreduce_timeout=ALLREDUCE_S,
    )  # fmt: skip

    def step(*, dies: bool = False) -> Figures:
        began, scheduled = time.monotonic(), get_dht_time() + 5.0
        control: Any = averager.step(scheduled_time=scheduled, timeout=STEP_LIMIT_S, wait=False)
        while dies:
            if control.stage == AveragingStage.RUNNING_ALLREDUCE:
                os.killpg(0, signal.SIGKILL)
            time.sleep(0.001)
        group = None
        with contextlib.suppress(Exception):
            group = control.result(timeout=STEP_LIMIT_S + 30.0)
        seconds = time.monotonic() - began
        return {
            "seconds": round(seconds, 2),
            "after_schedule_s": round(get_dht_time() - scheduled, 2),
            "group": len(group) if group else 0,
        }

    while True:
        command = turns.next()
        if command == "address":
            turns.answer({"address": str(dht.get_visible_maddrs()[0])})
        else:
            turns.answer(step(dies=command == "die in a step"))


if __name__ == "__main__":
    main()
