"""Follow a peer or a simulation into TensorBoard, trackio or Weights & Biases.

    dipaco-peer --initial-peers ADDR --log-json events.jsonl
    python examples/monitoring/follow_events.py events.jsonl --to tensorboard --out runs
    tensorboard --logdir runs

It reads the file from its beginning and goes on with what is written to it; `--once` stops at the
end. Each event becomes a few numbers, at the count of inner steps that came before it, or the round
of a simulation. TensorBoard needs no network. Each tracker is a package of its own: pip install
tensorboard, trackio or wandb.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

LOOK_S = 0.5
# A line that is no event: longer than any.
MAX_LINE_BYTES = 2**20
SIMULATED = ("tokens", "train_loss", "perplexity", "bytes", "seconds")

Scalars = dict[str, float]
Write = Callable[[Scalars, int, float], None]
"""Takes numbers by name, the step, and Unix seconds."""


def scalars_of(event: Mapping[str, Any]) -> Scalars:
    """Return what an event is worth to a tracker: numbers by name; none for most events."""
    kind = event["event"]
    if kind == "inner":
        return {
            "train/loss": event["loss"],
            "train/tokens_per_s": event["tokens_per_s"],
            "train/step_seconds": event["seconds"],
            "train/path": event["path"],
        }
    if kind == "validation":
        return {f"validation/path_{event['path']}": event["loss"]}
    if kind == "outer_step":
        level = level_of(event["module"])
        return {
            f"outer_step/{level}/peers": len(event["group"]),
            f"outer_step/{level}/seconds_after_boundary": event["seconds_after_boundary"],
            f"outer_step/{level}/version": event["version"],
        }
    if kind == "carry_on":
        return {f"carry_on/{level_of(event['module'])}": event["round"]}
    if kind == "round":
        return {"train/round": event["round"]}
    if kind == "simulated_round":
        known = {name: event[name] for name in SIMULATED if event[name] is not None}
        return {f"simulated/{name}": value for name, value in known.items()}
    return {}


def level_of(module: str) -> str:
    """Return the level of a module: `L0` of `L0.E3`, and `private` of `P17`."""
    return module.partition(".")[0] if "." in module else "private"


def events_of(path: Path, *, once: bool) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, and those that are appended; half a line is not read yet."""
    with path.open("rb") as file:
        rest = b""
        while True:
            data = file.read(MAX_LINE_BYTES)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and "event" in event:
                    yield event
            if data:
                continue
            if once:
                return
            time.sleep(LOOK_S)


def follow(events: Iterator[Mapping[str, Any]], write: Write) -> int:
    """Hand the numbers of all events on; returns how many inner steps there were."""
    steps = 0
    for event in events:
        steps += event["event"] == "inner"
        try:
            scalars = scalars_of(event)
        except (KeyError, TypeError):
            # Of another version of the peer.
            continue
        if scalars:
            step = event["round"] if event["event"] == "simulated_round" else steps
            write(scalars, step, float(event.get("time_s", time.time())))
    return steps


# -- trackers


def tensorboard(out: str, name: str) -> tuple[Write, Callable[[], None]]:
    """Write files below `out`, for `tensorboard --logdir`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(Path(out) / name), flush_secs=10)

    def write(scalars: Scalars, step: int, time_s: float) -> None:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step, walltime=time_s)

    return write, writer.close


def trackio(out: str, name: str) -> tuple[Write, Callable[[], None]]:
    """Log to trackio's local store; `trackio show` opens its page."""
    import trackio

    trackio.init(project=out, name=name)
    return lambda scalars, step, time_s: trackio.log(scalars, step=step), trackio.finish


def wandb(out: str, name: str) -> tuple[Write, Callable[[], None]]:
    """Log to Weights & Biases; with WANDB_MODE=offline to files alone."""
    import wandb

    run = wandb.init(project=out, name=name)
    return lambda scalars, step, time_s: run.log(scalars, step=step), run.finish


TRACKERS = {"tensorboard": tensorboard, "trackio": trackio, "wandb": wandb}


def main(words: list[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="what --log-json writes")
    parser.add_argument("--to", choices=TRACKERS, default="tensorboard", help="the tracker")
    parser.add_argument("--out", default="dipaco", help="folder of TensorBoard, or the project")
    parser.add_argument("--name", default="", help="of this peer (default: the file's name)")
    parser.add_argument("--once", action="store_true", help="stop at the end of the file")
    given = parser.parse_args(words)
    if not given.file.is_file():
        print(f"error: {given.file} is not there; start with --log-json", file=sys.stderr)
        return 2
    try:
        write, close = TRACKERS[given.to](given.out, given.name or given.file.stem)
    except ImportError:
        print(f"error: {given.to} is not installed: pip install {given.to}", file=sys.stderr)
        return 2
    try:
        steps = follow(events_of(given.file, once=given.once), write)
        print(f"{steps} inner steps of {given.file} are in {given.to}")
    except KeyboardInterrupt:
        pass
    finally:
        close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
