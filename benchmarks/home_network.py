"""Peers behind routers: two thirds of them cannot be called, one of those is behind two routers.

    python benchmarks/home_network.py [--json] [--minutes 12] [--out DIR]

Real `dipaco-peer` processes in network namespaces, real NAT (nftables masquerade), a bootstrap node
and a third of the peers with public addresses. They train a tiny run of a 2x2 grid by the clock.
Each peer is told its path, so that every module has one trainer that can be called: those that
nobody can call do not meet by themselves. A step takes at least 0.1 s, most of which the processor
waits.

For each peer: seconds from its start to its first step and to each state of reachability that
others found by calling it back; for each module: in which share of the rounds a group committed
it, and how many of its trainers were in it; for each path: how many rounds it was trained.

Exit code 1 when a peer that can be called is not told direct or one that cannot is, when a path
was not trained, or when a module that several trained did not commit in a group in half of the
rounds after the first three. Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from parts.common import Report, build_parser, scratch_folder, steady_peer
from parts.home_lines import Homes, can_make_homes, homes
from support.swarm import BIN, Member, Swarm
from support.tiny_run import make_tiny_run

START_S = 240.0
FIRST_ROUNDS = 3
LEAST_SHARE = 0.5
STEP_S = 0.1
# Of a 2x2 grid: the first two have all modules between them.
PATHS = (0, 3, 1, 2, 0, 3)


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=12.0, help="of training (12)")
    parser.add_argument("--round-s", type=float, default=20.0, help="seconds of a round (20)")
    parser.add_argument("--open", type=int, default=2, help="peers with public addresses (2)")
    parser.add_argument("--closed", type=int, default=4, help="peers behind routers (4)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")
    return parser.parse_args()


class World:
    """The bootstrap node at site 0, then open peers, then closed ones, the last behind two."""

    def __init__(self, swarm: Swarm, network: Homes, routers: tuple[int, ...]) -> None:
        self.swarm, self.network, self.routers = swarm, network, routers
        self.began_s: dict[str, float] = {}
        listen = f"/ip4/{network.address(0)}/tcp/31337"
        self.bootstrap = self._start(
            0, "bootstrap", str(BIN / "dipaco-bootstrap"), "serve", str(swarm.run.path),
            "--host-maddrs", listen,
        )  # fmt: skip
        self.peers: list[Member] = []

    def _start(self, site: int, name: str, *command: str) -> Member:
        self.began_s[name] = time.time()
        return self.swarm._add(name, [*self.network.prefix(site), *command])

    def start_peers(self) -> None:
        for site, depth in enumerate(self.routers[1:], start=1):
            name = ("open", "closed", "double")[depth] + str(site)
            cache = self.swarm.folder / f"{name}-cache"
            peer = self._start(
                site, name, *steady_peer(STEP_S),
                "--initial-peers", self.bootstrap.address(), "--threads", "1",
                "--cache-dir", str(cache), "--path", str(PATHS[(site - 1) % len(PATHS)]),
            )  # fmt: skip
            self.peers.append(peer)

    def after_s(self, member: Member, kind: str, **values: str) -> float | None:
        """Return how long after its start a member first told something."""
        for event in member.of(kind):
            if all(event[key] == value for key, value in values.items()):
                return round(event["time_s"] - self.began_s[member.name], 1)
        return None


def run(report: Report, chosen: argparse.Namespace, folder: Path) -> list[str]:
    routers = (0, *[0] * chosen.open, *[1] * (chosen.closed - 1), 2)
    tiny = make_tiny_run(
        folder / "run",
        modules_per_level=(2, 2),
        inner_steps=0,
        duration_s=chosen.round_s,
        start_s=time.time() + 30,
        inner={"learning_rate": 3e-3},
        rounds={"matchmaking_s": 0.15 * chosen.round_s, "validation_sequences": 4},
    )
    with homes(*routers) as network, Swarm(folder, tiny) as swarm:
        world = World(swarm, network, routers)
        world.start_peers()
        swarm.wait(world.peers, "training", timeout_s=START_S)
        until_s = time.time() + 60 * chosen.minutes
        while time.time() < until_s:
            dead = [member.name for member in swarm.members if not member.alive]
            if dead:
                return [f"{', '.join(dead)} ended by itself"]
            time.sleep(1.0)
        broken = tell_peers(report, world)
        return broken + tell_modules(report, world, chosen.round_s)


def tell_peers(report: Report, world: World) -> list[str]:
    broken, figures = [], {}
    for peer, depth in zip(world.peers, world.routers[1:], strict=True):
        told = peer.of("reachable")
        last = told[-1]["how"] if told else "unknown"
        found: dict[str, Any] = {"reachable": last, "routers": depth}
        found["step_s"] = world.after_s(peer, "inner")
        for how in ("direct", "outgoing", "relayed"):
            found[f"{how}_s"] = world.after_s(peer, "reachable", how=how)
        found["commits"] = len(peer.of("commit"))
        figures[peer.name] = found
        report.row(peer.name, *(found[key] if found[key] is not None else "-" for key in PEER_KEYS))
        if (last == "direct") is not (depth == 0):
            broken.append(f"{peer.name} is told {last}")
    report.figures["peers"] = figures
    return broken


PEER_KEYS = ("reachable", "step_s", "direct_s", "outgoing_s", "relayed_s", "commits")


def tell_modules(report: Report, world: World, round_s: float) -> list[str]:
    """Return what was broken; a round counts from the first that all peers can have been in."""
    groups: dict[str, dict[int, int]] = defaultdict(dict)
    paths: dict[int, set[int]] = defaultdict(set)
    first = max(peer.of("training")[0]["round"] for peer in world.peers) + FIRST_ROUNDS
    last = first
    for peer in world.peers:
        for event in peer.of("commit"):
            sizes = groups[event["module"]]
            round_index = event["round"]
            sizes[round_index] = max(sizes.get(round_index, 0), len(event["group"]))
            last = max(last, round_index)
        for event in peer.of("round"):
            paths[event["path"]].add(event["round"])
    rounds = range(first, last)
    broken, modules = [], {}
    for module, sizes in sorted(groups.items()):
        committed = [sizes[r] for r in rounds if r in sizes]
        together = sum(size > 1 for size in committed)
        modules[module] = {
            "rounds": len(rounds),
            "committed": len(committed),
            "in_groups": together,
            "mean_group": round(sum(committed) / max(1, len(committed)), 2),
        }
        report.notes.append(f"{module}: {modules[module]}")
        if together < LEAST_SHARE * len(rounds):
            broken.append(f"{module} committed in groups in {together} of {len(rounds)} rounds")
    trained = {path: len(paths[path]) for path in range(4)}
    report.notes.append(f"rounds in which paths were trained: {trained}")
    broken += [f"path {path} was not trained" for path, count in trained.items() if not count]
    reasons: dict[str, int] = defaultdict(int)
    for peer in world.peers:
        for event in peer.of("carry_on"):
            reasons[event["reason"].split(" 12D3")[0][:60]] += 1
    report.figures |= {
        "modules": modules,
        "paths_trained": trained,
        "round_s": round_s,
        "carried_on": dict(sorted(reasons.items(), key=lambda item: -item[1])[:8]),
    }
    return broken


def keep_logs(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for log in [*folder.glob("*.jsonl"), *folder.glob("*.out")]:
        shutil.copy(log, out)


def main() -> int:
    chosen = options()
    if not can_make_homes():
        print("needs root, iproute2 and nftables (apt-get install nftables)", file=sys.stderr)
        return 2
    report = Report("peers behind routers", ("peer", *PEER_KEYS))
    with scratch_folder() as folder:
        try:
            broken = run(report, chosen, folder)
        finally:
            if chosen.out is not None:
                keep_logs(folder, chosen.out)
    report.figures["broken"] = broken
    report.notes += broken
    report.print(chosen.json)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
