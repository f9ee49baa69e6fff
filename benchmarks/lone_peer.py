"""A lone peer's tokens a second in a swarm, against the bare training loop.

    python benchmarks/lone_peer.py [--json]

A bootstrap node and one `dipaco-peer`, real processes on loopback: rounds by the clock, an outer
step at every level's boundary, validation, saving and replication each round. The bare loop trains
the same path with the same number of threads in its own process, before and after each stay of
the peer. The peer is measured over whole rounds, from one inner step to another, so that what a
round costs is counted in full. Rounds of a real run take minutes, these take seconds: the cost of
a round weighs many times what it does in life. Only the held-out rows are as many for the seconds
of a round as by default (64 in 600 s), but at least 4.

Two ratios are given. The one of wall time is what counts, but other programs on this machine shift
it. The other divides the tokens by the processor time of the training thread, which they touch
less: it shows what the peer does between the inner steps. On a machine that other programs keep
busy use `--together`: the bare loop and the peer then train at the same time, so that both are
slowed alike. What the peer's other processes take is shown too, because it slows both there.
The share of its time that the training thread spends in inner steps is hardly moved by others.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

from dipaco.modules.config import ModelConfig, RoundsConfig
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from parts.common import (
    Report,
    alternate,
    build_parser,
    paired_ratios,
    run_json,
    scratch_folder,
    thread_cpu_s,
    tree_cpu_s,
)
from parts.synthetic_run import make_synthetic_run
from support.swarm import Event, Member, Swarm

MODEL = ModelConfig(
    vocabulary_size=2048,
    block_count=6,
    hidden_size=256,
    head_count=8,
    sequence_length=128,
)
TARGET = 0.95
KEYS = ("tokens_per_s", "tokens_per_cpu_s", "step_s")


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--stays", type=int, default=2, help="times the peer is measured (2)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in each stay (2)")
    parser.add_argument("--round-s", type=float, default=20.0, help="seconds of a round (20)")
    parser.add_argument("--together", action="store_true", help="both at once; see above")
    parser.add_argument("--bare-s", type=float, default=8.0, help="seconds of the bare loop (8)")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    report = Report("lone peer against the bare loop", ("", "tokens/s", "tokens/CPU s", "step s"))
    with scratch_folder() as folder:
        run = make_synthetic_run(
            folder / "run",
            MODEL,
            batch_sequences=4,
            duration_s=chosen.round_s,
            validation_sequences=validation_sequences(chosen.round_s),
            matchmaking_s=2.0,
        )
        with Swarm(folder, run) as swarm:
            bootstrap = swarm.start_bootstrap()
            bootstrap.address()
            found = (
                together(swarm, bootstrap, chosen)
                if chosen.together
                else alternate(
                    lambda: run_json(
                        "bare_loop.py", str(run.path), "--seconds", str(chosen.bare_s)
                    ),
                    lambda: peer_stay(swarm, bootstrap, chosen),
                    chosen.stays,
                )
            )
        fill(report, run.plan(), found, chosen)
    report.print(chosen.json)
    return 0


def together(swarm: Swarm, bootstrap: Member, chosen: argparse.Namespace) -> list[Any]:
    """Measure the peer while the bare loop runs, and give that as both of its neighbours."""
    stays = [peer_stay(swarm, bootstrap, chosen) for _ in range(chosen.stays)]
    return [(peer["beside"], peer, peer["beside"]) for peer in stays]


def validation_sequences(round_s: float) -> int:
    """Return the rows that a round of so many seconds scores in the default proportion."""
    default = RoundsConfig()
    return max(4, round(default.validation_sequences * round_s / default.duration_s))


def peer_stay(swarm: Swarm, bootstrap: Member, chosen: argparse.Namespace) -> dict[str, Any]:
    """Start the peer, measure whole rounds of it, stop it, and return what was seen.

    With `--together` the bare loop's figures for the same time are in it as `beside`.
    """
    seconds = chosen.rounds * chosen.round_s
    peer = swarm.start_peer(bootstrap, "--path", "0", name="peer")
    begin = len(peer.of("inner"))
    begin_s = wait_for_inner(peer, begin + 3, 60.0)["time_s"]
    training_cpu_s, all_cpu_s = thread_cpu_s(peer.popen.pid), tree_cpu_s(peer.popen.pid)
    seen, started = len(peer.of("inner")), time.monotonic()
    beside = None
    if chosen.together:
        beside = run_json("bare_loop.py", str(swarm.run.path), "--seconds", str(seconds))
        begin_s = beside["began_at_s"]
    else:
        time.sleep(max(0.0, begin_s + seconds - time.time()))
    wait_for_inner(peer, len(peer.of("inner")) + 1, 30.0)
    training_cpu_s = thread_cpu_s(peer.popen.pid) - training_cpu_s
    others_s = tree_cpu_s(peer.popen.pid) - all_cpu_s - training_cpu_s
    elapsed_s = time.monotonic() - started
    seen = len(peer.of("inner")) - seen
    peer.interrupt()
    peer.popen.wait(20)
    found = summary(peer.read(), begin_s, seconds, seen, training_cpu_s)
    return {**found, "background_cores": others_s / elapsed_s, "beside": beside}


def wait_for_inner(peer: Member, count: int, timeout_s: float) -> Event:
    """Wait until the peer has taken `count` inner steps in all; return the event of the last."""
    deadline = time.monotonic() + timeout_s
    while len(peer.of("inner")) < count:
        if not peer.alive or time.monotonic() > deadline:
            raise RuntimeError(f"the peer does not train:\n{peer.output.read_text()[-3000:]}")
        time.sleep(0.02)
    return peer.of("inner")[count - 1]


def summary(
    events: list[Event], begin_s: float, seconds: float, steps_by_cpu: int, cpu_s: float
) -> dict[str, Any]:
    """Return speed and outer work between an inner step and the first that is `seconds` later."""
    times = [event["time_s"] for event in events if event["event"] == "inner"]
    inside = [at for at in times if at >= begin_s]
    end_s = next(at for at in inside if at >= begin_s + seconds)
    inside = [at for at in inside if at <= end_s]
    steps = len(inside) - 1
    in_steps_s = sum(
        event["seconds"]
        for event in events
        if event["event"] == "inner" and inside[0] < event["time_s"] <= end_s
    )
    gaps = [after - before for before, after in itertools.pairwise(inside)]
    usual_s = statistics.median(gaps)
    tokens_per_step = 4 * MODEL.sequence_length
    count = {
        kind: sum(e["event"] == kind and begin_s <= e["time_s"] <= end_s for e in events)
        for kind in ("commit", "carry_on", "validation", "round")
    }
    return {
        "steps": steps,
        "seconds": end_s - inside[0],
        "step_s": (end_s - inside[0]) / steps,
        "median_step_s": usual_s,
        "share_in_steps": round(in_steps_s / (end_s - inside[0]), 4),
        "longest_gaps_s": [round(gap, 3) for gap in sorted(gaps)[-4:]],
        "tokens_per_s": steps * tokens_per_step / (end_s - inside[0]),
        "tokens_per_cpu_s": steps_by_cpu * tokens_per_step / max(cpu_s, 1e-9),
        **count,
    }


def fill(report: Report, plan: RunPlan, found: list[Any], chosen: argparse.Namespace) -> None:
    """Put rows and figures into the report."""
    bare = [after for _, _, after in found]
    if not chosen.together:
        bare.insert(0, found[0][0])
        report.row("bare loop", *(bare[0][key] for key in KEYS))
    for _, peer, after in found:
        report.row("peer", *(peer[key] for key in KEYS))
        report.row("bare loop", *(after[key] for key in KEYS))
    by_wall = paired_ratios(found, "tokens_per_s")
    by_cpu = paired_ratios(found, "tokens_per_cpu_s")
    wall, cpu = statistics.mean(by_wall), statistics.mean(by_cpu)
    size = Grid(plan.model, plan.grid).parameter_counts()["path"]
    in_steps = statistics.mean(peer["share_in_steps"] for _, peer, _ in found)
    background = statistics.mean(peer["background_cores"] for _, peer, _ in found)
    commits = sum(peer["commit"] for _, peer, _ in found)
    report.row("peer / bare", wall, cpu, "")
    report.notes += [
        f"a path of {size / 1e6:.1f} M parameters, 1 thread; {commits} commits in "
        f"{chosen.stays * chosen.rounds} rounds of {chosen.round_s:.0f} s",
        f"wall time: {wall:.1%} of the bare loop (target {TARGET:.0%}); "
        f"processor time of the training thread: {cpu:.1%}",
        f"{in_steps:.1%} of the training thread's time was spent in inner steps",
        f"the peer's other threads and processes take {background:.3f} of a core; "
        + ("bare loop and peer at the same time" if chosen.together else "in turns"),
    ]
    report.figures = {
        "ratio": round(wall, 4),
        "ratios": by_wall,
        "cpu_ratio": round(cpu, 4),
        "cpu_ratios": by_cpu,
        "target": TARGET,
        "path_parameters": size,
        "round_s": chosen.round_s,
        "commits": commits,
        "share_in_steps": round(in_steps, 4),
        "background_cores": round(background, 4),
        "together": chosen.together,
        "bare": bare,
        "peer": [peer for _, peer, _ in found],
    }


if __name__ == "__main__":
    sys.exit(main())
