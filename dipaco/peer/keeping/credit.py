"""What peers have trained, by the chains on a disk: of a run and of those that it continues."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from dipaco.base.errors import DipacoError
from dipaco.peer.exchange.chain_store import ChainStore, tellers
from dipaco.peer.node.node import Node
from dipaco.protocol.chain.steps import Step
from dipaco.protocol.ledger import Credit, credits_of
from dipaco.protocol.manifest import MANIFEST_FILE
from dipaco.routing.run_folder import RunFolder


def earlier_credits(
    run_id: str | None, folders: Sequence[Path]
) -> Iterator[tuple[str, dict[str, Credit]]]:
    """Yield the credits of a run and of those before it, until one is not on disk.

    If there are several folders of a run, the heaviest chain of each module counts; nothing is
    changed in them.
    """
    while run_id is not None:
        chains: dict[str, Sequence[Step]] = {}
        plan = None
        for folder in (*folders, *(folder / run_id for folder in folders)):
            if not (folder / MANIFEST_FILE).is_file():
                continue
            run = RunFolder(folder)
            if run.plan().run_id != run_id:
                continue
            plan = run.plan()
            modules = run.grid(plan).modules()
            index = run.states.kept.index
            for teller in tellers(index):
                store = ChainStore(run_id, modules, index, teller)
                for module in modules:
                    chain = store.chain(module)
                    weight = sum(len(step.rows) for step in chain)
                    if weight >= sum(len(step.rows) for step in chains.get(module, ())):
                        chains[module] = chain
        if plan is None:
            return
        yield run_id, credits_of(chains)
        run_id = plan.successor_of


def tokens_on_disk(run_id: str | None, peers: Collection[str], folders: Sequence[Path]) -> int:
    """Return how many tokens of some peers are in a run and in those that it continues, by the
    chains on the disk."""
    phases = [credits for _, credits in earlier_credits(run_id, folders)]
    return sum(credits[peer].tokens for credits in phases for peer in peers if peer in credits)


def own_tokens(node: Node) -> int:
    """Return how many tokens of this peer are in the chains that it has, over all phases."""
    credits = credits_of({module: node.chains.steps(module) for module in node.grid.modules()})
    before = 0
    with contextlib.suppress(DipacoError):  # A run of an older protocol, or a damaged folder.
        before = tokens_on_disk(node.plan.successor_of, {node.me}, [node.runs_folder])
    return before + (credits[node.me].tokens if node.me in credits else 0)
