"""`dipaco-status`: what a swarm is doing, read from its DHT.

dipaco-status --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW... --watch
dipaco-status --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW... --serve 8090
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dipaco.base.command_line import Command, Option, RunSettings
from dipaco.base.errors import ConfigurationError, RunSelectionError
from dipaco.dht.addresses import PROXY_NAME, check_given_peer

if TYPE_CHECKING:
    from dipaco.dht.directory import Directory
    from dipaco.protocol.manifest import SignedManifest

    from .reading import RunReader

WATCH_PERIOD_S = 5.0
MANIFEST_WAIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class StatusSettings(RunSettings):
    """What `dipaco-status` can be told."""

    initial_peers: Annotated[
        tuple[str, ...], Option("addresses of any peers", "ADDR", check=check_given_peer)
    ]
    watch: Annotated[bool, Option("show it again every few seconds")] = False
    json: Annotated[bool, Option("one JSON object instead of tables")] = False
    serve: Annotated[
        int | None,
        Option("serve a page at this TCP port; 0 is any free one", "PORT", least=0, most=65535),
    ] = None
    host: Annotated[
        str, Option("address that --serve listens on; 0.0.0.0 is everybody", "ADDR")
    ] = "127.0.0.1"
    proxy_names: Annotated[tuple[str, ...], PROXY_NAME] = ()
    history: Annotated[
        Path | None,
        Option(
            "where --serve keeps what was (default: RUN.history.sqlite in ~/.local/state/dipaco)",
            "FILE",
        ),
    ] = None
    ledger: Annotated[
        Path | None,
        Option("show on the page what dipaco-ledger --json has written to this file", "FILE"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.serve is not None and (self.watch or self.json):
            raise ConfigurationError("--serve goes without --watch and --json: it has its own page")
        if self.proxy_names and self.serve is None:
            raise ConfigurationError("--proxy-name is for --serve; give --serve PORT too")
        for flag in ("history", "ledger"):
            if getattr(self, flag) is not None and self.serve is None:
                raise ConfigurationError(f"--{flag} is for --serve; give --serve PORT too")

    def open_port(self) -> socket.socket | None:
        """Return the socket of the page, None when there is none to be served.

        Raises ConfigurationError when what serves is not installed, AddressError for a port that
        cannot be had.
        """
        if self.serve is None:
            return None
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                f"--serve needs {error.name}; install it with pip install 'dipaco[serve]'"
            ) from None
        from dipaco.base.http_server import listen

        return listen(self.host, self.serve, "--serve")


def run(settings: StatusSettings) -> int:
    """Join as a client, read, print; again and again with --watch. Or serve."""
    listening = settings.open_port()
    from dipaco.dht.addresses import split_operator
    from dipaco.dht.directory import Directory
    from dipaco.dht.node import join_dht
    from dipaco.protocol.identity import load_or_create_identity

    from .reading import RunReader

    addresses, operator = split_operator(settings.initial_peers)
    with tempfile.TemporaryDirectory(prefix="dipaco-status-") as folder:
        identity = load_or_create_identity(Path(folder) / "identity.key")
        dht = join_dht(addresses, identity=identity, client_mode=True)
        try:
            manifest = _select(Directory(dht, identity, None), settings.run, operator)
            reader = RunReader(dht, identity, manifest)
            if listening is not None:
                from .serving import serve_swarm

                return serve_swarm(
                    reader.read,
                    manifest.plan,
                    listening,
                    settings.history,
                    settings.ledger,
                    settings.proxy_names,
                )
            return _show(reader, settings)
        finally:
            dht.shutdown()


def _select(directory: Directory, run: str | None, operator: str | None) -> SignedManifest:
    """Find the run; a swarm that has just started publishes its manifest within seconds."""
    from dipaco.dht.node import select_run

    deadline = time.monotonic() + MANIFEST_WAIT_S
    while True:
        try:
            return select_run(directory.list_manifests(), run, operator=operator)
        except RunSelectionError:
            if directory.list_manifests() or time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _show(reader: RunReader, settings: StatusSettings) -> int:
    status = reader.read()
    if not settings.watch:
        print(json.dumps(status, indent=2)) if settings.json else _print(status)
        return 0 if status["healthy"] else 1
    if settings.json:
        while True:
            print(json.dumps(status), flush=True)
            time.sleep(WATCH_PERIOD_S)
            status = reader.read()
    if not sys.stdout.isatty():
        while True:
            _print(status)
            time.sleep(WATCH_PERIOD_S)
            status = reader.read()
    from .watch import StatusApp

    StatusApp(status, reader.read, WATCH_PERIOD_S).run()
    return 0


def _print(status: dict[str, Any]) -> None:
    from rich.console import Console

    from .screen import render

    Console(highlight=False).print(render(status))


COMMAND = Command(
    "dipaco-status",
    StatusSettings,
    run,
    description="Show a swarm's paths, modules and peers. Reads the DHT and changes nothing.",
    epilog="Exit code 0: healthy, 1: problems (listed), 2: no swarm reached.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
