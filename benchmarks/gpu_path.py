"""Training a 150M path on a GPU: `dipaco-peer` beside the bare loop, tokens/s and utilisation.

    python benchmarks/gpu_path.py [--json]

The path is that of examples/paper: 12 blocks of 896 with 14 heads, a vocabulary of 32,000 and
sequences of 1,024, in the card's number format and compiled. The bare loop runs before and after
the peer, which trains in a swarm with rounds by the clock. Then four peers share the GPU on a 2x2
grid and must commit equal digests.

Model FLOPs utilisation (MFU) counts 6 FLOPs for each parameter of a matrix product and 12 x blocks
x width x length for attention, a token, against the card's dense peak in 16 bits; a large matrix
product is measured as well, the best of three of a second each, because it is what the card reaches
in practice. Beside them stand peak memory, sequences at once, and how long the first step took,
which compiles. Without a CUDA device it says
so in one line and ends with exit code 0. `--rehearse` does the same with a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from parts.common import (
    HERE,
    Report,
    alternate,
    build_parser,
    paired_ratios,
    run_json,
    scratch_folder,
)
from parts.synthetic_run import make_synthetic_run
from support.swarm import Member, Swarm

from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.config import GridConfig, ModelConfig
from dipaco.modules.device import number_format
from dipaco.modules.grid import Grid

PATH_150M = load_run_config(HERE.parent / "examples" / "paper" / "RUN.toml").model
REHEARSAL = ModelConfig(
    vocabulary_size=320, block_count=4, hidden_size=64, head_count=2, sequence_length=64
)
# Dense products in bf16, on T4 and V100 in fp16, summed in fp32, in TFLOP/s, from the makers' data
# sheets and white papers. The first name that is a word of the card's counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 5090": 209.5,
    "RTX 4090 D": 147.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
WARMUP_STEPS = 20
PRODUCT_S = 1.0


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch (32)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each measure (20)")
    parser.add_argument("--stays", type=int, default=1, help="times the peer is measured (1)")
    parser.add_argument("--peak-tflops", type=float, help="the card's dense peak in 16 bits")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    if not torch.cuda.is_available() and not chosen.rehearse:
        line = "no CUDA device is there, so nothing was measured (--rehearse tries it on the CPU)"
        if chosen.json:
            report = Report("training a 150M path on a GPU", ())
            report.figures = {"cuda": False, "reason": line}
            report.print(True)
        else:
            print(line)
        return 0
    device = "cpu" if chosen.rehearse else "cuda"
    model = REHEARSAL if chosen.rehearse else PATH_150M
    batch = 4 if chosen.rehearse else chosen.batch
    columns = ("", "tokens/s", "step s", "MFU", "of a large matrix product")
    report = Report("training a 150M path on a GPU", columns)
    with scratch_folder() as folder:
        found = lone(folder / "lone", model, batch, device, chosen)
    with scratch_folder() as folder:
        shared = four_peers(folder, model, max(1, batch // 4), device)
    measured = matrix_product_tflops(torch.device(device))
    peak = peak_tflops(device, chosen.peak_tflops)
    per_token = flops_per_token(model)

    def row(name: str, values: dict[str, Any]) -> dict[str, Any]:
        tflops = values["tokens_per_s"] * per_token / 1e12
        of_peak = f"{tflops / peak:.1%}" if peak else "unknown peak"
        of_measured = f"{tflops / measured:.1%}"
        report.row(name, values["tokens_per_s"], values["step_s"], of_peak, of_measured)
        mfu = tflops / peak if peak else None
        return {**values, "tflops": tflops, "mfu": mfu, "of_measured": tflops / measured}

    bare = [row("bare loop", found[0][0])]
    peer = []
    for _, middle, after in found:
        peer.append(row("peer", middle))
        bare.append(row("bare loop", after))
    ratios = paired_ratios(found, "tokens_per_s")
    report.row("peer / bare", statistics.mean(ratios), "", "", "")
    size = path_parameters(model)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU (rehearsal)"
    first = found[0][0]
    report.notes += [
        f"{name}: {size / 1e6:.1f} M parameters a path, batch {batch} x {model.sequence_length}, "
        f"{per_token / 1e9:.2f} GFLOP a token; a large matrix product: {measured:.1f} TFLOP/s",
        f"bare loop: {first['number_format']}, {first['micro_batch']} sequences at once, "
        f"peak memory {first['peak_memory_bytes'] / 2**30:.1f} GiB, "
        f"first step {first['first_step_s']:.1f} s",
        f"four peers on the device: {shared['commits']} commits, digests equal: {shared['equal']}",
    ]
    report.figures = {
        "cuda": device == "cuda",
        "device": name,
        "ratio": statistics.mean(ratios),
        "ratios": ratios,
        "parameters": size,
        "flops_per_token": per_token,
        "peak_tflops": peak,
        "matrix_product_tflops": measured,
        "bare": bare,
        "peer": peer,
        "four_peers": shared,
    }
    report.print(chosen.json)
    return 0


def lone(
    folder: Path, model: ModelConfig, batch: int, device: str, chosen: argparse.Namespace
) -> list[Any]:
    """Measure one peer and the bare loop in turns."""
    folder.mkdir()
    run = make_synthetic_run(
        folder / "run",
        model,
        batch_sequences=batch,
        duration_s=max(8.0, chosen.seconds),
        train_sequences=4096 if device == "cuda" else 256,
    )
    bare_arguments = (
        str(run.path), "--seconds", str(chosen.seconds), "--device", device,
        "--warmup-steps", str(WARMUP_STEPS),
    )  # fmt: skip
    with Swarm(folder, run) as swarm:
        address = swarm.start_bootstrap().address()
        return alternate(
            lambda: run_json("parts/bare_loop.py", *bare_arguments),
            lambda: peer_stay(swarm, address, batch * model.sequence_length, device, chosen),
            chosen.stays,
        )


def peer_stay(
    swarm: Swarm, address: str, tokens_per_step: int, device: str, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Return how fast a peer trained over whole rounds, compilation left out."""
    peer = swarm.start_peer(address, "--path", "0", "--device", device)
    deadline = time.monotonic() + 300.0
    while len(peer.of("inner")) < WARMUP_STEPS + 1:
        if not peer.alive or time.monotonic() > deadline:
            raise RuntimeError(f"the peer does not train:\n{swarm.outputs()}")
        time.sleep(0.1)
    begin_s = peer.of("inner")[WARMUP_STEPS]["time_s"]
    duration_s = max(8.0, chosen.seconds)
    time.sleep(max(0.0, begin_s + duration_s + 1.0 - time.time()))
    times = [event["time_s"] for event in peer.of("inner")]
    end_s = next(at for at in times if at >= begin_s + duration_s)
    steps = sum(begin_s < at <= end_s for at in times)
    peer.interrupt()
    peer.popen.wait(30)
    return {
        "steps": steps,
        "seconds": end_s - begin_s,
        "step_s": (end_s - begin_s) / steps,
        "tokens_per_s": steps * tokens_per_step / (end_s - begin_s),
        "commit": len(peer.of("commit")),
    }


def four_peers(folder: Path, model: ModelConfig, batch: int, device: str) -> dict[str, Any]:
    """Let four peers share the device for some rounds, and compare what they committed."""
    run = make_synthetic_run(
        folder / "run",
        model,
        batch_sequences=batch,
        start_s=time.time(),
        duration_s=12.0 if device == "cpu" else 24.0,
        inner_steps=4,
    )
    with Swarm(folder, run) as swarm:
        address = swarm.start_bootstrap().address()
        peers = [
            swarm.start_peer(address, "--path", str(path), "--device", device) for path in range(4)
        ]
        swarm.wait(peers, "commit", in_a_group, timeout_s=240)
        rounds = [next(e["round"] for e in peer.of("commit") if in_a_group(e)) for peer in peers]
        last = max(rounds) + 1
        swarm.wait(peers, "round", lambda event: event["round"] >= last, timeout_s=120)
        return agreement(peers)


def in_a_group(event: dict[str, Any]) -> bool:
    return len(event["group"]) > 1


def agreement(peers: list[Member]) -> dict[str, Any]:
    """Return how many commits there were in groups, and whether their digests were equal."""
    digests: dict[tuple[str, int], list[str]] = {}
    for peer in peers:
        for event in filter(in_a_group, peer.of("commit")):
            digests.setdefault((event["module"], event["round"]), []).append(event["digest"])
    return {
        "commits": sum(len(found) for found in digests.values()),
        "equal": bool(digests) and all(len(set(found)) == 1 for found in digests.values()),
    }


def path_parameters(model: ModelConfig) -> int:
    """Return the parameters of a path."""
    return Grid(model, GridConfig(modules_per_level=(1,))).parameter_counts()["path"]


def flops_per_token(model: ModelConfig) -> float:
    """Return the FLOPs of one training token, forward and backward, without recomputation.

    The embedding is looked up and not multiplied; tied to the head it counts once, as the head.
    """
    embedding = model.vocabulary_size * model.hidden_size
    multiplied = path_parameters(model) - (0 if model.tied_embedding else embedding)
    attention = 12 * model.block_count * model.hidden_size * model.sequence_length
    return float(6 * multiplied + attention)


def peak_tflops(device: str, given: float | None) -> float | None:
    """Return the card's dense peak in 16 bits, or None when it is not known."""
    if given or device != "cuda":
        return given
    return peak_of(torch.cuda.get_device_name())


def peak_of(card: str) -> float | None:
    """Return the peak of a card by its name, TFLOP/s."""
    found = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", card))
    return next(found, None)


def matrix_product_tflops(device: torch.device) -> float:
    """Measure what a large matrix product reaches in the device's number format."""
    size = 8192 if device.type == "cuda" else 512
    dtype = number_format(device)
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)

    def multiply(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            product = left @ right
        float(product[0, 0])  # Waits for the device.
        return time.perf_counter() - started

    multiply(3)
    count = max(1, int(3 * PRODUCT_S / multiply(3)))
    return 2 * size**3 * count / min(multiply(count) for _ in range(3)) / 1e12


if __name__ == "__main__":
    sys.exit(main())
