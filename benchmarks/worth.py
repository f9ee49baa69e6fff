"""What a peer is worth: the loss of any number of peers, round by round, and the speed-up.

    python benchmarks/worth.py RUN_DIR --log FILE --one-path --rounds 12,24,48
    python benchmarks/worth.py RUN_DIR --log FILE --peers 8 --rounds 4,8,12,16 \\
        --set inner.learning_rate=3e-3 outer.momentum=0 outer.learning_rate=1
    python benchmarks/worth.py --log FILE --table --at 480

RUN_DIR is a prepared run. The reference trains it in one process, with any field of the plan
changed by --set: one machine (--one-path), DiLoCo (--one-path --peers 8: replicas of one path that
has all shards) or DiPaCo (the run's grid, peers spread evenly over its paths). One line of JSON for
each scored round is appended to --log, and none is made twice. `chosen_by` is the loss of some
held-out sequences, by which a setting is chosen; `loss` that of others, which is told; nats a
token. `nats` and `targets` are those of each sequence that is told. `tokens` are those of all
peers, `bytes` what one receives, as `dipaco-bootstrap plan` has it.

--table chooses among the settings of a --row those of the least `chosen_by` in the last round that
all were scored after. It tells the row's last loss, and how many inner steps, tokens and bytes it
needs to reach the loss of one machine after --at steps; between scored rounds the loss is taken as
linear in the logarithm of steps. In brackets are the 5th and 95th percentile of the speed-up when
held-out sequences are drawn anew, the same ones for all rows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.changed_run import ChangedRun, LossyReference, read_changes

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.modules.contributions import CODECS
from dipaco.modules.layout import layout_of
from dipaco.simulator.simulated_peers import SimulatedPeer, SimulatorSettings

Figures = dict[str, Any]
AMOUNTS = ("tokens", "bytes")
OF_EACH = ("nats", "targets")
ONE_MACHINE = "one machine"
RESAMPLES = 1000


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or the arguments of a queue's line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN_DIR", help="a prepared run")
    parser.add_argument("--log", type=Path, required=True, help="where figures are appended")
    parser.add_argument("--peers", type=int, help="that train (one for each path)")
    parser.add_argument("--one-path", action="store_true", help="a path that has all shards")
    parser.add_argument("--row", help="its name in the table (one machine, DiLoCo or DiPaCo)")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="of the plan")
    parser.add_argument("--steps", type=int, default=10, help="inner steps of a round (10)")
    parser.add_argument("--rounds", default="10", help="scored after these (10)")
    parser.add_argument(
        "--decay", action="store_true", help="a run for each of them, whose cosine ends there"
    )
    parser.add_argument("--dropped", type=float, default=0.0, help="share of contributions (0)")
    parser.add_argument("--held-out-every", type=int, default=4, help="scored sequences (each 4th)")
    parser.add_argument("--table", action="store_true", help="only tell what --log has")
    parser.add_argument("--at", type=int, default=480, help="steps of one machine (480)")
    return parser.parse_args(arguments)


def measure(chosen: argparse.Namespace, others: Sequence[Figures] = ()) -> None:
    """Train and score what was asked for, unless the log or `others` have it."""
    changes = read_changes(chosen.set)
    run = _changed(chosen, changes)
    paths = run.grid(run.plan()).path_count
    peers = chosen.peers or paths
    if peers % paths:
        raise ConfigurationError(f"--peers {peers} must be a multiple of the {paths} paths")
    one_path = ONE_MACHINE if peers == 1 else "DiLoCo"
    of = {
        "row": chosen.row or (one_path if chosen.one_path else f"DiPaCo {chosen.run.name}"),
        "run": str(chosen.run),
        "one_path": chosen.one_path,
        "peers": peers,
        "steps": chosen.steps,
        "set": changes,
        "held_out_every": chosen.held_out_every,
        "decay": chosen.decay,
        "dropped": chosen.dropped,
    }
    known = [(line["of"], line["round"]) for line in (*others, *read_log(chosen.log))]
    missing = [n for n in map(int, chosen.rounds.split(",")) if (of, n) not in known]
    swarm: LossyReference | None = None
    for number in missing:
        if swarm is None or chosen.decay:
            if chosen.decay:
                # The schedule counts the steps of all replicas.
                steps = number * chosen.steps * peers // paths
                run = _changed(chosen, {**changes, "inner.decay_steps": steps})
            swarm = _swarm(chosen, run, peers, paths)
        while swarm.next_round < number:
            swarm.run_round()
        batch_tokens = swarm.plan.inner.batch_sequences * swarm.plan.model.sequence_length
        amounts = {
            "tokens": number * chosen.steps * peers * batch_tokens,
            "bytes": number * received_bytes(swarm),
        }
        line = {"of": of, "round": number, **run.scores(swarm.states), **amounts}
        line["cpu_s"] = round(time.process_time(), 1)
        print(json.dumps({n: line[n] for n in line if n not in OF_EACH}), flush=True)
        with chosen.log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _changed(chosen: argparse.Namespace, changes: Figures) -> ChangedRun:
    return ChangedRun(
        chosen.run, changes, one_path=chosen.one_path, held_out_every=chosen.held_out_every
    )


def _swarm(chosen: argparse.Namespace, run: ChangedRun, peers: int, paths: int) -> LossyReference:
    swarm = LossyReference(
        run,
        steps_per_round=chosen.steps,
        peers=[SimulatedPeer(n % paths, n // paths) for n in range(peers)],
        settings=SimulatorSettings(validation_sequences=0),
    )
    swarm.dropped = chosen.dropped
    return swarm


def received_bytes(swarm: LossyReference) -> int:
    """Return what a peer of path 0 fetches in a round: the contributions of all others who train
    one of its modules, or keep it where few train it."""
    plan, grid, total = swarm.plan, swarm.grid, 0
    for module in grid.modules_of_path(0):
        trainers = sum(peer.path in grid.paths_of_module(module) for peer in swarm.peers)
        holders = max(trainers, min(plan.rounds.copies, len(swarm.peers)))
        codec = CODECS[plan.contributions.codec]
        total += (holders - 1) * codec.file_bytes(layout_of(grid, module).size)
    return total


def read_log(file: Path) -> list[Figures]:
    """Return the figures so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(lines: Sequence[Figures], at: int) -> str:
    """Return the speed-up of each row of a log against one machine after `at` steps."""
    rows: dict[tuple[str, int], dict[str, list[Figures]]] = {}
    for line in lines:
        of = line["of"]
        row = (of["row"], of["peers"])
        parts = [f"{field} {value}" for field, value in of["set"].items()]
        parts += ["cosine"] if of["decay"] else []
        parts += [f"{of['dropped']:.0%} missed"] if of["dropped"] else []
        setting = ", ".join([*parts, f"{of['steps']} steps a round"])
        rows.setdefault(row, {}).setdefault(setting, []).append(line)
    best = {row: chosen_setting(settings) for row, settings in rows.items()}
    _, one = best.get((ONE_MACHINE, 1), ("", []))
    machine = next((line for line in one if steps_of(line) == at), None)
    if machine is None:
        raise ConfigurationError(f"the log has no one machine (--one-path) after {at} steps")
    told = [
        f"One machine after {at} steps: loss {machine['loss']:.4f}, "
        f"perplexity {math.exp(machine['loss']):.1f}.\n",
        "| | loss (steps) | steps a peer | speed-up | tokens of all | MB received | setting |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for (row, peers), (setting, curve) in best.items():
        end = max(curve, key=steps_of)
        steps = steps_to(machine["loss"], [(steps_of(line), line["loss"]) for line in curve])
        amounts = "not reached | | |"
        if steps is not None:
            tokens, received = (steps / steps_of(end) * end[name] / 1e6 for name in AMOUNTS)
            low, high = speed_ups(machine, curve, at)
            least = f"{low:.2f}" if low else f"below {at / steps_of(end):.2f}"
            amounts = f"{steps:.0f} | {at / steps:.2f} ({least} to {high:.2f})"
            amounts += f" | {tokens:.2f} M | {received:.1f}"
        loss = f"{end['loss']:.4f} ({steps_of(end)})"
        told.append(f"| {row}, {peers} | {loss} | {amounts} | {setting} |")
    return "\n".join(told)


def chosen_setting(settings: Mapping[str, list[Figures]]) -> tuple[str, list[Figures]]:
    """Return the setting of the least `chosen_by` after the last steps that all were scored at."""
    scored = set.intersection(*({steps_of(line) for line in c} for c in settings.values()))
    if not scored:
        raise ConfigurationError(f"score these after the same steps: {'; '.join(settings)}")
    common = max(scored)
    return min(
        settings.items(),
        key=lambda item: min(line["chosen_by"] for line in item[1] if steps_of(line) == common),
    )


def speed_ups(machine: Figures, curve: Sequence[Figures], at: int) -> np.ndarray:
    """Return the 5th and the 95th percentile of the speed-up, held-out sequences drawn anew."""
    steps = [steps_of(line) for line in curve]
    drawn = zip(drawn_losses(machine), *map(drawn_losses, curve), strict=True)
    found = [at / (steps_to(t, [*zip(steps, c, strict=True)]) or math.inf) for t, *c in drawn]
    return np.percentile(found, (5, 95))


def drawn_losses(line: Figures) -> np.ndarray:
    """Return the loss of each drawing, [RESAMPLES]; the same drawings for every line."""
    nats, targets = (np.array(line[name], dtype=float) for name in OF_EACH)
    chances = np.full(len(nats), 1 / len(nats))
    drawn = np.random.default_rng(0).multinomial(len(nats), chances, size=RESAMPLES)
    return (drawn @ nats) / (drawn @ targets)


def steps_to(target: float, points: Sequence[tuple[int, float]]) -> float | None:
    """Return after how many inner steps a curve of (steps, loss) reaches a loss, or None."""
    before: tuple[int, float] | None = None
    for steps, loss in sorted(points):
        if loss <= target:
            if before is None or before[1] == loss:
                return steps
            share = (before[1] - target) / (before[1] - loss)
            return float(before[0] * (steps / before[0]) ** share)
        before = (steps, loss)
    return None


def steps_of(line: Mapping[str, Any]) -> int:
    return int(line["round"]) * int(line["of"]["steps"])


def main() -> int:
    """Measure or tell; returns the exit code."""
    chosen = options()
    torch.set_num_threads(1)
    try:
        if chosen.table:
            print(table(read_log(chosen.log), chosen.at))
        elif chosen.run is None:
            raise ConfigurationError("give RUN_DIR, made by 'dipaco-bootstrap prepare', or --table")
        else:
            measure(chosen)
    except DipacoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
