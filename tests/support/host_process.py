"""A process with an averager that is told what to do by lines of JSON, and answers each with one.

Both ends of it: `HostProcess` for who starts it, the rest for the process. Used by the tests of the
averager and, with a script of their own, by `benchmarks/averaging/reduce.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# The digest of the anchor that all outer gradients here belong to.
ANCHOR = hashlib.sha256(b"anchor").hexdigest()
# All patience at a meeting is a share of this; nobody waits for its end where all come.
MATCHMAKING_S = 10.0
# Who says nothing for so long is given up; longer than any pause of a busy machine.
SILENCE_S = 45.0


class HostProcess:
    """A running script of that kind; `number` says which outer gradient is its own."""

    def __init__(
        self, script: Path, number: int, initial_peers: Sequence[str], flags: Sequence[str]
    ) -> None:
        self.number = number
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(script), f"--number={number}", *flags),
                *("--initial-peers", *initial_peers),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
                ).rstrip(os.pathsep),
            },
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self.errors: list[str] = []
        threading.Thread(target=self._read_output, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_output(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line)
        # What ended says no more: whoever waits is told at once.
        self._lines.put("")

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.errors.append(line)

    def tell(self, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = 200.0) -> dict[str, Any]:
        """Return the next answer; the first says the process's addresses."""
        try:
            found: dict[str, Any] = json.loads(self._lines.get(timeout=timeout_s))
        except (queue.Empty, json.JSONDecodeError):
            errors = "".join(self.errors[-20:])
            raise AssertionError(f"peer {self.number} does not answer:\n{errors}") from None
        return found

    def close(self, timeout_s: float = 60.0) -> None:
        """End the process by the end of its input, or kill it and raise TimeoutExpired."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


def loopback_dht(initial_peers: Sequence[str]) -> Any:
    """Return a running DHT node of this process that is seen on this machine alone."""
    from dipaco.dht.guarded_dht import GuardedDHT

    return GuardedDHT(
        initial_peers=initial_peers,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        start=True,
        startup_timeout=60,
        use_relay=False,
        auto_nat=False,
        nat_port_map=False,
    )


def outer_gradient(number: int, round_index: int, size: int) -> torch.Tensor:
    """Return what process `number` contributes to a round, the same for whoever computes it."""
    generator = torch.Generator().manual_seed(1000 * round_index + number)
    return torch.randn(size, generator=generator) * 1e-3


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the numbers."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
