"""`dipaco-status --ledger`: who trained how many tokens, by the signed rows in the chains."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dipaco.base.errors import StorageError
from dipaco.peer.keeping.credit import earlier_credits
from dipaco.protocol.ledger import Credit, credits_of, exported, summed
from dipaco.protocol.plan import RunPlan

from .history import History
from .run_reader import RunReader


def read_ledger(reader: RunReader, history: History, earlier: Sequence[str] = ()) -> dict[str, Any]:
    """Read all chains of a run, and return its ledger as plain values (`exported`).

    Peers that have left have their last names from the `history`. `earlier` are folders with the
    chains of runs that this one continues. Raises StorageError where none of them is one, and what
    reading a swarm raises.
    """
    plan, peers, chains = reader.plan, reader.view.peers, reader.chains()
    before = _earlier_credits(plan, [Path(folder).expanduser() for folder in earlier])
    credits = summed(credits_of(chains), before.values())
    with contextlib.suppress(StorageError):  # A full disk hides nobody's tokens.
        # Only contributors are kept, so no crowd of strangers displaces them.
        here = {peer: peers[peer] for peer in credits.keys() & peers.keys()}
        history.keep_names({peer: (record.name, record.team) for peer, record in here.items()})
    not_counted = plan.successor_of if plan.successor_of not in before else None
    return exported(plan.run_id, credits, history.names(), tuple(before), not_counted)


def _earlier_credits(plan: RunPlan, folders: Sequence[Path]) -> dict[str, dict[str, Credit]]:
    """Return the credits of the runs that a run continues, the latest first, from what is on disk.

    Raises StorageError where none of them is.
    """
    found = dict(earlier_credits(plan.successor_of, folders)) if folders else {}
    if folders and not found:
        raise StorageError(
            f"--earlier {folders[0]}: no run is there that run {plan.run_id} continues; give a "
            "peer's cache folder, or the folder of the earlier run"
        )
    return found


def print_ledger(ledger: dict[str, Any]) -> None:
    """Print a ledger as a table."""
    runs = " and ".join((ledger["run"], *ledger["earlier"]))
    why = "work counts once a step has taken it: what is newer than that comes with the next step"
    if ledger["not_counted"] is not None:
        why += f". Run {ledger['not_counted']} before it is not counted: --earlier DIR"
    console = Console(highlight=False)
    console.print(f"{ledger['tokens']:,} tokens in the model of run {runs}")
    console.print(why)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("peer", "name", "team", "tokens", "last round"):
        table.add_column(title, justify="right" if title in ("tokens", "last round") else "left")
    for one in ledger["peers"]:
        row = (one["peer_id"][-8:], one["name"], one["team"])
        # Some have trained in earlier runs only.
        last_round = str(one["last_round"]) if one["last_round"] >= 0 else "-"
        table.add_row(*row, f"{one['tokens']:,}", last_round)
    console.print(table)
