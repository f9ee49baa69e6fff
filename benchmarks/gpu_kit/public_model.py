"""Part i: four peers specialise a public model on the device, and their paths are scored.

The folder `brought/`, beside this file, has what no machine without a network can make: `run/`, a
prepared run of four paths with adapters and fixed steps, `checkpoint/`, the base that it names, and
`validation.jsonl.gz`, held-out texts with a "domain". The base is made of the checkpoint on this
machine, its hash is checked, and the peers get it from the bootstrap node. They train for some
hundred steps and leave. Their digests must be equal in every group. Without the folder the part is
left out.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from parts.common import one_thread, scratch_folder
from parts.run_base import install_base
from support.swarms.swarm import BIN, Member, Swarm

from dipaco.routing.run_folder import RunFolder
from gpu_kit.common import Part, begin
from gpu_kit.four_peers import digests_of

BROUGHT = Path(__file__).parent / "brought"
PEERS = 4
STEPS = 500
LIMIT_S, SCORING_LIMIT_S = 180.0, 50.0


def main() -> int:
    part = begin("public model", __doc__)
    if not BROUGHT.is_dir():
        print(f"  left out: there is no {BROUGHT.name}/ with a run", flush=True)
        return part.conclude()
    with scratch_folder() as folder, part.measuring("public model"):
        run = RunFolder(BROUGHT / "run")
        install_base(run, BROUGHT / "checkpoint")
        trained = train(part, folder, run)
        part.note("public model", trained)
        assert trained["digests_equal"], "peers of one group computed unequal digests"
        assert trained["ended"], "the peers did not end in time"
        part.note("held out, perplexity", scored(part, folder, run))
    return part.conclude()


def train(part: Part, folder: Path, run: RunFolder) -> dict[str, Any]:
    """Train by four peers until all have left, or the time is over."""
    round_steps = run.plan().rounds.inner_steps
    assert round_steps is not None
    rounds = 1 if part.rehearses else STEPS // round_steps
    # Compilation would take longer than these steps.
    words = ("--device", part.device.type, "--no-compile", "--max-rounds", str(rounds))
    began_s = time.time()
    with Swarm(folder, run) as swarm:
        address = swarm.start_bootstrap().address()
        peers = [swarm.start_peer(address, "--path", str(path), *words) for path in range(PEERS)]
        limit_s = LIMIT_S * (4 if part.rehearses else 1)
        while any(peer.alive for peer in peers) and time.time() < began_s + limit_s:
            time.sleep(0.5)
        assert not any(peer.popen.returncode for peer in peers), swarm.outputs()
        ended = not any(peer.alive for peer in peers)
        return {"seconds": time.time() - began_s, "ended": ended, **of_rounds(peers)}


def of_rounds(peers: list[Member]) -> dict[str, Any]:
    """Return what peers did, and whether all groups agree."""
    inner = [event for peer in peers for event in peer.of("inner")]
    outer = [event for peer in peers for event in peer.of("outer_step")]
    digests = digests_of(peers)
    return {
        "tokens": sum(event["tokens"] for event in inner),
        "inner_step_s": sum(event["seconds"] for event in inner) / max(1, len(inner)),
        "begun_to_last_outer_step_s": max(e["time_s"] for e in outer)
        - min(e["time_s"] - e["seconds"] for e in inner),
        "last_round": max(event["round"] for event in outer),
        "outer_steps_in_groups": sum(len(found) for found in digests.values()),
        "digests_equal": bool(digests) and all(len(set(d)) == 1 for d in digests.values()),
    }


def scored(part: Part, folder: Path, run: RunFolder) -> dict[str, float]:
    """Return the held-out perplexity of each domain and of all, of the base and of the paths.

    Every peer has the states of its own modules; put together they are those of all paths.
    """
    caches = [folder / f"peer{path}-cache" for path in range(PEERS)]
    for cache in caches[1:]:
        shutil.copytree(cache, caches[0], dirs_exist_ok=True)
    done = subprocess.run(
        [
            str(BIN / "dipaco-eval"), "--state-dir", str(caches[0]), "--run", run.plan().run_id,
            "--data", str(BROUGHT / "validation.jsonl.gz"), "--label-field", "domain", "--json",
            "--device", part.device.type,
        ],
        env=one_thread(),
        capture_output=True,
        text=True,
        timeout=SCORING_LIMIT_S * (10 if part.rehearses else 1),
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    report = json.loads(done.stdout)
    by_domain = {**report["labels"], "all": report}
    return {
        f"{name}, {of}": figures[key]
        for name, figures in by_domain.items()
        for of, key in (("base", "base_perplexity"), ("paths", "perplexity"))
    }


if __name__ == "__main__":
    sys.exit(main())
