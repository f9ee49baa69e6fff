"""Kill a peer during a reduce, many times, and count what survives.

    python benchmarks/kill_during_reduce.py --kills 20 > kills.json

Four real peers train three paths that share a module of some million parameters, so that a reduce
takes a while. Again and again one of them is killed with SIGKILL at a random instant around the
boundary and started again under its old name. Prints one JSON object; exit code 1 when a promise
was broken.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.faults import (
    boundaries,
    first_after,
    forks,
    last_commits,
    next_boundary,
    partial_anchors,
    processes_of,
)
from support.swarm import Event, Member, Swarm
from support.tiny_run import make_tiny_run

SHARED = "L0.E0"
PEERS = 4


def _left_over(victim: Member, within_s: float = 3.0) -> list[str]:
    """Return the processes of a killed peer that live on; they get a moment to end."""
    deadline = time.monotonic() + within_s
    while (left := processes_of(victim)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


class Kills:
    """The swarm, and what was seen of each kill."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        run = make_tiny_run(
            folder / "run",
            modules_per_level=(1, 3),
            inner_steps=2,
            duration_s=options.duration_s,
            start_s=time.time(),
            hidden_size=options.hidden_size,
            head_count=4,
            feed_forward_size=4 * options.hidden_size,
            rounds={"matchmaking_s": 1.0, "validation_sequences": 4},
        )
        self.options = options
        self.grid = run.grid(run.plan())
        self.swarm = Swarm(folder, run)
        self.random = random.Random(options.seed)
        self.lives: list[Member] = []
        self.lost: list[Event] = []
        self.kills: list[dict[str, Any]] = []

    def alive(self) -> list[Member]:
        return [member for member in self.lives if member.alive]

    def start(self, entry: Member, name: str | None = None) -> Member:
        member = self.swarm.start_peer(entry, name=name)
        self.lives.append(member)
        return member

    def run(self) -> None:
        with self.swarm as swarm:
            bootstrap = swarm.start_bootstrap()
            for _ in range(PEERS):
                self.start(bootstrap)
            swarm.wait(self.lives, "training", timeout_s=120)
            for number in range(self.options.kills):
                self._wait_for_whole_group()
                self._kill(number)
                print(json.dumps(self.kills[-1]), file=sys.stderr, flush=True)

    def _wait_for_whole_group(self) -> None:
        """Wait for a round in which all peers commit together."""
        seen = {member: len(member.read()) for member in self.alive()}
        deadline = time.monotonic() + 20 * self.options.duration_s + 60
        for member, position in seen.items():
            while not any(
                event["event"] == "commit"
                and event["module"] == SHARED
                and len(event["group"]) == PEERS
                for event in member.read()[position:]
            ):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no whole group\n{self.swarm.outputs()}")
                time.sleep(0.05)

    def _kill(self, number: int) -> None:
        duration_s = self.options.duration_s
        victim = self.random.choice(self.alive())
        after_s = self.random.uniform(0.0, self.options.latest_s)
        next_boundary(victim, SHARED, timeout_s=4 * duration_s + 30)
        time.sleep(after_s)
        victim.kill()
        killed_s = time.time()
        survivors = self.alive()
        boundary = boundaries(victim, SHARED)[-1]
        events = [e for e in victim.read() if e.get("round") == boundary["round"]]
        mine = {(e["event"], e.get("module")) for e in events}
        began, ended = ("outer_round", SHARED) in mine, ("commit", SHARED) in mine
        self.lost += last_commits(victim, boundary["time_s"] - 0.1)
        # What it committed alone since the last replication dies with it.
        alone = last_commits(victim, boundary["time_s"] - 2 * duration_s)
        self.lost += [event for event in alone if len(event["group"]) == 1]
        path = int(victim.of("training")[-1]["path"])
        seen = {member: len(member.read()) for member in survivors}
        rounds = []
        for survivor in survivors:
            (found,) = self.swarm.wait(
                [survivor],
                "commit",
                lambda e: e["module"] == SHARED and e["round"] >= boundary["round"],
                timeout_s=4 * duration_s + 30,
            )
            rounds.append(int(found["round"]) - boundary["round"])
        left = _left_over(victim)
        back = self.start(survivors[0], victim.name)
        self.swarm.wait([back], "training", timeout_s=120)
        claimed = next(
            (
                e["time_s"]
                for member in [*survivors, back]
                if (e := first_after(member, "training", seen.get(member, 0))) is not None
                and e["path"] == path
            ),
            None,
        )
        others = any(int(m.of("training")[-1]["path"]) == path for m in survivors)
        self.kills.append(
            {
                "kill": number,
                "after_boundary_s": round(after_s, 3),
                "in_reduce": began and not ended,
                "committed_before": ended,
                "survivors_committed_after_rounds": rounds,
                "left_over_processes": len(left),
                "path_served_again": others or claimed is not None,
                "claimed_after_s": round(claimed - killed_s, 1) if claimed else None,
            }
        )

    def summary(self) -> dict[str, Any]:
        """Return what the kills showed; all counts of broken promises should be 0."""
        rounds = [max(kill["survivors_committed_after_rounds"]) for kill in self.kills]
        claims = [k["claimed_after_s"] for k in self.kills if k["claimed_after_s"] is not None]
        return {
            "kills": len(self.kills),
            "killed_in_reduce": sum(kill["in_reduce"] for kill in self.kills),
            "killed_after_commit": sum(kill["committed_before"] for kill in self.kills),
            "survivors_committed_same_round": sum(r == 0 for r in rounds),
            "survivors_committed_next_round": sum(r == 1 for r in rounds),
            "survivors_committed_later": sum(r > 1 for r in rounds),
            "forked_versions": len(forks(self.lives, self.lost)),
            "partial_anchors": len(partial_anchors(self.lives)),
            "left_over_processes": sum(kill["left_over_processes"] for kill in self.kills),
            "paths_not_served_again": sum(not kill["path_served_again"] for kill in self.kills),
            "claimed_again_median_s": statistics.median(claims) if claims else None,
            "round_s": self.options.duration_s,
            "module_parameters": self.grid.layout(SHARED).size,
        }


def main() -> int:
    """Run, print, and tell by the exit code whether every promise held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--duration-s", type=float, default=8.0)
    parser.add_argument("--latest-s", type=float, default=1.5, help="after the boundary")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="keep logs here (default: thrown away)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        kills = Kills(folder, options)
        kills.run()
        summary = kills.summary()
    print(json.dumps(summary, indent=2))
    broken = ("survivors_committed_later", "forked_versions", "partial_anchors")
    broken += ("left_over_processes", "paths_not_served_again")
    return int(any(summary[name] for name in broken))


if __name__ == "__main__":
    sys.exit(main())
