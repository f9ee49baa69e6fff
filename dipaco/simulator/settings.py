"""The settings of a simulation: who trains what, and how it is carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dipaco.base.errors import ConfigurationError
from dipaco.base.settings import ComputeSettings, Option

if TYPE_CHECKING:
    import torch

CHART_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class CommandSettings(ComputeSettings):
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
    first_round: Annotated[
        int,
        Option(
            "number of the first round, to compare with a swarm that began in round R",
            "R",
            least=0,
        ),
    ] = 0
    paths: Annotated[
        str | None,
        Option(
            "train only these paths; a path given twice has two replicas (default: each once)",
            "A,B,...",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            "write a run folder with the trained states, and what --resume needs beside them",
            "DIR",
        ),
    ] = None
    resume: Annotated[
        bool, Option("continue from the last round that an earlier call saved in --out")
    ] = False
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
    log_json: Annotated[
        Path | None, Option("write these objects to FILE; --resume appends to it", "FILE")
    ] = None
    plot: Annotated[
        Path | None,
        Option("draw losses and perplexities of the rounds: FILE.png, .svg or .pdf", "FILE"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None and self.plot.suffix not in CHART_SUFFIXES:
            raise ConfigurationError(f"--plot {self.plot}: name a .png, .svg or .pdf file")
        if self.resume and self.out is None:
            raise ConfigurationError("--resume needs the --out DIR of the simulation to go on with")


@dataclass(frozen=True)
class SimulatorSettings:
    """How a simulation is carried out. Changes no result, except where a field says so."""

    device: torch.device | str = "cpu"
    """Where paths are trained and scored. Another type of device has other bits."""
    optimizer: str = "adamw"
    """"adamw" or "adamw8bit", as the peers are told. They have different bits."""
    validation_sequences: int | None = None
    """Held-out sequences to score per path after each round, at most; None is all, 0 none."""
    exact: bool = True
    """Whether a CPU computes what peers of a run with fixed steps do. Otherwise as those of a run
    by the clock: in bf16, if it is made for that."""


@dataclass(frozen=True)
class SimulatedPeer:
    """Peers and paths. Several peers on one path are its replicas, numbered from 0 (the lead)."""

    path: int
    replica: int = 0
    name: str = ""
    """Peer ID in the swarm that is simulated; decides the order of summation among replicas."""

    @property
    def peer_id(self) -> str:
        """The name in contribution tables, unique within a swarm."""
        return self.name or f"{self.path}/{self.replica:06d}"


def checked_peers(
    peers: Sequence[SimulatedPeer] | None, path_count: int
) -> tuple[SimulatedPeer, ...]:
    """Return the peers in canonical order, by default one per path.

    Raises ConfigurationError for peers that cannot be.
    """
    if peers is None:
        return tuple(SimulatedPeer(path) for path in range(path_count))
    if not peers:
        raise ConfigurationError("a simulation needs at least one path to train")
    for peer in peers:
        if not 0 <= peer.path < path_count:
            raise ConfigurationError(
                f"path {peer.path} is not one of the {path_count} paths of this run; "
                f"give 0 to {path_count - 1}"
            )
    if len({(peer.path, peer.replica) for peer in peers}) < len(peers):
        raise ConfigurationError("a path is given twice; its replicas must differ in number")
    if len({peer.peer_id for peer in peers}) < len(peers):
        raise ConfigurationError("two simulated peers have the same name")
    return tuple(sorted(peers, key=lambda peer: (peer.path, peer.peer_id)))
