"""`dipaco-ledger`: who trained how many tokens, told by the signed rows in the chains of a run.

dipaco-ledger --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...
dipaco-ledger --initial-peers ADDR --json > run.ledger.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from dipaco.dht.addresses import check_given_peer
from dipaco.modules.command_line import Command, Option, RunSettings


@dataclass(frozen=True, kw_only=True)
class LedgerSettings(RunSettings):
    """What `dipaco-ledger` can be told."""

    initial_peers: Annotated[
        tuple[str, ...], Option("addresses of any peers", "ADDR", check=check_given_peer)
    ]
    json: Annotated[bool, Option("print one JSON object instead of a table")] = False


def run(settings: LedgerSettings) -> int:
    """Read all chains of a swarm, and print what each peer has trained."""
    # Importing the network takes seconds; --help and mistakes should not.
    from dipaco.dht.ledger import credits_of, exported

    from .client import ReadOnlyClient

    with ReadOnlyClient(settings.initial_peers, run=settings.run) as client:
        chains = {module: client.chain(module) for module in client.grid.modules()}
        ledger = exported(client.plan.run_id, credits_of(chains), client.view())
    if settings.json:
        print(json.dumps(ledger, indent=2))
    else:
        _print(ledger)
    return 0


def _print(ledger: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{ledger['tokens']:,} tokens in the chains of run {ledger['run']}",
        caption="tokens count once a step has taken them: those of the round under way, and what "
        "no step took, are not here, and a run that this one succeeds has a ledger of its own",
    )
    for title in ("peer", "name", "team", "tokens", "last round"):
        table.add_column(title, justify="right" if title in ("tokens", "last round") else "left")
    for one in ledger["peers"]:
        row = (one["peer_id"][-8:], one["name"], one["team"])
        table.add_row(*row, f"{one['tokens']:,}", str(one["last_round"]))
    Console(highlight=False).print(table)


COMMAND = Command(
    "dipaco-ledger",
    LedgerSettings,
    run,
    description="Show who trained how many tokens. Reads the chains and changes nothing.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
