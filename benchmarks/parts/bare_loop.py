"""The training loop alone, in its own process: what a peer is compared with.

    python benchmarks/parts/bare_loop.py RUN_DIR --seconds 20

It trains one path of a run folder with the inner loop of the peers, the same batches, the same
threads, and no swarm around it, and prints one JSON object. With --idle it only loads everything
and waits for the end of its input, so that its memory can be measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dipaco.modules.device import keep_freed_memory, limit_memory
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.training.inner import InnerLoop


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a prepared run folder")
    parser.add_argument("--path", type=int, default=0, help="path to train (0)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to measure (20)")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps before that (3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the model")
    parser.add_argument("--vram-gb", type=float, help="GPU memory at most, in GiB (all)")
    parser.add_argument("--idle", action="store_true", help="load, say so, wait for end of input")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    keep_freed_memory()
    torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    limit_memory(device, chosen.vram_gb)
    run = RunFolder(chosen.run)
    plan = run.plan()
    model = run.base_model(plan).to(device)
    # As the peers have it, which score and train in turns.
    model.train()
    inner = InnerLoop(
        model,
        plan.inner,
        device,
        compile_model=device.type == "cuda" and not chosen.no_compile,
        exact=bool(plan.rounds.inner_steps),
    )
    stream = BatchStream(
        run.train_tokens(plan, chosen.path),
        seed=plan.seed,
        path=chosen.path,
        batch_sequences=plan.inner.batch_sequences,
    )
    if chosen.idle:
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.read()
        return 0
    print(json.dumps(measure(inner, stream, chosen.seconds, max(1, chosen.warmup_steps))))
    return 0


def measure(
    inner: InnerLoop, stream: BatchStream, seconds: float, warmup_steps: int
) -> dict[str, Any]:
    """Train for a while and return how fast it went."""
    started = time.perf_counter()
    inner.step(stream.batch(0), 0)
    first_step_s, first_step_at_s = time.perf_counter() - started, time.time()
    for step in range(1, warmup_steps):
        inner.step(stream.batch(step), step)
    began_at_s, started, cpu_started = time.time(), time.perf_counter(), time.thread_time()
    steps = 0
    while time.perf_counter() - started < seconds or steps == 0:
        inner.step(stream.batch(warmup_steps + steps), warmup_steps + steps)
        steps += 1
    elapsed_s = time.perf_counter() - started
    tokens = steps * stream.tokens_per_batch
    return {
        "steps": steps,
        "seconds": elapsed_s,
        "step_s": elapsed_s / steps,
        "tokens_per_s": tokens / elapsed_s,
        "tokens_per_cpu_s": tokens / max(time.thread_time() - cpu_started, 1e-9),
        "first_step_at_s": first_step_at_s,
        "first_step_s": first_step_s,
        "began_at_s": began_at_s,
        "micro_batch": inner.micro_batch_size,
        "number_format": str(inner.dtype).removeprefix("torch."),
        "peak_memory_bytes": peak_memory_bytes(inner.device),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most that tensors took on a GPU, or the whole process on the CPU."""
    if device.type == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(torch.get_device_module(device).max_memory_allocated(device))


if __name__ == "__main__":
    sys.exit(main())
