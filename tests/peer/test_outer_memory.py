"""An outer round takes the memory that `plan` says, and gives it back."""

import json
import sys
from pathlib import Path

import pytest

from support.programs.processes import ran

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "outer_memory.py"


@pytest.mark.parametrize("levels", [1, 2])
def test_the_peak_of_an_outer_round_in_bytes_a_parameter(levels):
    """What a real trainer, its states and its files take, above what the inner loop has.

    A copy of a module too many would be 4 bytes, and what does not depend on the parameters is one
    or two of this small model.
    """
    options = {"codec": "int4", "members": 4, "millions": 10, "rounds": 2, "levels": levels}
    flags = [f"--{name}={value}" for name, value in options.items()]
    environment = {"PYTHONPATH": str(BENCHMARK.parent.parent / "tests"), "OMP_NUM_THREADS": "1"}
    done = ran(sys.executable, BENCHMARK, "--json", *flags, env=environment, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    found = {(row["of"], row["figure"]): row["value"] for row in rows}
    last, told = f"1 L{levels - 1}.E0 ", "bytes (most, left, files)"
    (_, before, _), (_, after, files) = found[last + "train", told], found[last + "save", told]
    peak = found[last + "peak", "bytes, most"]
    # The snapshot, the new state, the encoded contribution and pieces of what is computed.
    assert peak - before <= 12.0 / levels + 2.5
    # The anchors are files by then, and nothing of the round stays.
    assert after <= before + 0.5
    assert 7.5 <= files <= 9.0
    assert peak <= 18.0
