"""What a volunteer can choose, and what every node of a swarm can be told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from dipaco.base.errors import ConfigurationError, nearest_name
from dipaco.base.files import folder_variable, home_folder
from dipaco.base.host_and_port import host_and_port
from dipaco.base.settings import (
    ComputeSettings,
    Option,
    RunSettings,
    Settings,
    Typed,
    check_device,
)
from dipaco.dht.addresses import (
    check_given_peer,
    check_listen_address,
    listening_everywhere,
)
from dipaco.peer.owner.pause_reasons import Hours, programs_of


def default_cache_folder() -> Path:
    """Return where a volunteer's states and blobs live when no flag says otherwise."""
    base = folder_variable("XDG_CACHE_HOME") or str(home_folder() / ".cache")
    return Path(base) / "dipaco"


def _check_address_or_word(given: str) -> None:
    """Raise ConfigurationError for a mistyped command, and AddressError for other mistakes."""
    if (word := nearest_name(given, ("pause", "resume", "status"))) is not None:
        raise ConfigurationError(
            f"'{given}' is neither a command nor an address; did you mean dipaco-peer {word}?"
        )
    check_given_peer(given)


@dataclass(frozen=True, kw_only=True)
class NodeSettings(Settings):
    """How a node is reached, and where it writes what happens: a peer or a bootstrap node."""

    group = "network and output"

    initial_peers: Annotated[
        tuple[str, ...],
        Option("address of any peer of the swarm", "ADDR", check=check_given_peer, one_by_one=True),
    ]
    port: Annotated[
        int | None,
        Option(
            "TCP port to listen on (default: 31337, or the next that is free); 0 takes any",
            "PORT",
            least=0,
            most=65535,
        ),
    ] = None
    host_maddrs: Annotated[
        tuple[str, ...],
        Option(
            "address to listen on; may be given again (default: all, /ip4/0.0.0.0/tcp/PORT and "
            "/ip6/::/tcp/PORT)",
            "ADDR",
            check=partial(check_listen_address, flag="--host-maddrs"),
            one_by_one=True,
        ),
    ] = ()
    announce_maddrs: Annotated[
        tuple[str, ...],
        Option(
            "address to tell others, for example the router's when its port is forwarded; may be "
            "given again",
            "ADDR",
            check=partial(check_listen_address, flag="--announce-maddrs"),
            one_by_one=True,
        ),
    ] = ()
    invitation: Annotated[
        str | None,
        Option(
            "your invitation, or a file with it; needed once",
            "TEXT",
            common=True,
        ),
    ] = None
    max_upload_mbps: Annotated[
        float | None,
        Option(
            "greatest upload rate in Mbit/s (default: no limit)", "MBPS", least=0.1, common=True
        ),
    ] = None
    address_file: Annotated[
        Path | None, Option("write the addresses of this node to FILE", "FILE")
    ] = None
    log_json: Annotated[Path | None, Option("append events to FILE as JSON lines", "FILE")] = None
    metrics: Annotated[
        str | None,
        Option(
            "answer Prometheus at /metrics there; a PORT alone is for this machine only, and 0 is "
            "any free one",
            "[HOST:]PORT",
            check=partial(host_and_port, "--metrics"),
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_maddrs and self.port != type(self).port:
            raise ConfigurationError("give --port or --host-maddrs, not both")

    @property
    def port_file(self) -> Path | None:
        """Where the default port is kept that others know this node by."""
        return None

    def listen_maddrs(self) -> tuple[str, ...]:
        """Return the addresses to listen on; a default port is this process's from here on."""
        if self.host_maddrs:
            return self.host_maddrs
        port = self.port
        if port is None:
            # Not before a peer starts: --help does not wait for what this imports.
            from dipaco.dht.dht_node import take_port

            port = take_port(last_time=self.port_file)
        return listening_everywhere(port)


@dataclass(frozen=True, kw_only=True)
class PeerSettings(NodeSettings, ComputeSettings, RunSettings):
    """Everything a volunteer can choose; the rest is the run's plan."""

    group = "work"

    initial_peers: Annotated[
        tuple[str, ...],
        Option(
            "address of any peer (default: the last one)",
            "ADDR",
            check=_check_address_or_word,
            common=True,
            loose=True,
            one_by_one=True,
        ),
    ] = ()
    check: Annotated[
        bool,
        Option("do not join: say whether a peer can run here", common=True),
    ] = False
    fresh: Annotated[bool, Option("forget the flags of last time, all but the address")] = False
    stay: Annotated[bool, Option("stay in this run when the operator starts its successor")] = False
    path: Annotated[
        int | None, Option("train this path only (default: the least served)", "P", least=0)
    ] = None
    texts: Annotated[
        Path | None,
        Option(
            "also train on your own documents, which stay here: jsonl, parquet or txt, or a "
            "pattern in quotes",
            "FILE",
        ),
    ] = None
    text_field: Annotated[str, Option("field of --texts that holds the text", "F")] = "text"
    only_my_texts: Annotated[
        bool, Option("train on --texts alone, and not on the texts of the run")
    ] = False
    forget_texts: Annotated[
        bool, Option("do not join: remove what was made of --texts from the cache folder")
    ] = False
    max_rounds: Annotated[int | None, Option("leave after this many rounds", "N", least=1)] = None
    optimizer: Annotated[
        Literal["adamw", "adamw8bit"],
        Option("adamw8bit keeps AdamW's state in 8 bits (bitsandbytes), a quarter of the memory"),
    ] = "adamw"
    compile_model: Annotated[
        bool, Option("do not compile the model (CUDA only)", flag="--no-compile")
    ] = True
    hours: Annotated[
        str | None, Option("train at these hours only: 22-7 or 22:30-7:15", "H-H", common=True)
    ] = None
    on_battery: Annotated[
        Literal["pause", "run"], Option("what to do on a battery", common=True)
    ] = "run"
    pause_while: Annotated[
        str | None,
        Option("pause while one of these programs runs: steam,obs", "NAMES", common=True),
    ] = None
    when_idle: Annotated[
        float | None,
        Option(
            "train when nobody used this machine for so long",
            "MINUTES",
            least=0.1,
            common=True,
        ),
    ] = None
    duty: Annotated[
        float,
        Option(
            "compute for this share of the time, in percent, and rest after each inner step",
            "PERCENT",
            least=1,
            most=100,
        ),
    ] = 100.0
    keep_awake: Annotated[
        bool,
        Option("let the machine go to sleep by itself during training", flag="--let-sleep"),
    ] = True
    nice: Annotated[
        int | None,
        Option(
            "let other programs go first: 0 to 19 (default: 10 without a GPU, 0 with one)",
            "N",
            least=0,
            most=19,
        ),
    ] = None
    vram_gb: Annotated[
        float | None,
        Option("most GPU memory to use, in GiB (default: all)", "GIB", least=0.1),
    ] = None
    max_upload_gb_month: Annotated[
        float | None,
        Option(
            "pause, and send nothing, after this many GB in a month (default: no limit)",
            "GB",
            least=0.001,
        ),
    ] = None
    name: Annotated[
        str, Option("the name that others see, at most 32 characters", "NAME", common=True)
    ] = ""
    team: Annotated[
        str, Option("team that its tokens are credited to as well (default: none)", "NAME")
    ] = ""
    cache_folder: Annotated[
        Path,
        Option(
            "folder of its files",
            "DIR",
            flag="--cache-dir",
            common=True,
        ),
    ] = field(default_factory=default_cache_folder)
    max_disk_gb: Annotated[
        float | None,
        Option(
            "most GB of disk for a run (default: what is free)",
            "GB",
            least=0.001,
            common=True,
        ),
    ] = None
    devices: Annotated[
        tuple[str, ...],
        Option("train on each of these devices, with one peer for each: cuda:0 cuda:1", "D"),
    ] = ()

    typed: Typed = field(default_factory=Typed)
    """The flags that are kept for the next start."""

    @property
    def port_file(self) -> Path:
        """Where the default port is kept that others know this node by."""
        return self.cache_folder / "port"

    def __post_init__(self) -> None:
        super().__post_init__()
        for device in self.devices:
            check_device("--devices", device)
        if self.hours is not None:
            Hours.parse(self.hours)
        if self.pause_while is not None:
            programs_of(self.pause_while)
        if self.only_my_texts and self.texts is None:
            raise ConfigurationError("--only-my-texts needs texts: give --texts FILE")
        for flag, said in (("--name", self.name), ("--team", self.team)):
            if not re.fullmatch(r"[ -Z\\^-~]{0,32}", said):
                raise ConfigurationError(
                    f"{flag} '{said[:64]}' must be at most 32 plain characters, without brackets"
                )
