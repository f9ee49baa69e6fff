"""The options of the commands of `dipaco-bootstrap`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dipaco.base.errors import ConfigurationError
from dipaco.base.settings import ComputeSettings, Option, Settings
from dipaco.dht.addresses import check_given_peer
from dipaco.peer.peer_settings import NodeSettings

_RUN_FOLDER = Option("a prepared run folder", "DIR", positional=True)
_OPERATOR_KEY = Option("the key that signed the run (default: DIR/operator.pem)", "FILE")
CHANGES = Option(
    "use this value instead of the one in RUN.toml: outer.momentum=0.9", "KEY=VALUE", flag="--set"
)
_RUN_TOML = Option("the file that describes the run", "RUN.toml", positional=True)


@dataclass(frozen=True, kw_only=True)
class InitSettings(Settings):
    """The texts for which a RUN.toml is written, and where it is written."""

    files: Annotated[
        tuple[str, ...],
        Option(
            "files or folders of texts or chats: JSON Lines, JSON, Parquet, Arrow, plain text",
            "FILE",
            positional=True,
        ),
    ]
    base: Annotated[
        str | None,
        Option(
            "train adapters over this public model: the folder of a checkpoint, or the name of "
            "one in the cache of the Hugging Face Hub",
            "OWNER/NAME",
        ),
    ] = None
    peers: Annotated[int, Option("peers that you expect", "N", least=1, most=10**6)] = 4
    out: Annotated[Path, Option("the file to write", "FILE")] = Path("RUN.toml")


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(ComputeSettings):
    """How a run is prepared, and where."""

    run_toml: Annotated[Path | None, _RUN_TOML] = None
    changes: Annotated[tuple[str, ...], CHANGES] = ()
    out: Annotated[Path, Option("the run folder to make", "DIR")]
    start_in_s: Annotated[
        float | None,
        Option(
            "seconds from now until round 0 begins (default: 0); a run that is signed already "
            "needs --replace",
            "S",
            least=0,
            most=1e9,
        ),
    ] = None
    operator_key: Annotated[
        Path | None,
        Option(
            "the key that signs the manifest, made if missing (default: DIR/operator.pem)", "FILE"
        ),
    ] = None
    admission: Annotated[
        Literal["open", "invitation"] | None,
        Option(
            "who counts in the run: everybody, or whom you invite (default: as in this folder or "
            "in the run before, else open)"
        ),
    ] = None
    predecessor: Annotated[
        Path | None,
        Option(
            "continue the run in this folder, with its tokenizer and its trained modules; the "
            "folder of prepare, of dipaco-simulate --out, or a peer's folder of that run",
            "RUN",
            flag="--from",
        ),
    ] = None
    add_path: Annotated[
        tuple[str, ...],
        Option(
            "with --from, in place of RUN.toml: add a path for the documents of each file to the "
            "run, and leave everything else as it is",
            "NEW.jsonl",
        ),
    ] = ()
    initial_peers: Annotated[
        tuple[str, ...],
        Option(
            "with --from: an address of the run's live swarm, which gives its newest modules; may "
            "be given again",
            "ADDR",
            check=check_given_peer,
            one_by_one=True,
        ),
    ] = ()
    workers: Annotated[
        int,
        Option(
            "processes that tokenise, route and score; one for each core", "N", least=1, most=1024
        ),
    ] = 1
    dask: Annotated[
        str | None,
        Option(
            "a Dask cluster in place of --workers; it must see --out under the same name", "ADDRESS"
        ),
    ] = None
    allow_genesis: Annotated[
        bool,
        Option("with --from: a module without a state starts from its genesis state"),
    ] = False
    replace: Annotated[
        bool, Option("give up another run that is signed in this folder already")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dask is not None and self.workers != 1:
            raise ConfigurationError(
                "--workers starts processes here, but --dask has its own workers; give one of them"
            )
        if self.add_path and self.predecessor is None:
            raise ConfigurationError(
                "--add-path adds a path to a finished run; give the folder of that run with --from"
            )
        if self.add_path and self.run_toml is not None:
            raise ConfigurationError(
                f"{self.run_toml} and --add-path: everything but the new path stays as in the run "
                f"of --from; leave RUN.toml out, and change settings with --set"
            )
        if not self.add_path and self.run_toml is None:
            raise ConfigurationError("give RUN.toml, or --from RUN with --add-path NEW.jsonl")
        if self.initial_peers and self.predecessor is None:
            raise ConfigurationError(
                "--initial-peers is for a successor of a live run; give its folder with --from"
            )


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """The run whose figures are computed, and how they are shown."""

    run_toml: Annotated[Path, _RUN_TOML]
    changes: Annotated[tuple[str, ...], CHANGES] = ()
    corpus_tokens: Annotated[
        float | None,
        Option(
            "tokens of the training documents, for the sizes of shards: 160e9 for C4 (default: "
            "estimated from the first documents of files)",
            "N",
            least=1,
            most=1e18,
        ),
    ] = None
    peers: Annotated[
        int | None,
        Option("peers that you expect (default: one for each path)", "N", least=1, most=10**6),
    ] = None
    line_mbps: Annotated[
        float, Option("slowest line of a peer, up and down, in Mbit/s", "MBPS", least=0.01)
    ] = 20.0
    json: Annotated[bool, Option("print one JSON object and no tables")] = False


@dataclass(frozen=True, kw_only=True)
class InviteSettings(Settings):
    """The options of `dipaco-bootstrap invite`."""

    folder: Annotated[Path, _RUN_FOLDER]
    peers: Annotated[
        int,
        Option("how many peers it lets in at a time", "N", least=1, most=10_000),
    ]
    expires_days: Annotated[
        float | None,
        Option(
            "days after which it no longer counts (default: no limit)",
            "DAYS",
            least=0,
            most=36_500,
        ),
    ] = None
    name: Annotated[
        str,
        Option(
            "who it is for, in your own list DIR/invitations.jsonl (default: the run's name)",
            "TEXT",
        ),
    ] = ""
    operator_key: Annotated[Path | None, _OPERATOR_KEY] = None


@dataclass(frozen=True, kw_only=True)
class RevokeSettings(Settings):
    """Which invitations of a run are ended."""

    folder: Annotated[Path, _RUN_FOLDER]
    invitations: Annotated[
        tuple[str, ...],
        Option("ids of invitations to end, from DIR/invitations.jsonl or dipaco-status", "ID"),
    ]
    operator_key: Annotated[Path | None, _OPERATOR_KEY] = None


@dataclass(frozen=True, kw_only=True)
class ServeSettings(NodeSettings):
    """What a bootstrap node serves, and where it is reached."""

    folder: Annotated[Path, _RUN_FOLDER]
    initial_peers: Annotated[
        tuple[str, ...],
        Option(
            "another bootstrap node or peer of the same swarm; may be given again",
            "ADDR",
            check=check_given_peer,
            one_by_one=True,
        ),
    ] = ()
    port: Annotated[
        int,
        Option("TCP port to listen on; 0 takes a free one", "PORT", least=0, most=65535),
    ] = 31337
