"""What becomes of a peer whose machine lets it down, and of those that it trains with.

Three real `dipaco-peer` processes and a bootstrap node on loopback train a tiny run by the clock.
To one of the peers something happens: one of its own processes is killed or hangs, all of them are
suspended, its memory has a limit, its files cannot be written or are gone, its machine's clock is
set, its network comes back with another address. Then it has to step again, to pause with one line
that says what to do, or to end with such a line and a documented exit code; what the kernel kills
has to step again once it is started again. The others have to go on stepping. At the end all
processes are killed at once and started again from their folders.

Each accident happens to a peer that has stepped since the one before; one that has ended is
started again with its folder. A disk and a network of its own and a limit of memory need root; what
needs it is named as left out otherwise. Exit code 1 when a peer did none of these in time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import BIN, Event, Member, Swarm

from .common import Report, process_tree, scratch_folder
from .home_lines import Homes, can_make_homes, homes
from .memory_group import MemoryGroup

START_S = 300.0
LIMIT_S = 180.0
"""To recover."""
POLL_S = 0.1
DISK_BYTES = 64 * 2**20
SUSPENDED_S = (5.0, 45.0, 150.0)
# A peer that has missed more rounds than a fork may be deep, and than files and claims live.
SUSPENDED_ROUNDS = 70
CLOCK_STEPS_S = {"an hour": 3600.0, "two minutes": 120.0, "3 s": 3.0}
# Without a network, and of the limit what a peer has left.
OFFLINE_S = 30.0
MEMORY_LEFT_BYTES = 2**20
# Its system clock is ahead by what a file says. Processes forked from it have the same, p2pd not.
_CLOCK = """
import sys, time
from pathlib import Path
right, file = time.time, Path({file!r})
def moved():
    try:
        return right() + float(file.read_text() or 0)
    except OSError:
        return right()
time.time = moved
from dipaco.peer.peer_command import main
sys.exit(main(sys.argv[1:]))
"""
RESTART, MOVE = "all killed and started again", "network gone for 30 s, then another address"
VICTIMS_SITE = 3
# What its other processes may need to notice that it has ended.
LEFT_OVER_S = 60.0
# Happens to a peer; returns the processes that it cannot go on with.
Accident = Callable[[Member], list[int]]


@dataclass
class Outcome:
    """What became of the peer and the others. Seconds are since the accident."""

    accident: str
    steps_after_s: float | None
    """Until the peer took an outer step; None when it took none."""
    ends_after_s: float | None
    exit_code: int | None
    said: str
    """The last line that it printed when it ended, else the first of its warnings."""
    others_after_s: float | None
    """Until another peer took one."""
    is_paused: bool = False
    """It trains nothing until its owner has done something, and has said what."""

    left_over: int = 0
    """Processes of it that went on without it."""

    @property
    def is_well(self) -> bool:
        return (
            self.others_after_s is not None
            and not self.left_over
            and (
                self.steps_after_s is not None
                or self.is_paused
                or (self.exit_code in range(2, 13) and self.said.startswith("error: "))
            )
        )


class World:
    """The swarm, and the peer that has bad luck."""

    def __init__(self, folder: Path, round_s: float, limit_s: float) -> None:
        self.folder, self.limit_s = folder, limit_s
        run = make_tiny_run(
            folder / "run",
            modules_per_level=(1, 2),
            inner_steps=0,
            duration_s=round_s,
            start_s=time.time(),
            documents_per_path=200,
            rounds={"validation_sequences": 8},
        )
        self.swarm = Swarm(folder, run)
        self.entry = ""
        self.others: list[Member] = []
        self.victim: Member | None = None

    def begin(self) -> None:
        self.entry = self.start_bootstrap().address(START_S)
        self.others = [self.start_other(number) for number in range(2)]
        self.swarm.wait(self.others, "outer_step", timeout_s=START_S)

    def start_bootstrap(self) -> Member:
        return self.swarm.start_bootstrap()

    def start_other(self, number: int) -> Member:
        return self.swarm.start_peer(self.entry, name=f"other{number}")

    def start_victim(self) -> Member:
        file = clock_file(self.folder)
        file.unlink(missing_ok=True)
        program = (sys.executable, "-c", _CLOCK.format(file=str(file.resolve())))
        return self.swarm.start_peer(self.entry, name="victim", program=program)

    def is_back(self, step: Event) -> bool:
        """Tell whether a step shows that the peer is back."""
        return True

    def ready(self) -> Member:
        """Return a victim that lives and has taken an outer step lately."""
        if self.victim is None or not self.victim.alive:
            self.victim = self.start_victim()
        before = len(self.victim.of("outer_step"))
        deadline = time.monotonic() + START_S
        while len(self.victim.of("outer_step")) == before:
            if not self.victim.alive or time.monotonic() > deadline:
                raise RuntimeError(f"the victim does not step:\n{self.swarm.outputs()}")
            time.sleep(POLL_S)
        return self.victim

    def suffer(self, name: str, happen: Accident) -> Outcome:
        """Let it happen, and watch until the peer steps again or ends, and the others go on."""
        victim = self.ready()
        tree = [process.pid for process in process_tree(victim.popen.pid)]
        printed, steps = victim.output.stat().st_size, len(victim.of("outer_step"))
        happened_s = time.time()
        broken = happen(victim)
        until_s = time.time() + self.limit_s
        found = Outcome(name, None, None, None, "", None)
        # What was under way when it happened does not count: a whole round must have passed, for
        # the peer itself since it got rid of what is broken.
        since_s = mended_s = happened_s + self.swarm.run.plan().rounds.duration_s
        while time.time() < until_s:
            now_s = time.time()
            if any(Path(f"/proc/{pid}").exists() for pid in broken):
                mended_s = now_s + since_s - happened_s
            # When they are read, for its clock may be wrong.
            new, steps = victim.of("outer_step")[steps:], len(victim.of("outer_step"))
            if found.steps_after_s is None and now_s > mended_s and any(map(self.is_back, new)):
                found.steps_after_s = round(now_s - happened_s, 1)
            found.others_after_s = first_step_s(self.others, since_s, happened_s)
            if not victim.alive and found.ends_after_s is None:
                found.ends_after_s = round(now_s - happened_s, 1)
                found.exit_code = victim.popen.returncode
                found.left_over = left_over(tree)
                if found.exit_code == -signal.SIGKILL:  # Of the kernel, or a service manager.
                    self.victim = victim = self.start_victim()
                    steps = 0
            found.is_paused = any(e["time_s"] > happened_s for e in victim.of("paused"))
            is_over = found.steps_after_s is not None or not victim.alive
            if (is_over or found.is_paused) and found.others_after_s is not None:
                break
            time.sleep(POLL_S)
        lines = victim.output.read_bytes()[printed:].decode(errors="replace").splitlines()
        found.said = what_it_said(lines, not victim.alive)
        return found

    def restart_all(self) -> Outcome:
        """Kill everything at once; start it again in another order, the bootstrap node last."""
        victim = self.ready()
        printed = victim.output.stat().st_size
        for member in self.swarm.members:
            if member.alive:
                member.kill()
        happened_s = time.time()
        self.entry = self.start_bootstrap().address(START_S)
        self.victim = victim = self.start_victim()
        self.others = [self.start_other(number) for number in (1, 0)]
        found = Outcome(RESTART, None, None, None, "", None)
        with contextlib.suppress(AssertionError):
            self.swarm.wait([victim, *self.others], "outer_step", timeout_s=self.limit_s)
        found.steps_after_s = first_step_s([victim], happened_s, happened_s)
        found.others_after_s = first_step_s(self.others, happened_s, happened_s)
        lines = victim.output.read_bytes()[printed:].decode(errors="replace").splitlines()
        found.said = what_it_said(lines, not victim.alive)
        return found


class NetworkWorld(World):
    """Everybody has a machine of its own, with an address that others can call."""

    def __init__(self, folder: Path, round_s: float, limit_s: float, network: Homes) -> None:
        super().__init__(folder, round_s, limit_s)
        self.network = network

    def start_bootstrap(self) -> Member:
        listen = f"/ip4/{self.network.address(0)}/tcp/31337"
        serve = (str(BIN / "dipaco-bootstrap"), "serve", str(self.swarm.run.path))
        command = [*self.network.prefix(0), *serve, "--host-maddrs", listen]
        return self.swarm._add("bootstrap", command)

    def start_other(self, number: int) -> Member:
        return self._start(f"other{number}", 1 + number)

    def start_victim(self) -> Member:
        return self._start("victim", VICTIMS_SITE)

    def is_back(self, step: Event) -> bool:
        # Of what it trains alone it makes steps all the time.
        return len(step["group"]) > 1

    def _start(self, name: str, site: int) -> Member:
        return self.swarm._add(
            name,
            [
                *self.network.prefix(site), str(BIN / "dipaco-peer"),
                "--initial-peers", self.entry, "--threads", "1", "--nice", "0",
                "--cache-dir", str(self.folder / f"{name}-cache"),
            ],
        )  # fmt: skip

    def moves(self, victim: Member) -> list[int]:
        """Its network is gone for a while, and comes back with another address."""
        self.network.go_offline(VICTIMS_SITE)
        time.sleep(OFFLINE_S)
        self.network.come_back(VICTIMS_SITE, host=77)
        return []


def first_step_s(members: list[Member], since_s: float, from_s: float) -> float | None:
    """Return how long after `from_s` one of them took its first outer step after `since_s`."""
    times = [event["time_s"] for member in members for event in member.of("outer_step")]
    times = [time_s for time_s in times if time_s > since_s]
    return round(min(times) - from_s, 1) if times else None


def left_over(tree: list[int]) -> int:
    """Return how many of a peer's processes outlive it."""
    until_s = time.monotonic() + LEFT_OVER_S
    while any(living := [lives(pid) for pid in tree]) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return sum(living)


def lives(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def what_it_said(lines: list[str], has_ended: bool) -> str:
    """Return the line that a person would look at."""
    if has_ended:
        return next((line for line in reversed(lines) if line.strip()), "")
    telling = ("paused:", "carries on", "warning", "waiting", "kept in memory", "started again")
    return next((line for line in lines if any(word in line.lower() for word in telling)), "")


# -- what can happen


def processes(victim: Member) -> dict[str, list[int]]:
    """Return the ids of a peer's own processes by what they are."""
    tree = process_tree(victim.popen.pid)
    daemons = [process for process in tree if process.command.startswith("p2pd")]
    of_dht = [daemon.parent for daemon in daemons]
    return {"p2pd": [d.pid for d in daemons], "DHT process": of_dht}


def signalled(kind: str, number: signal.Signals) -> Accident:
    def happen(victim: Member) -> list[int]:
        pids = processes(victim)[kind]
        for pid in pids:
            os.kill(pid, number)
        return pids

    return happen


def suspended(seconds: float) -> Accident:
    def happen(victim: Member) -> list[int]:
        pids = [process.pid for process in process_tree(victim.popen.pid)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(seconds)
        return []

    return happen


def clock_file(folder: Path) -> Path:
    return folder / "victim-clock"


def clock_set(ahead_s: float) -> Accident:
    def happen(victim: Member) -> list[int]:
        clock_file(victim.folder).write_text(str(ahead_s))
        return []

    return happen


def memory_full(victim: Member) -> list[int]:
    """The machine gives a peer no more memory, and the kernel kills what has the most of it."""
    pids = [process.pid for process in process_tree(victim.popen.pid)]
    Path(f"/proc/{victim.popen.pid}/oom_score_adj").write_text("1000")
    with MemoryGroup(pids) as group:
        group.leave(MEMORY_LEFT_BYTES)
        group.press()
    return []


def no_address_space(victim: Member) -> list[int]:
    """Its training process can have no more memory, and hears so, as with `ulimit -v`."""
    for line in Path(f"/proc/{victim.popen.pid}/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            most = 1024 * int(line.split()[1]) + MEMORY_LEFT_BYTES
            resource.prlimit(victim.popen.pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    return []


def read_only(victim: Member) -> list[int]:
    """Nothing more can be opened for writing, as after an error of the disk."""
    place = str(cache(victim))
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
    return []


def disk_full(victim: Member) -> list[int]:
    with (cache(victim) / "something else").open("wb") as file, contextlib.suppress(OSError):
        for _ in range(2 * DISK_BYTES // 2**20):
            file.write(bytes(2**20))
    return []


def unwritable(victim: Member) -> list[int]:
    for folder in cache(victim).glob("*/states"):
        shutil.rmtree(folder)
        folder.write_text("no folder")
    return []


def disk_gone(victim: Member) -> list[int]:
    for entry in cache(victim).iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return []


def cache(victim: Member) -> Path:
    return victim.folder / "victim-cache"


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[bool]:
    """Put a small file system where the victim's files will be; false when that is not allowed."""
    place = folder / "victim-cache"
    place.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    done = subprocess.run(["mount", *options], capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(place)], check=False)


def mended(world: World) -> None:
    """Give the machine back what was taken from it."""
    place = world.folder / "victim-cache"
    if world.victim is not None and world.victim.alive:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(world.victim.popen.pid, resource.RLIMIT_AS, unlimited)
    with contextlib.suppress(FileNotFoundError):
        if not os.access(place, os.W_OK):
            subprocess.run(["umount", "--lazy", str(place)], check=True)
    (place / "something else").unlink(missing_ok=True)
    for file in place.glob("*/states"):
        if file.is_file():
            file.unlink()


def accidents(round_s: float, has_disk: bool) -> dict[str, Accident]:
    found = {
        f"{kind} {word}": signalled(kind, number)
        for kind in ("p2pd", "DHT process")
        for word, number in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP))
    }
    found |= {f"suspended for {s:.0f} s": suspended(s) for s in SUSPENDED_S}
    found[f"suspended for {SUSPENDED_ROUNDS} rounds"] = suspended(SUSPENDED_ROUNDS * round_s)
    if MemoryGroup.is_possible():
        found["no memory, the kernel kills the trainer"] = memory_full
    found["no memory, the trainer hears so"] = no_address_space
    if has_disk:
        found |= {"disk full": disk_full, "disk read-only": read_only}
    for name, step_s in CLOCK_STEPS_S.items():
        found[f"clock set {name} ahead"] = clock_set(step_s)
        found[f"clock set {name} back"] = clock_set(-step_s)
    return found | {"states cannot be written": unwritable, "files deleted": disk_gone}


def is_wanted(name: str, only: list[str]) -> bool:
    return not only or any(part in name for part in only)


def main(only: list[str], round_s: float, as_json: bool) -> int:
    """Let them happen, those whose name has one of `only` or all; returns the exit code."""
    report = Report("accidents", ("accident", "steps again", "ends", "code", "others step", "says"))
    outcomes: list[Outcome] = []

    def tell(world: World, found: Outcome) -> None:
        outcomes.append(found)
        print(found, file=sys.stderr, flush=True)
        if not found.is_well and world.victim is not None:
            print(world.victim.output.read_text()[-3000:], file=sys.stderr)
            world.victim.kill()

    with scratch_folder() as folder, own_disk(folder) as has_disk:
        chosen = {n: h for n, h in accidents(round_s, has_disk).items() if is_wanted(n, only)}
        world = World(folder, round_s, LIMIT_S)
        if chosen or is_wanted(RESTART, only):
            with world.swarm:
                world.begin()
                for name, happen in chosen.items():
                    tell(world, world.suffer(name, happen))
                    mended(world)
                if is_wanted(RESTART, only):
                    tell(world, world.restart_all())
    if can_make_homes(with_nat=False) and is_wanted(MOVE, only):
        with scratch_folder() as folder, homes(0, 0, 0, 0) as network:
            moving = NetworkWorld(folder, round_s, LIMIT_S, network)
            with moving.swarm:
                moving.begin()
                tell(moving, moving.suffer(MOVE, moving.moves))
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        seconds = [outcome.steps_after_s, outcome.ends_after_s, outcome.exit_code]
        cells = ["-" if value is None else value for value in (*seconds, outcome.others_after_s)]
        report.row(outcome.accident, *cells, outcome.said[-120:])
        rows.append({**asdict(outcome), "is_well": outcome.is_well})
    report.figures["outcomes"] = rows
    report.notes.append(f"seconds since the accident; rounds of {round_s:g} s")
    if not has_disk:
        report.notes.append("left out, it needs root: disk full, disk read-only")
    if not MemoryGroup.is_possible():
        report.notes.append("left out, it needs a control group: no memory, killed by the kernel")
    if not can_make_homes(with_nat=False):
        report.notes.append(f"left out, it needs root and iproute2: {MOVE}")
    report.print(as_json)
    return 0 if all(outcome.is_well for outcome in outcomes) else 1
