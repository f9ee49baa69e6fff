"""Slow lines: do rounds commit when outer gradients take half of a round, and who sends how much?

    python benchmarks/slow_lines.py [--json] [--rounds 8] [--only half,tenth] [--out DIR]

Five `dipaco-peer` processes train a run of two paths (one module that all share, then one for each
path) by the clock, in network namespaces of their own; a token bucket on the cable limits what
leaves each. Four swarms, one after the other:

* half: every line is so slow that what its peer sends for the outer steps of a round takes half of
  a round (--share), with equal shares of the reduces;
* limit: the lines are fast, and every peer has that rate as its --max-upload-mbps;
* tenth: four lines are ten times as fast as that, the fifth is not;
* blind: the same, with peers that do not measure their lines.

For each: in which share of the rounds each module was committed by a group, mean members of it,
seconds from the boundary to the commit, the share of the time that peers spent in inner steps, what
they measured of their lines, and, from the counters of their interfaces, what they sent: on
average, and in the busiest --sample-s. The DHT's own messages are in these. The first rounds are
left out. Best states are not kept here, and a state has as many keepers as its module has trainers
at least: copies would be most of the bytes.

The commit window is nine tenths of a round, of which the first attempt has half. Steps take at
least half a second, in most of which the processor waits. Exit code 1 when, in `half` or `limit`,
less than nine tenths of the rounds were committed, or less than 98% of the time was spent in inner
steps, or a peer with a limit sent more than that by a tenth in its busiest moment. Needs root,
iproute2 with tc, and nftables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from dipaco.modules.codecs import CODECS
from dipaco.peer.check.needs import all_reduce_bytes
from parts.common import Report, build_parser, scratch_folder, steady_peer
from parts.home_lines import Homes, can_make_homes, homes
from support.swarm import BIN, Member, Swarm
from support.tiny_run import make_tiny_run

PATHS = (0, 1, 0, 1, 0)
START_S = 300.0
FIRST_ROUNDS = 2
STEP_S = 0.5
WINDOW = 0.9
TIMES_FASTER = 10
LEAST_COMMITTED, LEAST_IN_STEPS, MOST_OVER = 0.9, 0.98, 1.1
SWARMS = ("half", "limit", "tenth", "blind")
# Says in a file what it knows of its line; or does not look.
_WATCHED = """
from dipaco.peer.owner.uplink import Uplink
note = Uplink.note_left
def watched(uplink, *arguments, **named):
    if {measures}:
        note(uplink, *arguments, **named)
        with open({file!r}, "w") as file:
            file.write(str(uplink.measured_mbit_per_s or ""))
Uplink.note_left = watched
"""


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds that count (8)")
    parser.add_argument("--round-s", type=float, default=20.0, help="seconds of a round (20)")
    parser.add_argument("--share", type=float, default=0.5, help="of a round that is sent (0.5)")
    parser.add_argument("--sample-s", type=float, default=10.0, help="between two looks (10)")
    parser.add_argument("--only", default=",".join(SWARMS), help="which swarms")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")
    chosen = parser.parse_args()
    if not set(chosen.only.split(",")) <= set(SWARMS):
        parser.error(f"--only {chosen.only}: give some of {', '.join(SWARMS)}")
    return chosen


class Lines:
    """One swarm, with what leaves each peer limited."""

    def __init__(self, kind: str, chosen: argparse.Namespace, folder: Path) -> None:
        self.kind, self.chosen, self.folder = kind, chosen, folder
        self.run = make_tiny_run(
            folder / "run",
            modules_per_level=(1, 2),
            inner_steps=0,
            duration_s=chosen.round_s,
            start_s=time.time() + 75,
            rounds={
                "matchmaking_s": 0.05 * chosen.round_s,
                "commit_window_s": WINDOW * chosen.round_s,
                "validation_sequences": 2,
                "early_stopping": False,
                "copies": 2,
            },
            # What a check sends does not grow with the model; usually it is next to nothing.
            averaging={"part_bytes": 2**16, "check_pieces": 2},
            hidden_size=192,
            head_count=4,
            feed_forward_size=512,
        )
        self.swarm = Swarm(folder, self.run)
        self.peers: list[Member] = []
        self.sent: dict[str, list[tuple[float, int]]] = defaultdict(list)
        plan = self.run.plan()
        grid = self.run.grid(plan)
        codec, part_bytes = CODECS[plan.averaging.codec], plan.averaging.part_bytes
        members = {"L0": len(PATHS), "L1": PATHS.count(0)}
        self.level_bytes = {
            level: all_reduce_bytes(grid.layout(level).size, count, codec, part_bytes)
            for level, count in members.items()
        }
        self.mbit_per_s = 8e-6 * sum(self.level_bytes.values()) / (chosen.share * chosen.round_s)

    def line_mbit_per_s(self, number: int) -> float | None:
        """Return what the line of a peer carries; None for as much as it can."""
        if self.kind == "limit":
            return None
        is_fast = self.kind in ("tenth", "blind") and number < len(PATHS) - 1
        return self.mbit_per_s * (TIMES_FASTER if is_fast else 1)

    def live(self) -> str:
        """Start all, let them train; returns what went wrong."""
        with homes(*[0] * (1 + len(PATHS))) as network, self.swarm:
            listen = f"/ip4/{network.address(0)}/tcp/31337"
            bootstrap = self.swarm._add(
                "bootstrap",
                [
                    *network.prefix(0), str(BIN / "dipaco-bootstrap"), "serve",
                    str(self.run.path), "--host-maddrs", listen,
                ],
            )  # fmt: skip
            for number, path in enumerate(PATHS):
                self.peers.append(self._start(network, number, path, bootstrap))
            self.swarm.wait(self.peers, "training", timeout_s=START_S)
            self.first = max(p.of("training")[0]["round"] for p in self.peers) + 1 + FIRST_ROUNDS
            start_s, round_s = self.run.plan().start_s, self.chosen.round_s
            until_s = start_s + (self.first + self.chosen.rounds + WINDOW) * round_s
            while time.time() < until_s:
                time.sleep(max(0.0, min(self.chosen.sample_s, until_s - time.time())))
                for number, peer in enumerate(self.peers):
                    self.sent[peer.name].append((time.time(), _sent_bytes(network, number + 1)))
                dead = [member.name for member in self.swarm.members if not member.alive]
                if dead:
                    return f"{', '.join(dead)} ended by itself"
        return ""

    def _start(self, network: Homes, number: int, path: int, bootstrap: Member) -> Member:
        site, name = number + 1, f"peer{number}"
        rate = self.line_mbit_per_s(number)
        if rate is not None:
            _run(
                *network.prefix(site), "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
                "rate", f"{int(1000 * rate)}kbit", "burst", "16kb", "latency", "200ms",
            )  # fmt: skip
        interpreter, flag, text = steady_peer(STEP_S)
        file = str(self.folder / f"{name}.measured")
        watched = _WATCHED.format(measures=self.kind != "blind", file=file)
        limit = ["--max-upload-mbps", f"{self.mbit_per_s:.3f}"] if self.kind == "limit" else []
        return self.swarm._add(
            name,
            [
                *network.prefix(site), interpreter, flag, watched + text,
                "--initial-peers", bootstrap.address(START_S), "--threads", "1", "--nice", "0",
                "--host-maddrs", f"/ip4/{network.address(site)}/tcp/31337", "--path", str(path),
                "--cache-dir", str(self.folder / f"{name}-cache"), *limit,
            ],
        )  # fmt: skip

    # -- what came of it

    def figures(self) -> dict[str, Any]:
        rounds = range(self.first, self.first + self.chosen.rounds)
        groups: dict[str, dict[int, int]] = defaultdict(dict)
        after_s: dict[str, list[float]] = defaultdict(list)
        reasons: dict[str, int] = defaultdict(int)
        for peer in self.peers:
            for event in peer.of("commit"):
                if event["round"] in rounds:
                    sizes = groups[event["module"]]
                    sizes[event["round"]] = max(sizes.get(event["round"], 0), len(event["group"]))
                    after_s[event["module"]].append(event["seconds_after_boundary"])
            for event in peer.of("carry_on"):
                if event["round"] in rounds:
                    reasons[event["reason"].split(" 12D3")[0][:60]] += 1
        modules = {}
        for module, count in (("L0.E0", 5), ("L1.E0", 3), ("L1.E1", 2)):
            sizes = groups[module]
            together = [size for size in sizes.values() if size > 1]
            modules[module] = {
                "in_groups": round(len(together) / len(rounds), 3),
                "members": round(statistics.fmean(together), 2) if together else 0.0,
                "of": count,
                "seconds_after_boundary": _median(after_s[module]),
            }
        return {
            "line_mbit_per_s": round(self.mbit_per_s, 2),
            "bytes_of_levels": self.level_bytes,
            "rounds": len(rounds),
            "modules": modules,
            "carried_on": dict(reasons),
            "share_in_steps": round(statistics.fmean(self._in_steps(rounds)), 4),
            "measured_mbit_per_s": {peer.name: self._measured(peer) for peer in self.peers},
            "sent_mbit_per_s": {peer.name: self._sent(peer) for peer in self.peers},
            "told_beforehand": sum(
                "this outer step sends" in peer.output.read_text() for peer in self.peers
            ),
        }

    def _in_steps(self, rounds: range) -> list[float]:
        plan = self.run.plan()
        begin_s, end_s = (plan.start_s + at * plan.rounds.duration_s for at in (
            rounds.start, rounds.stop))  # fmt: skip
        found = []
        for peer in self.peers:
            inner = [e for e in peer.of("inner") if begin_s < e["time_s"] <= end_s]
            taken_s = inner[-1]["time_s"] - inner[0]["time_s"]
            found.append(sum(event["seconds"] for event in inner[1:]) / taken_s)
        return found

    def _measured(self, peer: Member) -> float | None:
        file = self.folder / f"{peer.name}.measured"
        text = file.read_text() if file.exists() else ""
        return round(float(text), 2) if text else None

    def _sent(self, peer: Member) -> dict[str, float]:
        samples = self.sent[peer.name]
        rates = [
            8e-6 * (after - before) / (end_s - begin_s)
            for (begin_s, before), (end_s, after) in itertools.pairwise(samples)
        ]
        (begin_s, first), (end_s, last) = samples[0], samples[-1]
        mean = 8e-6 * (last - first) / (end_s - begin_s)
        return {"mean": round(mean, 2), "busiest": round(max(rates), 2)}


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def _sent_bytes(network: Homes, site: int) -> int:
    counted = _run(*network.prefix(site), "ip", "-s", "-j", "link", "show", "eth0")
    return int(json.loads(counted)[0]["stats64"]["tx"]["bytes"])


def _run(*command: str) -> str:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def broken_promises(kind: str, found: dict[str, Any]) -> list[str]:
    """Name what should not have happened."""
    if kind not in ("half", "limit"):
        return []
    broken = [
        f"{kind}: {module} was committed in {seen['in_groups']:.0%} of the rounds"
        for module, seen in found["modules"].items()
        if seen["in_groups"] < LEAST_COMMITTED
    ]
    if found["share_in_steps"] < LEAST_IN_STEPS:
        broken.append(f"{kind}: {found['share_in_steps']:.1%} of the time in inner steps")
    if kind == "limit":
        most = MOST_OVER * found["line_mbit_per_s"]
        broken += [
            f"limit: {name} sent {sent['busiest']} Mbit/s"
            for name, sent in found["sent_mbit_per_s"].items()
            if sent["busiest"] > most
        ]
    return broken


def main() -> int:
    """Run the swarms; returns the exit code."""
    chosen = options()
    if not can_make_homes() or shutil.which("tc") is None:
        print("needs root, iproute2 (with tc) and nftables", file=sys.stderr)
        return 2
    report = Report("slow lines", ("", "in groups", "members", "s to commit", "in steps"))
    broken: list[str] = []
    with scratch_folder() as scratch:
        for kind in chosen.only.split(","):
            folder = (chosen.out or scratch) / kind
            folder.mkdir(parents=True, exist_ok=True)
            lines = Lines(kind, chosen, folder)
            ended = lines.live()
            if ended:
                broken.append(f"{kind}: {ended}")
                continue
            found = report.figures[kind] = lines.figures()
            broken += broken_promises(kind, found)
            for module, seen in found["modules"].items():
                report.row(
                    f"{kind} {module}", seen["in_groups"], seen["members"],
                    seen["seconds_after_boundary"] or "-", found["share_in_steps"],
                )  # fmt: skip
            print(f"{kind}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return report.conclude(broken, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
