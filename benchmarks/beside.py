"""Ours beside what people would use in its place, taking turns on one machine.

    python benchmarks/beside.py --rows adapters-bf16 [--json]

Each rival is installed from the package index, pinned, into a folder of its own (--rivals), and
not into this environment. Ours and theirs wait in processes of one thread, and work in turns of a
few seconds. A ratio is ours to theirs, turn by turn: the median, with the quarters. The processor
seconds of a turn vary less than its seconds where other programs run.

* adapters-float32, adapters-bf16: a step of LoRA on SmolLM2-135M beside PEFT in a plain loop.
  --checkpoint is the folder that examples/smollm2/make_checkpoint.py makes; it is made if there is
  none.
* training-float32, training-bf16: one model of 7 M values by our inner loop, by transformers'
  Trainer, and a GPT of about as many in a loop as nanoGPT's.
* serving-small, serving-large: greedy text for one client and for eight, by HTTP: `dipaco-serve`
  with either of its engines beside llama.cpp's own server, on a path of 6 M and of 116 M values.
  Ours with llama.cpp needs its wheel in this environment (`pip install '.[llamacpp]'`).
* profile: where the time of one client goes in the engine of ours, from the matrix products of a
  token up to HTTP.
* averaging: four processes and 20 M values: an outer round of ours, beside a step of Hivemind's
  `DecentralizedAverager`. Needs root and iproute2, for a network namespace for each.
* loss: the same, one of four is killed between boundary and step, or in the all-reduce; how long
  the others need, and how long it takes until one that comes later is in a group.
* calm, churn: four processes train the model of examples/tiny, prepared in --run, for eight rounds
  of ten seconds: our real peers, Hivemind's `Optimizer` with local updates, torchft's `DiLoCo`. In
  churn one is killed, and another joins.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from parts.common import HERE, Report, build_parser
from rivals import adapters, averaging, local_updates, serving, training

DEFAULT_FOLDER = Path.home() / ".cache" / "dipaco-rivals"
ROWS = (
    "adapters-float32",
    "adapters-bf16",
    "training-float32",
    "training-bf16",
    "serving-small",
    "serving-large",
    "profile",
    "averaging",
    "loss",
    "calm",
    "churn",
)

LOCAL = ("calm", "churn")


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)} (all)")
    parser.add_argument("--rivals", type=Path, default=DEFAULT_FOLDER, help="where they are")
    parser.add_argument("--checkpoint", type=Path, help="SmolLM2-135M (in the folder of --rivals)")
    parser.add_argument("--turns", type=int, default=6, help="of each (6)")
    parser.add_argument("--run", type=Path, help="examples/tiny, prepared (calm, churn)")
    parser.add_argument("--times", type=int, default=1, help="whole swarms of each kind (1)")
    chosen = parser.parse_args()
    chosen.rows = chosen.rows.split(",")
    if set(LOCAL) & set(chosen.rows) and chosen.run is None:
        parser.error("calm and churn need --run, a folder that dipaco-bootstrap prepare made")
    unknown = sorted(set(chosen.rows) - set(ROWS))
    if unknown:
        parser.error(f"--rows has no {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return chosen


def checkpoint(chosen: argparse.Namespace) -> Path:
    """Return the folder of SmolLM2, made if there is none."""
    folder: Path = chosen.checkpoint or chosen.rivals / "smollm2"
    if not (folder / "config.json").is_file():
        make = HERE.parent / "examples" / "smollm2" / "make_checkpoint.py"
        subprocess.run([sys.executable, str(make), str(folder)], check=True, stdout=sys.stderr)
    return folder


def main() -> int:
    chosen = options()
    torch.set_num_threads(1)
    chosen.rivals.mkdir(parents=True, exist_ok=True)
    report = Report("beside what people would use", ("", "of", "ours to theirs", "ours", "theirs"))
    for row in chosen.rows:
        kind, _, detail = row.partition("-")
        if kind == "adapters":
            adapters.compare(report, checkpoint(chosen), detail, chosen.rivals, chosen.turns)
        elif kind == "training":
            training.compare(report, detail, chosen.rivals, chosen.turns)
        elif row == "profile":
            serving.profile(report, chosen.rivals, chosen.turns)
        elif row == "averaging":
            averaging.compare(report, chosen.times)
        elif row in LOCAL:
            local_updates.compare(report, row, chosen.run, chosen.rivals)
        elif row == "loss":
            averaging.compare_loss(report)
        elif kind == "serving":
            for engine in serving.ENGINES:
                serving.compare(report, engine, detail, chosen.rivals, chosen.turns)
    report.print(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
