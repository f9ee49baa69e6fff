"""What keeping freed memory is worth: inner steps with and without it, in turns.

    python benchmarks/allocator.py --hidden-size 128 --steps 8 --turns 3

Each turn is a process of its own, because glibc cannot be told to forget it. Processor time
counts, not the clock, so that what else the machine does matters less.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from typing import Any

from parts.common import Report, build_parser, ratio, shown


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = build_parser(__doc__)
    made.add_argument("--hidden-size", type=int, default=128, help="width of the model (128)")
    made.add_argument("--vocabulary-size", type=int, default=4096, help="pieces (4096)")
    made.add_argument("--steps", type=int, default=8, help="inner steps of a turn (8)")
    made.add_argument("--turns", type=int, default=3, help="turns of each kind (3)")
    made.add_argument("--mode", choices=("kept", "given back"), help=argparse.SUPPRESS)
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps in this process; return seconds and page faults of one."""
    import torch
    from dipaco.modules.config import InnerConfig, ModelConfig
    from dipaco.modules.device import keep_freed_memory
    from dipaco.modules.inner import InnerLoop
    from dipaco.modules.transformer import PathModel

    if options.mode == "kept" and not keep_freed_memory():
        raise SystemExit("error: the C library of this machine cannot be told to keep memory")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ModelConfig(hidden_size=options.hidden_size, vocabulary_size=options.vocabulary_size)
    loop = InnerLoop(PathModel(config), InnerConfig(), torch.device("cpu"))
    loop.reset()
    batch = torch.randint(4, config.vocabulary_size, (8, config.sequence_length))
    loss = loop.step(batch, 0)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for step in range(options.steps):
        loss = loop.step(batch, step + 1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "step_cpu_s": spent / options.steps,
        "step_page_faults": (after.ru_minflt - before.ru_minflt) // options.steps,
        "tokens_per_cpu_s": batch.numel() * options.steps / spent,
        "greatest_mib": after.ru_maxrss // 1024,
        "loss": loss,
    }


def main() -> int:
    """Run the benchmark; returns the exit code."""
    options = parser().parse_args()
    if options.mode:
        print(json.dumps(measure(options)))
        return 0
    report = Report(
        "kept memory", ("memory", "tokens / CPU s", "page faults / step", "MiB", "loss")
    )
    turns: dict[str, list[dict[str, Any]]] = {"given back": [], "kept": []}
    for _ in range(options.turns):
        for mode, found in turns.items():
            finished = subprocess.run(
                [sys.executable, *sys.argv, "--mode", mode], stdout=subprocess.PIPE, check=True
            )
            found.append(json.loads(finished.stdout))
    for mode, found in turns.items():
        rate = statistics.median(turn["tokens_per_cpu_s"] for turn in found)
        first = found[0]
        report.rows.append(
            (mode, shown(rate), shown(first["step_page_faults"]), shown(first["greatest_mib"]),
             f"{first['loss']:.9f}")
        )  # fmt: skip
        report.figures[mode.replace(" ", "_")] = found
    ratios = [
        ratio(kept["tokens_per_cpu_s"], given["tokens_per_cpu_s"])
        for kept, given in zip(turns["kept"], turns["given back"], strict=True)
    ]
    report.figures["ratio"] = statistics.median(ratios)
    report.notes.append(
        f"kept / given back: {statistics.median(ratios):.2f}, "
        f"{min(ratios):.2f} to {max(ratios):.2f}"
    )
    report.print(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
