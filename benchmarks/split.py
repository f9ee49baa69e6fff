"""A swarm in two parts for ten rounds, and one again: what is kept, and what it costs.

    python benchmarks/split.py [--json]

Six `dipaco-peer` processes train a tiny run of four paths (2x2) by the clock, four of them and the
bootstrap node in one network namespace, two in another; the cable between is cut for --rounds
rounds and mended. Needs root and iproute2. Told are: the steps of each side meanwhile, seconds
and rounds from the mending until all peers hold one state of every module, how much of the work of
both sides is in the final states (counted as in
`churn.py`), and their held-out perplexity beside that of the same peers without a split, when
their states count as many tokens. Exit code 1 when the peers do not agree in the end, or a peer
ended by itself.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from churn import DECAY_HELP, START_S, World, figures_of, run_world
from parts.common import Report, build_parser, ratio, scratch_folder, steady_peer
from support.swarms.swarm import BIN, Member
from support.wire.split_network import SplitNetwork, can_split, split_network

LARGE_SIDE, SMALL_SIDE = 4, 2
BEFORE_ROUNDS = 3
HEALING_ROUNDS = 20
"""After which a swarm that has not agreed is given up."""


def main() -> int:
    """Run both and compare; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the split (10)")
    parser.add_argument("--round-s", type=float, default=12.0, help="seconds of a round (12)")
    parser.add_argument("--step-s", type=float, default=0.15, help="seconds of a step (0.15)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (0.003)")
    parser.add_argument("--after-rounds", type=int, default=3, help="rounds once healed (3)")
    parser.add_argument("--decay-steps", type=int, default=0, help=DECAY_HELP)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-calm", action="store_true", help="no run without a split beside it")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the logs here")
    chosen = parser.parse_args()
    if not can_split():
        parser.error("network namespaces need root and iproute2")
    chosen.peers, chosen.closed, chosen.calm = LARGE_SIDE + SMALL_SIDE, 0, False
    chosen.bootstrap_dies, chosen.elders, chosen.clocks_off_s = False, 0, 0.0
    with scratch_folder() as scratch:
        folder = chosen.out or scratch
        with split_network() as network:
            world = SplitWorld(folder / "split", chosen, network)
            with world.swarm:
                world.live()
            counts = world.count()
        found = {**figures_of(world, counts), **world.found}
        beside: dict[str, Any] = {}
        if not chosen.no_calm:
            _, beside = run_world(folder / "calm", chosen, [], counts.final_tokens)
    report = Report("split and healed", ("", "split", "unsplit"))
    for key, value in found.items():
        report.row(key, value, beside.get(key, ""))
    report.figures = {"rounds": chosen.rounds, "round_s": chosen.round_s, "split": found}
    if beside:
        report.figures["unsplit"] = beside
        by_calm = ratio(found["perplexity"], beside["perplexity"])
        report.figures["perplexity_ratio"] = by_calm
        report.notes.append(f"perplexity {by_calm:.4f} times that of the unsplit run")
    report.print(chosen.json)
    return int(not found["agreed"] or found["ended_by_themselves"] > 0)


class SplitWorld(World):
    """The peers on both sides of a cable."""

    def __init__(self, folder: Path, chosen: Namespace, network: SplitNetwork) -> None:
        super().__init__(folder, chosen)
        self.network = network
        self.found: dict[str, Any] = {}

    def start(self, slot: int, name: str | None = None) -> Member:
        """Start a peer on its side; nobody comes back here, so `name` is not used."""
        name = f"peer{slot}"
        side = int(slot >= LARGE_SIDE)
        peer = self.swarm._add(
            name,
            [
                *self.network.prefix(side), *steady_peer(self.chosen.step_s),
                "--initial-peers", self.entry, "--threads", "1", "--nice", "0",
                "--host-maddrs", f"/ip4/{self.network.addresses[side]}/tcp/0",
                "--cache-dir", str(self.folder / f"{name}-cache"),
            ],
        )  # fmt: skip
        self.slots[slot] = peer
        self.endings[peer] = "stayed"
        return peer

    def live(self) -> None:
        """Train together, apart, and together again."""
        bootstrap = self.swarm._add(
            "bootstrap",
            [
                *self.network.prefix(0), str(BIN / "dipaco-bootstrap"), "serve",
                str(self.run.path), "--host-maddrs", f"/ip4/{self.network.addresses[0]}/tcp/0",
            ],
        )  # fmt: skip
        self.entry = bootstrap.address(START_S)
        peers = [self.start(slot) for slot in range(self.chosen.peers)]
        self.swarm.wait(peers, "training", timeout_s=START_S)
        self.swarm.wait(peers, "outer_step", timeout_s=START_S)
        round_s = self.chosen.round_s
        self._sleep_until(time.monotonic() + BEFORE_ROUNDS * round_s)
        self.network.cut()
        cut_s = time.time()
        self.say("cut")
        self._sleep_until(time.monotonic() + self.chosen.rounds * round_s)
        self.network.mend()
        mended_s = time.time()
        self.say("mended")
        agreed_s = self._wait_until_agreed(mended_s)
        self._sleep_until(time.monotonic() + self.chosen.after_rounds * round_s)
        self.settle()
        self.found = {
            "outer_steps_while_split": self._outer_steps(cut_s, mended_s),
            "agreed_after_s": round(agreed_s - mended_s, 1),
            "agreed_after_rounds": round((agreed_s - mended_s) / round_s, 2),
        }

    def _wait_until_agreed(self, mended_s: float) -> float:
        """Return when all held one state of each module, having met since the mending."""
        deadline = mended_s + HEALING_ROUNDS * self.chosen.round_s
        while time.time() < deadline:
            self.watch()
            if self._is_at_rest() and self._has_met(mended_s):
                break
            time.sleep(0.2)
        self.say("agreed")
        return time.time()

    def _has_met(self, since_s: float) -> bool:
        """Tell whether some group had members of both sides."""
        sides = {peer.peer_id: side for side, peers in self._sides().items() for peer in peers}
        return any(
            len({sides.get(member) for member in event["group"]}) > 1
            for peers in self._sides().values()
            for peer in peers
            for event in peer.of("outer_step")
            if event["time_s"] > since_s
        )

    def _sides(self) -> dict[str, list[Member]]:
        peers = [self.slots[slot] for slot in sorted(self.slots)]
        return {"four": peers[:LARGE_SIDE], "two": peers[LARGE_SIDE:]}

    def _outer_steps(self, from_s: float, to_s: float) -> dict[str, int]:
        """Return how many versions each side made of modules while it was alone."""
        return {
            side: len(
                {
                    (event["module"], event["digest"])
                    for peer in peers
                    for event in peer.of("outer_step")
                    if from_s < event["time_s"] < to_s
                }
            )
            for side, peers in self._sides().items()
        }


if __name__ == "__main__":
    sys.exit(main())
