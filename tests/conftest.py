"""Settings of all tests."""

from __future__ import annotations

import os
import sys

# Before PyTorch is imported, here and in every command that a test starts: results depend on the
# number of threads, and the tests share two cores with the swarms that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# The same examples everywhere, and no time limit an example: machines are shared and noisy.
settings.register_profile("dipaco", deadline=None, derandomize=True)
settings.load_profile("dipaco")


@pytest.fixture(autouse=True, scope="module")
def fresh_futures() -> None:
    """Give every module its own locks of Hivemind's futures.

    A test that kills a DHT process may kill it with the lock held that all processes share, and
    whoever is forked later would wait for it for ever.
    """
    module = sys.modules.get("hivemind.utils.mpfuture")
    if module is not None:
        module.MPFuture.reset_backend()
