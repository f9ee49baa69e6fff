"""A swarm whose peers are killed, leave, are suspended and join all the time, beside a calm one.

    python benchmarks/churn.py [--json] [--rounds 45] [--peers 8] [--no-calm] [--out DIR]
    python benchmarks/churn.py --closed 5 --bootstrap-dies
    python benchmarks/churn.py --calm --rounds 900 --round-s 8     # two hours: does anything grow?
    python benchmarks/churn.py --accidents [NAME ...]              # one machine lets its peer down

Real `dipaco-peer` processes on loopback train a tiny run of four paths (2x2) by the clock. Every
peer has a mean life of five rounds; then it gets SIGKILL, or SIGINT (a clean leave), or SIGSTOP,
to all of its processes, for up to two and a half rounds. In place of one that has gone comes the
same peer with its disk, or one that was never there. What happens when follows from --seed. At
the end three rounds are quiet, and three more once all that were started last train. With
--bootstrap-dies the bootstrap node is killed in the middle, and newcomers join through a peer.

The languages of the four paths are made up and share no words, so paths that share a module pull
it apart as hard as they can. Peers refuse what others made of a module without them when it wrecks
their own held-out text: `refused` counts how often. With --closed the last so many peers, and those
that take their places, are each behind a router with real NAT, in a network namespace, and nobody
can call them; this needs root, iproute2 and nftables. A step takes at least --step-s seconds, most
of which the processor waits, as it does for a GPU.

Share of trained tokens in the final states: every `inner` event of every life is so many tokens
for each module of its path. From this goes what a killed life had not contributed (the work since
its last boundary whose step was made), and what the peers that stay to the end have on top of the
final states. Beside the rest stand the tokens that the final states count. So what a step missed,
what a clean leave or a move leaves behind and what a fork throws away are losses here.

The held-out perplexity of the final states stands beside that of a calm run: the same peers
without a fault, until its states count as many tokens. Exit code 1 when a promise was broken: a
peer ended by itself, the peers did not agree in the end, less than 93% of the tokens are in the
final states, or the perplexity is more than 3% above the calm one. With --calm processes, memory,
threads, open files and disk are looked at once a minute: their slopes are told.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parts import accidents
from parts.churn_counts import (
    QUIET_ROUNDS,
    Counts,
    Ending,
    Fault,
    Life,
    count,
    last_states,
    schedule,
)
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
from support.swarm import BIN, Event, Member, Swarm
from support.tiny_run import make_tiny_run

from dipaco.modules.compose import load_path
from dipaco.modules.state import read_state
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from dipaco.training.scoring import LossSum, sum_losses

DECAY_HELP = "a path's learning rate falls to a tenth over so many of its steps (0: constant)"
LEAST_SHARE = 0.93
GREATEST_RATIO = 1.03
START_S = 240.0
SETTLE_ROUNDS = 6
LEAVE_S = 30.0
POLL_S = 0.1


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=45, help="rounds under churn (45)")
    parser.add_argument("--round-s", type=float, default=8.0, help="seconds of a round (8)")
    parser.add_argument("--peers", type=int, default=8, help="peers at a time (8)")
    parser.add_argument("--closed", type=int, default=0, help="of these behind routers (0)")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of a step (0.1)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (0.003)")
    parser.add_argument("--decay-steps", type=int, default=0, help=DECAY_HELP)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calm", action="store_true", help="only the calm run, for --rounds")
    parser.add_argument("--no-calm", action="store_true", help="no calm run beside it")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")
    parser.add_argument("--bootstrap-dies", action="store_true", help="in the middle")
    parser.add_argument("--accidents", nargs="*", metavar="NAME", help="these, or all, alone")
    chosen = parser.parse_args()
    if chosen.closed and not can_make_homes():
        parser.error("--closed needs root, iproute2 and nftables")
    if not 0 <= chosen.closed < chosen.peers:
        parser.error(f"--closed {chosen.closed}: fewer than the {chosen.peers} peers")
    if chosen.calm and chosen.no_calm:
        parser.error("give --calm or --no-calm, not both")
    return chosen


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
        self.exit_codes: Counter[int] = Counter()
        self.done: Counter[str] = Counter()
        self.names = 0
        self.ended_s = math.inf
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
        peer = self._start_peer(slot, name)
        self.slots[slot] = peer
        self.endings[peer] = "stayed"
        return peer

    def _start_bootstrap(self) -> Member:
        return self.swarm.start_bootstrap()

    def _start_peer(self, slot: int, name: str) -> Member:
        program = steady_peer(self.chosen.step_s)
        return self.swarm.start_peer(self.entry, name=name, program=program)

    def happen(self, fault: Fault) -> None:
        """Do what the schedule says, if the peer still lives; count it."""
        peer = self.slots[fault.slot]
        self.note_id(peer)
        if fault.kind in ("return", "join"):
            self.start(fault.slot, self._gone(peer) if fault.kind == "return" else None)
        elif self.endings[peer] != "stayed":
            return
        elif fault.kind == "kill":
            self.endings[peer] = "killed"
            peer.kill()
        elif fault.kind == "leave":
            self.endings[peer] = "left"
            peer.interrupt()
        else:
            number = signal.SIGSTOP if fault.kind == "stop" else signal.SIGCONT
            for process in process_tree(peer.popen.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        self.done[fault.kind] += 1
        self.say(f"{fault.kind} slot {fault.slot} {self.slots[fault.slot].name}")

    def _gone(self, peer: Member) -> str:
        """Wait until a peer that was told to leave has, and return its name."""
        peer.popen.wait(LEAVE_S)
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
                self.say(f"{peer.name} ended by itself:\n{peer.output.read_text()[-3000:]}")

    def say(self, text: str) -> None:
        seconds = time.time() - self.plan.start_s
        print(f"{seconds:7.1f} s {text}", file=sys.stderr, flush=True)

    # -- a run

    def begin(self) -> None:
        """Start all peers and wait until they train."""
        self.bootstrap = self._start_bootstrap()
        self.entry = self.bootstrap.address(START_S)
        peers = [self.start(slot) for slot in range(self.chosen.peers)]
        self.swarm.wait(peers, "training", timeout_s=START_S)
        self.swarm.wait(peers, "commit", timeout_s=START_S)
        self.say("all train")

    def churn(self, faults: Sequence[Fault]) -> None:
        """Let the faults happen, and wait for the end of the last round."""
        began = time.monotonic()
        for fault in faults:
            self._sleep_until(began + fault.at_rounds * self.chosen.round_s)
            if self.chosen.bootstrap_dies and 2 * fault.at_rounds > self.chosen.rounds:
                self._lose_bootstrap()
            self.happen(fault)
        self._sleep_until(began + self.chosen.rounds * self.chosen.round_s)

    def _lose_bootstrap(self) -> None:
        """Kill the bootstrap node; others join through a peer that lives and can be called."""
        if self.bootstrap.alive:
            self.bootstrap.kill()
            self.say("the bootstrap node was killed")
        for peer in self.slots.values():
            if self.endings[peer] == "stayed" and peer.address_file.exists():
                self.entry = peer.address()
                return

    def _sleep_until(self, at: float) -> None:
        while (left := at - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            self.watch()
            if self.chosen.calm:
                self.growth.look([self.bootstrap, *self.slots.values()])

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
            # All is counted as it was at this moment: the members of a group commit one by one.
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
            member.popen.wait(LEAVE_S)
            self.exit_codes[member.popen.returncode] += 1

    def _all_train(self) -> bool:
        staying = [member for member, ending in self.endings.items() if ending == "stayed"]
        return all(member.of("training") for member in staying)

    def _is_at_rest(self) -> bool:
        final, agreed = last_states(self.lives())
        return self._all_train() and agreed and len(final) == len(self.grid.modules())

    def lives(self) -> list[Life]:
        """Return what all processes have logged up to now, or to when the last were told to go."""
        return [
            Life(
                member.name,
                self.ids.get(member, ""),
                ending,
                [event for event in member.read() if event["time_s"] <= self.ended_s],
            )
            for member, ending in self.endings.items()
        ]

    def count(self) -> Counts:
        inner = self.plan.inner
        tokens_per_step = inner.batch_sequences * self.plan.model.sequence_length
        modules_of = self.grid.modules_of_path
        return count(self.lives(), modules_of, tokens_per_step, self.ended_s)

    def refusals(self) -> int:
        """Return how often a peer refused a state that it had fetched."""
        outputs = {member.output for member in self.endings}
        return sum(file.read_text(errors="replace").count("is refused") for file in outputs)

    def perplexity(self, final: dict[str, Event]) -> float:
        """Score the final states, as the peers wrote them when they left, on all held-out text."""
        states = {}
        for module, event in final.items():
            file = next(self.folder.glob(f"*-cache/**/*-{event['digest']}.safetensors"))
            layout = self.grid.layout(module)
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

    def _start_peer(self, slot: int, name: str) -> Member:
        return self.swarm._add(
            name,
            [
                *self.network.prefix(slot + 1), *steady_peer(self.chosen.step_s),
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
            world.churn(faults)
            world.be_quiet()
        world.settle()
    counts = world.count()
    return counts, figures_of(world, counts)


def figures_of(world: World, counts: Counts) -> dict[str, Any]:
    """Return what is reported of a run."""
    module, gap_s = counts.longest_without_commit
    endings = Counter(world.endings.values())
    return {
        "faults": dict(sorted(world.done.items())),
        "lives": len(world.endings),
        "ended_by_themselves": endings["by itself"],
        "refused": world.refusals(),
        "exit_codes": {str(code): times for code, times in sorted(world.exit_codes.items())},
        "commits": counts.commits,
        "versions": counts.versions,
        "forked_versions": len(counts.forked),
        "agreed": counts.agreed,
        "trained_tokens": counts.trained,
        "killed_unmerged_tokens": counts.killed_unmerged,
        "on_top_at_the_end_tokens": counts.stayed_unmerged,
        "left_behind_by_leaves_tokens": counts.left_unmerged,
        "left_behind_by_moves_tokens": counts.moved_unmerged,
        "final_tokens": counts.final_tokens,
        "share": round(counts.share, 4),
        "perplexity": round(world.perplexity(counts.final), 4),
        "longest_without_commit_s": round(gap_s, 1),
        "longest_without_commit_module": module,
        **world.growth.slopes_per_hour(),
    }


def main() -> int:
    chosen = options()
    if chosen.accidents is not None:
        return accidents.main(chosen.accidents, chosen.round_s, chosen.json)
    report = Report("churn", ("", "churn", "calm"))
    with output_folder(chosen) as folder:
        faults = [] if chosen.calm else schedule(chosen.peers, chosen.rounds, chosen.seed)
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
        f"perplexity above {GREATEST_RATIO} of the calm run": not by_calm <= GREATEST_RATIO,
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
