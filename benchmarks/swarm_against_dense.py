"""A real swarm with path-specific modules against a dense model of one path's size.

    python benchmarks/swarm_against_dense.py --data DIR --out DIR [--steps 400] [--json]

DIR of --data holds train-*.jsonl.gz and validation.jsonl.gz (fields `text`, `domain`). Prepares a
2x4 grid whose first and last block of each level and embedding are path-specific, lets four real
peers move between the eight paths until every path has the steps asked for, and scores the swarm,
the dense model (same base, the same steps as the average path) and the base on the same tokens.
Preparation and results are kept in --out; a second call uses the prepared run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from parts.common import CORPUS_TOML

BIN = Path(sys.executable).parent
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
PEERS = 4
PATHS = 8
RUN_TOML = (
    'name = "full-corpus"\n'
    + CORPUS_TOML
    + """\
[tokenizer]
training_characters = 10_000_000
[model]
vocabulary_size = 4096
block_count = 6
hidden_size = 128
head_count = 4
sequence_length = 256
[grid]
modules_per_level = [2, 4]
private_blocks = [0, 2, 3, 5]
private_embedding = true
[base]
steps = {base_steps}
learning_rate = 2e-3
warmup_steps = 20
batch_sequences = 8
[router]
balanced = true
[inner]
learning_rate = 2e-3
batch_sequences = 8
[rounds]
duration_s = {round_s}
matchmaking_s = 3.0
dwell_rounds = 1
validation_sequences = 32
"""
)


def run(program: str, *arguments: str, threads: int = 2) -> str:
    """Run one of our commands and return what it prints."""
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [str(BIN / program), *arguments], env=environment, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise SystemExit(f"{program} ended with {done.returncode}")
    return done.stdout.decode()


def start(program: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start one of our commands in the background, its output beside its event log."""
    with log.with_suffix(".out").open("wb") as output:
        return subprocess.Popen(
            [str(BIN / program), *arguments, "--log-json", str(log)],
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for_file(path: Path, timeout_s: float = 60.0) -> str:
    """Return the first line of a file once it is there."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear within {timeout_s:.0f} s")
        time.sleep(0.1)
    return path.read_text().split()[0]


def read_events(logs: list[Path]) -> list[dict[str, Any]]:
    """Return all events of all peers."""
    events = []
    for log in logs:
        if log.exists():
            lines = log.read_text().splitlines()
            events += [json.loads(line) for line in lines if line.endswith("}")]
    return events


def path_steps(events: list[dict[str, Any]]) -> dict[int, int]:
    """Return the inner steps that the swarm has merged, per path."""
    steps: dict[int, int] = {}
    for event in events:
        if event["event"] == "round":
            steps[event["path"]] = max(steps.get(event["path"], 0), event["path_step"])
    return steps


def train_swarm(options: argparse.Namespace, run_folder: Path) -> dict[str, Any]:
    """Train with real processes until every path has its steps; evaluate over the network."""
    out: Path = options.out
    address_file = out / "bootstrap.address"
    address_file.unlink(missing_ok=True)
    processes = [
        start(
            "dipaco-bootstrap",
            out / "bootstrap.jsonl",
            "serve",
            str(run_folder),
            "--host-maddrs",
            LOOPBACK,
            "--address-file",
            str(address_file),
        )
    ]
    logs = [out / f"peer{number}.jsonl" for number in range(PEERS)]
    started = time.time()
    try:
        address = wait_for_file(address_file)
        for number, log in enumerate(logs):
            processes.append(
                start(
                    "dipaco-peer",
                    log,
                    "--initial-peers",
                    address,
                    "--host-maddrs",
                    LOOPBACK,
                    "--threads",
                    "1",
                    "--cache-dir",
                    str(out / f"peer{number}"),
                )
            )
        steps: dict[int, int] = {}
        while min(steps.get(path, 0) for path in range(PATHS)) < options.steps:
            if time.time() - started > options.limit_s:
                break
            time.sleep(2.0)
            steps = path_steps(read_events(logs))
            print(f"\r{time.time() - started:5.0f} s, steps a path: {steps}", end="", flush=True)
        print()
        status = subprocess.run(
            [str(BIN / "dipaco-status"), "--initial-peers", address, "--json"],
            env=ENVIRONMENT, stdout=subprocess.PIPE, check=False,
        )  # fmt: skip
        evaluate = (
            "dipaco-eval", "--initial-peers", address, "--cache-dir", str(out / "reader"),
            "--data", str(options.data / "validation.jsonl.gz"), "--label-field", "domain",
            "--json",
        )  # fmt: skip
        evaluation = run(*evaluate)
    finally:
        for process in reversed(processes):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait(30)
    events = read_events(logs)
    return {
        "evaluation": json.loads(evaluation),
        "status": json.loads(status.stdout),
        "steps": steps,
        "seconds": time.time() - started,
        "commits": sum(event["event"] == "commit" for event in events),
        "carried_on": sum(event["event"] == "carry_on" for event in events),
        "moves": sum(event["event"] == "move" for event in events),
    }


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400, help="inner steps a path, at least")
    parser.add_argument("--base-steps", type=int, default=400)
    parser.add_argument("--round-s", type=float, default=45.0)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="stop training after this")
    parser.add_argument("--prepare-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run_toml = options.out / "RUN.toml"
    run_toml.write_text(
        RUN_TOML.format(
            data=options.data.resolve(), base_steps=options.base_steps, round_s=options.round_s
        )
    )
    run_folder = options.out / "run"
    print(run("dipaco-bootstrap", "prepare", str(run_toml), "--out", str(run_folder)))
    if options.prepare_only:
        return 0
    run(
        "dipaco-bootstrap", "prepare", str(run_toml), "--out", str(run_folder),
        "--start-in-s", "30",
    )  # fmt: skip
    result = train_swarm(options, run_folder)
    dense_steps = round(sum(result["steps"].values()) / PATHS)
    run(
        "dipaco-simulate", str(run_folder), "--rounds", "0", "--dense-steps", str(dense_steps),
        "--out", str(options.out / "dense"), "--validation-sequences", "0", "--json",
    )  # fmt: skip
    dense = json.loads(
        run(
            "dipaco-eval",
            "--state-dir",
            str(options.out / "dense"),
            "--allow-genesis",
            "--data",
            str(options.data / "validation.jsonl.gz"),
            "--json",
            "--baseline",
            str(options.out / "dense" / "dense.safetensors"),
        )
    )
    evaluation = result.pop("evaluation")
    summary = {
        "tokens_scored": evaluation["tokens"],
        "dense_tokens_scored": dense["tokens"],
        "base_perplexity": evaluation["base_perplexity"],
        "dense_perplexity": dense["baseline_perplexity"],
        "swarm_perplexity": evaluation["perplexity"],
        "swarm_against_dense": evaluation["perplexity"] / dense["baseline_perplexity"] - 1,
        "dense_steps": dense_steps,
        **result,
        "paths": evaluation["paths"],
        "labels": evaluation["labels"],
    }
    (options.out / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2) if options.json else _table(summary))
    return 0


def _table(summary: dict[str, Any]) -> str:
    return (
        f"{summary['tokens_scored']:,} tokens scored, first 32 of every document excluded\n"
        f"base   {summary['base_perplexity']:8.2f}\n"
        f"dense  {summary['dense_perplexity']:8.2f}  ({summary['dense_steps']} more steps)\n"
        f"swarm  {summary['swarm_perplexity']:8.2f}  (steps a path: {summary['steps']})\n"
        f"swarm against dense: {summary['swarm_against_dense']:+.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
