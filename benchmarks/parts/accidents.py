"""What becomes of a peer whose machine lets it down, and of those that it trains with.

Three real `dipaco-peer` processes and a bootstrap node train a tiny run by the clock. To one of the
peers something happens: one of its own processes is killed or hangs, all of them are suspended, it
gets no more memory, its files cannot be written or are gone, its machine's clock is set, its
network comes back with another address. Then it has to step again, to pause with one line that says
what to do, or to end with such a line and a documented exit code; what the kernel kills has to step
again once it is started again. The others have to go on stepping. At the end all processes are
killed at once and started again from their folders.

Each accident happens to a peer that has stepped since the one before; one that has ended is
started again with its folder. A disk and a network of its own need root; what needs it is named as
left out otherwise.
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
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from support.swarms.swarm import Event, Member

from .common import Report, process_tree
from .home_lines import Homes, can_make_homes, homes
from .world import START_S, World, signal_all

LIMIT_S = 180.0
"""To recover."""
POLL_S = 0.1
DISK_BYTES = 64 * 2**20
SUSPENDED_S = (5.0, 45.0)
# A peer that has missed more rounds than a fork may be deep, and than files and claims live.
SUSPENDED_ROUNDS = 70
CLOCK_STEPS_S = {"an hour": 3600.0, "two minutes": 120.0, "3 s": 3.0}
# Without a network, and of the address space what a peer has left.
OFFLINE_S = 30.0
LEFT_BYTES = 2**20
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
VICTIM = 2
# What its other processes may need to notice that it has ended.
LEFT_OVER_S = 60.0
# Happens to a peer; returns the processes that it cannot go on with.
Accident = Callable[[Member], list[int]]


class AccidentWorld(World):
    """Two peers, and one that has bad luck."""

    modules_per_level = (1, 2)

    @property
    def victim(self) -> Member:
        """Return the peer that it happens to."""
        return self.slots[VICTIM]

    @property
    def others(self) -> list[Member]:
        """Return the other two."""
        return [self.slots[slot] for slot in range(VICTIM)]

    def begin(self, peers: int = VICTIM) -> None:
        """Start the others, and wait until they step."""
        super().begin(peers)
        self.start_victim()

    def start_victim(self) -> None:
        """Start the victim with its disk and a right clock."""
        file = clock_file(self.folder).resolve()
        file.unlink(missing_ok=True)
        self.start(VICTIM, "victim", program=(sys.executable, "-c", _CLOCK.format(file=str(file))))

    def is_back(self, step: Event) -> bool:
        """Tell whether a step shows that the peer is back: with a network of its own it makes steps
        of what it trains alone all the time."""
        return self.network is None or len(step["group"]) > 1

    def ready(self) -> Member:
        """Return a victim that lives and has taken an outer step lately."""
        if not self.victim.alive:
            self.start_victim()
        before = len(self.victim.of("outer_step"))
        deadline = time.monotonic() + START_S
        while len(self.victim.of("outer_step")) == before:
            if not self.victim.alive or time.monotonic() > deadline:
                raise RuntimeError(f"the victim does not step:\n{self.swarm.outputs()}")
            time.sleep(POLL_S)
        return self.victim

    def suffer(self, happen: Accident) -> dict[str, object]:
        """Let it happen, and watch until the peer steps again or ends, and the others go on.

        Returns seconds since then, and what is not well.
        """
        victim = self.ready()
        tree = [process.pid for process in process_tree(victim.popen.pid)]
        printed, steps = victim.output.stat().st_size, len(victim.of("outer_step"))
        happened_s = time.time()
        broken = happen(victim)
        found: dict[str, object] = dict.fromkeys(
            ("steps again", "ends", "exit code", "others step")
        )
        left, is_paused = 0, False
        # What was under way when it happened does not count: a whole round must have passed, for
        # the peer itself since it got rid of what is broken.
        since_s = mended_s = happened_s + self.chosen.round_s
        while time.time() < happened_s + LIMIT_S:
            now_s = time.time()
            after_s = round(now_s - happened_s, 1)
            if any(Path(f"/proc/{pid}").exists() for pid in broken):
                mended_s = now_s + self.chosen.round_s
            # When they are read, for its clock may be wrong.
            new, steps = self.victim.of("outer_step")[steps:], len(self.victim.of("outer_step"))
            if found["steps again"] is None and now_s > mended_s and any(map(self.is_back, new)):
                found["steps again"] = after_s
            times = [e["time_s"] for peer in self.others for e in peer.of("outer_step")]
            later_s = [time_s for time_s in times if time_s > since_s]
            found["others step"] = round(min(later_s) - happened_s, 1) if later_s else None
            if not victim.alive and found["ends"] is None:
                found |= {"ends": after_s, "exit code": victim.popen.returncode}
                left = left_over(tree)
                if found["exit code"] == -signal.SIGKILL:  # Of the kernel, or a service manager.
                    self.start_victim()
                    steps = 0
            is_paused = any(e["time_s"] > happened_s for e in self.victim.of("paused"))
            is_over = found["steps again"] is not None or not self.victim.alive or is_paused
            if is_over and found["others step"] is not None:
                break
            time.sleep(POLL_S)
        lines = victim.output.read_bytes()[printed:].decode(errors="replace").splitlines()
        said = what_it_said(lines, found["ends"] is not None)
        ends_well = found["exit code"] in range(2, 13) and said.startswith("error: ")
        checks = {
            "the others do not step": found["others step"] is None,
            f"{left} processes of it go on": left > 0,
            "it does not recover": found["steps again"] is None and not (is_paused or ends_well),
        }
        wrong = [what for what, is_wrong in checks.items() if is_wrong]
        return {**found, "says": said[-120:] or None, "not well": ", ".join(wrong) or None}

    def restart_all(self) -> dict[str, object]:
        """Kill everything at once; start it again in another order, the bootstrap node first."""
        self.ready()
        for member in self.swarm.members:
            if member.alive:
                member.kill()
        happened_s = time.time()
        self.entry = self.start_bootstrap("bootstrap", self.run.path).address(START_S)
        self.start_victim()
        for slot, name in ((1, self.slots[1].name), (0, self.slots[0].name)):
            self.start(slot, name)
        members = [self.victim, *self.others]
        wrong = None
        try:
            self.swarm.wait(members, "outer_step", timeout_s=LIMIT_S)
        except AssertionError:
            wrong = "not all step again"
        again = [min((e["time_s"] for e in m.of("outer_step")), default=None) for m in members]
        told = [None if time_s is None else round(time_s - happened_s, 1) for time_s in again]
        return {"steps again": told[0], "others step": told[1], "not well": wrong}


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


def signalled(kind: str, number: signal.Signals) -> Accident:
    """One of its own processes is killed, or hangs."""

    def happen(victim: Member) -> list[int]:
        tree = process_tree(victim.popen.pid)
        daemons = [process for process in tree if process.command.startswith("p2pd")]
        pids = [d.pid if kind == "p2pd" else d.parent for d in daemons]
        pids = [victim.popen.pid] if kind == "trainer" else pids
        for pid in pids:
            os.kill(pid, number)
        return pids

    return happen


def suspended(seconds: float) -> Accident:
    """All of its processes are."""

    def happen(victim: Member) -> list[int]:
        signal_all(victim, signal.SIGSTOP)
        time.sleep(seconds)
        signal_all(victim, signal.SIGCONT)
        return []

    return happen


def clock_file(folder: Path) -> Path:
    return folder / "victim-clock"


def clock_set(ahead_s: float) -> Accident:
    """Its machine's clock is set."""

    def happen(victim: Member) -> list[int]:
        clock_file(victim.folder).write_text(str(ahead_s))
        return []

    return happen


def no_address_space(victim: Member) -> list[int]:
    """Its training process can have no more memory, and hears so, as with `ulimit -v`."""
    for line in Path(f"/proc/{victim.popen.pid}/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            most = 1024 * int(line.split()[1]) + LEFT_BYTES
            resource.prlimit(victim.popen.pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    return []


def read_only(victim: Member) -> list[int]:
    """Nothing more can be opened for writing, as after an error of the disk."""
    place = str(victim.cache)
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
    return []


def disk_full(victim: Member) -> list[int]:
    """Something else takes all of its disk."""
    with (victim.cache / "something else").open("wb") as file, contextlib.suppress(OSError):
        for _ in range(2 * DISK_BYTES // 2**20):
            file.write(bytes(2**20))
    return []


def disk_gone(victim: Member) -> list[int]:
    """All its files are deleted."""
    for entry in victim.cache.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return []


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


def mended(world: AccidentWorld) -> None:
    """Give the machine back what was taken from it."""
    place = world.victim.cache
    if world.victim.alive:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(world.victim.popen.pid, resource.RLIMIT_AS, unlimited)
    with contextlib.suppress(FileNotFoundError):
        if not os.access(place, os.W_OK):
            subprocess.run(["umount", "--lazy", str(place)], check=True)
    (place / "something else").unlink(missing_ok=True)


def accidents(round_s: float, has_disk: bool) -> dict[str, Accident]:
    """Return what can happen on loopback."""
    found = {
        f"{kind} {word}": signalled(kind, number)
        for kind in ("p2pd", "DHT process")
        for word, number in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP))
    }
    found["trainer killed"] = signalled("trainer", signal.SIGKILL)
    found |= {f"suspended for {s:.0f} s": suspended(s) for s in SUSPENDED_S}
    found[f"suspended for {SUSPENDED_ROUNDS} rounds"] = suspended(SUSPENDED_ROUNDS * round_s)
    found["no more memory"] = no_address_space
    if has_disk:
        found |= {"disk full": disk_full, "disk read-only": read_only}
    for name, step_s in CLOCK_STEPS_S.items():
        found[f"clock set {name} ahead"] = clock_set(step_s)
        found[f"clock set {name} back"] = clock_set(-step_s)
    return found | {"files deleted": disk_gone}


def moved(network: Homes) -> Accident:
    """Its network is gone for a while, and comes back with another address."""

    def happen(victim: Member) -> list[int]:
        network.go_offline(VICTIM + 1)
        time.sleep(OFFLINE_S)
        network.come_back(VICTIM + 1, host=77)
        return []

    return happen


def play(report: Report, chosen: Namespace, folder: Path) -> list[str]:
    """Let happen what --only names, or all; returns what did not end well."""
    broken: list[str] = []

    def tell(world: AccidentWorld, name: str, found: dict[str, object]) -> None:
        report.add(name, found)
        print(name, found, file=sys.stderr, flush=True)
        if found["not well"]:
            broken.append(f"{name}: {found['not well']}")
            print(world.victim.output.read_text()[-3000:], file=sys.stderr)
            world.victim.kill()

    def is_wanted(name: str) -> bool:
        return not chosen.only or any(part in name for part in chosen.only)

    place = folder / "loopback"
    with own_disk(place) as has_disk:
        happens = {n: h for n, h in accidents(chosen.round_s, has_disk).items() if is_wanted(n)}
        if happens or is_wanted(RESTART):
            world = AccidentWorld(place, chosen)
            with world.swarm:
                world.begin()
                for name, happen in happens.items():
                    tell(world, name, world.suffer(happen))
                    mended(world)
                if is_wanted(RESTART):
                    tell(world, RESTART, world.restart_all())
        if not has_disk:
            report.notes.append("left out, it needs root: disk full, disk read-only")
    if not can_make_homes(with_nat=False):
        report.notes.append(f"left out, it needs root and iproute2: {MOVE}")
    elif is_wanted(MOVE):
        with homes(0, 0, 0, 0) as network:
            world = AccidentWorld(folder / "homes", chosen, network)
            with world.swarm:
                world.begin()
                tell(world, MOVE, world.suffer(moved(network)))
    return broken
