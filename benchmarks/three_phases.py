"""A swarm goes dense run -> k-means grid -> discriminative re-sharding, and nobody restarts a peer.

    python benchmarks/three_phases.py [--out DIR] [--json FILE]

Four `dipaco-peer` processes on loopback train one dense model together (one path, four replicas).
The operator's commands `prepare --from RUN --initial-peers ADDR` and `serve NEW --initial-peers
ADDR` then make a 2x2 grid with path-specific blocks and embedding out of what the live swarm has
trained, and later shard that grid anew with a router trained on what the peers' paths make of the
documents. The peers move over by themselves, each in the process that was started once.

In the middle of every phase one peer is killed with SIGKILL, and one that was never there before,
with its own identity and an empty cache, is started so that four go on. The killed one stays dead.
At the end of every phase `dipaco-eval` scores the live swarm on the same documents, without the
first 32 tokens of each. Exit code 1 when a promise was broken.

DIR of --data holds train-*.jsonl.gz and validation.jsonl.gz (fields `text`, `domain`).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dipaco.routing.run_folder import RunFolder
from parts.common import CORPUS_TOML, HERE, scratch_folder
from parts.three_phases_report import Outcome, Phase, report_of
from support.faults import processes_of
from support.swarm import Event, Member, Swarm, command

PEERS = 4
START_S = 240.0
"""Seconds for all peers to train at the beginning, or a newcomer later."""
ADDRESS_S = 120.0
COMMAND_S = 600.0
DENSE_S = 3600.0
SCORE_WAIT_S = 180.0

RUN_TOML = (
    'name = "{name}"\n'
    + CORPUS_TOML
    + """\
[tokenizer]
training_characters = 1_000_000
[model]
vocabulary_size = 1024
block_count = 4
hidden_size = {hidden_size}
head_count = 4
sequence_length = 128
[grid]
{grid}
[base]
steps = {base_steps}
learning_rate = 2e-3
warmup_steps = 10
batch_sequences = 8
[router]
kind = "{router}"
prefix_tokens = 32
training_documents = 1000
[inner]
learning_rate = 2e-3
batch_sequences = 8
[rounds]
duration_s = {round_s}
matchmaking_s = {matchmaking_s}
validation_sequences = 16
"""
)
# Private: the first block of the first level, the last of the second, and the embedding.
GRID_TOML = "modules_per_level = [2, 2]\nprivate_blocks = [0, 3]\nprivate_embedding = true"


def three_phases() -> list[Phase]:
    """Return the phases in their order."""
    return [
        Phase("dense", "kmeans", "modules_per_level = [1]", 1),
        Phase("k-means", "kmeans", GRID_TOML, 4),
        Phase("re-sharded", "discriminative", GRID_TOML, 4),
    ]


class Chain:
    """The swarm and the operator who leads it through the phases."""

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        self.folder = folder
        self.chosen = chosen
        self.phases = three_phases()
        self.random = random.Random(chosen.seed)
        self.peers: list[Member] = []
        """Those that are to be alive."""
        self.first_run: dict[str, str] = {}
        """The run in which each peer was started, also of those that were killed."""
        self.everybody: list[Member] = []
        self.began_s = time.monotonic()
        self.dense_steps = 0
        self.dense_perplexity = float("nan")
        """Of a dense model that was trained beside, with as many steps as a peer made."""

    def run(self) -> None:
        """Go through all phases; no process is left afterwards, whatever happened."""
        dense = self.phases[0]
        self._prepare(dense, "--start-in-s", "25")
        with Swarm(self.folder, RunFolder(dense.folder)) as self.swarm:
            server = self.swarm.start_bootstrap(name=f"serve-{dense.name}")
            address = self._address_of(server)
            for _ in range(PEERS):
                self._start_peer(dense, address)
            self._wait_for("trains in 'dense'", self._those_with(dense, "training"), START_S)
            for number, phase in enumerate(self.phases):
                if number:
                    server = self._succeed(self.phases[number - 1], phase, server)
                self._train(phase)
                self._evaluate(phase)
        # Beside nothing that trains: what each phase began and ended with, on the same documents.
        for phase in self.phases:
            found = self._eval("--state-dir", str(phase.genesis), "--allow-genesis", "--no-base")
            phase.figures["began_with_perplexity"] = found["perplexity"]
            if phase.handed_over is not None:
                found = self._eval("--state-dir", str(phase.handed_over), "--no-base")
                phase.figures["handed_over_perplexity"] = found["perplexity"]
        self._train_dense_beside()

    def outcome(self) -> Outcome:
        """Return what is reported, after `run`."""
        return Outcome(
            phases=self.phases,
            alive=[peer.name for peer in self.peers],
            started=[peer.name for peer in self.everybody],
            dense_steps=self.dense_steps,
            dense_perplexity=self.dense_perplexity,
            round_s=self.chosen.round_s,
            hidden_size=self.chosen.hidden_size,
            base_steps=self.chosen.base_steps,
            seconds=time.monotonic() - self.began_s,
        )

    def _train_dense_beside(self) -> None:
        """Train one dense model from the same base, as many steps as a peer has made in all
        phases, also while the operator scored and prepared."""
        dense, beside = self.phases[0], self.folder / "dense-beside"
        steps = sum(sum(self._steps(phase).values()) for phase in self.phases)
        self.dense_steps = round(steps / PEERS)
        self._command(
            "dipaco-simulate", str(dense.genesis), "--rounds", "0", "--out", str(beside),
            "--dense-steps", str(self.dense_steps), "--threads", "1", "--json",
            timeout_s=DENSE_S,
        )  # fmt: skip
        found = self._eval(
            "--state-dir", str(dense.genesis), "--allow-genesis", "--no-base",
            "--baseline", str(beside / "dense.safetensors"),
        )  # fmt: skip
        self.dense_perplexity = float(found["baseline_perplexity"])

    # -- the operator

    def _prepare(self, phase: Phase, *arguments: str) -> str:
        """Prepare the run of a phase and return what the command printed."""
        chosen, phase.folder = self.chosen, self.folder / phase.name
        run_toml = self.folder / f"{phase.name}.toml"
        run_toml.write_text(
            RUN_TOML.format(
                name=phase.name,
                data=chosen.data.resolve(),
                hidden_size=chosen.hidden_size,
                grid=phase.grid,
                base_steps=chosen.base_steps,
                router=phase.router,
                round_s=chosen.round_s,
                matchmaking_s=0.15 * chosen.round_s,
            )
        )
        printed = self._command(
            "dipaco-bootstrap", "prepare", str(run_toml), "--out", str(phase.folder),
            "--threads", "1", "--device", "cpu", *arguments,
        )  # fmt: skip
        phase.run_id = RunFolder(phase.folder).plan().run_id
        phase.genesis = self.folder / f"{phase.name}-genesis"
        shutil.copytree(
            phase.folder, phase.genesis, ignore=shutil.ignore_patterns("work", "states", "*.pem")
        )
        return printed

    def _succeed(self, old: Phase, new: Phase, old_server: Member) -> Member:
        """Prepare a successor from the live swarm, serve it there, and see the peers move."""
        entry = self.peers[0].address()
        printed = self._prepare(
            new, "--from", str(old.folder), "--initial-peers", entry,
            "--score-wait-s", str(SCORE_WAIT_S), "--start-in-s", "10",
        )  # fmt: skip
        old.handed_over = self.folder / f"{old.name}-handed-over"
        shutil.copytree(old.genesis, old.handed_over)
        taken = new.folder / "work" / "swarm" / old.run_id / "states"
        shutil.copytree(taken, old.handed_over / "states", dirs_exist_ok=True)
        for line in printed.splitlines():
            if line.startswith(("scores:", "states:", "Genesis:")):
                self._say(f"prepare: {line}")
        new.figures["scores_by_peers"] = self._scores_by_peers(old)
        self.swarm.run = RunFolder(new.folder)
        server = self.swarm.start_bootstrap("--initial-peers", entry, name=f"serve-{new.name}")
        self._address_of(server)
        served_s = time.time()
        limit_s = 3 * self.chosen.round_s + START_S
        self._wait_for(
            f"moved to '{new.name}' and trains", self._those_with(new, "training"), limit_s
        )
        moved = [next(self._events(peer, new, "training"))["time_s"] for peer in self.peers]
        new.figures["moved_peers"] = len(moved)
        new.figures["moved_after_s"] = round(max(moved) - served_s, 1)
        ended = [event["round"] for p in self.everybody for event in self._events(p, old, "round")]
        old.figures["rounds_in_all"] = max(ended) + 1
        # The chain needs no server of an earlier run.
        old_server.interrupt()
        return server

    def _scores_by_peers(self, phase: Phase) -> list[int]:
        """Return the paths that peers have scored for the operator in a run."""
        found = (event for peer in self.everybody for event in self._events(peer, phase, "score"))
        return sorted({event["path"] for event in found if event["state"] == "done"})

    def _evaluate(self, phase: Phase) -> None:
        """Score the live swarm, and note what it had trained by then."""
        steps = self._steps(phase)
        source = ("--initial-peers", self.peers[0].address(), "--run", phase.run_id)
        found = self._eval(*source)
        count = {
            kind: sum(1 for peer in self.everybody for _ in self._events(peer, phase, kind))
            for kind in ("commit", "carry_on", "move")
        }
        phase.figures |= {
            "steps_per_path": steps,
            "commits": count["commit"],
            "carried_on": count["carry_on"],
            "moves_between_paths": count["move"],
            **{key: found[key] for key in ("perplexity", "base_perplexity", "documents", "tokens")},
            **{key: found[key] for key in ("missing_paths", "short_documents", "states", "paths")},
        }
        self._say(
            f"'{phase.name}': validation perplexity {found['perplexity']:.2f} over "
            f"{found['tokens']:,} tokens"
        )

    def _steps(self, phase: Phase) -> dict[int, int]:
        """Return the steps that each path has had so far, those of all its replicas."""
        steps: dict[int, int] = {}
        for peer in self.everybody:
            for event in self._events(peer, phase, "round"):
                steps[event["path"]] = max(steps.get(event["path"], 0), event["path_step"])
        return dict(sorted(steps.items()))

    def _eval(self, *source: str) -> dict[str, Any]:
        """Score the newest states."""
        printed = self._command(
            "dipaco-eval", *source, "--data", str(self.chosen.data / "validation.jsonl.gz"),
            "--limit-documents", str(self.chosen.documents), "--threads", "1", "--json",
        )  # fmt: skip
        found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
        return found

    # -- the peers

    def _start_peer(self, phase: Phase, address: str) -> Member:
        peer = self.swarm.start_peer(address)
        self.first_run[peer.name] = phase.run_id
        self.peers.append(peer)
        self.everybody.append(peer)
        return peer

    def _train(self, phase: Phase) -> None:
        """Let the peers do the rounds of a phase, and kill one of them halfway."""
        rounds, round_s = self.chosen.rounds_per_phase, self.chosen.round_s
        half = max(1, rounds // 2)
        begun = list(self.peers)
        self._wait_for(
            f"ended {half} rounds in '{phase.name}'",
            self._those_with(phase, "round", half),
            (half + 4) * round_s + 120.0,
        )
        time.sleep(self.random.uniform(0.0, round_s))
        victim = self.random.choice(begun)
        newcomer = self._kill(phase, victim)
        survivors = [peer for peer in begun if peer is not victim]
        self._wait_for(
            f"ended {rounds} rounds in '{phase.name}'",
            lambda: [p for p in survivors if self._number(p, phase, "round") >= rounds],
            (rounds - half + 4) * round_s + 120.0,
            need=len(survivors),
        )
        self._wait_for(
            f"trains as the newcomer in '{phase.name}' and has ended a round",
            lambda: [p for p in (newcomer,) if self._number(p, phase, "round")],
            START_S,
            need=1,
        )
        killed = phase.figures["killed"]
        self._wait_for(
            f"trains path {killed['path']} of the killed one in '{phase.name}'",
            lambda: [p for p in self.peers if self._rounds_in_place(p, phase)],
            START_S,
            need=1,
        )
        again_s = min(s for peer in self.peers for s in self._rounds_in_place(peer, phase))
        killed["path_trained_again_after_s"] = round(again_s - killed["time_s"], 1)
        phase.figures["rounds"] = min(self._number(p, phase, "round") for p in survivors)

    def _kill(self, phase: Phase, victim: Member) -> Member:
        """Kill a peer for good, and start one that was never there before."""
        last = list(self._events(victim, phase, "training"))[-1]
        ended = [event["round"] for event in self._events(victim, phase, "round")]
        victim.kill()
        killed_s = time.time()
        self.peers.remove(victim)
        newcomer = self._start_peer(phase, self.peers[0].address())
        deadline = time.monotonic() + 5.0
        while (left := processes_of(victim)) and time.monotonic() < deadline:
            time.sleep(0.1)
        phase.figures["killed"] = {
            "peer": victim.name,
            "path": last["path"],
            "after_round": max(ended),
            "time_s": killed_s,
            "left_over_processes": len(left),
            "newcomer": newcomer.name,
        }
        self._say(
            f"'{phase.name}': SIGKILL to {victim.name} on path {last['path']}; "
            f"{newcomer.name} is new"
        )
        return newcomer

    def _rounds_in_place(self, peer: Member, phase: Phase) -> list[float]:
        """Return when a peer ended rounds, after the kill, on the path of the one killed."""
        killed = phase.figures["killed"]
        return [
            event["time_s"]
            for event in self._events(peer, phase, "round")
            if event["path"] == killed["path"] and event["time_s"] > killed["time_s"]
        ]

    def _events(self, peer: Member, phase: Phase, kind: str) -> Iterator[Event]:
        """Yield what a peer logged in the run of a phase: from its move there to the next."""
        run = self.first_run[peer.name]
        for event in peer.read():
            if event["event"] == "successor" and event["state"] == "moving":
                run = event["run"]
            elif event["event"] == kind and run == phase.run_id:
                yield event

    def _number(self, peer: Member, phase: Phase, kind: str) -> int:
        return sum(1 for _ in self._events(peer, phase, kind))

    def _those_with(self, phase: Phase, kind: str, number: int = 1) -> Callable[[], list[Member]]:
        """Return a function that gives the living peers with so many events in a phase."""
        return lambda: [p for p in self.peers if self._number(p, phase, kind) >= number]

    # -- waiting, bounded

    def _wait_for(
        self,
        what: str,
        have: Callable[[], list[Member]],
        limit_s: float,
        need: int = PEERS,
    ) -> None:
        """Wait until `need` peers are among `have`; say how it stands. Raises RuntimeError when
        time is up, or when a peer has ended that nobody killed."""
        deadline, said_at, said = time.monotonic() + limit_s, float("-inf"), -1
        while len(found := have()) < need:
            now = time.monotonic()
            state = f"{what}: have {len(found)}, need {need} peers"
            if ended := [peer.name for peer in self.peers if not peer.alive]:
                raise RuntimeError(f"{', '.join(ended)} ended\n{state}\n{self.swarm.outputs()}")
            if now > deadline:
                raise RuntimeError(f"{state} after {limit_s:.0f} s\n{self.swarm.outputs()}")
            if len(found) != said or now - said_at > 20.0:
                self._say(f"{state}; waits {deadline - now:.0f} s more at most")
                said_at, said = now, len(found)
            time.sleep(0.25)

    def _address_of(self, server: Member) -> str:
        self._say(f"waits for the address of {server.name}, {ADDRESS_S:.0f} s at most")
        return server.address(ADDRESS_S)

    def _command(self, program: str, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        """Run one of our commands, with one thread and a bound, and return what it printed."""
        verb = program if arguments[0].startswith("-") else f"{program} {arguments[0]}"
        self._say(f"{verb}, {timeout_s:.0f} s at most")
        done = command(program, *arguments, timeout_s=timeout_s)
        if done.returncode:
            raise RuntimeError(f"{verb} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return done.stdout

    def _say(self, line: str) -> None:
        elapsed_s = time.monotonic() - self.began_s
        print(f"{elapsed_s:5.0f} s  {line}", file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiny = HERE.parent / "examples" / "tiny" / "data"
    add = parser.add_argument
    add("--data", type=Path, default=tiny, metavar="DIR", help="the corpus (examples/tiny/data)")
    add("--out", type=Path, metavar="DIR", help="keep runs and logs in this new folder")
    add("--hidden-size", type=int, default=64, metavar="N", help="a multiple of 4 (64)")
    add("--round-s", type=float, default=10.0, metavar="S", help="seconds a round (10)")
    add("--rounds-per-phase", type=int, default=8, metavar="N", help="at least 2 (8)")
    add("--base-steps", type=int, default=60, metavar="N", help="before the swarm (60)")
    add("--documents", type=int, default=1000, metavar="N", help="scored, at most (1000)")
    add("--seed", type=int, default=0, metavar="N", help="of who is killed and when (0)")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE as one JSON object")
    chosen = parser.parse_args()
    if chosen.rounds_per_phase < 2:
        parser.error(f"--rounds-per-phase must be at least 2, got {chosen.rounds_per_phase}")
    if chosen.out is not None and chosen.out.exists() and any(chosen.out.iterdir()):
        parser.error(f"--out {chosen.out} is not empty; peers have to begin without a past")
    return chosen


def main() -> int:
    """Run, print, and tell by the exit code whether every promise held."""
    chosen = options()
    # Ends by the same way as Ctrl+C, on which every process is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with scratch_folder() as scratch:
        folder: Path = chosen.out or scratch
        folder.mkdir(parents=True, exist_ok=True)
        chain = Chain(folder.resolve(), chosen)
        chain.run()
        report = report_of(chain.outcome())
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    report.print(as_json=False)
    return int(bool(report.figures["broken"]))


if __name__ == "__main__":
    sys.exit(main())
