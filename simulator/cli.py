"""`dipaco-simulate RUN_DIR`: the swarm of a prepared run in one process.

dipaco-simulate my-run --rounds 20
dipaco-simulate my-run --rounds 20 --out my-run-simulated --dense-steps 2000
dipaco-simulate my-run --rounds 20 --out my-run-simulated --resume
dipaco-simulate my-256-paths --rounds 20 --out my-256-paths-simulated --keep disk
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from dipaco.modules.command_line import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `dipaco-simulate`; returns the exit code."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.debug else logging.WARNING, format="%(message)s"
    )
    return run_command(lambda: _run(options), options.debug)


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="dipaco-simulate",
        description="Train a prepared run in one process, with the arithmetic of the swarm.",
        epilog="A swarm in the fixed-steps mode has the same digests, round by round.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="made by prepare")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="rounds to train now (default 1)"
    )
    parser.add_argument(
        "--steps-per-round",
        type=int,
        metavar="K",
        help="inner steps of a round (default: what the plan says)",
    )
    parser.add_argument(
        "--first-round",
        type=int,
        default=0,
        metavar="R",
        help="number of the first round, to compare with a swarm that began in round R",
    )
    parser.add_argument(
        "--paths",
        metavar="A,B,...",
        help="train only these paths; a path given twice has two replicas (default: each once)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write a run directory with the trained states"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from what an earlier call left in --out"
    )
    parser.add_argument(
        "--keep",
        choices=("memory", "device", "disk"),
        default="memory",
        help="where the paths are that wait for their turn: in memory (default), on the device of "
        "the model, or on disk in --out, for hundreds of them; there a simulation that was killed "
        "goes on within a round",
    )
    parser.add_argument(
        "--dense-steps",
        type=int,
        default=0,
        metavar="S",
        help="then train the dense baseline for S steps on all shards mixed",
    )
    parser.add_argument(
        "--validation-sequences",
        type=int,
        metavar="V",
        help="held-out sequences scored per path and round, at most; 0 is none (default: all)",
    )
    parser.add_argument(
        "--optimizer", default="adamw", metavar="O", help="adamw or adamw8bit, as for the peers"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads; must equal those of the peers"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default cpu)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a round")
    parser.add_argument("--debug", action="store_true", help="tracebacks and debug logging")
    return parser


def _run(options: argparse.Namespace) -> int:
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from .simulate import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
