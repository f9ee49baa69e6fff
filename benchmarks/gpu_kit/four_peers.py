"""Part d: four peers share the device with a node beside them, against four bare loops.

Rounds follow the clock, so peers train while they exchange; digests must be equal in every group.
Each peer may have its quarter of the memory, as somebody would give it who shares a card. Nothing
is compiled, because that takes longer than the rounds that are measured. Tokens a second are those
of whole rounds, from the end of one to the end of a later one, boundaries and exchanges included;
the share of inner steps is of the same time. The bare loops train the same paths at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from parts.common import HERE, one_thread, scratch_folder
from parts.synthetic_run import make_synthetic_run
from support.swarms.swarm import Member, Swarm

from dipaco.routing.run_folder import RunFolder
from gpu_kit.common import Part, begin

PEERS = 4
# Of the card, so that its driver and the four contexts have the rest.
SHARE = 0.88
# What is waited for at most: the first outer step of all, and the others.
FIRST_LIMIT_S, ROUNDS_LIMIT_S = 100.0, 100.0
MEASURED_ROUNDS = 2
THREADS = "4"
# As a run on volunteers' cards has it.
USUAL_ROUND_S = 300.0


def main() -> int:
    part = begin("four peers", __doc__)
    with scratch_folder() as folder:
        run = make_run(part, folder / "run")
        peers: dict[str, Any] = {}
        with part.measuring("four peers"):
            peers = four_peers(part, folder, run)
            part.note("four peers", peers)
        with part.measuring("four bare loops"):
            bare = bare_loops(part, run)
            part.note("four bare loops", bare)
            if peers:
                ratio = peers["tokens_per_s"] / bare["tokens_per_s"]
                part.note("four peers / four bare loops", {"ratio": ratio})
    if peers and not peers["digests_equal"]:
        print("  FAILED: peers of one group computed unequal digests", flush=True)
        return 1
    return part.conclude()


def make_run(part: Part, folder: Path) -> RunFolder:
    """Write a run of 2x2 paths with short rounds."""
    return make_synthetic_run(
        folder,
        part.model,
        batch_sequences=4 if part.rehearses else 64,
        train_sequences=64 if part.rehearses else 512,
        start_s=time.time(),
        duration_s=8.0 if part.rehearses else 30.0,
        validation_sequences=4,
    )


def memory_gib(part: Part) -> float:
    """Return what each peer may have of the device."""
    return SHARE / PEERS * torch.cuda.get_device_properties(part.device).total_memory / 2**30


def four_peers(part: Part, folder: Path, run: RunFolder) -> dict[str, Any]:
    """Train by peers for some rounds of all; returns speed, shares and agreement."""
    limits = () if part.rehearses else ("--vram-gb", f"{memory_gib(part):.2f}")
    words = ("--device", part.device.type, "--no-compile", "--threads", THREADS, *limits)
    started_s = time.time()
    with Swarm(folder, run) as swarm:
        address = swarm.start_bootstrap().address()
        peers = [swarm.start_peer(address, "--path", str(path), *words) for path in range(PEERS)]
        begun = swarm.wait(peers, "outer_step", timeout_s=FIRST_LIMIT_S)
        first = max(event["round"] for event in begun) + 1
        print(f"  all have an outer step after {max(e['time_s'] for e in begun) - started_s:.1f} s")
        last = first + MEASURED_ROUNDS
        swarm.wait(peers, "outer_step", lambda e: e["round"] >= last, timeout_s=ROUNDS_LIMIT_S)
        return figures(peers, first, last)


def figures(peers: list[Member], first: int, last: int) -> dict[str, Any]:
    """Return what peers did between the outer steps of two rounds."""
    speeds, shares, counts, lost_s = [], [], [], []
    for peer in peers:
        begin_s, end_s = (
            next(e["time_s"] for e in peer.of("outer_step") if e["round"] >= number)
            for number in (first, last)
        )
        steps = [e for e in peer.of("inner") if begin_s < e["time_s"] <= end_s]
        speeds.append(sum(e["tokens"] for e in steps) / (end_s - begin_s))
        shares.append(sum(e["seconds"] for e in steps) / (end_s - begin_s))
        counts.append(len(steps))
        idle_s = end_s - begin_s - sum(e["seconds"] for e in steps)
        lost_s.append(idle_s / (last - first))
    digests = digests_of(peers)
    return {
        "tokens_per_s": sum(speeds),
        "share_in_inner_steps": sum(shares) / len(shares),
        "lost_s_a_round": sum(lost_s) / len(lost_s),
        "share_at_usual_rounds": 1 - sum(lost_s) / len(lost_s) / USUAL_ROUND_S,
        "steps": sum(counts),
        "outer_steps_in_groups": sum(len(found) for found in digests.values()),
        "digests_equal": bool(digests) and all(len(set(d)) == 1 for d in digests.values()),
    }


def digests_of(peers: list[Member]) -> dict[tuple[str, int], list[str]]:
    """Return the digests that peers computed, by module and round, of steps with several rows."""
    digests: dict[tuple[str, int], list[str]] = {}
    for peer in peers:
        for event in peer.of("outer_step"):
            if len(event["group"]) > 1:
                digests.setdefault((event["module"], event["round"]), []).append(event["digest"])
    return digests


def bare_loops(part: Part, run: RunFolder) -> dict[str, Any]:
    """Train the four paths without a swarm, at the same time."""
    seconds = "3" if part.rehearses else "12"
    limits = () if part.rehearses else ("--vram-gb", f"{memory_gib(part):.2f}")
    script = str(HERE / "parts" / "bare_loop.py")
    loops = [
        subprocess.Popen(
            [
                sys.executable, script, str(run.path), "--path", str(path), "--seconds", seconds,
                "--device", part.device.type, "--no-compile", "--threads", THREADS,
                "--warmup-steps", "8", *limits,
            ],
            env=one_thread(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for path in range(PEERS)
    ]  # fmt: skip
    try:
        printed = [loop.communicate(timeout=150)[0] for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
    found = [json.loads(text.splitlines()[-1]) for text in printed]
    # What they did while all four were at it would be better; they begin within a second or two.
    begun = [each["began_at_s"] for each in found]
    return {
        "tokens_per_s": sum(each["tokens_per_s"] for each in found),
        "at_once": [each["micro_batch"] for each in found],
        "peak_memory_gib": sum(each["peak_memory_bytes"] for each in found) / 2**30,
        "begun_apart_s": max(begun) - min(begun),
    }


if __name__ == "__main__":
    sys.exit(main())
