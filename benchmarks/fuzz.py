"""Feed mutated traffic to every parser of bytes that come from outside, and count what breaks.

    python benchmarks/fuzz.py --folder DIR --record            # a swarm of five peers makes samples
    python benchmarks/fuzz.py --folder DIR [--inputs 1000000] [--seed 0] [--target NAME] [--json]

A parser may refuse an input with the errors that its callers expect. Anything else is a finding:
another exception, more than a second of processor time, more than a gigabyte of memory, or the
end of the process. Each parser runs in a process of its own, so that a crash in native code is
seen; inputs with findings are kept in DIR/findings. Exit code 1 when there is one.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import multiprocessing
import os
import random
import resource
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parts.common import HERE, Report, build_parser
from parts.fuzz_targets import Target, targets_of
from parts.mutations import MAX_BYTES, mutate

SLOW_S = 1.0
MEMORY_BYTES = 2**30
INPUTS = 1_000_000
RECORD_PEERS = 4
RECORD_ROUNDS = 4


def main() -> int:
    """Record or feed; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="samples and findings")
    parser.add_argument("--record", action="store_true", help="make samples with a real swarm")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="of all parsers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", help="this parser alone")
    options = parser.parse_args()
    if options.record:
        record(options.folder)
        return 0
    if not (options.folder / "samples").is_dir():
        parser.error(f"{options.folder} holds no samples; make them with --record")
    targets = [t for t in targets_of(options.folder) if options.target in (None, t.name)]
    if not targets:
        parser.error(f"no parser is called {options.target}")
    report = Report(
        "inputs to the parsers of outside bytes",
        ("parser", "samples", "inputs", "accepted", "refused", "findings", "us/input"),
    )
    each = -(-options.inputs // len(targets))
    results = [feed(target, each, options.seed, options.folder) for target in targets]
    for target, result in zip(targets, results, strict=True):
        report.row(
            target.name, len(target.samples), result["inputs"], result["accepted"],
            result["refused"], len(result["findings"]), 1e6 * result["cpu_s"] / result["inputs"],
        )  # fmt: skip
        report.notes += [f"{target.name}: {finding}" for finding in result["findings"]]
    report.figures = {
        "inputs": sum(result["inputs"] for result in results),
        "findings": sum(len(result["findings"]) for result in results),
        "seed": options.seed,
        "parsers": {t.name: r for t, r in zip(targets, results, strict=True)},
    }
    report.print(options.json)
    return int(report.figures["findings"] > 0)


def record(folder: Path) -> None:
    """Run a small swarm whose processes keep what reaches their parsers."""
    # Members are started with the environment of this process as it is when this is imported.
    os.environ["DIPACO_TAP"] = str((folder / "samples").resolve())
    tap = str(HERE / "parts" / "tap")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (tap, os.environ.get("PYTHONPATH"))))
    from support.runs.tiny_run import make_tiny_run
    from support.swarms.swarm import Swarm

    run = make_tiny_run(
        folder / "run", private_blocks=(3,), block_count=4, inner_steps=2, duration_s=8.0,
        start_s=time.time(),
    )  # fmt: skip
    with Swarm(folder, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap) for _ in range(RECORD_PEERS)]
        swarm.wait(peers, "training")
        peers.append(swarm.start_peer(peers[0]))
        swarm.wait(peers, "outer_step", lambda event: event["round"] >= RECORD_ROUNDS)
    keep_files(folder, "states", "states/*/L0.E0/*")
    keep_files(folder, "contributions", "contributions/L0.E0/*")


def keep_files(folder: Path, name: str, pattern: str) -> None:
    """Copy what the peers have on disk."""
    for file in sorted(folder.glob(f"peer*-cache/**/{pattern}"))[:20]:
        data = file.read_bytes()
        target = folder / name / hashlib.sha256(data).hexdigest()[:16]
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)


def feed(target: Target, inputs: int, seed: int, folder: Path) -> dict[str, Any]:
    """Feed one parser in a forked process; what was fed last is seen also when that dies."""
    last = mmap.mmap(-1, MAX_BYTES + 8)
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_feed, args=(target, inputs, seed, folder, last, there)
    )
    process.start()
    there.close()
    try:
        result: dict[str, Any] = here.recv()
    except EOFError:
        process.join()
        data = last[8 : 8 + int.from_bytes(last[:8], "little")]
        finding = f"the process ended with {process.exitcode}: {_keep(folder, target, data)}"
        result = {"inputs": 1, "accepted": 0, "refused": 0, "cpu_s": 0.0, "findings": [finding]}
    process.join()
    return result


def _feed(
    target: Target, inputs: int, seed: int, folder: Path, last: mmap.mmap, answer: Connection
) -> None:
    logging.disable(logging.CRITICAL)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES,) * 2)
    rng = random.Random(f"{seed}/{target.name}")
    counts: Counter[str] = Counter()
    findings: dict[str, str] = {}
    began_s = time.process_time()
    for number in range(inputs):
        # The samples themselves come first: a parser that refuses them is not the one meant.
        is_sample = number < len(target.samples)
        data = target.samples[number] if is_sample else mutate(rng, target.samples, target.spelling)
        last[: 8 + len(data)] = len(data).to_bytes(8, "little") + data
        started_s = time.process_time()
        what = _what_happens(target, data)
        if time.process_time() - started_s > SLOW_S:
            what = what if what.startswith("!") else f"! more than {SLOW_S:g} s"
        if is_sample and what == "refused":
            counts["samples refused"] += 1
        counts[what[:1] if what.startswith("!") else what] += 1
        if what.startswith("!") and what not in findings and len(findings) < 20:
            findings[what] = f"{what[2:]}: {_keep(folder, target, data)}"
    answer.send(
        {
            "inputs": inputs,
            "accepted": counts["accepted"],
            "refused": counts["refused"],
            "samples_refused": counts["samples refused"],
            "cpu_s": round(time.process_time() - began_s, 3),
            "findings": list(findings.values()),
        }
    )


def _what_happens(target: Target, data: bytes) -> str:
    try:
        if target.read(data) is False:
            return "refused"
    except target.refusals:
        return "refused"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"! {type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"
    return "accepted"


def _keep(folder: Path, target: Target, data: bytes) -> Path:
    name = f"{target.name.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
    file = folder / "findings" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
    return file


if __name__ == "__main__":
    sys.exit(main())
