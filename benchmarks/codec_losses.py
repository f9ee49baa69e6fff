"""Loss against bytes: what each codec costs in the reference, in calm runs and in bad ones.

    python benchmarks/codec_losses.py [RUN_DIR] [--json] [--rounds 15] [--steps 50] [--seeds 2]
    python benchmarks/codec_losses.py RUN_DIR --outer plain --dropped 0.3 --move-every 2
    python benchmarks/codec_losses.py --speed

RUN_DIR is a prepared run, of examples/tiny for instance, or of the nine domains with a 2x4 grid;
without it a run of made-up languages is made (2x2). Every codec trains it from the same genesis on
the same batches, in one process (`dipaco.simulator.reference`); only what codecs round differs.
Told is the held-out loss after the last round, in nats, and the difference to `float32`: the mean
of the seeds, and the greatest. Bytes are those of a contribution, a parameter.

* --outer: nesterov (the plan's outer optimizer) or plain (no outer momentum, learning rate 1).
* --dropped P: with that probability a contribution is missed by its step, and its work lost.
* --move-every N: half of the paths are trained, and every N rounds the other half: AdamW's states
  begin anew, and what encodings lost is gone.
* --speed: values a second that one thread encodes, checks and decodes, of 20 million.

Exit code 1 when `int4` or `int2` is more than 0.1% above `float32`, or `sign` more than 0.3%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from parts.changed_run import ChangedRun, LossyReference
from parts.common import Report, build_parser, scratch_folder
from support.runs.tiny_run import make_tiny_run

from dipaco.modules.contributions import CODECS
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.simulated_peers import SimulatedPeer, SimulatorSettings

BASE = "float32"
MAX_MORE = {"int4": 0.001, "int2": 0.001, "sign": 0.003}
SPEED_VALUES = 20_000_000
PLAIN = {"outer.momentum": 0.0, "outer.learning_rate": 1.0}


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN_DIR", help="a prepared run")
    parser.add_argument("--codecs", default=",".join(CODECS), help="beside float32")
    parser.add_argument("--rounds", type=int, default=15, help="outer rounds (15)")
    parser.add_argument("--steps", type=int, default=50, help="inner steps of a round (50)")
    parser.add_argument("--seeds", type=int, default=2, help="of the batches (2)")
    parser.add_argument("--replicas", type=int, default=1, help="trainers of a path (1)")
    parser.add_argument("--outer", choices=("nesterov", "plain"), default="nesterov")
    parser.add_argument("--dropped", type=float, default=0.0, help="share of contributions (0)")
    parser.add_argument("--move-every", type=int, default=0, metavar="N", help="rounds (never)")
    parser.add_argument("--validation", type=int, help="held-out sequences a path (all)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--speed", action="store_true", help="only how fast codecs are")
    return parser.parse_args()


def final_loss(folder: Path, codec: str, seed: int, chosen: argparse.Namespace) -> float:
    """Train with a codec and return the held-out loss of the last states."""
    outer = PLAIN if chosen.outer == "plain" else {}
    run = ChangedRun(
        folder,
        {"contributions.codec": codec, **outer, "seed": RunFolder(folder).plan().seed + seed},
    )
    path_count = run.grid(run.plan()).path_count
    silent = SimulatorSettings(validation_sequences=0)
    scored = SimulatorSettings(validation_sequences=chosen.validation)
    states, done = {}, 0
    while done < chosen.rounds:
        rounds = min(chosen.move_every or chosen.rounds, chosen.rounds - done)
        peers = peers_of(path_count, chosen, (done // chosen.move_every) if states else 0)
        swarm = LossyReference(
            run, steps_per_round=chosen.steps, peers=peers, first_round=done, states=states,
            settings=silent,
        )  # fmt: skip
        swarm.dropped = chosen.dropped
        for _ in swarm.rounds(rounds):
            pass
        states, done = dict(swarm.states), done + rounds
    swarm = ReferenceSwarm(run, steps_per_round=1, first_round=done, states=states, settings=scored)
    loss = swarm.report().validation.loss
    assert loss is not None
    return float(loss)


def peers_of(path_count: int, chosen: argparse.Namespace, stay: int) -> list[SimulatedPeer]:
    """Return the trainers: of all paths, or of the even or the odd ones in turn."""
    paths = range(path_count)
    if chosen.move_every:
        paths = range(stay % 2, path_count, 2)
    return [SimulatedPeer(path, number) for path in paths for number in range(chosen.replicas)]


def speeds(report: Report) -> None:
    """Measure all codecs on one thread."""
    values = 1e-3 * torch.randn(SPEED_VALUES, generator=torch.Generator().manual_seed(0))
    for name, codec in CODECS.items():
        began = time.perf_counter()
        data = codec.encode(values)
        encoded = time.perf_counter()
        codec.check(data, SPEED_VALUES)
        checked = time.perf_counter()
        for begin in range(0, SPEED_VALUES, 2**18):
            codec.decode(data, SPEED_VALUES, begin, min(begin + 2**18, SPEED_VALUES))
        ended = time.perf_counter()
        taken = (encoded - began, checked - encoded, ended - checked)
        rates = [round(SPEED_VALUES / max(1e-9, seconds) / 1e6, 1) for seconds in taken]
        report.row(name, len(data) / SPEED_VALUES, *rates)
        report.figures[name] = dict(
            zip(("encode_m_s", "check_m_s", "decode_m_s"), rates, strict=True)
        )


def losses(report: Report, folder: Path, chosen: argparse.Namespace) -> list[str]:
    """Train with every codec; returns which differ too much."""
    found: dict[str, list[float]] = {}
    broken = []
    for codec in (BASE, *(c for c in chosen.codecs.split(",") if c != BASE)):
        found[codec] = [final_loss(folder, codec, seed, chosen) for seed in range(chosen.seeds)]
        more = [loss - base for loss, base in zip(found[codec], found[BASE], strict=True)]
        share = statistics.fmean(more) / statistics.fmean(found[BASE])
        per_value = CODECS[codec].file_bytes(2**20) / 2**20
        told = {
            "bytes": round(per_value, 3),
            "loss": round(statistics.fmean(found[codec]), 5),
            "more": round(statistics.fmean(more), 5),
            "greatest_more": round(max(more), 5),
            "more_percent": round(100 * share, 3),
        }
        report.row(codec, *told.values())
        report.figures[codec] = told
        print(f"{codec}: {json.dumps(told)}", file=sys.stderr, flush=True)
        if share > MAX_MORE.get(codec, 1.0):
            broken.append(f"{codec}: {share:.2%} above {BASE}")
    return broken


def main() -> int:
    """Measure; returns the exit code."""
    chosen = options()
    torch.set_num_threads(chosen.threads)
    if chosen.speed:
        report = Report("speed of codecs", ("codec", "bytes", "M/s encoded", "checked", "decoded"))
        speeds(report)
        report.print(chosen.json)
        return 0
    columns = ("codec", "bytes", "loss", "more", "greatest", "more, %")
    report = Report("loss against bytes", columns)
    with scratch_folder() as scratch:
        folder = chosen.run
        if folder is None:
            folder = make_tiny_run(
                scratch / "run", documents_per_path=200, validation_documents_per_path=32
            ).path
        broken = losses(report, folder, chosen)
    report.figures |= {
        "rounds": chosen.rounds, "steps": chosen.steps, "outer": chosen.outer,
        "dropped": chosen.dropped, "move_every": chosen.move_every,
    }  # fmt: skip
    return report.conclude(broken, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
