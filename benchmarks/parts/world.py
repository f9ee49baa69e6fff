"""A swarm of real processes with some slots, each with a peer that can be replaced by another."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import BIN, LOOPBACK, Member, Swarm

from dipaco.modules.compose import load_path
from dipaco.modules.layout import layout_of
from dipaco.modules.state import read_state
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from dipaco.training.scoring import LossSum, sum_losses

from .common import cpu_seconds, process_tree, steady_peer
from .growth import Growth
from .home_lines import Homes
from .lives import QUIET_ROUNDS, Counts, Ending, Event, Fault, Life, count, last_states

START_S = 240.0
SETTLE_ROUNDS = 6
LEAVE_S = 30.0
# Parts of the run after which the bootstrap node is killed, and another one comes.
DIES_AT, NEXT_AT = 0.4, 0.6
POLL_S = 0.1
BOOT = -1
# A model whose contributions take half of a round of 20 s at 2 Mbit/s: a million values a module.
LARGE = {"hidden_size": 192, "head_count": 4, "feed_forward_size": 512}
# 30.3 M parameters.
HOME = {"hidden_size": 512, "head_count": 8, "feed_forward_size": 1280, "block_count": 10}
_CLOCK_OFF = """
import time
right = time.time
time.time = lambda: right() + {seconds!r}
"""


def add_options(parser: ArgumentParser, *, round_s: float, step_s: float) -> None:
    """Add what every benchmark of real processes has."""
    parser.add_argument("--round-s", type=float, default=round_s, help=f"of a round ({round_s:g})")
    parser.add_argument("--step-s", type=float, default=step_s, help=f"of a step ({step_s:g})")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (0.003)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")


@dataclass
class Span:
    """When a process was there."""

    began_s: float = 0.0
    ended_s: float = math.inf
    stops: list[tuple[float, float]] = field(default_factory=list)
    is_join: bool = False


class World:
    """The swarm, what happens to it, and what came of it.

    :param network: homes, if every peer has one of its own
    """

    modules_per_level: tuple[int, ...] = (2, 2)
    inner_steps = 0
    """Of a round; 0: rounds follow the clock."""

    def __init__(self, folder: Path, chosen: Namespace, network: Homes | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.chosen, self.folder, self.network = chosen, folder, network
        self.elders: int = getattr(chosen, "elders", 0)
        self.clocks_off_s: float = getattr(chosen, "clocks_off_s", 0.0)
        self.mbps: float | None = getattr(chosen, "mbps", None)
        self.is_one_path: bool = getattr(chosen, "one_path", False)
        if self.is_one_path:
            self.modules_per_level, self.inner_steps = (1,), chosen.inner_steps
        self.run = self._make_run(folder / "run")
        self.plan = self.run.plan()
        self.grid = self.run.grid(self.plan)
        self.swarm = Swarm(folder, self.run)
        self.slots: dict[int, Member] = {}
        self.endings: dict[Member, Ending] = {}
        self.ids: dict[Member, str] = {}
        self.spans: dict[Member, Span] = {}
        self.exit_codes: Counter[int] = Counter()
        self.done: Counter[str] = Counter()
        self.hung_leaves = 0
        self.began_s, self.churned_s, self.ended_s = 0.0, math.inf, math.inf
        self.growth = Growth()
        self._names = 0

    def _make_run(self, folder: Path, **more: Any) -> RunFolder:
        chosen = self.chosen
        inner = {"learning_rate": chosen.learning_rate, **more.pop("inner", {})}
        return make_tiny_run(
            folder,
            modules_per_level=self.modules_per_level,
            inner_steps=self.inner_steps,
            duration_s=chosen.round_s,
            start_s=time.time(),
            seed=chosen.seed,
            documents_per_path=400,
            validation_documents_per_path=2 if self.is_one_path else 32,
            inner=inner,
            rounds={
                "validation_sequences": 8,
                "validation_every_rounds": 100 if self.is_one_path else 1,
                **more.pop("rounds", {}),
            },
            **(HOME if self.is_one_path else LARGE if self.mbps else {}),
            **more,
        )

    # -- a peer

    def where(self, slot: int) -> tuple[Sequence[str], str | None]:
        """Return what runs a command where a slot is, and where it listens if that is told."""
        if self.network is None:
            return (), LOOPBACK
        site = slot + 1
        listens = f"/ip4/{self.network.address(site)}/tcp/0" if slot == BOOT else None
        return self.network.prefix(site), listens

    def start_bootstrap(self, name: str, folder: Path, *more: str) -> Member:
        """Start a bootstrap node."""
        prefix, listens = self.where(BOOT)
        serve = [*prefix, str(BIN / "dipaco-bootstrap"), "serve", str(folder)]
        return self.swarm._add(name, [*serve, "--host-maddrs", str(listens), *more])

    def start(self, slot: int, name: str | None = None, *, more=()) -> Member:
        """Start the peer of a slot: one that was never there, or one of a name."""
        if name is None:
            name = f"peer{self._names}"
            self._names += 1
        began_s = time.time()
        prefix, listens = self.where(slot)
        listen = () if listens is None else ("--host-maddrs", listens)
        peer = self.swarm._add(
            name,
            [
                *prefix, *self.program(name), "--initial-peers", self.entry,
                "--threads", "1", "--nice", "0", *listen,
                "--cache-dir", str(self.folder / f"{name}-cache"), *more,
            ],
        )  # fmt: skip
        self.spans[peer] = Span(began_s, is_join=self.began_s > 0.0)
        self.slots[slot] = peer
        self.endings[peer] = "stayed"
        return peer

    def program(self, name: str) -> tuple[str, ...]:
        """Return what runs as a peer: its clock may be off."""
        off_s = self._clock_off_s(name)
        before = _CLOCK_OFF.format(seconds=off_s) if off_s else ""
        return steady_peer(self.chosen.step_s, before=before, computes=not self.is_one_path)

    def _clock_off_s(self, name: str) -> float:
        most_s = self.clocks_off_s
        return random.Random(f"{self.chosen.seed}-{name}").uniform(-most_s, most_s)

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

    def _suffer(self, peer: Member, kind: str) -> None:
        span, now_s = self.spans[peer], time.time()
        if kind == "kill":
            self.endings[peer], span.ended_s = "killed", now_s
            peer.kill()
        elif kind == "leave":
            self.endings[peer], span.ended_s = "left", now_s
            peer.interrupt()
        elif kind == "stop":
            span.stops.append((now_s, math.inf))
            signal_all(peer, signal.SIGSTOP)
        else:
            span.stops[-1] = span.stops[-1][0], now_s
            signal_all(peer, signal.SIGCONT)

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
        """Remember the id of a peer; it has one when it trains."""
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
        """Tell what happens, and when."""
        seconds = time.time() - self.plan.start_s
        print(f"{seconds:7.1f} s {text}", file=sys.stderr, flush=True)

    # -- a run

    def begin(self, peers: int) -> None:
        """Start all peers and wait until they train."""
        # Before anybody has served it: the next bootstrap node comes from another machine.
        shutil.copytree(self.run.path, self.folder / "run2", dirs_exist_ok=True)
        self.bootstrap = self.start_bootstrap("bootstrap", self.run.path)
        self.entry = self.bootstrap.address(START_S)
        started = [self.start(slot) for slot in range(peers)]
        self.swarm.wait(started, "training", timeout_s=START_S)
        self.swarm.wait(started, "outer_step", timeout_s=START_S)
        self.began_s = time.time()
        self.cpu_s = {peer: cpu_seconds(peer.popen.pid) for peer in started}
        self.say("all train")

    def churn(self, faults: Sequence[Fault], rounds: float, *, bootstrap_dies: bool) -> None:
        """Let the faults happen, and wait for the end of the last round."""
        began = time.monotonic()
        for fault in faults:
            self.sleep_until(began + fault.at_rounds * self.chosen.round_s)
            if bootstrap_dies:
                self._choose_entry(fault.at_rounds / rounds)
            self.happen(fault)
        self.sleep_until(began + rounds * self.chosen.round_s)
        self.churned_s = time.time()

    def _choose_entry(self, part: float) -> None:
        """Kill the bootstrap node, and start another one later; `part` of the run is over.

        Meanwhile others join through a peer that lives and can be called.
        """
        is_first = self.bootstrap.name == "bootstrap"
        if part >= DIES_AT and is_first and self.bootstrap.alive:
            self.bootstrap.kill()
            self.say("the bootstrap node was killed")
        if part >= NEXT_AT and is_first:
            to = ("--initial-peers", self.entry)
            self.bootstrap = self.start_bootstrap("bootstrap2", self.folder / "run2", *to)
            self.say("another bootstrap node comes")
        if self.bootstrap.alive and self.bootstrap.address_file.exists():
            self.entry = self.bootstrap.address()
            return
        for peer in self.slots.values():
            is_awake = all(until_s < math.inf for _, until_s in self.spans[peer].stops)
            if self.endings[peer] == "stayed" and is_awake and peer.address_file.exists():
                self.entry = peer.address()
                return

    def sleep_until(self, at: float) -> None:
        """Wait, and look at what peers need: of all of them, or of the elders."""
        while (left := at - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            self.watch()
            looked_at = [self.slots[slot] for slot in range(self.elders or len(self.slots))]
            self.growth.look([*([] if self.elders else [self.bootstrap]), *looked_at])

    def train_until(self, tokens: int, rounds: float) -> None:
        """Wait until the states of all modules count so many tokens, at most thrice as long."""
        deadline = time.monotonic() + START_S + 3 * rounds * self.chosen.round_s
        while time.monotonic() < deadline:
            final, _ = last_states(self.lives())
            if sum(event["tokens"] for event in final.values()) >= tokens:
                return
            time.sleep(POLL_S)
            self.watch()

    def be_quiet(self) -> None:
        """Wait until all peers train, and let them train for some rounds."""
        deadline = time.monotonic() + START_S
        while not self._all_train() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.watch()
        self.say("all train again")
        self.sleep_until(time.monotonic() + QUIET_ROUNDS * self.chosen.round_s)

    def settle(self) -> None:
        """Wait until all peers have the same states, for some rounds at most; then all leave."""
        deadline = time.monotonic() + SETTLE_ROUNDS * self.chosen.round_s
        while True:
            # All is counted as it was at this moment: members of a group step one by one.
            self.ended_s = time.time()
            at_rest = self.is_at_rest()
            if at_rest or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
            self.watch()
        self.say("at rest" if at_rest else "not at rest")
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

    def is_at_rest(self) -> bool:
        """Tell whether all train, and stand on the same states."""
        final, agreed = last_states(self.lives())
        return self._all_train() and agreed and len(final) == len(self.grid.modules())

    # -- what came of it

    def lives(self) -> list[Life]:
        """Return what all processes have logged up to now, or to when the last were told to go."""
        return [self._life(member, ending) for member, ending in self.endings.items()]

    def _life(self, member: Member, ending: Ending) -> Life:
        off_s, events = self._clock_off_s(member.name), member.read()
        if off_s:
            events = [{**event, "time_s": event["time_s"] - off_s} for event in events]
        events = [event for event in events if event["time_s"] <= self.ended_s]
        return Life(
            member.name, self.ids.get(member, ""), ending, events, **vars(self.spans[member])
        )

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a batch."""
        return self.plan.inner.batch_sequences * self.plan.model.sequence_length

    def count(self) -> Counts:
        """Add up what all lives did."""
        return count(self.lives(), self.grid.modules_of_path, self.tokens_per_step)

    def refusals(self) -> int:
        """Return how often a peer refused a state that it had fetched."""
        outputs = {member.output for member in self.endings}
        return sum(file.read_text(errors="replace").count("is refused") for file in outputs)

    def perplexity(self, final: Mapping[str, Event]) -> float:
        """Score the final states, as the peers wrote them when they left, on all held-out text."""
        states = {}
        for module, event in final.items():
            file = next(self.folder.glob(f"*-cache/*/store/**/{event['digest']}"))
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


def signal_all(peer: Member, number: signal.Signals) -> None:
    """Send a signal to all processes of a peer."""
    for process in process_tree(peer.popen.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
