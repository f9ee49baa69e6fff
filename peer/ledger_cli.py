"""`dipaco-ledger`: who trained how many tokens, told by the signed rows in the chains of a run.

dipaco-ledger --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...
dipaco-ledger --initial-peers ADDR --json > run.ledger.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dipaco.base.command_line import Command, Option, RunSettings
from dipaco.base.errors import StorageError
from dipaco.dht.addresses import check_given_peer

if TYPE_CHECKING:
    from dipaco.modules.plan import RunPlan
    from dipaco.protocol.ledger import Credit


@dataclass(frozen=True, kw_only=True)
class LedgerSettings(RunSettings):
    """What `dipaco-ledger` can be told."""

    initial_peers: Annotated[
        tuple[str, ...], Option("addresses of any peers", "ADDR", check=check_given_peer)
    ]
    earlier: Annotated[
        tuple[str, ...],
        Option(
            "count the runs that this one continues too: a peer's cache folder, or folders of runs",
            "DIR",
        ),
    ] = ()
    json: Annotated[bool, Option("print one JSON object instead of a table")] = False


def run(settings: LedgerSettings) -> int:
    """Read all chains of a swarm, and print what each peer has trained."""
    # Importing the network takes seconds; --help and mistakes should not.
    from dipaco.protocol.ledger import credits_of, exported, summed

    from .client import ReadOnlyClient

    with ReadOnlyClient(settings.initial_peers, run=settings.run) as client:
        chains = {module: client.chain(module) for module in client.grid.modules()}
        plan, view = client.plan, client.view()
    earlier = _earlier_credits(plan, [Path(one).expanduser() for one in settings.earlier])
    credits = summed(credits_of(chains), earlier.values())
    ledger = exported(plan.run_id, credits, view, tuple(earlier))
    if settings.json:
        print(json.dumps(ledger, indent=2))
    else:
        _print(ledger, plan.successor_of if plan.successor_of not in earlier else None)
    return 0


def _earlier_credits(plan: RunPlan, folders: Sequence[Path]) -> dict[str, dict[str, Credit]]:
    """Return the credits of the runs that a run continues, the latest first, from what is on disk.

    Raises StorageError where none of them is.
    """
    from .credit import earlier_credits

    found = dict(earlier_credits(plan.successor_of, folders)) if folders else {}
    if folders and not found:
        raise StorageError(
            f"--earlier {folders[0]}: no run is there that run {plan.run_id} continues; give a "
            "peer's cache folder, or the folder of the earlier run"
        )
    return found


def _print(ledger: dict[str, Any], not_counted: str | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    runs = " and ".join((ledger["run"], *ledger["earlier"]))
    why = "work counts once a step has taken it: what is newer than that comes with the next step"
    if not_counted is not None:
        why += f". Run {not_counted} before it is not counted: --earlier DIR"
    console = Console(highlight=False)
    console.print(f"{ledger['tokens']:,} tokens in the model of run {runs}")
    console.print(why)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("peer", "name", "team", "tokens", "last round"):
        table.add_column(title, justify="right" if title in ("tokens", "last round") else "left")
    for one in ledger["peers"]:
        row = (one["peer_id"][-8:], one["name"], one["team"])
        table.add_row(*row, f"{one['tokens']:,}", str(one["last_round"]))
    console.print(table)


COMMAND = Command(
    "dipaco-ledger",
    LedgerSettings,
    run,
    description="Show who trained how many tokens. Reads the chains and changes nothing.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
