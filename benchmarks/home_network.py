"""Peers at home: behind routers with real NAT, where nobody can call them, and on slow lines.

    python benchmarks/home_network.py [--json] [--rounds 20] [--out DIR]
    python benchmarks/home_network.py --open 0 --closed 4       # nobody who trains can be called
    python benchmarks/home_network.py --open 5 --closed 0 --mbps 2
    python benchmarks/home_network.py --open 5 --closed 0 --mbps 2 --limited

Real `dipaco-peer` processes in network namespaces, a bootstrap node with a public address, peers
with public addresses, and peers behind routers (nftables masquerade), the last behind two. They
train a run of a 2x2 grid by the clock; each is told its path. A step takes at least --step-s
seconds, most of which the processor waits. With --mbps a token bucket on each peer's cable limits
what leaves it, and modules have a million parameters, so that the contributions of a round take
half of it at 2 Mbit/s; with --limited the lines are fast, and that is each peer's
--max-upload-mbps.

For each peer: how others call it, seconds from its start to that and to its first step, its steps
of modules, the share of the time in inner steps, and what its interface sent. For each module: the
share of the rounds in which it was stepped, by how many of its trainers, seconds from boundary to
anchor, and versions of which there are two. The first rounds are left out.

Exit code 1 when a peer ended by itself, one that can be called is told otherwise or one that cannot
is told so, a path was not trained, a version is forked, fewer than nine tenths of the rounds had
the contributions of most trainers, or less than nine tenths of the time was spent in inner steps.
Needs root, iproute2 (with tc) and nftables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from parts.common import Report, build_parser, scratch_folder, steady_peer
from parts.home_lines import Homes, can_make_homes, homes
from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import BIN, Member, Swarm

START_S = 240.0
FIRST_ROUNDS = 3
LEAST_TOGETHER, LEAST_IN_STEPS, MAX_OVER = 0.9, 0.9, 1.1
# Of a 2x2 grid: the first two have all modules between them.
PATHS = (0, 3, 1, 2, 0, 3, 1, 2)
LARGE = {"hidden_size": 192, "head_count": 4, "feed_forward_size": 512}


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count (20)")
    parser.add_argument("--round-s", type=float, default=20.0, help="seconds of a round (20)")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of a step (0.1)")
    parser.add_argument("--open", type=int, default=2, help="peers with public addresses (2)")
    parser.add_argument("--closed", type=int, default=4, help="peers behind routers (4)")
    parser.add_argument("--mbps", type=float, help="what a line carries, Mbit/s (no limit)")
    parser.add_argument("--limited", action="store_true", help="by the peer, not by the line")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")
    chosen = parser.parse_args()
    if not 1 <= chosen.open + chosen.closed <= len(PATHS):
        parser.error(f"give 1 to {len(PATHS)} peers")
    return chosen


class World:
    """The bootstrap node at site 0, then open peers, then closed ones, the last behind two."""

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        doubly = min(1, chosen.closed // 2)
        self.routers = (0, *[0] * chosen.open, *[1] * (chosen.closed - doubly), *[2] * doubly)
        self.run = make_tiny_run(
            folder / "run",
            modules_per_level=(2, 2),
            inner_steps=0,
            duration_s=chosen.round_s,
            start_s=time.time() + 30,
            inner={"learning_rate": 3e-3},
            rounds={"validation_sequences": 4},
            **(LARGE if chosen.mbps else {}),
        )
        self.grid = self.run.grid(self.run.plan())
        self.swarm = Swarm(folder, self.run)
        self.peers: list[Member] = []
        self.paths = dict(enumerate(PATHS[: chosen.open + chosen.closed]))
        self.began_s: dict[str, float] = {}
        self.sent: list[list[int]] = []
        self.first = 0

    def live(self, network: Homes) -> list[str]:
        """Start all and let them train; returns what went wrong."""
        serve = [str(BIN / "dipaco-bootstrap"), "serve", str(self.run.path)]
        listen = ["--host-maddrs", f"/ip4/{network.address(0)}/tcp/31337"]
        node = self.swarm._add("bootstrap", [*network.prefix(0), *serve, *listen])
        for number in self.paths:
            self.peers.append(self._start(network, number, node.address(START_S)))
        training = self.swarm.wait(self.peers, "training", timeout_s=START_S)
        self.first = max(event["round"] for event in training) + FIRST_ROUNDS
        self._sleep_until(self.first)
        self.sent.append([_sent_bytes(network, number + 1) for number in self.paths])
        self._sleep_until(self.first + self.chosen.rounds)
        self.sent.append([_sent_bytes(network, number + 1) for number in self.paths])
        self._sleep_until(self.first + self.chosen.rounds + 0.9)
        dead = [member.name for member in self.swarm.members if not member.alive]
        return [f"{', '.join(dead)} ended by itself"] if dead else []

    def _start(self, network: Homes, number: int, entry: str) -> Member:
        site, limits = number + 1, []
        if self.chosen.mbps and self.chosen.limited:
            limits = ["--max-upload-mbps", f"{self.chosen.mbps}"]
        elif self.chosen.mbps:
            _run(
                *network.prefix(site), "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
                "rate", f"{int(1000 * self.chosen.mbps)}kbit", "burst", "16kb", "latency", "200ms",
            )  # fmt: skip
        name = ("open", "closed", "double")[self.routers[site]] + str(site)
        self.began_s[name] = time.time()
        return self.swarm._add(
            name,
            [
                *network.prefix(site), *steady_peer(self.chosen.step_s),
                "--initial-peers", entry, "--threads", "1", "--nice", "0",
                "--cache-dir", str(self.swarm.folder / f"{name}-cache"),
                "--path", str(self.paths[number]), *limits,
            ],
        )  # fmt: skip

    def _sleep_until(self, round_index: float) -> None:
        until_s = self.run.plan().start_s + round_index * self.chosen.round_s
        while time.time() < until_s and all(member.alive for member in self.swarm.members):
            time.sleep(0.5)

    # -- what came of it

    def of_peers(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each peer."""
        found = {}
        for number, peer in enumerate(self.peers):
            told = peer.of("reachable")
            times = [event["time_s"] - self.began_s[peer.name] for event in peer.of("inner")]
            sent = self.sent[-1][number] - self.sent[0][number] if self.sent else 0
            found[peer.name] = {
                "reachable": told[-1]["how"] if told else "unknown",
                "told_after_s": round(told[-1]["time_s"] - self.began_s[peer.name], 1)
                if told
                else None,
                "step_after_s": round(times[0], 1) if times else None,
                "outer_steps": len(peer.of("outer_step")),
                "in_steps": round(self._in_steps(peer), 4),
                "sent_mbps": round(8e-6 * sent / (self.chosen.rounds * self.chosen.round_s), 3),
            }
        return found

    def _in_steps(self, peer: Member) -> float:
        begin_s = self.run.plan().start_s + self.first * self.chosen.round_s
        inner = [event for event in peer.of("inner") if event["time_s"] > begin_s]
        if len(inner) < 2:
            return 0.0
        taken_s = inner[-1]["time_s"] - inner[0]["time_s"]
        return float(sum(event["seconds"] for event in inner[1:]) / taken_s)

    def of_modules(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each module."""
        rounds = range(self.first, self.first + self.chosen.rounds)
        groups: dict[str, dict[int, int]] = defaultdict(dict)
        after_s: dict[str, list[float]] = defaultdict(list)
        versions: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for peer in self.peers:
            for event in (*peer.of("outer_step"), *peer.of("adopt")):
                versions[event["module"]][event["version"]].add(event["digest"])
            for event in peer.of("outer_step"):
                if event["round"] in rounds:
                    sizes = groups[event["module"]]
                    sizes[event["round"]] = max(sizes.get(event["round"], 0), event["rows"])
                    after_s[event["module"]].append(event["seconds_after_boundary"])
        found = {}
        for module in self.grid.modules():
            trainers = sum(p in self.grid.paths_of_module(module) for p in self.paths.values())
            sizes = groups[module].values()
            found[module] = {
                "trainers": trainers,
                "stepped": round(len(sizes) / len(rounds), 3),
                "by_most": round(sum(2 * size > trainers for size in sizes) / len(rounds), 3),
                "mean_rows": round(statistics.fmean(sizes), 2) if sizes else 0.0,
                "seconds": round(statistics.median(after_s[module]), 2) if sizes else None,
                "forked_versions": sum(len(d) > 1 for d in versions[module].values()),
            }
        return found

    def broken_promises(self) -> list[str]:
        """Name what should not have happened."""
        broken = []
        for (name, peer), depth in zip(self.of_peers().items(), self.routers[1:], strict=True):
            if (peer["reachable"] == "direct") is not (depth == 0):
                broken.append(f"{name} is told {peer['reachable']}")
            if peer["in_steps"] < LEAST_IN_STEPS:
                broken.append(f"{name}: {peer['in_steps']:.1%} of the time in inner steps")
            if self.chosen.limited and peer["sent_mbps"] > MAX_OVER * self.chosen.mbps:
                broken.append(f"{name} sent {peer['sent_mbps']} Mbit/s")
        for module, found in self.of_modules().items():
            if found["trainers"] and found["by_most"] < LEAST_TOGETHER:
                broken.append(f"{module} was stepped by most in {found['by_most']:.0%} of rounds")
            if found["forked_versions"]:
                broken.append(f"{module}: {found['forked_versions']} versions are forked")
        trained = {event["path"] for peer in self.peers for event in peer.of("round")}
        return broken + [f"path {p} was not trained" for p in {*self.paths.values()} - trained]


def _sent_bytes(network: Homes, site: int) -> int:
    counted = _run(*network.prefix(site), "ip", "-s", "-j", "link", "show", "eth0")
    return int(json.loads(counted)[0]["stats64"]["tx"]["bytes"])


def _run(*command: str) -> str:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Run and tell; returns the exit code."""
    chosen = options()
    if not can_make_homes():
        print("needs root, iproute2 and nftables (apt-get install nftables)", file=sys.stderr)
        return 2
    columns = ("peer", "reachable", "told, s", "first step, s", "steps", "in steps", "sent Mbit/s")
    report = Report("peers at home", columns)
    with scratch_folder() as scratch:
        folder = chosen.out or scratch
        folder.mkdir(parents=True, exist_ok=True)
        world = World(folder, chosen)
        with homes(*world.routers) as network, world.swarm:
            broken = world.live(network)
        peers, modules = world.of_peers(), world.of_modules()
        broken += world.broken_promises()
    for name, found in peers.items():
        report.row(name, *("-" if value is None else value for value in found.values()))
    report.notes += [f"{module}: {found}" for module, found in modules.items()]
    report.figures = {"rounds": chosen.rounds, "round_s": chosen.round_s, "mbps": chosen.mbps}
    report.figures |= {"peers": peers, "modules": modules}
    return report.conclude(broken, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
