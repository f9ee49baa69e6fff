"""What has one digest has it on every processor: golden values under lesser instruction sets."""

import os
import sys
from pathlib import Path

import pytest

from support.programs.processes import ran

TESTS = Path(__file__).parent
GOLDEN_TESTS = ("test_contributions.py", "test_outer.py", "test_trimmed_mean.py", "test_state.py")


@pytest.mark.parametrize(("vectors", "math_library"), [("default", "SSE4_2"), ("avx2", "AVX2")])
def test_golden_values_are_those_of_an_older_processor(vectors, math_library):
    """PyTorch and MKL choose their kernels by these when they are loaded."""
    chosen = {"ATEN_CPU_CAPABILITY": vectors, "MKL_ENABLE_INSTRUCTIONS": math_library}
    arguments = ["-q", "-k", "golden", "-p", "no:cacheprovider", *GOLDEN_TESTS]
    found = ran(sys.executable, "-m", "pytest", *arguments, cwd=TESTS, env=os.environ | chosen)
    assert found.returncode == 0, found.stdout + found.stderr
