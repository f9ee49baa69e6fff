"""`dipaco-ledger`: who trained how many tokens, kept in a file for as long as a run lasts.

dipaco-ledger run.ledger --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...
dipaco-ledger run.ledger --json
dipaco-ledger run.ledger --merge other.ledger
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dipaco.modules.command_line import Command, Option, RunSettings
from dipaco.modules.errors import ConfigurationError

if TYPE_CHECKING:
    from dipaco.dht.ledger_file import LedgerFile
    from dipaco.dht.records import RecordError

    from .exchange.ledger_keeper import LedgerKeeper
    from .node import Node

# Of what another ledger has and cannot be.
MOST_REFUSALS_SAID = 5


@dataclass(frozen=True, kw_only=True)
class LedgerSettings(RunSettings):
    """What `dipaco-ledger` can be told."""

    file: Annotated[Path, Option("the ledger", "FILE", positional=True)]
    initial_peers: Annotated[
        tuple[str, ...],
        Option("addresses of any peers: add what they know to FILE, until Ctrl+C", "ADDR"),
    ] = ()
    once: Annotated[bool, Option("with --initial-peers: look once, and print")] = False
    merge: Annotated[
        Path | None, Option("add what another ledger of the same run has", "OTHER")
    ] = None
    json: Annotated[bool, Option("print one JSON object instead of tables")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_peers and self.merge is not None:
            raise ConfigurationError("give --initial-peers or --merge, not both")
        if self.once and not self.initial_peers:
            raise ConfigurationError("--once belongs to --initial-peers; without them FILE is read")


def run(settings: LedgerSettings) -> int:
    """Keep, merge or print a ledger."""
    # Importing the network takes seconds; --help and mistakes should not.
    from dipaco.dht.ledger_file import LedgerFile

    if settings.initial_peers:
        return _keep(settings)
    with closing(LedgerFile(settings.file)) as file:
        if settings.merge is not None:
            with closing(LedgerFile(settings.merge)) as other:
                _merge(file, other)
        _print(file, settings)
    return 0


def _keep(settings: LedgerSettings) -> int:
    """Look at the swarm, once or until Ctrl+C."""
    from dipaco.dht.ledger_file import LedgerFile

    from .node import join_run

    with tempfile.TemporaryDirectory(prefix="dipaco-ledger-") as folder:
        node = join_run(
            initial_peers=settings.initial_peers,
            run=settings.run,
            cache_folder=Path(folder),
            client_mode=True,
        )
        with closing(node), closing(LedgerFile(settings.file, node.manifest)) as file:
            keeper = keeper_of(node, file)
            if not settings.once:
                what = f"ledger of run '{node.plan.name}' in {settings.file}"
                print(f"{what}; Ctrl+C ends", flush=True)
                keeper.run(threading.Event(), lambda line: print(line, flush=True))
            keeper.look()
            _print(file, settings)
    return 0


def keeper_of(node: Node, file: LedgerFile) -> LedgerKeeper:
    """Return what fills a ledger with what a node can learn. Also used by the bootstrap node."""
    from dipaco.dht.coverage import whole_scope

    from .exchange.ledger_keeper import LedgerKeeper

    return LedgerKeeper(
        file,
        node.grid,
        node.fetcher,
        node.exchange,
        lambda: node.directory.read_view(
            node.plan, node.grid, node.clock.now(), whole_scope(node.grid)
        ),
        node.clock.now,
    )


def _merge(file: LedgerFile, other: LedgerFile) -> None:
    refused: list[RecordError] = []
    new = file.merge(other, time.time(), refused.append)
    print(f"{new} certificates more from {other.path}, {len(refused)} refused", file=sys.stderr)
    for error in refused[:MOST_REFUSALS_SAID]:
        print(f"refused: {error}", file=sys.stderr)


def _print(file: LedgerFile, settings: LedgerSettings) -> None:
    from dipaco.dht.ledger import exported

    values = exported(file.run_id, file.credits(), file.sayings())
    if settings.json:
        print(json.dumps(values, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for word, title in (("team", "teams"), ("name", "names")):
        if values[title]:
            table = Table(title=title, title_justify="left")
            table.add_column(word)
            for column in ("tokens", "alone", "peers"):
                table.add_column(column, justify="right")
            for one in values[title]:
                numbers = (one["tokens"], one["tokens_alone"], len(one["peers"]))
                table.add_row(Text(one[word]), *(f"{number:,}" for number in numbers))
            console.print(table)
    table = Table(title=f"peers of run {values['run']}", title_justify="left")
    for column in ("peer", "name", "team"):
        table.add_column(column)
    for column in ("tokens", "alone", "commits", "rounds"):
        table.add_column(column, justify="right")
    for peer in values["peers"]:
        table.add_row(
            f"..{peer['peer_id'][-8:]}",
            Text(peer["name"]),
            Text(peer["team"]),
            f"{peer['tokens']:,}",
            f"{peer['tokens_alone']:,}",
            f"{peer['commits']:,}",
            f"{peer['first_round']} to {peer['last_round']}",
        )
    console.print(table)


COMMAND = Command(
    "dipaco-ledger",
    LedgerSettings,
    run,
    description="Who trained how many tokens of a run, by the certificates that peers sign. With "
    "--initial-peers it adds what the swarm knows to FILE; without, it prints what FILE has.",
    epilog="What counts, and what JSON it prints: docs/monitoring.md.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
