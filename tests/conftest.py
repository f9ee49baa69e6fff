"""Settings of all tests."""

import os
from collections import Counter
from pathlib import Path

# Before PyTorch is imported, here and in every command that a test starts: results depend on the
# number of threads, and the tests share two cores with the swarms that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No thread waits for the wrong thing (base/waits.py), here and in every process that a test starts.
os.environ["DIPACO_ASSERT_WAITS"] = "1"

import pytest
from hypothesis import settings

# The same examples everywhere, and no time limit an example: machines are shared and noisy.
settings.register_profile("dipaco", deadline=None, derandomize=True)
settings.load_profile("dipaco")


SWARM_FOLDER = Path(__file__).parent / "swarm"


def pytest_collection_modifyitems(items):
    """Mark what starts whole swarms: the folder says so."""
    for item in items:
        if SWARM_FOLDER in item.path.parents:
            item.add_marker(pytest.mark.swarm)


def pytest_terminal_summary(terminalreporter):
    """Say what was not tested, one line a reason."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(str(report.longrepr[2]) for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} not run: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="module")
def joined_nodes():
    """Give a module a DHT node."""
    from support.wire.exchange_nodes import Nodes  # it imports Hivemind, which few tests need

    joined = Nodes()
    yield joined
    joined.server_dht.shutdown()


@pytest.fixture
def nodes(joined_nodes):
    """Give a test the module's node, and stop the exchanges that it started."""
    yield joined_nodes
    joined_nodes.stop_exchanges()


@pytest.fixture
def one_thread():
    """Compute as the simulator's commands do, whatever was set before."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """Give a module a tiny prepared run of 2x2 paths without path-specific modules."""
    from support.runs.tiny_run import make_tiny_run

    return make_tiny_run(tmp_path_factory.mktemp("shared") / "run")


@pytest.fixture(scope="module")
def private_run(tmp_path_factory):
    """Give a module the same with path-specific blocks and embedding."""
    from support.runs.tiny_run import PRIVATE, make_tiny_run

    return make_tiny_run(tmp_path_factory.mktemp("private") / "run", **PRIVATE)


@pytest.fixture(scope="module")
def browser():
    """Give a module a browser; where there is none, its tests are skipped with a line that says so.

    It ends with the module: while it is there, an event loop runs on this thread.
    """
    from support.programs.browser import NoBrowserError, chromium

    try:
        with chromium() as found:
            yield found
    except NoBrowserError as missing:
        pytest.skip(str(missing))
