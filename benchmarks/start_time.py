"""Time from the start of the process to the first inner step, on loopback.

    python benchmarks/start_time.py [--json]

A newcomer with an empty cache joins a swarm of one bootstrap node in a run that is under way:
it imports, joins the DHT, checks its clock and the manifest, fetches blobs, claims a path (which
takes a look, a short random wait and another look), loads the model and takes a step. Beside it,
in turns, stands the bare training loop: imports, model, one step. The model is tiny, so this is
what joining costs by itself.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from parts.common import Report, alternate, build_parser, paired_ratios, run_json, scratch_folder
from support.swarm import Member, Swarm
from support.tiny_run import make_tiny_run


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--times", type=int, default=3, help="newcomers (3)")
    chosen = parser.parse_args()
    report = Report("start to first inner step", ("", "seconds", "of which joining", "claiming"))
    with scratch_folder() as folder:
        run = make_tiny_run(folder / "run", inner_steps=0, duration_s=600.0)
        with Swarm(folder, run) as swarm:
            bootstrap = swarm.start_bootstrap()
            bootstrap.address()
            found = alternate(
                lambda: start_bare(run.path), lambda: start_peer(swarm, bootstrap), chosen.times
            )
    report.row("bare loop", found[0][0]["seconds"], "", "")
    for _, peer, after in found:
        report.row("peer", peer["seconds"], peer["joined"], peer["claimed"] - peer["joined"])
        report.row("bare loop", after["seconds"], "", "")
    ratios = paired_ratios(found, "seconds")
    seconds = statistics.median(peer["seconds"] for _, peer, _ in found)
    report.row("peer / bare", statistics.median(ratios), "", "")
    report.notes.append(
        f"median {seconds:.1f} s to the first inner step; 'joining' ends when the manifest is "
        "checked and the peer serves, 'claiming' when it has looked again"
    )
    report.figures = {
        "seconds": round(seconds, 3),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "peer": [peer for _, peer, _ in found],
        "bare": [found[0][0], *(after for _, _, after in found)],
    }
    report.print(chosen.json)
    return 0


def start_bare(run: Path) -> dict[str, Any]:
    """Return the seconds that the bare loop needs to its first step."""
    started_s = time.time()
    found = run_json("bare_loop.py", str(run), "--seconds", "0", "--warmup-steps", "1")
    return {"seconds": found["first_step_at_s"] - started_s}


def start_peer(swarm: Swarm, bootstrap: Member) -> dict[str, Any]:
    """Start a newcomer and return when it reached each stage, in seconds from its start."""
    address = bootstrap.address()
    started_s = time.time()
    peer = swarm.start_peer(address)
    first = swarm.wait([peer], "inner")[0]
    stages = {
        "claimed": peer.of("claimed")[0]["time_s"] - started_s,
        "training": peer.of("training")[0]["time_s"] - started_s,
        # Written when the peer listens and its session is about to claim.
        "joined": peer.address_file.stat().st_mtime - started_s,
    }
    peer.interrupt()
    peer.popen.wait(20)
    return {**stages, "seconds": first["time_s"] - started_s}


if __name__ == "__main__":
    sys.exit(main())
