"""Attacks 1 to 6 of docs/results/attacks.md on a swarm of real processes, beside a clean one.

    python benchmarks/insiders.py [--json] [--attacks 1,2,3,4,5,6] [--rounds 12] [--out DIR]

Four honest `dipaco-peer` processes and a bootstrap node on loopback train a tiny run of two paths
with fixed steps: all share one module, and each path has one of its own. One more peer on path 0
is an insider (`parts/insiders.py`). For attack 2 it is as honest as the others, and 20 nodes that
were never admitted stand next to the key of the shared module in the DHT and name each other alone
(`dht_liars.py`), before any peer comes. In the clean swarm the fifth peer is honest too.

Told are the held-out loss of what the honest peers hold after the last round, in nats; how many
forged states they adopted; the shares of their rounds, of all their modules, that brought no step
(*without*); the share of their own contributions that are in the steps of the shared module
(*kept*), and of the one that is in the fewest (*least*). Exit code 1 when a forged state was
adopted, the honest peers do not agree, or the loss is more than --greatest-gap above the clean one.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from churn import START_S
from dht_liars import grind, lie
from hostile import SEEN_S, MixedWorld
from parts.common import HERE, Report, build_parser, scratch_folder
from parts.insiders import INSIDERS
from support.swarms.swarm import Member

HONEST, LIARS, TRIES = 4, 20, 400
CLEAN, BARE_NODES = "clean", "2"
ATTACKS = (CLEAN, *sorted((*INSIDERS, BARE_NODES)))
SHARED = "L0.E0"
_BECOME = """
import sys
sys.path.insert(0, {here!r})
from parts.insiders import become
become({attack!r}, {notes!r})
"""


class InsiderWorld(MixedWorld):
    """Four honest peers, and one that may be an insider."""

    def __init__(self, folder: Path, chosen: Namespace, attack: str) -> None:
        super().__init__(folder, chosen, attack, "default")
        self.honest, self.notes = HONEST, folder / "forged.txt"
        self.liars: Any = None
        self.began_s = 0.0

    def begin(self) -> None:
        """Start all, and wait until they train."""
        self.entry = self.swarm.start_bootstrap().address(START_S)
        if self.kind == BARE_NODES:
            self._start_liars()
        peers = [self.start(slot) for slot in range(HONEST)]
        self.hostile = [self._start_fifth()]
        self.swarm.wait([*peers, *self.hostile], "training", timeout_s=START_S)
        time.sleep(SEEN_S)
        self.go.touch()
        self.began_s = time.time()
        self.say("all train")

    def _start_fifth(self) -> Member:
        before = ""
        if self.kind in INSIDERS:
            before = _BECOME.format(here=str(HERE), attack=self.kind, notes=str(self.notes))
        return self._start(HONEST, "fifth", before)

    def _start_liars(self) -> None:
        keys = [k.private_bytes_raw() for k in grind(LIARS, self.plan.run_id, SHARED, TRIES)]
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        arguments = keys, [self.entry], self.folder, ready
        self.liars = context.Process(target=lie, args=arguments, daemon=False)
        self.liars.start()
        assert ready.wait(START_S), "the liars did not start"

    def end(self) -> None:
        """End what is not a member of the swarm."""
        if self.liars is not None:
            self.liars.terminate()
            self.liars.join(10)

    def train(self) -> dict[str, Any]:
        """Wait until the honest peers have done their rounds, and return what they came to."""
        found = super().train()
        honest = list(self.slots.values())
        forged = set(self.notes.read_text().split()) if self.notes.exists() else set()
        taken = [
            e["digest"] for peer in honest for k in ("outer_step", "adopt") for e in peer.of(k)
        ]
        rounds = HONEST * len(self.modules_per_level) * self.chosen.rounds
        steps = {
            event["version"]: event["group"]
            for peer in honest
            for event in peer.of("outer_step")
            if event["module"] == SHARED
        }
        ids = [peer.peer_id for peer in honest]
        shares = [sum(i in group for group in steps.values()) / self.chosen.rounds for i in ids]
        ended_s = max((e["time_s"] for peer in honest for e in peer.of("outer_step")), default=0.0)
        return {
            **found,
            "loss": round(math.log(found["perplexity"]), 4),
            "forged_made": len(forged),
            "forged_adopted": sum(digest in forged for digest in taken),
            "without": round(found["carried_on"] / rounds, 4),
            "kept": round(sum(shares) / HONEST, 4),
            "least": round(min(shares), 4),
            "seconds": round(ended_s - self.began_s, 1),
        }


def live(folder: Path, chosen: Namespace, attack: str) -> dict[str, Any]:
    """Let one swarm live."""
    world = InsiderWorld(folder, chosen, "" if attack == CLEAN else attack)
    try:
        with world.swarm:
            world.begin()
            return world.train()
    finally:
        world.end()


def main() -> int:
    """Run all swarms and compare; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--attacks", default=",".join(ATTACKS[1:]), help="which, in this order")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each swarm (12)")
    parser.add_argument("--steps", type=int, default=20, help="inner steps of a round (20)")
    parser.add_argument("--round-s", type=float, default=24.0, help="limit of a round (24)")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds of a step (0.02)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (0.003)")
    parser.add_argument("--greatest-gap", type=float, default=0.1, help="of losses, nats (0.1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")
    chosen = parser.parse_args()
    attacks = [name for name in chosen.attacks.split(",") if name]
    if not set(attacks) <= set(ATTACKS):
        parser.error(f"--attacks: of {', '.join(ATTACKS[1:])}")
    chosen.paths, chosen.peers, chosen.calm, chosen.decay_steps = 2, HONEST, False, 0
    keys = ("loss", "forged_adopted", "without", "kept", "least", "outer_steps", "seconds")
    report = Report("insiders", ("attack", *keys))
    report.figures = {"rounds": chosen.rounds, "steps": chosen.steps}
    broken: list[str] = []
    clean = math.nan
    with scratch_folder() as scratch:
        for attack in (CLEAN, *attacks):
            found = live((chosen.out or scratch) / f"attack-{attack}", chosen, attack)
            clean = found["loss"] if attack == CLEAN else clean
            found["gap"] = round(found["loss"] - clean, 4)
            report.figures[attack] = found
            report.row(attack, *(found[key] for key in keys))
            print(f"{attack}: {json.dumps(found)}", file=sys.stderr, flush=True)
            is_worse = not found["gap"] <= chosen.greatest_gap
            if is_worse or found["forged_adopted"] or not found["agreed"]:
                broken.append(f"attack {attack}: see its row; agreed: {found['agreed']}")
    return report.conclude(broken, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
