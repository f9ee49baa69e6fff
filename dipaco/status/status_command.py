"""`dipaco-status`: what a swarm is doing, read from its DHT.

dipaco-status /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW... --watch
dipaco-status /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW... --serve 8090
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError, DipacoError, StorageError
from dipaco.base.host_and_port import host_and_port
from dipaco.base.output import is_unread
from dipaco.base.running import say
from dipaco.base.settings import Option, RunSettings
from dipaco.dht.addresses import PROXY_NAME, check_given_peer
from dipaco.peer.node.given_address import known_addresses

if TYPE_CHECKING:
    from .run_reader import RunReader

# How often --watch draws anew.
_WATCH_PERIOD_S = 5.0


@dataclass(frozen=True, kw_only=True)
class StatusSettings(RunSettings):
    """The options of `dipaco-status`."""

    initial_peers: Annotated[
        tuple[str, ...],
        Option(
            "addresses of any peers (default: those that the peer of this machine knows)",
            "ADDR",
            check=check_given_peer,
            loose=True,
            one_by_one=True,
        ),
    ] = ()
    watch: Annotated[bool, Option("show it again every few seconds")] = False
    json: Annotated[bool, Option("print one JSON object in place of tables")] = False
    ledger: Annotated[bool, Option("show who trained how many tokens")] = False
    earlier: Annotated[
        tuple[str, ...],
        Option(
            "the ledger also counts the runs that this one continues: the cache folder of a peer, "
            "or folders of runs",
            "DIR",
        ),
    ] = ()
    serve: Annotated[
        str | None,
        Option(
            "serve a page there; a PORT alone is for this machine only, and 0 is any free one",
            "[HOST:]PORT",
            check=partial(host_and_port, "--serve"),
        ),
    ] = None
    proxy_names: Annotated[tuple[str, ...], PROXY_NAME] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.serve is not None and (self.watch or self.json):
            raise ConfigurationError("--serve has its own page; give it without --watch and --json")
        if self.proxy_names and self.serve is None:
            raise ConfigurationError("--proxy-name is for --serve; give --serve PORT too")
        if self.ledger and self.watch:
            raise ConfigurationError("--ledger reads all chains; give it without --watch")
        if self.earlier and not self.ledger and self.serve is None:
            raise ConfigurationError("--earlier is for --ledger; give --ledger too")

    def open_port(self) -> socket.socket | None:
        """Return the socket of the page, None when no page is to be served. Raises
        ConfigurationError when the server is not installed, AddressError for a port that is not
        free.
        """
        if self.serve is None:
            return None
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                f"--serve needs {error.name}; install it with pip install 'dipaco[status]'"
            ) from None
        from dipaco.base.http_server import listen

        return listen(*host_and_port("--serve", self.serve), "--serve")


def run(settings: StatusSettings) -> int:
    """Join as a reader, look, print; again and again with --watch. Or serve."""
    listening = settings.open_port()
    if not settings.initial_peers:
        settings = replace(settings, initial_peers=known_addresses())
    if sys.stderr.isatty():
        # Importing the reader takes seconds, and reading takes some more.
        say(f"reading the swarm through {settings.initial_peers[0]} ...")
    from .ledger_report import read_ledger
    from .run_reader import RunReader

    with RunReader(settings.initial_peers, run=settings.run) as reader:
        if listening is not None:
            from .page import serve_swarm

            return serve_swarm(
                reader.read,
                lambda history: read_ledger(reader, history, settings.earlier),
                reader.plan,
                listening,
                settings.proxy_names,
            )
        return _show_ledger(reader, settings) if settings.ledger else _show(reader, settings)


def _show_ledger(reader: RunReader, settings: StatusSettings) -> int:
    from .history import History, default_file
    from .ledger_report import print_ledger, read_ledger

    try:
        history = History(default_file())
    except StorageError as error:
        say(f"names of peers that have left are not known: {error}")
        history = History(None)
    ledger = read_ledger(reader, history, settings.earlier)
    history.close()
    print(json.dumps(ledger, indent=2)) if settings.json else print_ledger(ledger)
    return 0


def _show(reader: RunReader, settings: StatusSettings) -> int:
    status = reader.read()
    if settings.json:
        print(json.dumps(status, indent=None if settings.watch else 2), flush=True)
        while settings.watch and not is_unread():
            time.sleep(_WATCH_PERIOD_S)
            try:
                print(json.dumps(reader.read()), flush=True)
            except DipacoError as error:
                say(f"cannot read the swarm, tries again: {error}")
    else:
        from rich.console import Console

        from .screen import render, watch

        console = Console(highlight=False)
        if settings.watch:
            watch(status, reader.read, _WATCH_PERIOD_S, console)
        console.print(render(status))
    return 0 if status["healthy"] else 1


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
