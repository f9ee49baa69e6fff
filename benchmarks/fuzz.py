"""Feed mutated inputs to every parser of bytes that come from outside, guided by coverage.

    python benchmarks/fuzz.py --folder DIR [--inputs 1000000] [--seed 0] [--target NAME] [--json]

Atheris (libFuzzer) mutates seeds that are made here, in bytes and in what msgpack or JSON says in
them, and keeps what reaches new code in DIR/corpus, from which the next run goes on. A parser may
refuse an input with the errors that its callers expect. Anything else is a finding: another
exception, seconds of processor time, more than a gigabyte of memory, or the end of the process.
Each parser runs in a process of its own, up to its first finding; the input is kept in
DIR/findings. Exit code 1 when there is one. An input with a finding becomes a test.

Needs Atheris, which has wheels for Linux and Python 3.11 to 3.13: pip install 'atheris>=3'
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import random
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from parts.common import Report, build_parser, one_thread
from parts.mutations import mutate

SLOW_S, MEMORY_MIB = 5, 1024
RSS_MIB = 4096
MAX_BYTES = 2**20
START_S = 300.0
# Of an input whose spelling is known, so often it is changed inside.
INSIDE = 0.6


def options() -> Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="corpus and findings")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all parsers together")
    parser.add_argument("--seconds", type=int, default=0, help="for each parser at most (no limit)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", help="this parser alone")
    parser.add_argument("--child", action="store_true", help="feed --target in this process")
    return parser.parse_args()


def feed_here(chosen: Namespace) -> None:
    """Feed one parser in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["dipaco"], enable_loader_override=False):
        from parts.fuzz_targets import targets_of
    target = targets_of(chosen.folder)[chosen.target]
    logging.disable(logging.CRITICAL)

    def read(data: bytes) -> None:
        with contextlib.suppress(*target.refusals):
            target.read(data)

    def changed(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if target.spelling != "bytes" and rng.random() < INSIDE:
            inside = mutate(data, target.spelling, rng)
            if inside is not None and len(inside) <= max_bytes:
                return inside
        return bytes(atheris.Mutate(data, max_bytes))

    corpus = folder_of(chosen.folder, "corpus", chosen.target)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = {
        "runs": chosen.inputs,
        "max_total_time": chosen.seconds,
        "seed": chosen.seed,
        "timeout": SLOW_S,
        "malloc_limit_mb": MEMORY_MIB,
        "rss_limit_mb": RSS_MIB,
        "max_len": min(MAX_BYTES, 4 * max(map(len, target.seeds))),
        "artifact_prefix": f"{folder_of(chosen.folder, 'findings', chosen.target)}/",
        "print_final_stats": 1,
    }
    flags = [f"-{name}={value}" for name, value in limits.items()]
    atheris.Setup([sys.argv[0], str(corpus), *flags], read, custom_mutator=changed)
    atheris.Fuzz()


def folder_of(folder: Path, kind: str, target: str) -> Path:
    """Return where the files of a target are."""
    found = folder / kind / target.replace(" ", "-")
    found.mkdir(parents=True, exist_ok=True)
    return found


def feed(chosen: Namespace, target: str, inputs: int) -> dict[str, Any]:
    """Feed one parser in a process of its own; returns what came of it."""
    findings = folder_of(chosen.folder, "findings", target)
    known = set(findings.iterdir())
    command = [
        sys.executable, __file__, "--child", "--folder", str(chosen.folder), "--target", target,
        "--inputs", str(inputs), "--seconds", str(chosen.seconds), "--seed", str(chosen.seed),
    ]  # fmt: skip
    began_s = time.monotonic()
    done = subprocess.run(
        command, env=one_thread(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    said = done.stderr + done.stdout
    counted = re.search(r"stat::number_of_executed_units: +(\d+)", said)
    new = sorted(set(findings.iterdir()) - known)
    finding = None
    if done.returncode or new:
        error = re.search(r"Uncaught Python exception: ===\s+(.+)", said)
        error = error or re.search(r"ERROR: (.+)", said)
        told = error[1] if error else said[-500:]
        finding = f"{told.strip()}: {new[0] if new else f'ended with {done.returncode}'}"
    corpus = folder_of(chosen.folder, "corpus", target)
    covered = re.findall(r"cov: (\d+)", said)
    return {
        "inputs": int(counted[1]) if counted else 0,
        "corpus": len(list(corpus.iterdir())),
        "covered": int(covered[-1]) if covered else 0,
        "seconds": round(time.monotonic() - began_s, 1),
        "finding": finding,
    }


def main() -> int:
    """Feed all parsers; returns the exit code."""
    chosen = options()
    if chosen.child:
        feed_here(chosen)
    if importlib.util.find_spec("atheris") is None:
        print("Atheris is not here: pip install 'atheris>=3'", file=sys.stderr)
        return 2
    from parts.fuzz_targets import targets_of

    chosen.folder.mkdir(parents=True, exist_ok=True)
    targets = targets_of(chosen.folder)
    for name, target in targets.items():
        if not any(target.read(seed) is not False for seed in target.seeds):
            raise SystemExit(f"{name} refuses its own seeds")
    names = [name for name in targets if chosen.target in (None, name)]
    if not names:
        print(f"no parser is called {chosen.target}; of: {', '.join(targets)}", file=sys.stderr)
        return 2
    report, broken = Report("inputs to parsers", seed=chosen.seed), []
    for name in names:
        found = feed(chosen, name, -(-chosen.inputs // len(names)))
        report.add(name, found)
        if found["finding"]:
            broken.append(f"{name}: {found['finding']}")
        print(name, found, file=sys.stderr, flush=True)
    return report.conclude(chosen, broken)


if __name__ == "__main__":
    sys.exit(main())
