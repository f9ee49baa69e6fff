"""A quarter of the peers is hostile: the perplexity with a robust mean, and without.

    python benchmarks/hostile.py [--json] [--kinds flipped,forker] [--means default] [--out DIR]

Real `dipaco-peer` processes on loopback train a tiny run: for each of --paths paths three honest
peers, and one that does what its kind says. All take as many steps in each round (fixed steps), so
that a busy machine changes nothing. All train one module in common, and one for each path, so that
every path has four trainers: a robust mean needs three at least. The inner learning rate falls
to a tenth to the end, so that perplexities can be compared.

* thousand: its contributions are a thousand times as large;
* flipped: eight times as large, and in the other direction;
* tokens: it says that it has trained a thousand times as many tokens, with a negated contribution;
* garbage: its files do not decode;
* silent: its rows come and its files never do: who asks waits;
* forker: it tells one half of the peers a step and the other half another one;
* alone: with every row it tells a step of that row alone, before others have told theirs;
* flood: a thousand rows a second, of rounds to come and on invented steps, and files to everybody;
* strangers: three identities that were never admitted tell, ask, get and put without a pause;
* states: every state that it serves is spoiled with noise, and named by that state's digest.

What stored records can do is in tests/dht/test_quotas.py, thousands of histories with liars are in
the swarm simulator (`swarm_faults.py`).

Each kind lives through --rounds rounds with `combine = trimmed_mean` and with the default, and
beside them stand swarms of the honest peers alone, whose tokens are as many as those of the honest
ones there. Told are the held-out perplexity of what the honest peers hold after the last round, its
ratio to that of the clean swarm with the same mean, the steps that one of them took, the rounds
that one of them carried on without, and the seconds of all. Exit code 1 when, with the robust mean,
a perplexity is more than 3% above the clean one, or the honest peers do not agree, or stop.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from churn import START_S, World
from parts.churn_counts import last_states
from parts.common import Report, build_parser, ratio, scratch_folder, steady_peer
from support.swarms.swarm import Member

HONEST_OF_A_PATH = 3
STRANGERS = 3
MAX_RATIO = 1.03
SEEN_S = 17.0
"""Claims are read by then: records are renewed every quarter of the limit of a round."""
ROBUST = {"combine": "trimmed_mean", "trim_share": 0.25}
MEANS: dict[str, dict[str, Any]] = {"robust": ROBUST, "default": {}}
_CONTRIBUTION = """
from dipaco.modules.outer import OuterGradient
from dipaco.training.trainer import Snapshot
honest = Snapshot.outer_gradient
def changed(snapshot):
    gradient = honest(snapshot)
    return OuterGradient(gradient.anchor, gradient.anchor - gradient[:] * {factor})
Snapshot.outer_gradient = changed
"""
# What a hostile peer does before it starts as any other.
KINDS = {
    "thousand": _CONTRIBUTION.format(factor=1000.0),
    "flipped": _CONTRIBUTION.format(factor=-8.0),
    "tokens": _CONTRIBUTION.format(factor=-1.0)
    + """
from dipaco.peer.shell import outer_steps
credible = outer_steps.claimed_tokens
outer_steps.claimed_tokens = lambda plan, tokens, round: credible(plan, 1000 * tokens, round)
""",
    "garbage": """
from dipaco.training.trainer import Snapshot
encode = Snapshot.encode
Snapshot.encode = lambda *arguments: bytes([255]) * len(encode(*arguments))
""",
    "silent": """
import asyncio
from dipaco.peer.exchange.responder import Responder
async def wait(*arguments):
    await asyncio.sleep(600)
Responder._send = wait
""",
    "forker": """
from dipaco.protocol.chain import Step
from dipaco.peer.exchange.exchange import Exchange
honest = Exchange.tell
def tell(exchange, peers, module, rows=(), steps=(), keep=False):
    if not steps or len(steps[-1].rows) < 2:
        return honest(exchange, peers, module, rows, steps, keep)
    other = (*steps[:-1], Step.of(steps[-1].rows[:-1]))
    honest(exchange, peers[::2], module, rows, steps, keep)
    honest(exchange, peers[1::2], module, rows, other, keep)
Exchange.tell = tell
""",
    "alone": """
from dipaco.protocol.chain import Step
from dipaco.peer.exchange.exchange import Exchange
honest = Exchange.tell
def tell(exchange, peers, module, rows=(), steps=(), keep=False):
    own = [row for row in rows if row.peer == exchange.peer_id]
    honest(exchange, peers, module, rows, steps or [Step.of([row]) for row in own[:1]], keep)
Exchange.tell = tell
""",
    "flood": """
import os, threading, time
from dataclasses import replace
from dipaco.protocol.chain import sign_row
from dipaco.protocol.member.events import Published
from dipaco.peer.shell import outer_steps
first = outer_steps.OuterSteps._publish
flooding = []
def flood(node, row):
    while True:
        peers = [peer for peer in node.exchange.connected_peers() if peer != node.me]
        rows = []
        for number in range(64):
            data = os.urandom(row.bytes)
            name = __import__("hashlib").sha256(data).hexdigest()
            parent = name if number % 2 else row.parent
            later = row.round_index + number % 3
            made = replace(row, file=name, round_index=later, parent=parent)
            rows.append(sign_row(made, node.identity.key))
        node.exchange.tell(peers, row.module, rows)
        for peer in peers:
            node.exchange.put(peer, rows[-3], data, 2.0)
        time.sleep(0.06)
def publish(steps, action, snapshot):
    report = steps._report
    def watched(event):
        if isinstance(event, Published) and not flooding:
            flooding.append(threading.Thread(
                target=flood, args=(steps._node, event.row), daemon=True))
            flooding[0].start()
        report(event)
    steps._report = watched
    try:
        first(steps, action, snapshot)
    finally:
        steps._report = report
outer_steps.OuterSteps._publish = publish
""",
    "strangers": "",
    "states": """
import dataclasses, torch
from dipaco.modules.outer import OuterRule
honest = OuterRule.step
def spoiled(*arguments):
    state = honest(*arguments)
    noise = torch.randn(state.parameters.shape) * state.parameters.std()
    return dataclasses.replace(state, parameters=state.parameters + noise)
OuterRule.step = spoiled
""",
}
# Joins as a reader does, which needs no admission, and asks for everything without a pause.
_STRANGER = """
import hashlib, os, sys, threading
from pathlib import Path
from dipaco.protocol.chain import Row, genesis_name, sign_row
from dipaco.base.blobs import BlobStore
from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.join_run import join_run
from dipaco.peer.owner.uplink import Uplink
folder = Path(sys.argv[sys.argv.index("--cache-dir") + 1])
entry = sys.argv[sys.argv.index("--initial-peers") + 1]
node = join_run(initial_peers=[entry], run=None, cache_folder=folder,
    identity_path=folder / "key", listening=Listening(host_maddrs=("/ip4/127.0.0.1/tcp/0",)),
    uplink=Uplink(None), say=print)
node.serve_run()
blobs = BlobStore(folder / "taken")
def get(digest, peer):
    try:
        node.exchange.get(
            digest, (peer,), blobs, max_bytes=2**24, timeout_s=2.0
        ).unlink(missing_ok=True)
    except Exception as error:
        print(error, flush=True)
def ask_without_end():
    number = 0
    while True:
        number += 1
        for module in node.grid.modules():
            genesis = genesis_name(node.run_id, module)
            data = os.urandom(4096)
            rows = [sign_row(Row(module, number % 9, genesis, "0" * 64, 0, node.me, 1000,
                hashlib.sha256(data + bytes([k])).hexdigest(), 4096), node.identity.key)
                for k in range(64)]
            peers = [peer for peer in node.exchange.connected_peers() if peer != node.me]
            node.exchange.tell(peers, module, rows)
            for peer in peers:
                answer = node.exchange.ask(peer, module, [genesis], 1.0)
                node.exchange.put(peer, rows[0], data, 1.0)
                for _ in range(4 if answer and answer.held else 0):
                    get(answer.held.digest, peer)
threads = [threading.Thread(target=ask_without_end) for _ in range(8)]
for thread in threads:
    thread.start()
"""


class MixedWorld(World):
    """Honest peers, and behind them hostile ones; only the honest ones are looked at."""

    def __init__(self, folder: Path, chosen: Namespace, kind: str, mean: str) -> None:
        self.kind = kind
        self.modules_per_level = (1, chosen.paths)
        self.contributions = MEANS[mean]
        self.rounds = {"gather_s": 4.0, "grace_s": 1.0}
        self.inner_steps = chosen.steps
        super().__init__(folder, chosen)
        self.honest = HONEST_OF_A_PATH * chosen.paths
        self.hostile: list[Member] = []
        self.go = folder / "go"

    def begin(self) -> None:
        """Start all, and wait until the honest ones train."""
        self.entry = self.swarm.start_bootstrap().address(START_S)
        honest = [self.start(slot) for slot in range(self.honest)]
        hostile = range(self.honest, self.honest + self.chosen.paths) if self.kind else ()
        if self.kind == "strangers":
            for number in range(STRANGERS):
                program = (sys.executable, "-c", _STRANGER)
                self.swarm.start_peer(self.entry, name=f"stranger{number}", program=program)
        else:
            self.hostile = [self._start_hostile(slot) for slot in hostile]
        self.swarm.wait([*honest, *self.hostile], "training", timeout_s=START_S)
        time.sleep(SEEN_S)
        self.go.touch()
        self.say("all train")

    def start(self, slot: int, name: str | None = None) -> Member:
        """Start an honest peer on its path."""
        peer = self._start(slot, f"peer{slot}", "")
        self.slots[slot] = peer
        self.endings[peer] = "stayed"
        return peer

    def _start_hostile(self, slot: int) -> Member:
        return self._start(slot, f"hostile{slot}", KINDS[self.kind])

    def _start(self, slot: int, name: str, before: str) -> Member:
        """Start a peer that does something before it is as any other."""
        program = steady_peer(self.chosen.step_s, self.go, before)
        path = str(slot % self.chosen.paths)
        how_long = ("--max-rounds", str(self.chosen.rounds))
        return self.swarm.start_peer(
            self.entry, "--path", path, *how_long, name=name, program=program
        )

    def train(self) -> dict[str, Any]:
        """Wait until the honest peers have done their rounds, and return what they came to."""
        honest = list(self.slots.values())
        deadline = time.monotonic() + START_S + self.chosen.rounds * self.chosen.round_s
        while any(peer.alive for peer in honest) and time.monotonic() < deadline:
            time.sleep(0.2)
        stopped = [peer.name for peer in honest if peer.alive or peer.popen.returncode]
        final, _ = last_states(self.lives())
        steps = honest[0].of("outer_step")
        missing = sorted(set(self.grid.modules()) - final.keys())
        return {
            "perplexity": math.inf if missing else round(self.perplexity(final), 4),
            "agreed": self._agreed(honest) and not stopped,
            "never_stepped": missing,
            "outer_steps": len(steps),
            "rows": round(statistics.fmean([event["rows"] for event in steps] or [0]), 2),
            "carried_on": sum(len(peer.of("carry_on")) for peer in honest),
            "refused_states": self.refusals(),
            "did_not_end": stopped,
            "seconds": round(steps[-1]["time_s"] - self.plan.start_s, 1) if steps else 0,
        }

    def _agreed(self, honest: list[Member]) -> bool:
        """Tell whether all stood on one state of each module before the last round.

        They leave right behind the last one, in which two steps may still be on their way.
        """
        held: dict[str, set[str]] = {}
        for peer in honest:
            mine: dict[str, dict[int, str]] = {}
            for event in peer.read():
                if event["event"] in ("outer_step", "adopt"):
                    mine.setdefault(event["module"], {})[event["version"]] = event["digest"]
            for module, digests in mine.items():
                before = [version for version in digests if version < self.chosen.rounds]
                held.setdefault(module, set()).add(digests[max(before)] if before else "")
        return all(len(digests) == 1 for digests in held.values())


def live(folder: Path, chosen: Namespace, kind: str, mean: str) -> dict[str, Any]:
    """Let one swarm live; `kind` is empty for honest peers alone."""
    world = MixedWorld(folder, chosen, kind, mean)
    with world.swarm:
        world.begin()
        return world.train()


def main() -> int:
    """Run all swarms and compare; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which kinds, in this order")
    parser.add_argument("--means", default=",".join(MEANS), help="robust, default, or both")
    parser.add_argument("--paths", type=int, default=2, help="each has four trainers (2)")
    parser.add_argument("--rounds", type=int, default=16, help="rounds of each swarm (16)")
    parser.add_argument("--steps", type=int, default=40, help="inner steps of a round (40)")
    parser.add_argument("--round-s", type=float, default=40.0, help="limit of a round (40)")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds of a step (0.02)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (0.003)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")
    chosen = parser.parse_args()
    kinds, means = chosen.kinds.split(","), chosen.means.split(",")
    if not set(kinds) <= set(KINDS) or not set(means) <= set(MEANS):
        parser.error(f"--kinds: of {', '.join(KINDS)}; --means: of {', '.join(MEANS)}")
    chosen.peers, chosen.calm = HONEST_OF_A_PATH * chosen.paths, False
    chosen.decay_steps = HONEST_OF_A_PATH * chosen.steps * chosen.rounds
    columns = ("", "mean", "perplexity", "ratio", "steps", "rows", "carried on", "s")
    report = Report("hostile peers", columns)
    report.figures = {"rounds": chosen.rounds, "steps": chosen.steps, "paths": chosen.paths}
    broken: list[str] = []
    clean: dict[str, float] = dict.fromkeys(means, math.nan)
    with scratch_folder() as scratch:
        for kind in ("", *kinds):
            for mean in means:
                name = kind or "clean"
                found = live((chosen.out or scratch) / f"{name}-{mean}", chosen, kind, mean)
                if not kind:
                    clean[mean] = found["perplexity"]
                found["ratio"] = ratio(found["perplexity"], clean[mean])
                report.figures.setdefault(name, {})[mean] = found
                keys = ("perplexity", "ratio", "outer_steps", "rows", "carried_on", "seconds")
                report.row(name, mean, *(found[key] for key in keys))
                print(f"{name} {mean}: {json.dumps(found)}", file=sys.stderr, flush=True)
                if mean == "robust" and not (found["ratio"] <= MAX_RATIO and found["agreed"]):
                    broken.append(f"{name}: {found['ratio']} of the clean perplexity")
    return report.conclude(broken, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
