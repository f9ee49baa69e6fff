"""What `dipaco-simulate` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dipaco.base.settings import ComputeSettings, Option


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(ComputeSettings):
    """What `dipaco-simulate` can be told."""

    device: Annotated[str, Option("auto, cpu, cuda or cuda:N", "D")] = "cpu"
    threads: Annotated[
        int | None,
        Option("CPU threads; must equal those of the peers (default: all)", "N", least=1),
    ] = None
    run_folder: Annotated[
        Path, Option("run folder, made by dipaco-bootstrap prepare", "RUN_DIR", positional=True)
    ]
    rounds: Annotated[int, Option("rounds to train now", "N", least=0)] = 1
    steps_per_round: Annotated[
        int | None, Option("inner steps in a round (default: what the plan says)", "K", least=1)
    ] = None
    paths: Annotated[
        str | None,
        Option(
            "train only these paths; a path given twice has two replicas (default: each once)",
            "A,B,...",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option("write a run folder with the states that every round leaves", "DIR"),
    ] = None
    dense_steps: Annotated[
        int,
        Option(
            "then train the dense baseline for S steps on all shards mixed; its rate falls to the "
            "end, unless the run has a schedule (default: none)",
            "S",
            least=0,
        ),
    ] = 0
    dense_rate: Annotated[
        float | None,
        Option("peak learning rate of the baseline (default: the plan's)", "RATE", least=1e-9),
    ] = None
    validation_sequences: Annotated[
        int | None,
        Option(
            "held-out sequences scored per path and round, at most; 0 is none (default: all)",
            "V",
            least=0,
        ),
    ] = None
    optimizer: Annotated[
        Literal["adamw", "adamw8bit"], Option("adamw or adamw8bit, as for the peers")
    ] = "adamw"
    json: Annotated[bool, Option("print one JSON object per round")] = False
