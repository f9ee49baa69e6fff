"""Time from a boundary to the commit: 4 peers, 20 M parameters a module, fp16 and fp32 on the wire.

    python benchmarks/averaging/boundary_to_commit.py [--json]

Four real peers train the four paths of a 2x2 grid in the fixed-steps mode, so they wait while a
module is averaged and nothing but the outer round takes time: the snapshot, meeting the others,
the all-reduce over loopback, the Nesterov step, hashing the result. Every module has a group of
two. `--one-module` puts all four on one module instead, a group of four. Saving and replication
come after the commit and are switched off here.

Beside it stands the same arithmetic in one process without a network: the outer gradient, both
passes through the codec, the sum, the outer step and the digest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from dipaco.modules.codecs import CODECS
from dipaco.modules.config import ModelConfig, OuterConfig
from dipaco.modules.grid import Grid
from dipaco.modules.outer import (
    AveragingRule,
    Contribution,
    outer_gradient,
    outer_step,
)
from dipaco.modules.state import ModuleState
from parts.common import Report, build_parser, ratio, scratch_folder
from parts.synthetic_run import make_synthetic_run
from support.swarm import Event, Member, Swarm

# Four blocks of 5.0 M parameters in a module, and an embedding of 0.2 M in the first.
MODEL = {
    "vocabulary_size": 320,
    "hidden_size": 640,
    "feed_forward_size": 1760,
    "head_count": 10,
    "sequence_length": 16,
}
BLOCKS_OF_A_MODULE = 4
SMALL_HIDDEN = {"hidden_size": 64, "feed_forward_size": 176, "head_count": 2}
SHOWN_CODECS = {"fp16": "float16", "fp32": "none"}


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="rounds that count (2)")
    parser.add_argument("--round-s", type=float, default=16.0, help="seconds of a round (16)")
    parser.add_argument("--one-module", action="store_true", help="one level, one module, 4 peers")
    parser.add_argument("--small", action="store_true", help="modules of 0.2 M, to try it out")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    torch.set_num_threads(1)
    columns = ("wire", "commit after boundary, median s", "slowest", "one process alone", "ratio")
    report = Report("boundary to commit", columns)
    report.figures = {"wire": {}}
    for shown_codec, codec in SHOWN_CODECS.items():
        with scratch_folder() as folder:
            found = measure(folder, codec, chosen)
        report.row(
            shown_codec, found["median_s"], found["slowest_s"], found["alone_s"], found["ratio"]
        )
        report.figures["wire"][shown_codec] = found
    last = report.figures["wire"]["fp32"]
    report.notes.append(
        f"{last['parameters'] / 1e6:.1f} M parameters a module, groups of "
        f"{last['group']}, {last['commits']} commits a wire format; digests equal: "
        f"{all(f['digests_equal'] for f in report.figures['wire'].values())}"
    )
    report.print(chosen.json)
    return 0


def measure(folder: Path, codec: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Let four peers do some rounds and return what their commits say."""
    levels = (1,) if chosen.one_module else (2, 2)
    shape = {**MODEL, **(SMALL_HIDDEN if chosen.small else {})}
    run = make_synthetic_run(
        folder / "run",
        ModelConfig(**shape, block_count=BLOCKS_OF_A_MODULE * len(levels)),
        modules_per_level=levels,
        batch_sequences=1,
        codec=codec,
        train_sequences=64,
        validation_sequences=1,
        start_s=time.time(),
        duration_s=chosen.round_s,
        inner_steps=2,
        matchmaking_s=3.0,
        save_every_rounds=10_000,
        replication_every_rounds=10_000,
    )
    plan = run.plan()
    grid = Grid(plan.model, plan.grid)
    group = 4 if chosen.one_module else 2
    with Swarm(folder, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        address = bootstrap.address()
        peers = [
            swarm.start_peer(address, "--path", str(0 if chosen.one_module else path))
            for path in range(4)
        ]
        swarm.wait(peers, "training", timeout_s=240)
        commits = wait_for_full_groups(swarm, peers, group, chosen.rounds * len(levels), chosen)
    after_s = [event["seconds_after_boundary"] for event in commits]
    digests: dict[tuple[str, int], set[str]] = {}
    for event in commits:
        digests.setdefault((event["module"], event["round"]), set()).add(event["digest"])
    alone = statistics.median(
        alone_s(run.genesis_state(plan, "L0.E0"), codec, group) for _ in range(3)
    )
    median = statistics.median(after_s)
    return {
        "median_s": round(median, 3),
        "slowest_s": round(max(after_s), 3),
        "alone_s": round(alone, 3),
        "ratio": ratio(median, alone),
        "commits": len(commits),
        "group": group,
        "parameters": grid.layout("L0").size,
        "digests_equal": all(len(found) == 1 for found in digests.values()),
    }


def wait_for_full_groups(
    swarm: Swarm, peers: list[Member], group: int, wanted: int, chosen: argparse.Namespace
) -> list[Event]:
    """Wait until every peer has `wanted` commits with everybody in the group; return them all."""
    deadline = time.monotonic() + chosen.round_s * (chosen.rounds + 4)

    def full(peer: Member) -> list[Event]:
        return [event for event in peer.of("commit") if len(event["group"]) == group]

    while min(len(full(peer)) for peer in peers) < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"too few full groups\n{swarm.outputs()}")
        time.sleep(0.2)
    return [event for peer in peers for event in full(peer)]


def alone_s(anchor: ModuleState, codec: str, group: int) -> float:
    """Return the seconds that one process needs for the arithmetic of an outer round."""
    generator = torch.Generator().manual_seed(0)
    local = [
        anchor.parameters + 1e-3 * torch.randn(anchor.layout.size, generator=generator)
        for _ in range(group)
    ]
    table = [Contribution(0, f"peer{number}", 1000) for number in range(group)]
    started = time.perf_counter()
    gradients = [outer_gradient(anchor.parameters, tensor) for tensor in local]
    average = AveragingRule(CODECS[codec]).average(gradients, table)
    digest = outer_step(anchor, average, table, OuterConfig(), 0).digest
    assert digest
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
