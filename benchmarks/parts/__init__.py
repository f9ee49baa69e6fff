"""What the benchmarks are made of. Importing it makes the helpers of the tests importable."""

import sys
from pathlib import Path

# The processes of a swarm are started as the tests start them.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
