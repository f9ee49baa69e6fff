"""`dipaco-peer status`: what the peer of this machine does, and what its owner has given."""

from __future__ import annotations

from pathlib import Path

from dipaco.base.errors import DipacoError, printable
from dipaco.base.files import text_of
from dipaco.peer.keeping.credit import tokens_on_disk
from dipaco.peer.node.given_address import kept_line
from dipaco.peer.owner.pauses import activity_file
from dipaco.protocol.identity import KEY_FILE, is_in_use, kept_peer_id
from dipaco.protocol.manifest import MANIFEST_FILE
from dipaco.routing.run_folder import RunFolder


def lines_about(cache_folder: Path) -> list[str]:
    """Return what an owner asks first, from this machine's disk alone: nobody is called.

    `cache_folder` is that of a peer, or of the trainers of `--devices`.
    """
    trainers = sorted(
        folder for folder in cache_folder.glob("trainer-*") if (folder / KEY_FILE).exists()
    )
    folders = [f for f in (cache_folder, *trainers) if (f / KEY_FILE).exists()]
    running = [folder for folder in folders if is_in_use(folder / KEY_FILE)]
    lines = [text_of(activity_file(folder)).strip() or "joining" for folder in running]
    if not running:
        lines = ["no peer is running here; dipaco-peer starts one"]
    totals = _totals(cache_folder, {kept_peer_id(folder / KEY_FILE) for folder in folders})
    lines += totals or ["nothing trained yet"]
    friends = [line for folder in running if (line := kept_line(folder))]
    if friends:
        lines.append(f"for a friend: {friends[0]}")
        if friends[0].endswith("TEXT"):
            lines.append("the run is by invitation: TEXT comes from its operator")
    return [printable(line) for line in lines]


def _totals(cache_folder: Path, peers: set[str]) -> list[str]:
    """Return a line for each run on the disk, with those that it continues."""
    plans = {}
    for file in sorted(cache_folder.glob(f"*/{MANIFEST_FILE}")):
        try:
            plan = RunFolder(file.parent).plan()
        except DipacoError as error:
            return [f"{file.parent}: {error}"]
        plans[plan.run_id] = plan
    continued = {plan.successor_of for plan in plans.values()}
    return [
        f"run '{plans[run_id].name}' ({run_id}): {tokens:,} tokens of yours are in the model"
        for run_id in plans.keys() - continued
        if (tokens := tokens_on_disk(run_id, peers, [cache_folder]))
    ]
