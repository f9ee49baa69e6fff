"""What an outer round costs: bytes, seconds and memory, by codec, members and size of the module.

    python benchmarks/outer_round.py [--json] [--codecs int4,int2,sign] [--members 4,8]
    python benchmarks/outer_round.py --millions 80 --codecs int4 --members 4
    python benchmarks/outer_round.py --idle                      # a peer that waits for its run
    python benchmarks/outer_round.py --phases --codecs int4 --members 4    # where the memory goes

Real `dipaco-peer` processes with one thread each train one module, all of them, in the fixed-steps
mode: they wait while it is stepped, so nothing but the outer round takes time. Each has a network
namespace of its own, whose interface counts what it sends and receives: the files, the rows and
steps, and all of the DHT. Told for each swarm:

* bytes received and sent, a parameter, a round and a peer (mean), and what the codec says of it;
* seconds from the last peer's boundary to a peer's new anchor (median, greatest), and beside it
  the same arithmetic in one process: to encode once, to check and decode all, to step, to hash;
* the peak of main memory, a parameter: all processes of a peer, less those of a peer whose model
  is tiny. On a CPU 16 bytes of it are model, gradients and AdamW's states; on a GPU none is.

With --idle: processes of a peer that has everything and waits for its run to start, and their
memory (proportional and anonymous), beside the bare training loop. With --phases: the main memory
of one process, phase by phase (`parts/outer_memory.py`). All else needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from parts.common import (
    HERE,
    Report,
    build_parser,
    one_thread,
    process_tree,
    ratio,
    scratch_folder,
    smaps_rollup,
    steady_peer,
)
from parts.home_lines import Homes, can_make_homes, homes
from parts.outer_memory import BLOCK_MILLIONS, SHAPE, measure_phases
from parts.synthetic_run import make_synthetic_run
from support.swarms.swarm import BIN, Member, Swarm

from dipaco.modules.layout import layout_of
from dipaco.protocol.config import ModelConfig

TINY = {"hidden_size": 64, "feed_forward_size": 176, "head_count": 2}
START_S, ROUND_S, FIRST_ROUNDS = 300.0, 120.0, 2
SAMPLE_S = 0.5
SEEN_S = 30.0
"""Claims are read by then."""


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--codecs", default="int4,int2,sign", help="of the manifest")
    parser.add_argument("--members", default="4,8", help="peers of a module (4,8)")
    parser.add_argument("--millions", type=int, default=20, help="parameters: 5, 10, ... (20)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (3)")
    parser.add_argument("--device", default="cpu", help="of the peers: cpu or cuda (cpu)")
    parser.add_argument("--idle", action="store_true", help="only what an idle peer takes")
    parser.add_argument("--phases", action="store_true", help="only memory, phase by phase")
    parser.add_argument("--levels", type=int, default=1, help="of the grid, with --phases (1)")
    chosen = parser.parse_args()
    if not (chosen.idle or chosen.phases) and not can_make_homes(with_nat=False):
        parser.error("needs root and iproute2")
    return chosen


class Group:
    """All trainers of one module, each at a site of its own."""

    def __init__(
        self, folder: Path, model: ModelConfig, codec: str, members: int, device: str
    ) -> None:
        self.run = make_synthetic_run(
            folder / "run",
            model,
            modules_per_level=(1,),
            batch_sequences=1,
            codec=codec,
            train_sequences=64,
            validation_sequences=1,
            start_s=time.time(),
            duration_s=ROUND_S,
            inner_steps=2,
        )
        plan = self.run.plan()
        self.parameters = layout_of(self.run.grid(plan), "L0.E0").size
        self.members, self.device = members, device
        self.go = folder / "go"
        self.swarm = Swarm(folder, self.run)
        self.peers: list[Member] = []
        self.peak: dict[str, float] = {}
        self._over = threading.Event()

    def measure(self, rounds: int) -> dict[str, Any]:
        """Let them do some rounds, and return what these cost."""
        with homes(*[0] * (1 + self.members)) as network, self.swarm:
            self._start(network)
            self.swarm.wait(self.peers, "training", timeout_s=START_S)
            watch = threading.Thread(target=self._watch_memory, daemon=True)
            watch.start()
            time.sleep(SEEN_S)
            self.go.touch()
            first = FIRST_ROUNDS
            before = self._traffic_after(network, first)
            after = self._traffic_after(network, first + rounds)
            self._over.set()
            watch.join()
        received, sent = (
            statistics.mean(b - a for a, b in zip(before[k], after[k], strict=True)) for k in (0, 1)
        )
        per = self.parameters * rounds
        return {
            "parameters": self.parameters,
            "received": round(received / per, 4),
            "sent": round(sent / per, 4),
            "peak_mib": round(statistics.mean(self.peak.values()), 1),
            **self._seconds(range(first + 1, first + rounds + 1)),
        }

    def _start(self, network: Homes) -> None:
        serve = [str(BIN / "dipaco-bootstrap"), "serve", str(self.run.path)]
        listen = ["--host-maddrs", f"/ip4/{network.address(0)}/tcp/31337"]
        node = self.swarm._add("bootstrap", [*network.prefix(0), *serve, *listen])
        for number in range(1, self.members + 1):
            name = f"peer{number}"
            self.peers.append(
                self.swarm._add(
                    name,
                    [
                        *network.prefix(number), *steady_peer(0.0, self.go), "--path", "0",
                        "--initial-peers", node.address(START_S), "--threads", "1", "--nice", "0",
                        "--host-maddrs", f"/ip4/{network.address(number)}/tcp/31337",
                        "--device", self.device,
                        "--cache-dir", str(self.swarm.folder / f"{name}-cache"),
                    ],
                )
            )  # fmt: skip

    def _traffic_after(self, network: Homes, round_index: int) -> tuple[list[int], list[int]]:
        """Wait for a step of everybody; return the bytes received and sent by each until then."""
        self.swarm.wait(
            self.peers,
            "outer_step",
            lambda e: e["round"] >= round_index,
            START_S + 2 * ROUND_S,
        )
        found = [_traffic(network, number) for number in range(1, self.members + 1)]
        return [rx for rx, _ in found], [tx for _, tx in found]

    def _watch_memory(self) -> None:
        # Processes are looked for once: a peer has all of them when it trains.
        trees = {p.name: [one.pid for one in process_tree(p.popen.pid)] for p in self.peers}
        while not self._over.wait(SAMPLE_S):
            for name, pids in trees.items():
                used = sum(_main_memory_mib(pid) for pid in pids)
                self.peak[name] = max(used, self.peak.get(name, 0.0))

    def _seconds(self, rounds: range) -> dict[str, Any]:
        """Return how long after the last boundary of a round each had its new anchor."""
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
        return {
            "seconds_median": round(statistics.median(after), 3),
            "seconds_greatest": round(max(after), 3),
            "mean_group": round(statistics.mean(groups), 2),
            "outer_steps": len(after),
        }


def _main_memory_mib(pid: int) -> float:
    """Return what a process holds that is no file on disk; what processes share counts once."""
    try:
        found = smaps_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return 0.0
    return found["Pss_Anon"] + found["Pss_Shmem"]


def _traffic(network: Homes, site: int) -> tuple[int, int]:
    command = [*network.prefix(site), "ip", "-s", "-j", "link", "show", "eth0"]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    counted = json.loads(done.stdout)[0]["stats64"]
    return int(counted["rx"]["bytes"]), int(counted["tx"]["bytes"])


def alone_s(group: Group) -> dict[str, float]:
    """Return the seconds that one process needs for what one peer of the group computes."""
    from dipaco.modules.outer import OuterGradient, OuterRule, encode_in_place
    from dipaco.protocol.outer_row import OuterRow

    plan = group.run.plan()
    rule = OuterRule.of(plan, group.run.shard_index(plan))
    state = group.run.genesis_state(plan, "L0.E0")
    codec, size = rule.codec, state.layout.size
    generator = torch.Generator().manual_seed(0)
    began = time.perf_counter()
    change = 1e-3 * torch.randn(size, generator=generator)
    data = encode_in_place(OuterGradient(state.parameters, state.parameters + change), codec)
    encoded = time.perf_counter()
    for _ in range(group.members):
        codec.check(data, size)
    checked = time.perf_counter()
    rows = [OuterRow(0, f"peer{number}", 1000) for number in range(group.members)]
    stepped = rule.step(state, [data] * group.members, rows, 0)
    ended = time.perf_counter()
    assert stepped.digest
    hashed = time.perf_counter()
    return {
        "encode_s": round(encoded - began, 3),
        "check_s": round(checked - encoded, 3),
        "step_s": round(ended - checked, 3),
        "digest_s": round(hashed - ended, 3),
    }


def measure(chosen: argparse.Namespace, report: Report) -> None:
    """Measure all swarms."""
    large = ModelConfig(**SHAPE, block_count=max(1, chosen.millions // BLOCK_MILLIONS))
    tiny = ModelConfig(**{**SHAPE, **TINY}, block_count=4)
    with scratch_folder() as folder:
        beside = Group(folder, tiny, "float32", 4, chosen.device).measure(1)
    report.figures["tiny_model"] = beside
    for codec in chosen.codecs.split(","):
        for members in map(int, chosen.members.split(",")):
            with scratch_folder() as folder:
                group = Group(folder, large, codec, members, chosen.device)
                found = group.measure(chosen.rounds)
                alone = alone_s(group)
            more = found["parameters"] - beside["parameters"]
            memory = (found["peak_mib"] - beside["peak_mib"]) * 2**20 / more
            found |= {"memory_a_parameter": round(memory, 2), "alone": alone}
            report.figures[f"{codec} {members}"] = found
            report.row(
                codec, members, found["received"], found["sent"], found["seconds_median"],
                found["seconds_greatest"], sum(alone.values()), found["memory_a_parameter"],
            )  # fmt: skip
            print(f"{codec} {members}: {json.dumps(found)}", file=sys.stderr, flush=True)


def measure_idle(report: Report) -> None:
    """Measure a peer that waits, process by process, and the bare loop beside it."""
    with scratch_folder() as folder:
        run = make_synthetic_run(
            folder / "run", ModelConfig(**{**SHAPE, **TINY}, block_count=4),
            start_s=time.time() + 3600.0, duration_s=60.0,
        )  # fmt: skip
        bare = subprocess.Popen(
            [sys.executable, str(HERE / "parts/bare_loop.py"), str(run.path), "--idle"],
            env=one_thread(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert bare.stdout is not None
        bare.stdout.readline()
        with Swarm(folder, run) as swarm:
            node = swarm.start_bootstrap()
            peer = swarm.start_peer(node, "--path", "0")
            swarm.wait([peer], "waiting", lambda event: "to start" in event["what"])
            time.sleep(5.0)
            trees = {
                "bare training loop": process_tree(bare.pid),
                "peer": process_tree(peer.popen.pid),
                "bootstrap node": process_tree(node.popen.pid),
            }
        bare.communicate("\n")
    for name, tree in trees.items():
        sums = [math.fsum(getattr(p, k) for p in tree) for k in ("proportional_mib",
                                                                 "anonymous_mib")]  # fmt: skip
        report.row(name, len(tree), *sums)
        report.figures[name] = {
            "processes": [process.command for process in tree],
            "proportional_mib": round(sums[0], 1),
            "anonymous_mib": round(sums[1], 1),
        }
    peer_mib, bare_mib = (
        report.figures[name]["proportional_mib"] for name in ("peer", "bare training loop")
    )
    report.figures["peer_to_bare"] = ratio(peer_mib, bare_mib)


def main() -> int:
    chosen = options()
    torch.set_num_threads(1)
    if chosen.idle:
        report = Report("an idle peer", ("", "processes", "proportional MiB", "anonymous MiB"))
        measure_idle(report)
    elif chosen.phases:
        columns = ("phase", "most", "left", "files", "seconds")
        report = Report("main memory in an outer round, bytes a parameter", columns)
        measure_phases(
            report,
            millions=chosen.millions,
            levels=chosen.levels,
            codec=chosen.codecs.split(",")[0],
            members=int(chosen.members.split(",")[0]),
            rounds=chosen.rounds,
        )
    else:
        columns = ("codec", "members", "received", "sent", "s, median", "s, greatest", "s, alone",
                   "memory")  # fmt: skip
        report = Report(f"an outer round of {chosen.millions} M parameters", columns)
        measure(chosen, report)
        report.notes.append("received, sent, memory: bytes a parameter; of a round and a peer")
    report.print(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
