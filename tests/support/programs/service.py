"""A trained tiny run for tests of the service, and waiting for what its threads do."""

import time

from dipaco.bootstrap.import_base import ImportedBase
from dipaco.simulator import simulate_command as simulator_cli
from support.runs.foreign_base import make_foreign_base
from support.runs.tiny_run import make_tiny_run


def trained_run(folder):
    """Train a tiny run of 2x2 paths for two rounds and return its folder."""
    make_tiny_run(folder / "run", private_embedding=True, sequence_length=48)
    arguments = [str(folder / "run"), "--rounds", "2", "--out", str(folder / "out")]
    assert simulator_cli.main([*arguments, "--validation-sequences", "0", "--json"]) == 0
    return folder / "out"


def run_with_adapters(folder, adapters):
    """Train adapters of 2x2 paths over a base, `base`, for two rounds; return the run's folder."""
    make_foreign_base(folder / "base", "smollm2")
    make_tiny_run(
        folder / "run", imported=ImportedBase(folder / "base"), adapters=adapters, inner={"learning_rate": 0.02}
    )
    arguments = [str(folder / "run"), "--rounds", "2", "--out", str(folder / "out")]
    assert simulator_cli.main([*arguments, "--validation-sequences", "0", "--json"]) == 0
    return folder / "out"


def wait_until(condition, timeout_s=60.0):
    """Wait for a condition; fails when it does not come true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.01)
