"""`dipaco-simulate RUN_DIR`: the swarm of a prepared run in one process.

dipaco-simulate my-run --rounds 20
dipaco-simulate my-run --rounds 20 --out my-run-simulated --dense-steps 2000
"""

from __future__ import annotations

import sys

from dipaco.base.command_line import Command

from .simulate_settings import SimulateSettings


def run(settings: SimulateSettings) -> int:
    """Run `dipaco-simulate`; returns the exit code."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from .simulate import run

    return run(settings)


COMMAND = Command(
    "dipaco-simulate",
    SimulateSettings,
    run,
    description="Train a prepared run in one process, with the arithmetic of the swarm.",
    epilog="A swarm in the fixed-steps mode has the same digests, round by round.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
