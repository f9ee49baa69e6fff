"""Memory of an idle peer beyond the model, process by process.

    python benchmarks/idle_memory.py [--json]

A peer with a tiny model waits for its run to start; everything is there that it needs to train.
Sizes are proportional (`Pss` of /proc/PID/smaps_rollup): a page that several processes map counts
for each of them with its share, so the sum is what the peer really takes. Beside it stand the bare
training loop with the same model, which is mostly PyTorch itself, and the bootstrap node.
`anonymous` leaves out files (libraries above all), which other programs may map too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dipaco.modules.grid import Grid
from parts.common import (
    HERE,
    ProcessMemory,
    Report,
    build_parser,
    one_thread,
    process_tree,
    ratio,
    scratch_folder,
)
from support.swarm import Swarm
from support.tiny_run import make_tiny_run

SETTLE_S = 5.0


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--levels", type=int, default=2, help="levels of the grid (2)")
    chosen = parser.parse_args()
    report = Report("memory of an idle peer", ("process", "proportional MiB", "anonymous MiB"))
    with scratch_folder() as folder:
        run = make_tiny_run(
            folder / "run",
            modules_per_level=(2,) * chosen.levels,
            start_s=time.time() + 3600.0,
        )
        plan = run.plan()
        parameters = Grid(plan.model, plan.grid).parameter_counts()["path"]
        bare = measure_bare(run.path)
        with Swarm(folder, run) as swarm:
            bootstrap = swarm.start_bootstrap()
            peer = swarm.start_peer(bootstrap, "--path", "0")
            swarm.wait([peer], "waiting", lambda event: "to start" in event["what"])
            time.sleep(SETTLE_S)
            trees = {
                "peer": named(process_tree(peer.popen.pid)),
                "bootstrap node": named(process_tree(bootstrap.popen.pid)),
            }
    totals = {"bare training loop": total([bare])}
    report.row("bare training loop", *totals["bare training loop"])
    for owner, tree in trees.items():
        for name, process in tree:
            report.row(f"{owner}: {name}", process.proportional_mib, process.anonymous_mib)
        totals[owner] = total([process for _, process in tree])
        report.row(f"{owner}, all", *totals[owner])
    against = ratio(totals["peer"][0], totals["bare training loop"][0])
    report.row("peer / bare loop", against, "")
    report.notes.append(
        f"the model itself has {parameters * 4 / 2**20:.2f} MiB of parameters; "
        f"{chosen.levels} levels, one averager each"
    )
    report.figures = {
        "ratio": against,
        "model_mib": parameters * 4 / 2**20,
        "levels": chosen.levels,
        "totals": {
            name: {"proportional_mib": round(sizes[0], 1), "anonymous_mib": round(sizes[1], 1)}
            for name, sizes in totals.items()
        },
        "processes": [
            {
                "of": owner,
                "process": name,
                "proportional_mib": round(process.proportional_mib, 1),
                "anonymous_mib": round(process.anonymous_mib, 1),
            }
            for owner, tree in trees.items()
            for name, process in tree
        ],
    }
    report.print(chosen.json)
    return 0


def measure_bare(run: Path) -> ProcessMemory:
    """Load the bare loop in its own process and return its memory."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "bare_loop.py"), str(run), "--idle"],
        env=one_thread(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        json.loads(process.stdout.readline())
        time.sleep(1.0)
        return process_tree(process.pid)[0]
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def named(tree: Sequence[ProcessMemory]) -> list[tuple[str, ProcessMemory]]:
    """Name the processes of a peer: libp2p's daemon, its DHT, the averagers, the main process."""
    root = tree[0].pid
    dht = {process.parent for process in tree if process.command == "p2pd"}
    found, averagers = [], 0
    for process in tree:
        if process.pid == root:
            name = "main"
        elif process.command == "p2pd":
            name = "p2pd"
        elif process.pid in dht:
            name = "DHT"
        elif process.parent == root:
            name = f"averager {averagers}"
            averagers += 1
        else:
            name = process.command
        found.append((name, process))
    return found


def total(processes: Sequence[ProcessMemory]) -> tuple[float, float]:
    """Return the proportional and the anonymous MiB of several processes together."""
    return (
        sum(process.proportional_mib for process in processes),
        sum(process.anonymous_mib for process in processes),
    )


if __name__ == "__main__":
    sys.exit(main())
