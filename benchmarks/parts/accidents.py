"""What becomes of a peer whose machine lets it down, and of those that it trains with.

Three real `dipaco-peer` processes and a bootstrap node on loopback train a tiny run by the clock.
To one of the peers something happens: one of its own processes is killed or hangs, all of them are
suspended, its files cannot be written or are gone, its machine's clock is set. Then it has to
step again, to pause with one line that says what to do, or to end with such a line and a documented
exit code; and the others have to go on stepping. At the end all processes are killed at once and
started again from their folders.

Each accident happens to a peer that has stepped since the one before; one that has ended is
started again with its folder. A full disk is a file system of its own, which needs root; it
is named as left out otherwise. Exit code 1 when a peer did none of these in time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.swarm import Member, Swarm
from support.tiny_run import make_tiny_run

from .common import Report, process_tree, scratch_folder

START_S = 300.0
LIMIT_S = 180.0
"""To recover."""
POLL_S = 0.1
DISK_BYTES = 64 * 2**20
SUSPENDED_S = (5.0, 45.0, 150.0)
CLOCK_JUMP_S = 3600.0
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
from dipaco.peer.cli import main
sys.exit(main(sys.argv[1:]))
"""
# Happens to a peer; returns the processes that it cannot go on with.
Accident = Callable[[Member], list[int]]


@dataclass
class Outcome:
    """What became of the peer and the others. Seconds are since the accident."""

    accident: str
    commits_after_s: float | None
    """Until the peer committed; None when it did not."""
    ends_after_s: float | None
    exit_code: int | None
    said: str
    """The last line that it printed when it ended, else the first of its warnings."""
    others_after_s: float | None
    """Until another peer committed."""
    is_paused: bool = False
    """It trains nothing until its owner has done something, and has said what."""

    @property
    def is_well(self) -> bool:
        return self.others_after_s is not None and (
            self.commits_after_s is not None
            or self.is_paused
            or (self.exit_code in range(2, 13) and self.said.startswith("error: "))
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
        self.entry = self.swarm.start_bootstrap().address(START_S)
        self.others = [self.swarm.start_peer(self.entry, name=f"other{n}") for n in range(2)]
        self.swarm.wait(self.others, "commit", timeout_s=START_S)

    def _start_victim(self) -> Member:
        file = clock_file(self.folder)
        file.unlink(missing_ok=True)
        program = (sys.executable, "-c", _CLOCK.format(file=str(file.resolve())))
        return self.swarm.start_peer(self.entry, name="victim", program=program)

    def ready(self) -> Member:
        """Return a victim that lives and has committed lately."""
        if self.victim is None or not self.victim.alive:
            self.victim = self._start_victim()
        now_s = time.time()
        self.swarm.wait([self.victim], "commit", lambda e: e["time_s"] > now_s, timeout_s=START_S)
        return self.victim

    def suffer(self, name: str, happen: Accident) -> Outcome:
        """Let it happen, and watch until the peer has committed or ended and the others go on."""
        victim = self.ready()
        printed = victim.output.stat().st_size
        happened_s = time.time()
        broken = happen(victim)
        until_s = time.time() + self.limit_s
        found = Outcome(name, None, None, None, "", None)
        # What was under way when it happened does not count: a whole round must have passed, for
        # the peer itself since it got rid of what is broken.
        since_s = mended_s = happened_s + self.swarm.run.plan().rounds.duration_s
        while time.time() < until_s:
            if any(Path(f"/proc/{pid}").exists() for pid in broken):
                mended_s = time.time() + since_s - happened_s
            found.commits_after_s = first_commit_s([victim], mended_s, happened_s)
            found.others_after_s = first_commit_s(self.others, since_s, happened_s)
            if not victim.alive and found.ends_after_s is None:
                found.ends_after_s = round(time.time() - happened_s, 1)
                found.exit_code = victim.popen.returncode
            found.is_paused = any(e["time_s"] > happened_s for e in victim.of("paused"))
            is_over = found.commits_after_s is not None or found.ends_after_s is not None
            if (is_over or found.is_paused) and found.others_after_s is not None:
                break
            time.sleep(POLL_S)
        lines = victim.output.read_bytes()[printed:].decode(errors="replace").splitlines()
        found.said = what_it_said(lines, found.ends_after_s is not None)
        return found

    def restart_all(self) -> Outcome:
        """Kill everything at once; start it again in another order, the bootstrap node last."""
        victim = self.ready()
        printed = victim.output.stat().st_size
        for member in self.swarm.members:
            if member.alive:
                member.kill()
        happened_s = time.time()
        node = self.swarm.start_bootstrap()
        self.entry = node.address(START_S)
        self.victim = victim = self._start_victim()
        self.others = [self.swarm.start_peer(self.entry, name=f"other{n}") for n in (1, 0)]
        found = Outcome("all killed and started again", None, None, None, "", None)
        with contextlib.suppress(AssertionError):
            self.swarm.wait([victim, *self.others], "commit", timeout_s=self.limit_s)
        found.commits_after_s = first_commit_s([victim], happened_s, happened_s)
        found.others_after_s = first_commit_s(self.others, happened_s, happened_s)
        lines = victim.output.read_bytes()[printed:].decode(errors="replace").splitlines()
        found.said = what_it_said(lines, not victim.alive)
        return found


def first_commit_s(members: list[Member], since_s: float, from_s: float) -> float | None:
    """Return how long after `from_s` one of them first committed something after `since_s`."""
    stamps = [event["time_s"] for member in members for event in member.of("commit")]
    # Whose clock was set by an hour writes other stamps.
    apart_s = [CLOCK_JUMP_S * round((stamp - time.time()) / CLOCK_JUMP_S) for stamp in stamps]
    times = [s - a for s, a in zip(stamps, apart_s, strict=True) if s - a > since_s]
    return round(min(times) - from_s, 1) if times else None


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


def mended(folder: Path) -> None:
    """Give the disk back what was taken from it."""
    place = folder / "victim-cache"
    (place / "something else").unlink(missing_ok=True)
    for file in place.glob("*/states"):
        if file.is_file():
            file.unlink()


def accidents(has_disk: bool) -> dict[str, Accident]:
    found = {
        f"{kind} {word}": signalled(kind, number)
        for kind in ("p2pd", "DHT process")
        for word, number in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP))
    }
    found |= {f"suspended for {s:.0f} s": suspended(s) for s in SUSPENDED_S}
    if has_disk:
        found["disk full"] = disk_full
    found |= {
        "clock set an hour ahead": clock_set(CLOCK_JUMP_S),
        "clock set an hour back": clock_set(-CLOCK_JUMP_S),
    }
    return found | {"states cannot be written": unwritable, "files deleted": disk_gone}


def main(only: list[str], round_s: float, as_json: bool) -> int:
    """Let them happen, those whose name has one of `only` or all; returns the exit code."""
    report = Report("accidents", ("accident", "steps again", "ends", "code", "others step", "says"))
    outcomes = []
    with scratch_folder() as folder, own_disk(folder) as has_disk:
        world = World(folder, round_s, LIMIT_S)
        with world.swarm:
            world.begin()
            for name, happen in accidents(has_disk).items():
                if only and not any(part in name for part in only):
                    continue
                outcomes.append(world.suffer(name, happen))
                print(outcomes[-1], file=sys.stderr, flush=True)
                if not outcomes[-1].is_well and world.victim is not None:
                    print(world.victim.output.read_text()[-3000:], file=sys.stderr)
                    world.victim.kill()
                mended(folder)
            if not only or any("all" in part for part in only):
                outcomes.append(world.restart_all())
                print(outcomes[-1], file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        seconds = [outcome.commits_after_s, outcome.ends_after_s, outcome.exit_code]
        cells = ["-" if value is None else value for value in (*seconds, outcome.others_after_s)]
        report.row(outcome.accident, *cells, outcome.said[-120:])
        rows.append({**asdict(outcome), "is_well": outcome.is_well})
    report.figures["outcomes"] = rows
    report.notes.append(f"seconds since the accident; rounds of {round_s:g} s")
    if not has_disk:
        report.notes.append("left out, it needs root: disk full")
    report.print(as_json)
    return 0 if all(outcome.is_well for outcome in outcomes) else 1
