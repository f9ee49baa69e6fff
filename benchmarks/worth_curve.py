"""Whether what paths lack, or gain, against one machine grows or shrinks with the training.

    python benchmarks/worth_curve.py LOG... --run 2x4 --at 0.05
    python benchmarks/worth_curve.py LOG... --run 2x4 --equal steps
    python benchmarks/worth_curve.py LOG... --run h128-2x2 --one-machine-of h128-2x4 --json

LOG are logs of worth.py or of worth_queue.py. --run names the run folder whose grid is told, as it
was written there, without the folders above it. With --equal tokens (the default) it is compared
with one machine that trained on as many tokens: the gap is how much more perplexity the paths have.
With --equal steps each peer took as many steps as the one machine, and the gap is how much more
perplexity the one machine has. Of several settings that of the least `chosen_by` counts.

The gaps are fitted by `gap = factor * tokens ** -exponent`, tokens of all peers: with an exponent
above 0 the gap shrinks. Brackets have the 5th and 95th percentile when held-out sequences are
drawn anew, the same ones for all lengths. The second bracket and that of --at, the tokens after
which the gap would be so small, also have every point scattered as the points lie about the law.
No power law reaches a gap of nothing. Where paths are ahead in the end, what is told instead is
after how many tokens the gap was closed, on a line between the two nearest points in the logarithm
of tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import worth
from parts.power_law import PowerLaws, fit, scattered

from dipaco.base.errors import ConfigurationError, DipacoError

INTERVAL = (5, 95)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="files of figures")
    parser.add_argument("--run", required=True, metavar="FOLDER", help="whose grid is told")
    parser.add_argument("--one-machine-of", metavar="FOLDER", help="another run of one machine")
    parser.add_argument("--equal", choices=("tokens", "steps"), default="tokens", help="(tokens)")
    parser.add_argument("--at", type=float, default=0.05, help="the gap to reach (0.05)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    return parser.parse_args()


def best_lines(lines: Sequence[worth.Figures], run: str, *, grid: bool) -> dict[int, worth.Figures]:
    """Return the best setting's line of one machine, or of a run's grid, by inner steps."""
    best: dict[int, worth.Figures] = {}
    for line in lines:
        of, steps = line["of"], worth.steps_of(line)
        is_one_machine = of["one_path"] and of["peers"] == 1
        if Path(of["run"]).name != run or (of["one_path"] if grid else not is_one_machine):
            continue
        if steps not in best or line["chosen_by"] < best[steps]["chosen_by"]:
            best[steps] = line
    return best


def pairs(
    one: Mapping[int, worth.Figures], paths: Mapping[int, worth.Figures], equal: str
) -> list[tuple[worth.Figures, worth.Figures]]:
    """Return one machine's line and the paths' at each length that both have, shortest first.

    Raises ConfigurationError if they were not scored on the same sequences.
    """
    if equal == "tokens":
        one = {line["tokens"]: line for line in one.values()}
        paths = {line["tokens"]: line for line in paths.values()}
    found = [(one[length], paths[length]) for length in sorted(one.keys() & paths.keys())]
    if any(a["targets"] != b["targets"] for a, b in found):
        raise ConfigurationError(
            "one machine and the paths were scored on different sequences; give both the same "
            "--held-out-every, and runs of the same tokenizer and held-out texts"
        )
    return found


def gaps_of(
    found: Sequence[tuple[worth.Figures, worth.Figures]], equal: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gap at each length [N], and those of each drawing of held-out sequences [R, N]."""
    sign = 1.0 if equal == "tokens" else -1.0
    told = [sign * (paths["loss"] - one["loss"]) for one, paths in found]
    drawn = [sign * (worth.drawn_losses(b) - worth.drawn_losses(a)) for a, b in found]
    return np.expm1(told), np.expm1(np.stack(drawn, axis=1))


def law_of(lengths: np.ndarray, gaps: np.ndarray, drawn: np.ndarray, at: float) -> dict[str, Any]:
    """Return the law of a curve and what it says of the length at which the gap is `at`.

    `length_at` and the end of its interval are None where there is no such length.
    """
    law = fit(lengths, gaps)
    by_sequences = fit(lengths, drawn)
    whole = fit(lengths, scattered(lengths, drawn, float(law.scatter)))
    each = -np.diff(np.log(gaps)) / np.diff(np.log(lengths)) if (gaps > 0).all() else []
    return {
        "factor": float(np.exp(law.log_factors)),
        "exponent": float(law.exponents),
        "exponent_interval": _interval(by_sequences.exponents),
        "exponent_interval_with_scatter": _interval(whole.exponents),
        "exponents_between": [float(value) for value in each],
        "scatter": float(law.scatter),
        "at": at,
        "length_at": _finite(float(law.lengths_at(at))),
        "length_at_interval": _lengths_interval(whole, at),
    }


def _interval(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.percentile(values, INTERVAL)]


def _lengths_interval(laws: PowerLaws, at: float) -> list[float | None]:
    # A percentile between a number and infinity would be no number.
    lengths = np.percentile(laws.lengths_at(at), INTERVAL, method="higher")
    return [_finite(float(value)) for value in lengths]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def curve(lines: Sequence[worth.Figures], chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the points and, of three or more, the law."""
    one = best_lines(lines, chosen.one_machine_of or chosen.run, grid=False)
    paths = best_lines(lines, chosen.run, grid=True)
    found = pairs(one, paths, chosen.equal)
    if not found:
        raise ConfigurationError(
            f"no length of {chosen.run} ({sorted(paths)} steps) has one machine of equal "
            f"{chosen.equal} ({sorted(one)} steps)"
        )
    gaps, drawn = gaps_of(found, chosen.equal)
    lengths = np.array([paths["tokens"] for _, paths in found], dtype=float)
    low, high = np.percentile(drawn, INTERVAL, axis=0)
    points = [
        {
            "tokens": b["tokens"],
            "steps": worth.steps_of(b),
            "one_machine": a["loss"],
            "paths": b["loss"],
            "gap": float(gap),
            "gap_interval": [float(low[n]), float(high[n])],
        }
        for n, ((a, b), gap) in enumerate(zip(found, gaps, strict=True))
    ]
    is_closed = bool(gaps[-1] <= 0)
    law = law_of(lengths, gaps, drawn, chosen.at) if len(found) > 2 and not is_closed else None
    closed = closed_after(lengths, gaps, drawn) if is_closed else None
    figures = {"run": chosen.run, "equal": chosen.equal, "points": points}
    return {**figures, "law": law, "closed_after": closed}


def closed_after(lengths: np.ndarray, gaps: np.ndarray, drawn: np.ndarray) -> dict[str, Any]:
    """Return after how many tokens the gap was closed for good, and the interval.

    A length is None where the gap was never open, and where it is open at the end.
    """
    low, high = np.percentile(
        [_closed(lengths, each) for each in drawn], INTERVAL, method="higher"
    ).tolist()
    return {
        "length": _finite(_closed(lengths, gaps)),
        "length_interval": [_finite(low), _finite(high)],
    }


def _closed(lengths: np.ndarray, gaps: np.ndarray) -> float:
    """Return the length at which a curve falls to 0 for the last time: minus infinity if it never
    was above, infinity if it is above at the end."""
    above = np.flatnonzero(gaps > 0)
    if not len(above):
        return -np.inf
    last = above[-1]
    if last == len(gaps) - 1:
        return np.inf
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    return float(lengths[last] * (lengths[last + 1] / lengths[last]) ** share)


def told(figures: Mapping[str, Any]) -> str:
    """Return the table of a curve, and its law in words."""
    lines = [
        "| tokens of all | steps of each | one machine, loss | paths, loss | gap |",
        "|---:|---:|---:|---:|---:|",
    ]
    for point in figures["points"]:
        low, high = point["gap_interval"]
        lines.append(
            f"| {point['tokens'] / 1e6:.2f} M | {point['steps']} | {point['one_machine']:.3f} | "
            f"{point['paths']:.3f} | {point['gap']:.1%} ({low:.1%} to {high:.1%}) |"
        )
    law, closed = figures["law"], figures["closed_after"]
    if closed is not None:
        return "\n".join([*lines, "", _told_closed(closed)])
    if law is None:
        return "\n".join([*lines, "", "A law needs three lengths."])
    low, high = law["exponent_interval"]
    least, most = law["exponent_interval_with_scatter"]
    between = ", ".join(f"{value:.2f}" for value in law["exponents_between"])
    return "\n".join([
        *lines,
        "",
        f"exponent {law['exponent']:.3f} ({low:.3f} to {high:.3f}; with the points scattered "
        f"{least:.3f} to {most:.3f}), between neighbours {between}",
        f"points lie {law['scatter']:.1%} about the law",
        _told_end(law),
    ])  # fmt: skip


def _told_closed(closed: Mapping[str, Any]) -> str:
    if closed["length"] is None:
        return "there is no gap at any length"
    low, high = (f"{end / 1e6:.1f} M" if end else "no end" for end in closed["length_interval"])
    return f"the gap is closed after {closed['length'] / 1e6:.1f} M tokens ({low} to {high})"


def _told_end(law: Mapping[str, Any]) -> str:
    low, high = law["length_at_interval"]
    if law["length_at"] is None or low is None:
        return f"a gap of {law['at']:.0%} is not within reach"
    interval = f"{low / 1e6:.1f} M to {high / 1e6:.1f} M" if high else f"{low / 1e6:.1f} M or more"
    if high is None:
        return f"a gap of {law['at']:.0%} is not within reach: {interval}, the interval has no end"
    return f"a gap of {law['at']:.0%} after {law['length_at'] / 1e6:.1f} M tokens ({interval})"


def main() -> int:
    """Tell the curve; returns the exit code."""
    chosen = options()
    lines = [line for log in chosen.logs for line in worth.read_log(log)]
    try:
        figures = curve(lines, chosen)
    except DipacoError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(figures) if chosen.json else told(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
