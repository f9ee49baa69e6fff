"""What an outer round costs: bytes, seconds and memory, by codec, members, size and line.

    python benchmarks/outer_round.py [--codecs int4,int2,sign] [--members 4,8]
    python benchmarks/outer_round.py --millions 30 --codecs int4 --members 4 --mbps 50,200,1000 \\
        --steps 32 --step-s 1                   # the share of the time in inner steps
    python benchmarks/outer_round.py --phases --codecs int4 --members 4   # where the memory goes

Real `dipaco-peer` processes with one thread each train one module, all of them, in the fixed-steps
mode: they wait while it is stepped, so nothing but the outer round takes time. Each has a network
namespace of its own, whose interface counts what it sends and receives: the files, the rows and
steps, and all of the DHT; with --mbps a token bucket limits what leaves it. Told for each swarm:

* bytes received and sent, a parameter, a round and a peer (mean);
* seconds from the last peer's boundary to a peer's new anchor (median, greatest), and beside it
  the same arithmetic in one process: to encode once, to check and decode all, to step, to hash;
* the share of the time in inner steps, which take at least --step-s seconds each;
* the peak of main memory, a parameter: all processes of a peer, less those of a peer whose model
  is tiny. On a CPU 16 bytes of it are model, gradients and AdamW's states; on a GPU none is.

With --phases: the main memory of one process, phase by phase (`parts/outer_memory.py`). All else
needs root and iproute2.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from parts.common import (
    Report,
    build_parser,
    process_tree,
    scratch_folder,
    smaps_rollup,
    steady_peer,
)
from parts.home_lines import Homes, can_make_homes, homes
from parts.outer_memory import BLOCK_MILLIONS, SHAPE, measure_phases
from parts.synthetic_run import make_synthetic_run
from support.swarms.swarm import BIN, Member, Swarm

from dipaco.modules.layout import layout_of
from dipaco.modules.outer import OuterGradient, OuterRule, encode_in_place
from dipaco.protocol.chain.outer_row import OuterRow
from dipaco.protocol.config import ModelConfig

TINY = {"hidden_size": 64, "feed_forward_size": 176, "head_count": 2}
START_S, ROUND_S, FIRST_ROUNDS = 300.0, 120.0, 2
SAMPLE_S = 0.5
SEEN_S = 30.0
"""Claims are read by then."""


def options() -> Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--codecs", default="int4,int2,sign", help="of the manifest")
    parser.add_argument("--members", default="4,8", help="peers of a module (4,8)")
    parser.add_argument("--millions", type=int, default=20, help="parameters: 5, 10, ... (20)")
    parser.add_argument("--mbps", default="0", help="what lines carry, Mbit/s (0: no limit)")
    parser.add_argument("--steps", type=int, default=2, help="inner steps of a round (2)")
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds of a step at least (0)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (3)")
    parser.add_argument("--device", default="cpu", help="of the peers: cpu or cuda (cpu)")
    parser.add_argument("--phases", action="store_true", help="only memory, phase by phase")
    parser.add_argument("--levels", type=int, default=1, help="of the grid, with --phases (1)")
    chosen = parser.parse_args()
    if not (chosen.phases or can_make_homes(with_nat=False)):
        parser.error("needs root and iproute2")
    return chosen


class Group:
    """All trainers of one module, each at a site of its own."""

    def __init__(
        self, folder: Path, model: ModelConfig, chosen: Namespace, codec: str, members: int
    ) -> None:
        self.chosen, self.members = chosen, members
        # Between two boundaries lie all steps of a round too.
        round_s = ROUND_S + 2 * chosen.steps * chosen.step_s
        self.limit_s = START_S + 2 * round_s
        self.run = make_synthetic_run(
            folder / "run",
            model,
            modules_per_level=(1,),
            batch_sequences=1,
            codec=codec,
            train_sequences=64,
            validation_sequences=1,
            start_s=time.time(),
            duration_s=round_s,
            inner_steps=chosen.steps,
        )
        plan = self.run.plan()
        self.parameters = layout_of(self.run.grid(plan), "L0.E0").size
        self.go = folder / "go"
        self.swarm = Swarm(folder, self.run)
        self.peers: list[Member] = []
        self.peak: dict[str, float] = {}
        self._over = threading.Event()

    def measure(self, rounds: int, mbps: float) -> dict[str, Any]:
        """Let them do some rounds, and return what these cost."""
        with homes(*[0] * (1 + self.members)) as network, self.swarm:
            self._start(network)
            for site in range(1, self.members + 1) if mbps else ():
                network.limit(site, mbps)
            self.swarm.wait(self.peers, "training", timeout_s=START_S)
            watch = threading.Thread(target=self._watch_memory, daemon=True)
            watch.start()
            time.sleep(SEEN_S)
            self.go.touch()
            before = self._traffic_after(network, FIRST_ROUNDS)
            after = self._traffic_after(network, FIRST_ROUNDS + rounds)
            self._over.set()
            watch.join()
        received, sent = (
            statistics.mean(b[k] - a[k] for a, b in zip(before, after, strict=True)) for k in (0, 1)
        )
        per = self.parameters * rounds
        return {
            "parameters": self.parameters,
            "bytes received": round(received / per, 4),
            "bytes sent": round(sent / per, 4),
            "MiB of a peer at its peak": round(statistics.mean(self.peak.values()), 1),
            **self._seconds(range(FIRST_ROUNDS + 1, FIRST_ROUNDS + rounds + 1)),
        }

    def _start(self, network: Homes) -> None:
        serve = [str(BIN / "dipaco-bootstrap"), "serve", str(self.run.path)]
        listen = ["--host-maddrs", f"/ip4/{network.address(0)}/tcp/31337"]
        node = self.swarm._add("bootstrap", [*network.prefix(0), *serve, *listen])
        program = steady_peer(self.chosen.step_s, self.go)
        for number in range(1, self.members + 1):
            name = f"peer{number}"
            self.peers.append(
                self.swarm._add(
                    name,
                    [
                        *network.prefix(number), *program, "--path", "0",
                        "--initial-peers", node.address(START_S), "--threads", "1", "--nice", "0",
                        "--host-maddrs", f"/ip4/{network.address(number)}/tcp/31337",
                        "--device", self.chosen.device,
                        "--cache-dir", str(self.swarm.folder / f"{name}-cache"),
                    ],
                )
            )  # fmt: skip

    def _traffic_after(self, network: Homes, round_index: int) -> list[tuple[int, int]]:
        """Wait for a step of everybody; return the bytes received and sent by each until then."""
        self.swarm.wait(self.peers, "outer_step", lambda e: e["round"] >= round_index, self.limit_s)
        return [network.traffic(number) for number in range(1, self.members + 1)]

    def _watch_memory(self) -> None:
        # Processes are looked for once: a peer has all of them when it trains.
        trees = {p.name: [one.pid for one in process_tree(p.popen.pid)] for p in self.peers}
        while not self._over.wait(SAMPLE_S):
            for name, pids in trees.items():
                used = sum(_main_memory_mib(pid) for pid in pids)
                self.peak[name] = max(used, self.peak.get(name, 0.0))

    def _seconds(self, rounds: range) -> dict[str, Any]:
        """Return how long after the last boundary of a round each had its new anchor, and what
        share of the time it took steps."""
        after: list[float] = []
        groups: list[int] = []
        for round_index in rounds:
            of_round = [
                {e["event"]: e for e in p.read() if e.get("round") == round_index}
                for p in self.peers
            ]
            outer_steps = [found["outer_step"] for found in of_round if "outer_step" in found]
            last_s = max(f["outer_round"]["time_s"] for f in of_round if "outer_round" in f)
            after += [event["time_s"] - last_s for event in outer_steps]
            groups += [len(event["group"]) for event in outer_steps]
        shares = []
        for peer in self.peers:
            inner = peer.of("inner")[self.chosen.steps :]
            taken_s = inner[-1]["time_s"] - inner[0]["time_s"]
            shares.append(sum(event["seconds"] for event in inner[1:]) / taken_s)
        return {
            "seconds, median": round(statistics.median(after), 3),
            "seconds, greatest": round(max(after), 3),
            "peers in a step": round(statistics.mean(groups), 2),
            "time in inner steps, %": round(100 * statistics.mean(shares), 1),
        }


def _main_memory_mib(pid: int) -> float:
    """Return what a process holds that is no file on disk; what processes share counts once."""
    try:
        found = smaps_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return 0.0
    return found["Pss_Anon"] + found["Pss_Shmem"]


def alone_s(group: Group) -> dict[str, float]:
    """Return the seconds that one process needs for what one peer of the group computes."""
    plan = group.run.plan()
    rule = OuterRule.of(plan, group.run.shard_index(plan))
    state = group.run.genesis_state(plan, "L0.E0")
    codec, size = rule.codec, state.layout.size
    change = 1e-3 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    rows = [OuterRow(0, f"peer{number}", 1000) for number in range(group.members)]
    times = [time.perf_counter()]
    data = encode_in_place(OuterGradient(state.parameters, state.parameters + change), codec)
    times.append(time.perf_counter())
    for _ in range(group.members):
        codec.check(data, size)
    times.append(time.perf_counter())
    stepped = rule.step(state, [data] * group.members, rows, 0)
    times.append(time.perf_counter())
    assert stepped.digest
    times.append(time.perf_counter())
    taken_s = [after - before for before, after in itertools.pairwise(times)]
    told = ("encode", "check", "step", "digest")
    return {name: round(s, 3) for name, s in zip(told, taken_s, strict=True)}


def measure(chosen: Namespace, report: Report) -> None:
    """Measure all swarms."""
    large = ModelConfig(**SHAPE, block_count=max(1, chosen.millions // BLOCK_MILLIONS))
    tiny = ModelConfig(**{**SHAPE, **TINY}, block_count=4)
    with scratch_folder() as folder:
        calm = Namespace(**{**vars(chosen), "steps": 2, "step_s": 0.0})
        beside = Group(folder, tiny, calm, "int4", 4).measure(1, 0.0)
    for codec in chosen.codecs.split(","):
        for members in map(int, chosen.members.split(",")):
            for mbps in map(float, chosen.mbps.split(",")):
                with scratch_folder() as folder:
                    group = Group(folder, large, chosen, codec, members)
                    found = group.measure(chosen.rounds, mbps)
                    found["seconds alone"] = alone_s(group)
                peak, least = "MiB of a peer at its peak", "parameters"
                more = found[least] - beside[least]
                memory = (found[peak] - beside[peak]) * 2**20 / more
                found["bytes of memory"] = round(memory, 2)
                line = f", {mbps:g} Mbit/s" if mbps else ""
                report.add(f"{codec}, {members} members{line}", found)
                print(f"{codec} {members} {mbps}: {json.dumps(found)}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure what was asked for; returns the exit code."""
    chosen = options()
    torch.set_num_threads(1)
    told = ("millions", "rounds", "steps", "step_s", "device")
    report = Report("an outer round", **{name: vars(chosen)[name] for name in told})
    report.notes.append("bytes: a parameter, a round and a peer")
    if chosen.phases:
        measure_phases(
            report,
            millions=chosen.millions,
            levels=chosen.levels,
            codec=chosen.codecs.split(",")[0],
            members=int(chosen.members.split(",")[0]),
            rounds=chosen.rounds,
        )
    else:
        measure(chosen, report)
    return report.conclude(chosen)


if __name__ == "__main__":
    sys.exit(main())
