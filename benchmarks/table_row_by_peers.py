"""A row of the paper's table again, with real peers instead of the simulator.

    python benchmarks/table_row_by_peers.py --table OUT --out DIR [--cell dipaco-2x4-private]

OUT is the work folder of `paper_table.py`, in which the cell is finished. Its run is signed
again to begin now, with the same shards, base, seed and steps a round, and one `dipaco-peer` per
path trains it over loopback, through one bootstrap node. Then the states are fetched from the
swarm as any reader would, compared with the simulator's digest by digest, and scored on the
table's held-out tokens. Exit code 1 when a module differs.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from dipaco.dht.manifest import load_or_create_operator_key, sign_manifest
from dipaco.modules.files import atomic_write
from dipaco.modules.state import ModuleState
from dipaco.peer.client import ReadOnlyClient
from dipaco.routing.run_folder import RunFolder
from parts.common import Report, build_parser
from parts.paper_table_cells import CELLS_BY_NAME, Cell, Size
from parts.paper_table_runs import Runs
from parts.paper_table_scores import HeldOut, load_states, score_routed
from support.swarm import Swarm


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--table", type=Path, required=True, help="--out of paper_table.py")
    parser.add_argument("--out", type=Path, required=True, help="work folder, kept")
    parser.add_argument("--cell", default="dipaco-2x4-private", help="which row")
    parser.add_argument("--round-s", type=float, default=60.0, help="limit of a round (60)")
    parser.add_argument("--join-s", type=float, default=240.0, help="limit of joining (240)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cell = CELLS_BY_NAME.get(options.cell)
    if cell is None or cell.kind != "swarm" or cell.replicas > 1 or cell.half_of:
        parser.error(f"--cell {options.cell} is no row with one peer per path from the base on")
    size = Size(**json.loads((options.table / "size.json").read_bytes()))
    simulated = RunFolder(Runs(options.table, options.table, size).trained(cell))
    expected = load_states(simulated)
    run = signed_to_begin(
        simulated, options.out / "run", options.table / "operator.pem",
        time.time(), options.round_s,
    )  # fmt: skip
    with Swarm(options.out, run) as swarm:
        seconds, found = train(swarm, cell, size, options)
        commits = [event for member in swarm.members for event in member.of("commit")]
    for state in found.values():
        run.states.save(state)
    report = Report(f"{cell.title}: simulated, and by {cell.path_count} real peers",
                    ("trained by", "perplexity", "modules of equal digest", "seconds"))  # fmt: skip
    held_out = HeldOut.open(options.table / "runs" / "one-path", size)
    simulator_s = json.loads((simulated.path / "diary.json").read_bytes())["seconds"]
    perplexities = {
        name: score_routed(folder, held_out).as_dict(held_out.labels)["perplexity"]
        for name, folder in (("simulator", simulated), ("peers", run))
    }
    equal = sum(found[module].digest == state.digest for module, state in expected.items())
    report.row("dipaco-simulate", perplexities["simulator"], "-", simulator_s)
    report.row("dipaco-peer", perplexities["peers"], f"{equal} of {len(expected)}", seconds)
    report.figures = {
        "cell": cell.name,
        "perplexity": perplexities,
        "equal_digests": equal,
        "modules": len(expected),
        "rounds": size.rounds,
        "steps": size.steps,
        "seconds": {"simulator": simulator_s, "peers": seconds},
        "commits": len(commits),
        "greatest_seconds_after_boundary": max(e["seconds_after_boundary"] for e in commits),
    }
    report.notes.append(
        f"{len(commits)} commits, the last {report.figures['greatest_seconds_after_boundary']:.1f} "
        f"s after its boundary; rounds of {options.round_s:g} s, {size.rounds} of them with "
        f"{size.round_steps} steps a path"
    )
    report.print(options.json)
    return 0 if equal == len(expected) else 1


def signed_to_begin(
    simulated: RunFolder, folder: Path, key_file: Path, start_s: float, round_s: float
) -> RunFolder:
    """Return a run folder with the blobs of another and a manifest that starts at `start_s`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(simulated.path / "blobs", folder / "blobs")
    plan = simulated.plan()
    # Everybody keeps everything: the readers come when the peers have left.
    rounds = {"duration_s": round_s, "matchmaking_s": 0.08 * round_s, "copies": 16}
    begun = plan.model_copy(
        update={"start_s": start_s, "rounds": plan.rounds.model_copy(update=rounds)}
    )
    run = RunFolder(folder)
    atomic_write(run.manifest_path, sign_manifest(begun, load_or_create_operator_key(key_file)))
    return run


def train(
    swarm: Swarm, cell: Cell, size: Size, options: Any
) -> tuple[float, Mapping[str, ModuleState]]:
    """Train all rounds with one peer per path; return the seconds and the states."""
    bootstrap = swarm.start_bootstrap()
    rounds = ("--max-rounds", str(size.rounds))
    peers = [swarm.start_peer(bootstrap, "--path", str(p), *rounds) for p in range(cell.path_count)]
    started = swarm.wait(peers, "training", timeout_s=options.join_s)
    late = [event["path"] for event in started if event["round"] > 0]
    if late:
        raise SystemExit(f"paths {late} were not there for the first round; give more --join-s")
    began = time.time()
    grid = swarm.run.grid(swarm.run.plan())
    last = size.rounds - 1
    for path, peer in enumerate(peers):
        for module in grid.modules_of_path(path):
            swarm.wait(
                [peer],
                "commit",
                lambda e, module=module: (e["module"], e["round"]) == (module, last),
                timeout_s=(size.rounds + 2) * options.round_s + options.join_s,
            )
    seconds = time.time() - began
    for module in grid.modules():
        swarm.wait(
            [bootstrap],
            "kept",
            lambda e, module=module: (e["module"], e["version"]) == (module, size.rounds),
            timeout_s=options.round_s,
        )
    for peer in peers:
        peer.popen.wait(60)
    with ReadOnlyClient((bootstrap.address(),)) as client:
        states = {module: client.winning_state(module) for module in grid.modules()}
    for module, state in states.items():
        if state.version != size.rounds:
            raise SystemExit(f"{module} is of version {state.version}, not {size.rounds}")
    return seconds, states


if __name__ == "__main__":
    raise SystemExit(main())
