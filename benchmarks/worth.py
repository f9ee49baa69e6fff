"""What a peer is worth: the loss of any number of peers, round by round, and the speed-up.

    python benchmarks/worth.py RUN_DIR --log FILE --one-path --rounds 12,24,48
    python benchmarks/worth.py RUN_DIR --log FILE --peers 8 --rounds 4,8,12,16 \\
        --set inner.learning_rate=3e-3 outer.momentum=0 outer.learning_rate=1
    python benchmarks/worth.py --log FILE --table --at 480
    python benchmarks/worth.py --log FILE --gap RUN_DIR_NAME
    xargs -P 2 -L 1 python benchmarks/worth.py --log FILE < QUEUE    # a run for each line

RUN_DIR is a prepared run. The reference trains it in one process, with any field of the plan
changed by --set: one machine (--one-path), DiLoCo (--one-path --peers 8: replicas of one path that
has all shards) or DiPaCo (the run's grid, peers spread evenly over its paths). Codecs, optimizers,
what is private, and ranks of adapters are fields too. One line of JSON for each scored round is
appended to --log, and none is made twice. `chosen_by` is the loss of some held-out sequences, by
which a setting is chosen; `loss` that of others, which is told; nats a token. `nats` and `targets`
are those of each sequence that is told, or of each document of --texts. `tokens` are those of all
peers, `bytes` what one receives, as `dipaco-bootstrap plan` has it.

--table chooses among the settings of a --row those of the least `chosen_by` in the last round that
all were scored after. It tells how many inner steps, tokens and bytes the row needs to reach the
loss of one machine after --at steps. --gap tells how much more perplexity the grid of a run has
than one machine, length by length, and after how many tokens the gap is closed. In brackets are the
5th and 95th percentile when what is held out is drawn anew.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

# Before PyTorch is imported: it asks once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from parts import gaps
from parts.changed_run import ChangedRun, LossyReference, read_changes
from parts.common import Report, build_parser

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.modules.contributions import CODECS
from dipaco.modules.layout import layout_of
from dipaco.simulator.simulated_peers import SimulatedPeer, SimulatorSettings


def options(arguments: list[str] | None = None) -> Namespace:
    """Read the command line, or other arguments."""
    parser = build_parser(__doc__)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN_DIR", help="a prepared run")
    parser.add_argument("--log", type=Path, required=True, help="where figures are appended")
    parser.add_argument("--peers", type=int, help="that train (one for each path)")
    parser.add_argument("--one-path", action="store_true", help="a path that has all shards")
    parser.add_argument("--row", help="its name in the table (one machine, DiLoCo or DiPaCo)")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="of the plan")
    parser.add_argument("--steps", type=int, default=10, help="inner steps of a round (10)")
    parser.add_argument("--rounds", default="10", help="scored after these (10)")
    parser.add_argument(
        "--decay", action="store_true", help="a run for each of them, whose cosine ends there"
    )
    parser.add_argument("--dropped", type=float, default=0.0, help="share of contributions (0)")
    parser.add_argument("--move-every", type=int, default=0, metavar="N", help="rounds (never)")
    parser.add_argument("--held-out-every", type=int, default=4, help="scored parts (each 4th)")
    parser.add_argument("--texts", type=Path, help="held-out documents, validation.jsonl.gz")
    parser.add_argument("--bf16", action="store_true", help="as peers by the clock on such a CPU")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--table", action="store_true", help="only tell what --log has")
    parser.add_argument("--at", type=int, default=480, help="steps of one machine (480)")
    parser.add_argument("--gap", metavar="FOLDER", help="only tell of this run's grid, by its name")
    parser.add_argument("--equal", choices=("tokens", "steps"), default="tokens", help="(tokens)")
    return parser.parse_args(arguments)


def measure(chosen: Namespace) -> None:
    """Train and score what was asked for, unless the log has it."""
    changes = read_changes(chosen.set)
    run = changed_run(chosen)
    paths = run.grid(run.plan()).path_count
    peers = chosen.peers or paths
    if peers % paths:
        raise ConfigurationError(f"--peers {peers} must be a multiple of the {paths} paths")
    one_path = gaps.ONE_MACHINE if peers == 1 else "DiLoCo"
    of = {
        "row": chosen.row or (one_path if chosen.one_path else f"DiPaCo {chosen.run.name}"),
        "run": str(chosen.run),
        "one_path": chosen.one_path,
        "peers": peers,
        "steps": chosen.steps,
        "set": changes,
        "held_out_every": chosen.held_out_every,
        "texts": chosen.texts and str(chosen.texts),
        "decay": chosen.decay,
        "dropped": chosen.dropped,
        "move_every": chosen.move_every,
        "exact": not chosen.bf16,
    }
    known = [(line["of"], line["round"]) for line in read_log(chosen.log)]
    missing = [n for n in map(int, chosen.rounds.split(",")) if (of, n) not in known]
    swarm: LossyReference | None = None
    for number in missing:
        if swarm is None or chosen.decay:
            if chosen.decay:
                run = changed_run(chosen, {"inner.decay_steps": number * chosen.steps})
            swarm = new_swarm(chosen, run, peers)
        while swarm.next_round < number:
            if chosen.move_every and swarm.next_round % chosen.move_every == 0:
                swarm = new_swarm(chosen, run, peers, swarm)
            swarm.run_round()
        batch_tokens = swarm.plan.inner.batch_sequences * swarm.plan.model.sequence_length
        line = {
            "of": of,
            "round": number,
            **run.scores(swarm.states, chosen.device, exact=not chosen.bf16),
            "tokens": number * chosen.steps * len(swarm.peers) * batch_tokens,
            "bytes": number * received_bytes(swarm),
            "cpu_s": round(time.process_time(), 1),
        }
        told = {n: line[n] for n in line if n not in ("nats", "targets")}
        print(json.dumps(told), file=sys.stderr, flush=True)
        # One write, so that several processes may have one log.
        with chosen.log.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def changed_run(chosen: Namespace, more: dict[str, object] | None = None) -> ChangedRun:
    """Return the run with what --set changes, and more."""
    return ChangedRun(
        chosen.run,
        {**read_changes(chosen.set), **(more or {})},
        one_path=chosen.one_path,
        held_out_every=chosen.held_out_every,
        texts=chosen.texts,
    )


def new_swarm(
    chosen: Namespace, run: ChangedRun, peers: int, before: LossyReference | None = None
) -> LossyReference:
    """Return a swarm that begins, or one whose peers have moved: to the even paths, or the odd."""
    paths = run.grid(run.plan()).path_count
    trained, states, first = list(range(paths)), {}, 0
    if chosen.move_every:
        first = before.next_round if before else 0
        states = dict(before.states) if before else {}
        trained = trained[(first // chosen.move_every) % 2 :: 2]
    swarm = LossyReference(
        run,
        steps_per_round=chosen.steps,
        peers=[SimulatedPeer(path, n) for n in range(peers // paths) for path in trained],
        first_round=first,
        states=states,
        settings=SimulatorSettings(
            device=chosen.device, validation_sequences=0, exact=not chosen.bf16
        ),
    )
    swarm.dropped = chosen.dropped
    return swarm


def received_bytes(swarm: LossyReference) -> int:
    """Return what a peer of the first path fetches in a round: the contributions of all others who
    train one of its modules, or keep it where few train it."""
    plan, grid, total = swarm.plan, swarm.grid, 0
    for module in grid.modules_of_path(swarm.peers[0].path):
        trainers = sum(peer.path in grid.paths_of_module(module) for peer in swarm.peers)
        holders = max(trainers, min(plan.rounds.copies, len(swarm.peers)))
        codec = CODECS[plan.contributions.codec]
        total += (holders - 1) * codec.file_bytes(layout_of(grid, module).size)
    return total


def read_log(file: Path) -> list[gaps.Figures]:
    """Return the figures so far, without half a line that a process may have left."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def main() -> int:
    """Measure or tell; returns the exit code."""
    chosen = options()
    torch.set_num_threads(chosen.threads)
    try:
        if not (chosen.table or chosen.gap):
            if chosen.run is None:
                raise ConfigurationError(
                    "give RUN_DIR, made by 'dipaco-bootstrap prepare', or --table or --gap"
                )
            measure(chosen)
            return 0
        lines = read_log(chosen.log)
        report = Report("what a peer is worth", brackets="5th and 95th percentile, drawn anew")
        if chosen.table:
            report.rows = gaps.speed_up_rows(lines, chosen.at)
        else:
            report.rows = gaps.gap_rows(lines, chosen.gap, chosen.equal)
    except DipacoError as error:
        print(error, file=sys.stderr)
        return 1
    return report.conclude(chosen)


if __name__ == "__main__":
    sys.exit(main())
