"""One machine, DiLoCo with eight and 2x4 at ten million parameters a path, on one GPU.

    python benchmarks/gpu_kit/size.py RUN_DIR --out FOLDER [--seconds 540] [--tokens 300000000]
    python benchmarks/gpu_kit/size.py RUN_DIR --out FOLDER --rehearse      # on the CPU

RUN_DIR is what `prepare.sh` has prepared. First one machine trains a base for a twentieth of the
tokens; all arms begin with it. Each arm then trains on --tokens of all its peers, one after the
other in this process, with a cosine to its end, and is scored four times on the way: a line of
FOLDER/size.jsonl each time, so that a cut loses only what comes after it. How fast the card is is
seen in the base: if the arms would not end within --seconds, all get as many tokens fewer. Texts
come several times; the log says how many tokens an epoch has. `python benchmarks/worth.py --log
FOLDER/size.jsonl --table` and `--gap` tell what came of it.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import safetensors.torch
import torch
import worth

from dipaco.modules.compose import load_path
from dipaco.modules.transformer import PathModel, initialise
from dipaco.routing.run_folder import RunFolder

PEERS, SCORED = 8, 4
ROUND_STEPS, REHEARSED_STEPS = 50, 5
BASE_SHARE, MACHINE_RATE, PATHS_RATE = 0.05, 3e-3, 6e-3
# Of the seconds that are left after the base, so many are planned: scoring takes time too.
PLANNED = 0.85


def options() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="made by prepare.sh")
    parser.add_argument("--out", type=Path, required=True, help="a folder for size.jsonl")
    parser.add_argument("--tokens", type=float, default=3e8, help="of all peers of an arm (3e8)")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it (540)")
    parser.add_argument("--rehearse", action="store_true", help="a hundredth, on the CPU")
    chosen = parser.parse_args()
    if not (chosen.rehearse or torch.cuda.is_available()):
        parser.error("PyTorch sees no CUDA device; --rehearse tries it on the CPU")
    return chosen


class Kit:
    """The arms, and the base that all begin with."""

    def __init__(self, chosen: Namespace) -> None:
        self.chosen, self.began_s = chosen, time.monotonic()
        self.run = RunFolder(chosen.run)
        self.plan = self.run.plan()
        self.log = chosen.out / "size.jsonl"
        self.tokens = chosen.tokens / 100 if chosen.rehearse else chosen.tokens
        self.steps = REHEARSED_STEPS if chosen.rehearse else self.steps
        self.batch = self.plan.inner.batch_sequences * self.plan.model.sequence_length

    def say(self, text: str) -> None:
        """Tell what happens, and when."""
        print(f"{time.monotonic() - self.began_s:6.1f} s {text}", flush=True)

    def options(
        self, name: str, rounds: list[int], rate: float, base: str, *more: str
    ) -> Namespace:
        """Return the options of worth.py for an arm whose cosine ends with the last round."""
        changes = {
            "inner.learning_rate": rate,
            "inner.decay_steps": rounds[-1] * self.steps,
            "blobs.base": base,
        }
        return worth.options([
            str(self.chosen.run), "--log", str(self.log), "--row", name, "--bf16",
            "--device", "cpu" if self.chosen.rehearse else "cuda",
            "--steps", str(self.steps), "--rounds", ",".join(map(str, rounds)),
            "--set", *(f"{field}={json.dumps(value)}" for field, value in changes.items()), *more,
        ])  # fmt: skip

    def add_base(self, model: PathModel) -> str:
        """Keep a model as a base of the run, and return its hash."""
        parameters = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
        return self.run.blobs.add_bytes(safetensors.torch.save(parameters))

    def train_base(self) -> tuple[str, float]:
        """Train a base on one machine; returns its hash, and the tokens a second."""
        model = PathModel(self.plan.model)
        initialise(model, self.plan.seed)
        rounds = max(2, round(BASE_SHARE * self.tokens / self.batch / self.steps))
        chosen = self.options("base", [rounds], MACHINE_RATE, self.add_base(model), "--one-path")
        run = worth.changed_run(chosen)
        swarm = worth.new_swarm(chosen, run, 1)
        # The first round compiles.
        swarm.run_round()
        began_s = time.monotonic()
        while swarm.next_round < rounds:
            swarm.run_round()
        rate = self.batch * self.steps * (rounds - 1) / (time.monotonic() - began_s)
        load_path(model, run.grid(run.plan()), 0, swarm.states)
        self.say(f"base of {rounds * self.steps} steps, {rate:,.0f} tokens a second")
        return self.add_base(model), rate

    def train(self) -> None:
        """Train all arms."""
        self.chosen.out.mkdir(parents=True, exist_ok=True)
        base, rate = self.train_base()
        left_s = self.chosen.seconds - (time.monotonic() - self.began_s)
        tokens = self.tokens
        if not self.chosen.rehearse:
            tokens = min(tokens, PLANNED * left_s * rate / 3)
        rounds = max(SCORED, round(tokens / self.batch / self.steps / PEERS))
        epoch = sum(shard.train_sequences for shard in self.run.shard_index(self.plan).paths)
        self.say(
            f"{rounds * self.steps * PEERS * self.batch:,} tokens for each arm; an epoch has "
            f"{epoch * self.plan.model.sequence_length:,}"
        )

        def scored(last: int) -> list[int]:
            return sorted({max(1, last * part // SCORED) for part in range(1, SCORED + 1)})

        eight = ("--peers", str(PEERS))
        for name, last, inner_rate, more in (
            ("DiPaCo 2x4", rounds, PATHS_RATE, ()),
            ("one machine", rounds * PEERS, MACHINE_RATE, ("--one-path",)),
            ("DiLoCo", rounds, PATHS_RATE, ("--one-path", *eight)),
        ):
            worth.measure(self.options(name, scored(last), inner_rate, base, *more))
            self.say(f"{name} is done")


if __name__ == "__main__":
    torch.set_num_threads(1)
    Kit(options()).train()
