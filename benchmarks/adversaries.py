"""Peers that lie, flood or attack among real ones, beside a clean swarm.

    python benchmarks/adversaries.py [--kinds flipped,forker,5] [--rounds 12] [--out DIR]
    python benchmarks/adversaries.py --kinds flipped --mean mean

Real `dipaco-peer` processes and a bootstrap node on loopback train a tiny run of two paths with
fixed steps, so that a busy machine changes nothing: all share one module, and each path has one of
its own. Beside --honest peers there are

* two liars, one on each path (`parts/liars.py`): thousand, flipped, tokens, garbage, silent,
  forker, flood; by default with the mean `trimmed_mean`, which needs three contributions;
* three strangers, identities that were never admitted and tell, ask, get and put without a pause;
* or one insider on path 0 (`parts/insiders.py`), with the numbers of docs/results/attacks.md: 1,
  3, 4, `4 all`, 5, 6. For attack 2 twenty nodes that were never admitted stand next to the key of
  the shared module in the DHT and name each other alone (`parts/bare_nodes.py`).

Told are the held-out loss of what the honest peers hold after the last round, in nats, and its
perplexity beside that of a clean swarm; how many forged states they adopted; the share of their
rounds, of all their modules, that brought no step; the share of their contributions that are in the
steps of the shared module, and of the one that is in the fewest; the processor seconds of an honest
peer until it ends. Behind the first step a newcomer comes to path 0: told is after how many seconds
it trains, and after how many it is in a step of the shared module. Exit code 1 when a
forged state was adopted, the honest peers do not agree or do not end, the newcomer trains not
within a minute, an attacker fails, or a perplexity is more than --most times the clean one.

Attacks in thousands of simulated histories: `swarm_faults.py --attack`.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from parts.bare_nodes import bare_nodes
from parts.common import (
    HERE,
    Report,
    build_parser,
    cpu_seconds,
    ratio,
    scratch_folder,
    steady_peer,
)
from parts.insiders import INSIDERS
from parts.liars import LIARS
from parts.lives import last_states
from parts.world import START_S, World, add_options
from support.swarms.swarm import Member

STRANGERS, BARE_NODES = "strangers", "2"
KINDS = (*LIARS, STRANGERS, *sorted((*INSIDERS, BARE_NODES)))
SHARED, PATHS = "L0.E0", 2
STRANGER_COUNT, BARE_NODE_COUNT = 3, 20
NEWCOMER_LIMIT_S = 60.0
MEANS = ("mean", "trimmed_mean")
SEEN_S = 17.0
"""Claims are read by then: records are renewed every quarter of the limit of a round."""
_BECOME = """
import sys
sys.path[:0] = {path!r}
from parts.{module} import become
become(*{given!r})
"""
_STRANGER = """
import sys
sys.path[:0] = {path!r}
from parts.liars import be_a_stranger
be_a_stranger()
"""
_PATH = [str(HERE), str(HERE.parent / "tests")]


def options() -> Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, in this order (all)")
    parser.add_argument("--mean", choices=MEANS, help="of the run (trimmed_mean for liars)")
    parser.add_argument("--honest", type=int, default=6, help="peers that are (6)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each swarm (12)")
    parser.add_argument("--steps", type=int, default=20, help="inner steps of a round (20)")
    parser.add_argument("--most", type=float, default=1.1, help="of perplexities (1.1)")
    add_options(parser, round_s=40.0, step_s=0.02)
    chosen = parser.parse_args()
    chosen.kinds = [name for name in chosen.kinds.split(",") if name]
    if not set(chosen.kinds) <= set(KINDS):
        parser.error(f"--kinds: of {', '.join(KINDS)}")
    return chosen


class AdversaryWorld(World):
    """Honest peers in the first slots, and behind them others; only the honest are looked at.

    :param kind: of the others; empty for none
    """

    modules_per_level = (1, PATHS)

    def __init__(self, folder: Path, chosen: Namespace, kind: str, mean: str) -> None:
        self.kind, self.mean, self.inner_steps = kind, mean, chosen.steps
        super().__init__(folder, chosen)
        self.notes, self.go = folder / "forged.txt", folder / "go"

    def _make_run(self, folder: Path, **_: Any) -> Any:
        # The rate falls to a tenth to the end, so that perplexities can be compared.
        steps = self.chosen.honest // PATHS * self.chosen.steps * self.chosen.rounds
        robust = {"combine": "trimmed_mean", "trim_share": 0.25}
        return super()._make_run(
            folder,
            inner={"decay_steps": steps},
            rounds={"gather_s": 4.0, "grace_s": 1.0},
            contributions=robust if self.mean == "trimmed_mean" else {},
        )

    def program(self, name: str) -> tuple[str, ...]:
        """Return what runs as a peer: another one becomes what it is first."""
        before = ""
        if name.startswith("other") and self.kind in LIARS:
            before = _BECOME.format(path=_PATH, module="liars", given=(self.kind,))
        elif name.startswith("other") and self.kind in INSIDERS:
            given = (self.kind, str(self.notes))
            before = _BECOME.format(path=_PATH, module="insiders", given=given)
        return steady_peer(self.chosen.step_s, self.go, before)

    def live(self) -> dict[str, Any]:
        """Let all train, and return what came of the honest ones."""
        chosen = self.chosen
        self.entry = self.start_bootstrap("bootstrap", self.run.path).address(START_S)
        with contextlib.ExitStack() as stack:
            if self.kind == BARE_NODES:
                run_id = self.plan.run_id
                nodes = (BARE_NODE_COUNT, run_id, SHARED, self.entry, self.folder)
                stack.enter_context(bare_nodes(*nodes))
            honest = [self._start(slot, f"peer{slot}") for slot in range(chosen.honest)]
            count = PATHS if self.kind in LIARS else int(self.kind in INSIDERS)
            others = [self._start(chosen.honest + n, f"other{n}") for n in range(count)]
            stranger = (sys.executable, "-c", _STRANGER.format(path=_PATH))
            for n in range(STRANGER_COUNT if self.kind == STRANGERS else 0):
                self.swarm.start_peer(self.entry, name=f"stranger{n}", program=stranger)
            self.swarm.wait([*honest, *others], "training", timeout_s=START_S)
            time.sleep(SEEN_S)
            self.go.touch()
            self.began_s = time.time()
            self.say("all train")
            deadline = time.monotonic() + START_S + chosen.rounds * chosen.round_s
            used_s: dict[str, float] = {}
            newcomer, came_s = None, 0.0
            while any(peer.alive for peer in honest) and time.monotonic() < deadline:
                time.sleep(0.5)
                used_s |= {peer.name: cpu_seconds(peer.popen.pid) for peer in honest if peer.alive}
                if newcomer is None and honest[0].of("outer_step"):
                    newcomer, came_s = self._start(chosen.honest + count, "newcomer"), time.time()
        found = self.found(honest)
        texts = {peer.name: peer.output.read_text(errors="replace") for peer in others}
        failed = [name for name, text in texts.items() if "Traceback" in text]
        found["attackers that failed"] = ", ".join(failed) or None
        if newcomer is not None:
            found |= self._came_in(newcomer, came_s)
        return {**found, "processor seconds": round(statistics.mean(used_s.values()), 1)}

    def _came_in(self, newcomer: Member, came_s: float) -> dict[str, Any]:
        """Return how long a newcomer took that was started at a time."""
        trains = newcomer.of("training")
        me = newcomer.peer_id if trains else ""
        steps = [e for e in newcomer.of("outer_step") if e["module"] == SHARED and me in e["group"]]
        return {
            f"newcomer {what}, s": round(events[0]["time_s"] - came_s, 1) if events else None
            for what, events in (("trains", trains), ("in a step", steps))
        }

    def _start(self, slot: int, name: str) -> Member:
        told = ("--path", str(slot % PATHS), "--max-rounds", str(self.chosen.rounds))
        return self.start(slot, name, more=told)

    def found(self, honest: list[Member]) -> dict[str, Any]:
        """Return what the honest peers came to."""
        for peer in self.endings.keys() - set(honest):
            del self.endings[peer]
        rounds = self.chosen.rounds
        for peer in honest:
            self.note_id(peer)
        stopped = [peer.name for peer in honest if peer.alive or peer.popen.returncode]
        final, _ = last_states(self.lives())
        never = sorted(set(self.grid.modules()) - final.keys())
        forged = set(self.notes.read_text().split()) if self.notes.exists() else set()
        taken = [e for peer in honest for k in ("outer_step", "adopt") for e in peer.of(k)]
        steps = [event for peer in honest for event in peer.of("outer_step")]
        groups = {e["version"]: e["group"] for e in steps if e["module"] == SHARED}
        shares = [sum(self.ids[p] in g for g in groups.values()) / rounds for p in honest]
        without = sum(len(peer.of("carry_on")) for peer in honest)
        perplexity = math.inf if never else self.perplexity(final)
        return {
            "perplexity": round(perplexity, 4),
            "loss": round(math.log(perplexity), 4),
            "agreed": self._agreed(honest) and not stopped,
            "never stepped": ", ".join(never) or None,
            "did not end": ", ".join(stopped) or None,
            "forged states made": len(forged) or None,
            "forged states adopted": sum(event["digest"] in forged for event in taken),
            "rounds without a step, %": round(
                100 * without / (len(honest) * rounds * len(self.modules_per_level)), 1
            ),
            "kept, %": round(100 * sum(shares) / len(honest), 1),
            "least kept, %": round(100 * min(shares), 1),
            "refused states": self.refusals(),
            "seconds": round(max((e["time_s"] for e in steps), default=0.0) - self.began_s, 1),
        }

    def _agreed(self, honest: list[Member]) -> bool:
        """Tell whether all stood on one state of each module, at the last version that all had.

        They leave right behind the last round, in which a step may still be on its way.
        """
        held: dict[str, list[dict[int, str]]] = {}
        for peer in honest:
            mine: dict[str, dict[int, str]] = {}
            for event in peer.read():
                if event["event"] in ("outer_step", "adopt"):
                    mine.setdefault(event["module"], {})[event["version"]] = event["digest"]
            for module, digests in mine.items():
                held.setdefault(module, []).append(digests)
        for digests in held.values():
            common = set.intersection(*map(set, digests))
            if not common or len({of[max(common)] for of in digests}) > 1:
                return False
        return True


def main() -> int:
    """Run all swarms and compare; returns the exit code."""
    chosen = options()
    told = ("honest", "rounds", "steps", "seed")
    report = Report("adversaries", **{name: vars(chosen)[name] for name in told})
    clean: dict[str, float] = {}
    broken = []
    with scratch_folder() as scratch:
        for kind in chosen.kinds:
            mean = chosen.mean or ("trimmed_mean" if kind in LIARS else "mean")
            for each in ("", kind) if mean not in clean else (kind,):
                folder = (chosen.out or scratch) / f"{each or 'clean'}-{mean}"
                world = AdversaryWorld(folder, chosen, each, mean)
                try:
                    with world.swarm:
                        found = world.live()
                except AssertionError as error:
                    broken.append(f"{each or 'clean'}, {mean}: {str(error).partition(chr(10))[0]}")
                    continue
                clean.setdefault(mean, found["perplexity"])
                found["of the clean perplexity"] = ratio(
                    found["perplexity"], clean.get(mean, math.nan)
                )
                name = f"{each or 'clean'}, {mean}"
                report.add(name, found)
                print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
                is_worse = not found["of the clean perplexity"] <= chosen.most
                is_late = (found.get("newcomer trains, s") or math.inf) > NEWCOMER_LIMIT_S
                is_bad = is_worse or is_late or found["attackers that failed"]
                if is_bad or found["forged states adopted"] or not found["agreed"]:
                    broken.append(f"{name}: see its figures")
    return report.conclude(chosen, broken)


if __name__ == "__main__":
    sys.exit(main())
