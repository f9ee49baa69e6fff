"""How fast a path trains and codecs are, and what a card could reach.

    python benchmarks/speed.py RUN_DIR --seconds 20     # the training loop alone, without a swarm
    python benchmarks/speed.py --codecs                 # values a second that one thread encodes
    python benchmarks/speed.py --roofline --cards H100 "RTX 4090" T4

RUN_DIR is a prepared run, of which one path is trained with the inner loop of the peers on the same
batches. --roofline computes the least time that a training token of examples/paper can take on a
card, and where it must go (`parts/roofline.py`); it needs no card.
"""

from __future__ import annotations

import resource
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch
from parts.common import HERE, Report, build_parser
from parts.roofline import (
    BATCH,
    CARDS,
    KINDS,
    fitting,
    flops_per_token,
    path_parameters,
    seconds_per_token,
    work_of,
)

from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.contributions import CODECS
from dipaco.modules.device import keep_freed_memory
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.training.inner import InnerLoop

SHOWN = ("H100", "A100", "RTX 4090", "RTX 3060", "T4")
VALUES = 20_000_000
WARM_UP_STEPS = 3


def options() -> Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN_DIR", help="a prepared run")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training (20)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--codecs", action="store_true", help="how fast codecs are")
    parser.add_argument("--values", type=int, default=VALUES, help=f"to encode ({VALUES:,})")
    parser.add_argument("--roofline", action="store_true", help="what a card can reach")
    parser.add_argument(
        "--cards", nargs="+", default=list(SHOWN), help="names of parts/roofline.py"
    )
    parser.add_argument("--sequences", type=int, default=8, help="in a micro-batch (8)")
    chosen = parser.parse_args()
    if not (chosen.run or chosen.codecs or chosen.roofline):
        parser.error("give RUN_DIR, --codecs or --roofline")
    return chosen


def training(run: RunFolder, device: torch.device, seconds: float) -> dict[str, float | str]:
    """Train path 0 for a while and return how fast it went."""
    plan = run.plan()
    # As the peers have it, which score and train in turns.
    model = run.base_model(plan).to(device).train()
    inner = InnerLoop(
        model, plan.inner, device, compile_model=device.type == "cuda",
        exact=bool(plan.rounds.inner_steps),
    )  # fmt: skip
    stream = BatchStream(
        run.train_tokens(plan, 0), seed=plan.seed, path=0,
        batch_sequences=plan.inner.batch_sequences,
    )  # fmt: skip
    for step in range(WARM_UP_STEPS):
        inner.step(stream.batch(step), step)
    steps, began_s, cpu_began_s = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - began_s < seconds or not steps:
        inner.step(stream.batch(WARM_UP_STEPS + steps), WARM_UP_STEPS + steps)
        steps += 1
    took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_began_s
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device.type != "cpu":
        peak_bytes = torch.get_device_module(device).max_memory_allocated(device)
    tokens = steps * stream.batch(0).numel()
    return {
        "tokens a second": round(tokens / took_s, 1),
        "tokens a processor second": round(tokens / cpu_s, 1),
        "sequences at once": inner.micro_batch_size,
        "peak memory, MiB": round(peak_bytes / 2**20),
        "format": str(inner.dtype).removeprefix("torch."),
    }


def codecs(report: Report, count: int) -> None:
    """Measure all codecs on one thread."""
    values = 1e-3 * torch.randn(count, generator=torch.Generator().manual_seed(0))
    for name, codec in CODECS.items():
        began = time.perf_counter()
        data = codec.encode(values)
        encoded = time.perf_counter()
        codec.check(data, count)
        checked = time.perf_counter()
        for begin in range(0, count, 2**18):
            codec.decode(data, count, begin, min(begin + 2**18, count))
        decoded = time.perf_counter()
        taken_s = (encoded - began, checked - encoded, decoded - checked)
        figures = {"bytes a value": round(len(data) / count, 3)}
        for what, seconds in zip(("encoded", "checked", "decoded"), taken_s, strict=True):
            figures[f"M values a second {what}"] = round(count / max(1e-9, seconds) / 1e6, 1)
        report.add(name, figures)


def roofline(report: Report, cards: list[str], sequences: int) -> None:
    """Compute what each card can reach."""
    model = load_run_config(HERE.parent / "examples" / "paper" / "RUN.toml").model
    parameters, per_token = path_parameters(model), flops_per_token(model)
    tokens, batch_tokens = sequences * model.sequence_length, BATCH * model.sequence_length
    work = work_of(model, sequences)
    ways = {"eager": work.eager, "fused": work.fused}
    for name in cards:
        card = CARDS[name]
        report.add(name, {"sequences that fit": fitting(model, card, parameters)})
        for way, operations in ways.items():
            found = seconds_per_token(operations, card, tokens, batch_tokens, parameters)
            whole = sum(found.values())
            mfu = per_token / whole / card.tflops / 1e12
            shares = {kind: round(100 * found[kind] / whole, 1) for kind in KINDS}
            told = {"tokens a second": round(1 / whole), "MFU, %": round(100 * mfu, 1)}
            report.add(f"{name}, {way}", {**told, "share of the time, %": shares})
    for way, operations in ways.items():
        moved = {k: sum(o.bytes for o in operations if o.kind == k) for k in KINDS[:-1]}
        report.add(way, {f"kB a token: {k}": round(v / tokens / 1e3) for k, v in moved.items()})
    report.add("fused", {"kB a token: between, in fp32": round(work.wide_bytes / tokens / 1e3)})
    report.notes.append(
        f"{parameters / 1e6:.1f} M parameters, {per_token / 1e9:.3f} GFLOP a token, micro-batches "
        f"of {sequences}, batches of {BATCH} sequences of {model.sequence_length}"
    )


def main() -> int:
    """Measure what was asked for; returns the exit code."""
    chosen = options()
    keep_freed_memory()
    torch.set_num_threads(chosen.threads)
    report = Report("speed", device=chosen.device, threads=chosen.threads)
    if chosen.codecs:
        codecs(report, chosen.values)
    if chosen.roofline:
        roofline(report, chosen.cards, chosen.sequences)
    if chosen.run:
        found = training(RunFolder(chosen.run), torch.device(chosen.device), chosen.seconds)
        report.add(chosen.run.name, found)
    return report.conclude(chosen)


if __name__ == "__main__":
    sys.exit(main())
