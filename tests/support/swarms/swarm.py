"""A swarm of real processes on loopback, for tests: start, wait for events, kill, read.

    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peers = [swarm.start_peer(bootstrap) for _ in range(4)]
        swarm.wait(peers, "outer_step", lambda event: event["round"] >= 4)

Every wait is for an event and fails with the output of the processes when its bound has passed. A
bound is no measure: it is far beyond what the slowest machine needs. Every process is ended by id.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from support.programs.processes import ran

BIN = Path(sys.executable).parent
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
LIMIT_S = 240.0
# A swarm that goes on and never does what is awaited: less than pytest gives a test.
MOST_S = 540.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}

Event = dict[str, Any]


class Member:
    """One started command."""

    def __init__(self, name, folder, command, terminal=None):
        """`terminal` is where it prints, if not into a file."""
        self.name = name
        self.folder = folder
        self.log = folder / f"{name}.jsonl"
        self.cache = folder / f"{name}-cache"
        self.output = folder / f"{name}.out"
        self.address_file = folder / f"{name}.address"
        self.events = []
        # A name that comes back is the same peer in a new life: events and address begin anew.
        self._offset = self.log.stat().st_size if self.log.exists() else 0
        self._is_over = False
        self.address_file.unlink(missing_ok=True)
        with self.output.open("ab") as output:
            self.popen = subprocess.Popen(
                [*command, "--log-json", str(self.log), "--address-file", str(self.address_file)],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def read(self):
        """Return all events so far."""
        if not self._is_over and self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offset += len(complete)
            self.events += [json.loads(line) for line in complete.splitlines()]
        return self.events

    def be_replaced(self):
        """Read to the end of this life: what comes to the log after it is of the next one."""
        self.read()
        self._is_over = True

    def of(self, kind):
        """Return the events of one kind so far."""
        return [event for event in self.read() if event["event"] == kind]

    @property
    def alive(self):
        return self.popen.poll() is None

    def address(self, timeout_s=LIMIT_S):
        """Wait until this process has written its address and return it."""
        deadline = time.monotonic() + timeout_s
        while not self.address_file.exists():
            assert self.alive, f"{self.name} ended:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"no address of {self.name}"
            time.sleep(0.05)
        return self.address_file.read_text().split()[0]

    @property
    def peer_id(self):
        return self.address().rsplit("/", 1)[1]

    def kill(self):
        """SIGKILL the process itself, as the kernel or a power cut would; children must follow."""
        self.popen.kill()
        self.popen.wait(LIMIT_S)

    def interrupt(self):
        """Press Ctrl+C once: a terminal sends it to all processes of the command."""
        os.killpg(self.popen.pid, signal.SIGINT)


class Swarm:
    """Starts members and ends them all."""

    def __init__(self, folder, run):
        self.folder = folder
        self.run = run
        self.members = []
        self._terminate = None

    def __enter__(self):
        # A script that is told to end takes its members with it.
        if threading.current_thread() is threading.main_thread():
            self._terminate = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        return self

    def __exit__(self, kind, error, trace):
        for member in self.members:
            if member.alive:
                member.interrupt()
        deadline = time.monotonic() + 30
        for member in self.members:
            try:
                member.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.kill()
        if self._terminate is not None:
            signal.signal(signal.SIGTERM, self._terminate)

    def _add(self, name, command, terminal=None):
        for earlier in self.members:
            if earlier.name == name:
                earlier.be_replaced()
        member = Member(name, self.folder, command, terminal)
        self.members.append(member)
        return member

    def start_bootstrap(self, *extra, name="bootstrap", terminal=None):
        """Start a bootstrap node for the run."""
        return self._add(
            name,
            [
                str(BIN / "dipaco-bootstrap"), "serve", str(self.run.path),
                "--host-maddrs", LOOPBACK, *extra,
            ],
            terminal,
        )  # fmt: skip

    def start_peer(self, entry, *extra, name=None, program=(str(BIN / "dipaco-peer"),), terminal=None):
        """Start a training peer that joins through `entry`. The same name is the same peer."""
        name = name or f"peer{sum(m.name.startswith('peer') for m in self.members)}"
        address = entry if isinstance(entry, str) else entry.address()
        return self._add(
            name,
            [
                *program, "--initial-peers", address,
                "--host-maddrs", LOOPBACK, "--threads", "1", "--nice", "0",
                "--cache-dir", str(self.folder / f"{name}-cache"), *extra,
            ],
            terminal,
        )  # fmt: skip

    def wait(self, members, kind, accept=lambda event: True, timeout_s=LIMIT_S):
        """Wait until every one of `members` has logged such an event; return each one's first.

        The wait ends when nobody has logged anything for `timeout_s`, on a machine however busy.
        """
        members = list(members)
        begun_s = moved_s = time.monotonic()
        seen = 0
        while True:
            if (count := sum(len(m.read()) for m in self.members)) != seen:
                seen, moved_s = count, time.monotonic()
            found = [next((e for e in m.of(kind) if accept(e)), None) for m in members]
            if all(event is not None for event in found):
                return [event for event in found if event is not None]
            waiting = [m for m, event in zip(members, found, strict=True) if event is None]
            dead = [m.name for m in waiting if not m.alive]
            now_s = time.monotonic()
            if dead or now_s - moved_s > timeout_s or now_s - begun_s > MOST_S:
                names = [member.name for member in waiting]
                raise AssertionError(f"no '{kind}' from {names}, ended: {dead}\n{self.outputs()}")
            time.sleep(0.05)

    def wait_after(self, event, member, *kinds):
        """Wait until `member` has logged events of these kinds, one after the other, behind one."""
        for kind in kinds:
            [event] = self.wait([member], kind, lambda e, s=event["time_s"]: e["time_s"] > s)

    def outputs(self, last=3000):
        """Return the end of what every process printed."""
        return "\n".join(f"--- {m.name} ({m.popen.poll()})\n{m.output.read_text()[-last:]}" for m in self.members)

    def digests(self, round_index):
        """Return the digests of the steps that members took per module in a round."""
        found = {}
        for member in self.members:
            for event in member.of("outer_step"):
                if event["round"] == round_index:
                    found.setdefault(event["module"], set()).add(event["digest"])
        return found


def command(program, *arguments, timeout_s=LIMIT_S):
    """Run one of our commands to its end."""
    return ran(BIN / program, *arguments, env=ENVIRONMENT, stdin=subprocess.DEVNULL, timeout_s=timeout_s)
