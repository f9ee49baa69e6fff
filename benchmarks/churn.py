"""A swarm whose peers are killed, leave, are suspended and join all the time, beside a calm one.

    python benchmarks/churn.py [--json] [--rounds 45] [--peers 8] [--no-calm] [--out DIR]
    python benchmarks/churn.py --closed 5 --bootstrap-dies
    python benchmarks/churn.py --peers 10 --elders 1 --closed 3 --clocks-off-s 1 --bootstrap-dies \\
        --rounds 575 --round-s 10 --step-s 0.3 --no-calm       # 600 joins, an hour and a half
    python benchmarks/churn.py --calm --rounds 900 --round-s 8     # two hours: does anything grow?
    python benchmarks/churn.py --accidents [NAME ...]              # one machine lets its peer down

Real `dipaco-peer` processes on loopback train a tiny run of four paths (2x2) by the clock. Every
peer has a mean life of five rounds; then it gets SIGKILL, or SIGINT (a clean leave), or SIGSTOP,
to all of its processes, for up to two and a half rounds. In place of one that has gone comes the
same peer with its disk, or one that was never there. What happens when follows from --seed. At
the end three rounds are quiet, and three more once all that were started last train. With
--bootstrap-dies the bootstrap node is killed when two fifths are over; newcomers join through a
peer, until after three fifths another bootstrap node comes. With --clocks-off-s the clock of every
peer's machine is off by up to so many seconds. Nothing happens to the first --elders peers; what
they have of memory, threads, open files, disk and records in the DHT is looked at once a minute.

The languages of the four paths are made up and share no words, so paths that share a module pull
it apart as hard as they can. Peers refuse what others made of a module without them when it wrecks
their own held-out text: `refused` counts how often. With --closed the last so many peers, and those
that take their places, are each behind a router with real NAT, in a network namespace, and nobody
can call them; this needs root, iproute2 and nftables. A step takes at least --step-s seconds, most
of which the processor waits, as it does for a GPU.

A join has *contributed* when its work is in a step of one of the two rounds that end after it has
begun to train; it *had time* for it when it was there that long, and not suspended. The greatest
wait is the longest that no step had work of a path. Speeds are of the first and of the last tenth
of the time, for each second of a process that is not suspended.

Share of trained tokens in the final states: every `inner` event of every life is so many tokens
for each module of its path. From this goes what a killed life had not contributed (the work since
its last boundary whose step was made), and what the peers that stay to the end have on top of the
final states. Beside the rest stand the tokens that the final states count. So what a step missed,
what a clean leave or a move leaves behind and what a fork throws away are losses here. The share
of those that left or stayed is the least that it can be: what no log accounts for is theirs.

The held-out perplexity of the final states stands beside that of a calm run: the same peers
without a fault, until its states count as many tokens. Ctrl+C ends the churn early. Exit code 1
when a promise was broken: a peer ended by itself, the peers did not agree in the end, less than 93%
of the tokens are in the final states, or the perplexity is more than 3% above the calm one. With
--calm processes, memory, threads, open files and disk are looked at once a minute: their slopes are
told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parts import accidents
from parts.churn_counts import (
    QUIET_ROUNDS,
    Counts,
    Ending,
    Fault,
    FaultKind,
    Life,
    count,
    last_states,
    schedule,
)
from parts.churn_rates import Clock, Join, greatest_wait_s, joins, rounds_without_step, speed
from parts.common import (
    Report,
    build_parser,
    process_tree,
    ratio,
    scratch_folder,
    steady_peer,
)
from parts.growth import Growth
from parts.home_lines import Homes, can_make_homes, homes
from parts.instruments import clock_off, counts_records, records_counted
from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import BIN, LOOPBACK, Event, Member, Swarm

from dipaco.modules.compose import load_path
from dipaco.modules.layout import layout_of
from dipaco.modules.state import read_state
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from dipaco.training.scoring import LossSum, sum_losses

DECAY_HELP = "a path's learning rate falls to a tenth over so many of its steps (0: constant)"
LEAST_SHARE = 0.93
MAX_RATIO = 1.03
START_S = 240.0
SETTLE_ROUNDS = 6
LEAVE_S = 30.0
# Parts of the run after which the bootstrap node is killed, and another one comes.
DIES_AT, NEXT_AT = 0.4, 0.6
# A peer that has not begun to train after so many rounds counts as one that does not.
PATIENCE_ROUNDS = 5
POLL_S = 0.1


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=45, help="rounds under churn (45)")
    parser.add_argument("--round-s", type=float, default=8.0, help="seconds of a round (8)")
    parser.add_argument("--peers", type=int, default=8, help="peers at a time (8)")
    parser.add_argument("--closed", type=int, default=0, help="of these behind routers (0)")
    parser.add_argument("--elders", type=int, default=0, help="that nothing happens to (0)")
    parser.add_argument("--clocks-off-s", type=float, default=0.0, help="up to so much (0)")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of a step (0.1)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (0.003)")
    parser.add_argument("--decay-steps", type=int, default=0, help=DECAY_HELP)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calm", action="store_true", help="only the calm run, for --rounds")
    parser.add_argument("--no-calm", action="store_true", help="no calm run beside it")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")
    parser.add_argument("--bootstrap-dies", action="store_true", help="and another comes")
    parser.add_argument("--accidents", nargs="*", metavar="NAME", help="these, or all, alone")
    chosen = parser.parse_args()
    if chosen.closed and not can_make_homes():
        parser.error("--closed needs root, iproute2 and nftables")
    if not 0 <= chosen.closed < chosen.peers:
        parser.error(f"--closed {chosen.closed}: fewer than the {chosen.peers} peers")
    if not 0 <= chosen.elders <= chosen.peers - chosen.closed:
        parser.error(f"--elders {chosen.elders}: of those that are not --closed")
    if chosen.calm and chosen.no_calm:
        parser.error("give --calm or --no-calm, not both")
    return chosen


@dataclass
class Span:
    """When a process was there."""

    began_s: float = 0.0
    ended_s: float = math.inf
    stops: list[tuple[float, float]] = field(default_factory=list)
    is_join: bool = False


class World:
    """A swarm of some slots, each with a peer that can be replaced by another."""

    modules_per_level: tuple[int, ...] = (2, 2)
    inner_steps: int = 0
    contributions: Mapping[str, Any] = {}
    rounds: Mapping[str, Any] = {}
    """What a benchmark sets of the run's sections of these names."""

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.chosen = chosen
        self.folder = folder
        self.run = self._make_run(folder / "run")
        self.plan = self.run.plan()
        self.grid = self.run.grid(self.plan)
        self.swarm = Swarm(folder, self.run)
        self.slots: dict[int, Member] = {}
        self.endings: dict[Member, Ending] = {}
        self.ids: dict[Member, str] = {}
        self.spans: defaultdict[Member, Span] = defaultdict(Span)
        self.clocks_off_s: dict[str, float] = {}
        self.exit_codes: Counter[int] = Counter()
        self.done: Counter[str] = Counter()
        self.names = 0
        self.hung_leaves = 0
        self.began_s, self.churned_s, self.ended_s = 0.0, math.inf, math.inf
        self.growth = Growth()

    def _make_run(self, folder: Path) -> RunFolder:
        chosen = self.chosen
        return make_tiny_run(
            folder,
            modules_per_level=self.modules_per_level,
            contributions=dict(self.contributions),
            inner_steps=self.inner_steps,
            duration_s=chosen.round_s,
            start_s=time.time(),
            seed=chosen.seed,
            documents_per_path=400,
            validation_documents_per_path=32,
            inner={"learning_rate": chosen.learning_rate, "decay_steps": chosen.decay_steps},
            rounds={"validation_sequences": 8, **self.rounds},
        )

    # -- a peer

    def start(self, slot: int, name: str | None = None) -> Member:
        if name is None:
            name = f"peer{self.names}"
            self.names += 1
        began_s = time.time()
        peer = self._start_peer(slot, name)
        self.spans[peer] = Span(began_s, is_join=self.began_s > 0.0)
        self.slots[slot] = peer
        self.endings[peer] = "stayed"
        return peer

    def _start_bootstrap(self) -> Member:
        return self.swarm.start_bootstrap()

    def _start_next_bootstrap(self, folder: Path) -> Member:
        serve = [str(BIN / "dipaco-bootstrap"), "serve", str(folder), "--host-maddrs", LOOPBACK]
        return self.swarm._add("bootstrap2", [*serve, "--initial-peers", self.entry])

    def _start_peer(self, slot: int, name: str) -> Member:
        return self.swarm.start_peer(self.entry, name=name, program=self._program(slot, name))

    def _program(self, slot: int, name: str) -> tuple[str, ...]:
        """Return what runs as a peer: its clock is off, the first elder's records are counted."""
        most_s = self.chosen.clocks_off_s
        off_s = random.Random(f"{self.chosen.seed}-{name}").uniform(-most_s, most_s)
        self.clocks_off_s[name] = off_s
        before = clock_off(off_s)
        if slot == 0 < self.chosen.elders:
            before += counts_records(self._records_file)
        return steady_peer(self.chosen.step_s, before=before)

    @property
    def _records_file(self) -> Path:
        return self.folder / "elder-records"

    def happen(self, fault: Fault) -> None:
        """Do what the schedule says, if the peer still lives; count it."""
        peer = self.slots[fault.slot]
        self.note_id(peer)
        if fault.kind in ("return", "join"):
            self.start(fault.slot, self._gone(peer) if fault.kind == "return" else None)
        elif self.endings[peer] != "stayed":
            return
        else:
            self._suffer(peer, fault.kind)
        self.done[fault.kind] += 1
        self.say(f"{fault.kind} slot {fault.slot} {self.slots[fault.slot].name}")

    def _suffer(self, peer: Member, kind: FaultKind) -> None:
        span, now_s = self.spans[peer], time.time()
        if kind == "kill":
            self.endings[peer], span.ended_s = "killed", now_s
            peer.kill()
        elif kind == "leave":
            self.endings[peer], span.ended_s = "left", now_s
            peer.interrupt()
        elif kind == "stop":
            span.stops.append((now_s, math.inf))
            self._signal(peer, signal.SIGSTOP)
        else:
            span.stops[-1] = span.stops[-1][0], now_s
            self._signal(peer, signal.SIGCONT)

    def _signal(self, peer: Member, number: signal.Signals) -> None:
        for process in process_tree(peer.popen.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _gone(self, peer: Member) -> str:
        """Wait until a peer that was told to leave has, and return its name."""
        try:
            peer.popen.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.hung_leaves += 1
            self.say(f"{peer.name} does not leave:\n{peer.output.read_text()[-3000:]}")
            peer.kill()
        return peer.name

    def note_id(self, peer: Member) -> None:
        """Remember under which id a peer is in certificates; it has one when it trains."""
        if peer.address_file.exists() and peer not in self.ids:
            self.ids[peer] = peer.peer_id

    def watch(self) -> None:
        """Note which peers have ended although nobody told them to."""
        for peer in self.slots.values():
            if self.endings[peer] == "stayed" and not peer.alive:
                self.endings[peer] = "by itself"
                self.spans[peer].ended_s = time.time()
                self.say(f"{peer.name} ended by itself:\n{peer.output.read_text()[-3000:]}")

    def say(self, text: str) -> None:
        seconds = time.time() - self.plan.start_s
        print(f"{seconds:7.1f} s {text}", file=sys.stderr, flush=True)

    # -- a run

    def begin(self) -> None:
        """Start all peers and wait until they train."""
        if self.chosen.bootstrap_dies:
            # Before anybody has served it: the next one comes from another machine.
            shutil.copytree(self.run.path, self.folder / "run2")
        self.bootstrap = self._start_bootstrap()
        self.entry = self.bootstrap.address(START_S)
        peers = [self.start(slot) for slot in range(self.chosen.peers)]
        self.swarm.wait(peers, "training", timeout_s=START_S)
        self.swarm.wait(peers, "outer_step", timeout_s=START_S)
        self.began_s = time.time()
        self.say("all train")

    def churn(self, faults: Sequence[Fault]) -> None:
        """Let the faults happen, and wait for the end of the last round."""
        began = time.monotonic()
        for fault in faults:
            self._sleep_until(began + fault.at_rounds * self.chosen.round_s)
            if self.chosen.bootstrap_dies:
                self._choose_entry(fault.at_rounds / self.chosen.rounds)
            self.happen(fault)
        self._sleep_until(began + self.chosen.rounds * self.chosen.round_s)

    def _choose_entry(self, part: float) -> None:
        """Kill the bootstrap node, and start another one later; `part` of the run is over.

        Meanwhile others join through a peer that lives and can be called.
        """
        is_first = self.bootstrap.name == "bootstrap"
        if part >= DIES_AT and is_first and self.bootstrap.alive:
            self.bootstrap.kill()
            self.say("the bootstrap node was killed")
        if part >= NEXT_AT and is_first:
            self.bootstrap = self._start_next_bootstrap(self.folder / "run2")
            self.say("another bootstrap node comes")
        if self.bootstrap.alive and self.bootstrap.address_file.exists():
            self.entry = self.bootstrap.address()
            return
        for peer in self.slots.values():
            is_awake = all(until_s < math.inf for _, until_s in self.spans[peer].stops)
            if self.endings[peer] == "stayed" and is_awake and peer.address_file.exists():
                self.entry = peer.address()
                return

    def _sleep_until(self, at: float) -> None:
        while (left := at - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            self.watch()
            if self.chosen.calm:
                self.growth.look([self.bootstrap, *self.slots.values()])
            elif self.chosen.elders:
                elders = [self.slots[slot] for slot in range(self.chosen.elders)]
                self.growth.look(elders, dht_records=records_counted(self._records_file))

    def train_until(self, tokens: int) -> None:
        """Wait until the states of all modules count so many tokens."""
        deadline = time.monotonic() + START_S + 3 * self.chosen.rounds * self.chosen.round_s
        while self.tokens() < tokens and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.watch()

    def tokens(self) -> int:
        """Return the tokens that the newest states count now."""
        final, _ = last_states(self.lives())
        return sum(event["tokens"] for event in final.values())

    def be_quiet(self) -> None:
        """Wait until all peers train, and let them train for some rounds."""
        deadline = time.monotonic() + START_S
        while not self._all_train() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.watch()
        self.say("all train again")
        self._sleep_until(time.monotonic() + QUIET_ROUNDS * self.chosen.round_s)

    def settle(self) -> None:
        """Wait until all peers have the same states, for some rounds at most; then all leave."""
        deadline = time.monotonic() + SETTLE_ROUNDS * self.chosen.round_s
        while True:
            # All is counted as it was at this moment: members of a group step one by one.
            self.ended_s = time.time()
            is_at_rest = self._is_at_rest()
            if is_at_rest or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
            self.watch()
        self.say("at rest" if is_at_rest else "not at rest")
        for peer in self.slots.values():
            self.note_id(peer)
        for member in self.endings:
            if member.alive:
                member.interrupt()
        for member in self.endings:
            self._gone(member)
            self.exit_codes[member.popen.returncode] += 1

    def _all_train(self) -> bool:
        staying = [member for member, ending in self.endings.items() if ending == "stayed"]
        return all(member.of("training") for member in staying)

    def _is_at_rest(self) -> bool:
        final, agreed = last_states(self.lives())
        return self._all_train() and agreed and len(final) == len(self.grid.modules())

    def lives(self) -> list[Life]:
        """Return what all processes have logged up to now, or to when the last were told to go."""
        return [self._life(member, ending) for member, ending in self.endings.items()]

    def _life(self, member: Member, ending: Ending) -> Life:
        off_s = self.clocks_off_s.get(member.name, 0.0)
        events = member.read()
        if off_s:
            events = [{**event, "time_s": event["time_s"] - off_s} for event in events]
        return Life(
            member.name,
            self.ids.get(member, ""),
            ending,
            [event for event in events if event["time_s"] <= self.ended_s],
            **vars(self.spans[member]),
        )

    @property
    def tokens_per_step(self) -> int:
        return self.plan.inner.batch_sequences * self.plan.model.sequence_length

    def count(self) -> Counts:
        modules_of = self.grid.modules_of_path
        return count(self.lives(), modules_of, self.tokens_per_step, self.ended_s)

    def refusals(self) -> int:
        """Return how often a peer refused a state that it had fetched."""
        outputs = {member.output for member in self.endings}
        return sum(file.read_text(errors="replace").count("is refused") for file in outputs)

    def perplexity(self, final: dict[str, Event]) -> float:
        """Score the final states, as the peers wrote them when they left, on all held-out text."""
        states = {}
        for module, event in final.items():
            file = next(self.folder.glob(f"*-cache/**/*-{event['digest']}.safetensors"))
            layout = layout_of(self.grid, module)
            states[module] = read_state(file, layout, event["digest"], module=module)
        model = PathModel(self.plan.model)
        sums = []
        for path in range(self.grid.path_count):
            own = {module: states[module] for module in self.grid.modules_of_path(path)}
            load_path(model, self.grid, path, own)
            rows = self.run.validation_tokens(self.plan, path)
            sums.append(LossSum(*sum_losses(model, rows, self.plan.routing.prefix_tokens)))
        return LossSum.total(sums).perplexity or math.inf


class HomesWorld(World):
    """Every slot is a home with an address of its own, the last ones behind routers."""

    def __init__(self, folder: Path, chosen: argparse.Namespace, network: Homes) -> None:
        super().__init__(folder, chosen)
        self.network = network

    def _start_bootstrap(self) -> Member:
        listen = f"/ip4/{self.network.address(0)}/tcp/31337"
        serve = (str(BIN / "dipaco-bootstrap"), "serve", str(self.run.path))
        command = [*self.network.prefix(0), *serve, "--host-maddrs", listen]
        return self.swarm._add("bootstrap", command)

    def _start_next_bootstrap(self, folder: Path) -> Member:
        listen = f"/ip4/{self.network.address(0)}/tcp/31338"
        serve = (str(BIN / "dipaco-bootstrap"), "serve", str(folder))
        command = [*self.network.prefix(0), *serve, "--host-maddrs", listen]
        return self.swarm._add("bootstrap2", [*command, "--initial-peers", self.entry])

    def _start_peer(self, slot: int, name: str) -> Member:
        return self.swarm._add(
            name,
            [
                *self.network.prefix(slot + 1), *self._program(slot, name),
                "--initial-peers", self.entry, "--threads", "1", "--nice", "0",
                "--cache-dir", str(self.folder / f"{name}-cache"),
            ],
        )  # fmt: skip


@contextlib.contextmanager
def make_world(folder: Path, chosen: argparse.Namespace) -> Iterator[World]:
    """Give a world on loopback, or one of homes."""
    if not chosen.closed:
        yield World(folder, chosen)
        return
    routers = [0] * (1 + chosen.peers - chosen.closed) + [1] * chosen.closed
    with homes(*routers) as network:
        yield HomesWorld(folder, chosen, network)


def run_world(
    folder: Path, chosen: argparse.Namespace, faults: Sequence[Fault], tokens: int = 0
) -> tuple[Counts, dict[str, Any]]:
    """Let a swarm live through the faults, or until it has trained so many tokens."""
    with make_world(folder, chosen) as world, world.swarm:
        world.begin()
        if tokens:
            world.train_until(tokens)
        else:
            try:
                world.churn(faults)
            except KeyboardInterrupt:
                world.say("told to end early")
            world.churned_s = time.time()
            world.be_quiet()
        world.settle()
    counts = world.count()
    found = figures_of(world, counts)
    if faults:
        found |= rates_of(world)
    keep(world)
    return counts, found


def figures_of(world: World, counts: Counts) -> dict[str, Any]:
    """Return what is reported of a run."""
    module, gap_s = counts.longest_without_step
    endings = Counter(world.endings.values())
    return {
        "faults": dict(sorted(world.done.items())),
        "lives": len(world.endings),
        "ended_by_themselves": endings["by itself"],
        "hung_leaves": world.hung_leaves,
        "refused": world.refusals(),
        "exit_codes": {str(code): times for code, times in sorted(world.exit_codes.items())},
        "outer_steps": counts.outer_steps,
        "versions": counts.versions,
        "forked_versions": len(counts.forked),
        "outbid_versions": counts.outbid,
        "agreed": counts.agreed,
        "trained_tokens": counts.trained,
        "killed_pending_tokens": counts.killed_pending,
        "on_top_at_the_end_tokens": counts.stayed_pending,
        "left_behind_by_leaves_tokens": counts.left_pending,
        "left_behind_by_moves_tokens": counts.moved_pending,
        "missed_by_steps_tokens": counts.missed,
        "final_tokens": counts.final_tokens,
        "share": round(counts.share, 4),
        "share_of_leavers_and_stayers": round(counts.share_of_living, 4),
        "perplexity": round(world.perplexity(counts.final), 4),
        "longest_without_step_s": round(gap_s, 1),
        "longest_without_step_module": module,
        **world.growth.slopes_per_hour(),
    }


def keep(world: World) -> None:
    """Write, beside the logs, what they do not say: each process's time, and samples of growth."""
    lives = [{**vars(life), "events": len(life.events)} for life in world.lives()]
    (world.folder / "lives.json").write_text(json.dumps(lives))
    (world.folder / "samples.json").write_text(json.dumps(world.growth.samples))


def rates_of(world: World) -> dict[str, Any]:
    """Return how joins, rounds, paths and speed went while peers came and went."""
    lives, grid, rounds = world.lives(), world.grid, world.plan.rounds
    offsets = {m: grid.level_offset(grid.level_of(m)) for m in grid.modules()}
    clock = Clock(world.plan.start_s, rounds.duration_s, offsets)
    step_s = rounds.gather_limit_s + rounds.grace_limit_s
    patience_s = PATIENCE_ROUNDS * rounds.duration_s
    begin_s, end_s = world.began_s, world.churned_s
    came = joins(lives, grid.modules_of_path, clock, patience_s=patience_s, step_s=step_s)
    misses = rounds_without_step(lives, clock, begin_s, end_s - step_s)
    path, wait_s = greatest_wait_s(lives, grid.path_count, begin_s, end_s)
    found: dict[str, Any] = {
        **joins_told(came, world.folder / "joins.json"),
        "rounds_without_step": {module: missed for module, (missed, _) in misses.items()},
        "rounds_of_modules": sum(due for _, due in misses.values()),
        "greatest_wait_s": round(wait_s, 1),
        "greatest_wait_path": path,
    }
    tenth_s = (end_s - begin_s) / 10
    for name, at_s in (("first", begin_s), ("last", end_s - tenth_s)):
        per_path = len(grid.modules_of_path(0))
        told = speed(lives, world.tokens_per_step, per_path, at_s, at_s + tenth_s)
        found |= {f"{key}_{name}_tenth": round(value, 3) for key, value in asdict(told).items()}
    return found


def joins_told(came: Sequence[Join], file: Path) -> dict[str, Any]:
    """Return what is told of joins; each is in `file`."""
    file.write_text(json.dumps([asdict(join) for join in came]))
    had_time = [join for join in came if join.had_time]
    starts_s = sorted(join.start_s for join in came if join.start_s < math.inf)
    found: dict[str, Any] = {
        "joins": len(came),
        "joins_without_time": len(came) - len(had_time),
        "joins_contributed": ratio(sum(j.has_contributed for j in had_time), len(had_time)),
        "joins_everywhere": ratio(sum(j.is_everywhere for j in had_time), len(had_time)),
        "joins_that_did_not": [j.name for j in had_time if not j.has_contributed],
    }
    if len(starts_s) > 1:
        hundredths = statistics.quantiles(starts_s, n=100, method="inclusive")
        found["start_median_s"], found["start_99_s"] = hundredths[49], hundredths[98]
    return found


def main() -> int:
    chosen = options()
    if chosen.accidents is not None:
        return accidents.main(chosen.accidents, chosen.round_s, chosen.json)
    report = Report("churn", ("", "churn", "calm"))
    with output_folder(chosen) as folder:
        faults = (
            [] if chosen.calm else schedule(chosen.peers, chosen.rounds, chosen.seed, chosen.elders)
        )
        name = "calm" if chosen.calm else "churn"
        counts, found = run_world(folder / name, chosen, faults)
        report.figures = {"rounds": chosen.rounds, "round_s": chosen.round_s}
        report.figures |= {"peers": chosen.peers, "closed": chosen.closed, "seed": chosen.seed}
        report.figures[name] = found
        beside = found if chosen.calm else {}
        if not chosen.calm and not chosen.no_calm:
            _, beside = run_world(folder / "calm", chosen, [], counts.final_tokens)
            report.figures["calm"] = beside
            by_calm = ratio(found["perplexity"], beside["perplexity"])
            report.figures["perplexity_ratio"] = by_calm
        broken = broken_promises(found, report.figures.get("perplexity_ratio", 1.0))
    for key in beside if chosen.calm else found:
        report.row(key, "" if chosen.calm else found[key], beside.get(key, ""))
    report.figures["broken"] = broken
    report.notes.append(f"broken: {', '.join(broken) or 'nothing'}")
    report.notes += [
        f"forked: {m} version {v}, {len(d)} states" for (m, v), d in counts.forked.items()
    ]
    report.print(chosen.json)
    return int(bool(broken))


def broken_promises(found: dict[str, Any], by_calm: float) -> list[str]:
    """Name what should not have happened."""
    checks = {
        "a peer ended by itself": found["ended_by_themselves"] > 0,
        "the peers did not agree in the end": not found["agreed"],
        f"less than {LEAST_SHARE:.0%} of the tokens": not found["share"] >= LEAST_SHARE,
        f"perplexity above {MAX_RATIO} of the calm run": not by_calm <= MAX_RATIO,
    }
    return [name for name, is_broken in checks.items() if is_broken]


@contextlib.contextmanager
def output_folder(chosen: argparse.Namespace) -> Iterator[Path]:
    """Give the folder of --out, or one that is removed afterwards."""
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        yield chosen.out
    else:
        with scratch_folder() as folder:
            yield folder


if __name__ == "__main__":
    sys.exit(main())
