"""The options that the inference tools share, and what follows from them.

PyTorch is imported where it is needed: `--help` and mistakes should not wait for it.
"""

from __future__ import annotations

import contextlib
import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.base.running import say
from dipaco.base.settings import ComputeSettings, Option, RunSettings, Settings
from dipaco.dht.addresses import check_given_peer
from dipaco.peer.node.given_address import known_addresses

if TYPE_CHECKING:
    import torch

    from dipaco.protocol.plan import RunPlan
    from dipaco.routing.documents.corpus import CorpusConfig

    from .sources import StateSource


@dataclass(frozen=True, kw_only=True)
class SourceOptions(RunSettings):
    """Where the model comes from."""

    group = "where the model is"

    initial_peers: Annotated[
        tuple[str, ...],
        Option(
            "address of any peer of a live swarm; may be given again (default: those that the "
            "peer of this machine knows)",
            "ADDR",
            check=check_given_peer,
            one_by_one=True,
        ),
    ] = ()
    state_folder: Annotated[
        Path | None,
        Option(
            "a run on disk: the --out of dipaco-simulate, a run folder or a peer's cache",
            "DIR",
            flag="--state-dir",
        ),
    ] = None
    cache_folder: Annotated[
        Path | None,
        Option(
            "folder for fetched files (default: a temporary one); given alone, it is "
            "the cache of a peer, which is only read",
            "DIR",
            flag="--cache-dir",
        ),
    ] = None
    allow_genesis: Annotated[bool, Option("if nobody holds a module, take its genesis state")] = (
        False
    )

    def open_source(self, *, follow: bool = False) -> StateSource:
        """Open the source of states, perhaps to `follow` what becomes of it. Raises
        ConfigurationError, and what reading it raises."""
        from .sources import SourceSettings, open_source

        initial_peers = self.initial_peers
        if not (initial_peers or self.state_folder or self.cache_folder):
            with contextlib.suppress(ConfigurationError):
                initial_peers = known_addresses()
                say(f"reading the swarm of this machine's peer, through {initial_peers[0]}")
        return open_source(
            state_folder=self.state_folder,
            initial_peers=initial_peers,
            run=self.run,
            cache_folder=self.cache_folder,
            settings=SourceSettings(
                self.allow_genesis, follow, context_length=getattr(self, "context", None)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class InferenceSettings(SourceOptions, ComputeSettings):
    """Where the model comes from, and where it computes."""

    device: Annotated[str, Option("auto, cpu, cuda or cuda:N", "D")] = "cpu"

    def prepare_process(self) -> torch.device:
        """Set threads and return the device. Raises ConfigurationError."""
        from dipaco.modules.device import choose_device, prepare_process

        prepare_process(self.threads)
        return choose_device(self.device)[0]


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(InferenceSettings):
    """How much of a prompt and its answer is read."""

    context: Annotated[
        int | None,
        Option(
            "tokens that prompt and answer may have together, up to what the base of the run is "
            "made for (default: those of a training sequence)",
            "N",
            least=8,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CorpusSettings(Settings):
    """Which documents are read."""

    group = "documents"

    data: Annotated[
        tuple[str, ...],
        Option("documents: jsonl, parquet or txt files or patterns, also compressed", "FILE"),
    ]
    text_field: Annotated[str, Option("field of the text", "F")] = "text"
    label_field: Annotated[str | None, Option("field of the label, such as domain", "F")] = None

    def corpus(self) -> CorpusConfig:
        """Return the documents of `--data`. Raises ConfigurationError and CorpusError."""
        from dipaco.protocol.config import parse_config
        from dipaco.routing.documents.corpus import CorpusConfig

        for pattern in self.data:
            if not Path(pattern).is_file() and not glob.glob(pattern, recursive=True):
                raise CorpusError(f"--data '{pattern}' matches no file; check its name")
        values = {
            "train": self.data,
            "text_field": self.text_field,
            "label_field": self.label_field,
        }
        return parse_config(CorpusConfig, values, "--data")

    def check_labels(self, plan: RunPlan) -> None:
        """Raise ConfigurationError if the run routes by a label and no field holds it."""
        from dipaco.routing.routers.kinds import ROUTER_KINDS

        kind = ROUTER_KINDS.get(plan.routing.kind)
        if kind is not None and kind.needs_labels and not self.label_field:
            raise ConfigurationError(
                "this run routes documents by a label of the data; name the field of --data that "
                "holds it with --label-field F"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How a text is continued."""

    group = "the text"

    max_tokens: Annotated[int, Option("generate at most N tokens", "N", least=0)] = 128
    temperature: Annotated[
        float, Option("0 always takes the likeliest token", "T", least=0, most=100)
    ] = 0.8
    top_k: Annotated[int, Option("choose among the K likeliest tokens; 0 is all", "K", least=0)] = (
        50
    )
    top_p: Annotated[
        float,
        Option("choose among the likeliest tokens whose chances add up to P; 1 is all", "P"),
    ] = 1.0
    seed: Annotated[
        int, Option("the same seed chooses the same tokens", "N", least=0, most=2**63 - 1)
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"--top-p {self.top_p} must be above 0 and at most 1")


def check_paths(option: str, count: int, source: StateSource) -> None:
    """Raise ConfigurationError if a run has fewer paths than `option` asks for."""
    if count > source.grid.path_count:
        raise ConfigurationError(
            f"{option} {count}: this run has {source.grid.path_count} paths; {option} 2 is usual"
        )
