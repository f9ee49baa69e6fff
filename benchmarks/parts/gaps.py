"""What lines of `worth.py` say beside each other: speed-ups, and gaps against length.

A line has the figures of one setting after a round. Its `nats` and `targets` are those of each
held-out part: brackets are the 5th and 95th percentile when parts are drawn anew, the same ones
for all lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError

Figures = dict[str, Any]
ONE_MACHINE = "one machine"
RESAMPLES = 1000
INTERVAL = (5, 95)


def steps_of(line: Mapping[str, Any]) -> int:
    """Return the inner steps of each peer."""
    return int(line["round"]) * int(line["of"]["steps"])


def drawn_losses(line: Figures) -> np.ndarray:
    """Return the loss of each drawing, [RESAMPLES]."""
    nats, targets = (np.array(line[name], dtype=float) for name in ("nats", "targets"))
    chances = np.full(len(nats), 1 / len(nats))
    drawn = np.random.default_rng(0).multinomial(len(nats), chances, size=RESAMPLES)
    return (drawn @ nats) / (drawn @ targets)


def steps_to(target: float, points: Sequence[tuple[int, float]]) -> float | None:
    """Return after how many inner steps a curve of (steps, loss) reaches a loss, or None.

    Between scored rounds the loss is taken as linear in the logarithm of steps.
    """
    before: tuple[int, float] | None = None
    for steps, loss in sorted(points):
        if loss <= target:
            if before is None or before[1] == loss:
                return steps
            share = (before[1] - target) / (before[1] - loss)
            return float(before[0] * (steps / before[0]) ** share)
        before = (steps, loss)
    return None


def speed_ups(machine: Figures, curve: Sequence[Figures], at: int) -> tuple[float, float]:
    """Return the 5th and the 95th percentile of the speed-up against a machine after `at` steps."""
    steps = [steps_of(line) for line in curve]
    drawn = zip(drawn_losses(machine), *map(drawn_losses, curve), strict=True)
    found = [at / (steps_to(t, [*zip(steps, c, strict=True)]) or math.inf) for t, *c in drawn]
    low, high = np.percentile(found, INTERVAL).tolist()
    return low, high


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


def speed_up_rows(lines: Sequence[Figures], at: int) -> list[Figures]:
    """Return the rows of a log: of each name and number of peers those of its best setting.

    What has reached the loss of one machine after `at` steps has the steps, the speed-up, and the
    tokens of all and the bytes that a peer received until then.
    """
    named: dict[str, dict[str, list[Figures]]] = {}
    for line in lines:
        of = line["of"]
        parts = [f"{field} {value}" for field, value in of["set"].items()]
        parts += ["cosine"] if of["decay"] else []
        parts += [f"{of['dropped']:.0%} missed"] if of["dropped"] else []
        parts += ["bf16"] if not of["exact"] else []
        parts += [f"moves every {of['move_every']} rounds"] if of["move_every"] else []
        setting = ", ".join([*parts, f"{of['steps']} steps a round"])
        name = f"{of['row']}, {of['peers']}"
        named.setdefault(name, {}).setdefault(setting, []).append(line)
    best = {name: chosen_setting(settings) for name, settings in named.items()}
    _, one = best.get(f"{ONE_MACHINE}, 1", ("", []))
    machine = next((line for line in one if steps_of(line) == at), None)
    if machine is None:
        raise ConfigurationError(f"the log has no one machine (--one-path) after {at} steps")
    rows = []
    for name, (setting, curve) in best.items():
        end = max(curve, key=steps_of)
        found = {f"loss after {steps_of(end)} steps": end["loss"], "setting": setting}
        found |= {f"perplexity, {d}": p for d, p in end.get("perplexities", {}).items()}
        steps = steps_to(machine["loss"], [(steps_of(line), line["loss"]) for line in curve])
        if steps is not None:
            low, high = speed_ups(machine, curve, at)
            found["steps of each"] = round(steps)
            found["speed-up"] = {"value": round(at / steps, 2), "high": round(high, 2)}
            # A drawing that does not reach the loss has no speed-up.
            found["speed-up"] |= {"low": round(low, 2)} if low else {}
            until = steps / steps_of(end)
            found["tokens of all, M"] = round(until * end["tokens"] / 1e6, 2)
            found["MB received"] = round(until * end["bytes"] / 1e6, 1)
        for figure, value in found.items():
            several = value if isinstance(value, dict) else {"value": value}
            rows.append({"of": name, "figure": figure, **several})
    return rows


def gap_rows(lines: Sequence[Figures], run: str, equal: str) -> list[Figures]:
    """Return the gap between a run's grid and one machine at each length that both have.

    With `equal` tokens it is how much more perplexity the paths have, with `equal` steps how much
    more the one machine has. Of several settings that of the least `chosen_by` counts. The last
    row says after how many tokens of all the gap was closed for good, where it was.
    """
    one, paths = (_by_length(lines, run, equal, grid=grid) for grid in (False, True))
    lengths = sorted(one.keys() & paths.keys())
    if not lengths:
        told = (f"{sorted(found)} {equal}" for found in (paths, one))
        raise ConfigurationError(f"{run} has {next(told)}, one machine {next(told)}: none equal")
    pairs = [(one[length], paths[length]) for length in lengths]
    if any(a["targets"] != b["targets"] for a, b in pairs):
        raise ConfigurationError(
            "one machine and the paths were scored on different texts; give both the same "
            "--held-out-every, and runs of the same tokenizer and held-out texts"
        )
    sign = 1.0 if equal == "tokens" else -1.0
    gaps = np.expm1([sign * (b["loss"] - a["loss"]) for a, b in pairs])
    drawn = np.expm1([sign * (drawn_losses(b) - drawn_losses(a)) for a, b in pairs]).T
    rows = []
    for n, (a, b) in enumerate(pairs):
        of = f"{b['tokens']:,} tokens"
        ends = np.percentile(drawn[:, n], INTERVAL).tolist()
        low, high = (round(100 * end, 1) for end in ends)
        gap = {"value": round(100 * float(gaps[n]), 1), "low": low, "high": high}
        rows += [
            {"of": of, "figure": "loss, one machine", "value": a["loss"]},
            {"of": of, "figure": "loss, paths", "value": b["loss"]},
            {"of": of, "figure": f"gap at equal {equal}, %", **gap},
        ]
    tokens = np.array([b["tokens"] for _, b in pairs], dtype=float)
    if gaps[-1] <= 0 < gaps.max():
        # A percentile between a number and infinity would be no number.
        ends = [closed_after(tokens, each) for each in drawn]
        low, high = np.percentile(ends, INTERVAL, method="higher").tolist()
        found = {"value": closed_after(tokens, gaps), "low": low, "high": high}
        told = {key: round(end / 1e6, 1) for key, end in found.items() if math.isfinite(end)}
        rows.append({"of": "where the gap closes", "figure": "tokens of all, M", **told})
    return rows


def _by_length(lines: Sequence[Figures], run: str, equal: str, *, grid: bool) -> dict[int, Figures]:
    best: dict[int, Figures] = {}
    for line in lines:
        of = line["of"]
        is_one_machine = of["one_path"] and of["peers"] == 1
        if Path(of["run"]).name != run or (of["one_path"] if grid else not is_one_machine):
            continue
        length = line["tokens"] if equal == "tokens" else steps_of(line)
        if length not in best or line["chosen_by"] < best[length]["chosen_by"]:
            best[length] = line
    return best


def closed_after(lengths: np.ndarray, gaps: np.ndarray) -> float:
    """Return the length at which a curve falls to 0 for the last time: minus infinity if it never
    was above, infinity if it is above at the end. In between it is linear in the logarithm."""
    above = np.flatnonzero(gaps > 0)
    if not len(above):
        return -math.inf
    last = int(above[-1])
    if last == len(gaps) - 1:
        return math.inf
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    return float(lengths[last] * (lengths[last + 1] / lengths[last]) ** share)
