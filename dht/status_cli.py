"""`dipaco-status`: what a swarm is doing, read from its DHT.

dipaco-status --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/Qm... --watch
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipaco.modules.errors import RunSelectionError

from .logs import run_logged

if TYPE_CHECKING:
    from rich.console import Group

    from .directory import Directory
    from .manifest import SignedManifest

WATCH_PERIOD_S = 5.0
MANIFEST_WAIT_S = 10.0
MAX_REQUESTS_SHOWN = 4


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `dipaco-status`; a test freezes it."""
    parser = argparse.ArgumentParser(
        prog="dipaco-status",
        description="Show a swarm's paths, modules and peers. Reads the DHT and changes nothing.",
        epilog="Exit code 0: healthy, 1: problems (listed), 2: no swarm reached.",
    )
    parser.add_argument(
        "--initial-peers", nargs="+", required=True, metavar="ADDR", help="addresses of any peers"
    )
    parser.add_argument("--run", help="run id, its beginning, or its name (if there are several)")
    parser.add_argument("--watch", action="store_true", help="show it again every few seconds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--debug", action="store_true", help="tracebacks and debug messages")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    return run_logged(run, build_parser().parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Join as a client, read, print; again and again with --watch."""
    from .directory import Directory
    from .identity import load_or_create_identity
    from .node import join_dht

    with tempfile.TemporaryDirectory(prefix="dipaco-status-") as folder:
        identity = load_or_create_identity(Path(folder) / "identity.key")
        dht = join_dht(options.initial_peers, identity=identity, client_mode=True)
        try:
            manifest = _select(Directory(dht, identity, None), options.run)
            reader = Directory(dht, identity, manifest.plan.run_id)
            return _show(reader, manifest, options)
        finally:
            dht.shutdown()


def _select(directory: Directory, run: str | None) -> SignedManifest:
    """Find the run; a swarm that has just started publishes its manifest within seconds."""
    from .node import select_run

    deadline = time.monotonic() + MANIFEST_WAIT_S
    while True:
        try:
            return select_run(directory, run)
        except RunSelectionError:
            if directory.list_manifests() or time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _show(directory: Directory, manifest: SignedManifest, options: argparse.Namespace) -> int:
    status = read_status(directory, manifest)
    if not options.watch:
        print(json.dumps(status, indent=2)) if options.json else _print(status)
        return 0 if status["healthy"] else 1
    if options.json:
        while True:
            print(json.dumps(status), flush=True)
            time.sleep(WATCH_PERIOD_S)
            status = read_status(directory, manifest)
    from rich.live import Live

    with Live(render(status), screen=False, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_PERIOD_S)
            live.update(render(read_status(directory, manifest)), refresh=True)


def read_status(directory: Directory, manifest: SignedManifest) -> dict[str, Any]:
    """Read everything once and return the status."""
    from dipaco.modules.grid import Grid

    from .manifest import newest_run
    from .scoring_policy import build_board
    from .status import status_of

    plan = manifest.plan
    grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
    view = directory.read_view(plan, grid, time.time())
    boards = {
        found.request_id: build_board(
            found.request, grid.path_count, directory.scores(found.request_id), view.now_s
        )
        for found in directory.score_requests(manifest.operator_fingerprint)[:MAX_REQUESTS_SHOWN]
    }
    newest = newest_run(manifest, directory.list_manifests())
    successor = newest if newest.plan.run_id != plan.run_id else None
    return status_of(view, manifest, grid, requests=boards, successor=successor)


def _print(status: dict[str, Any]) -> None:
    from rich.console import Console

    Console(highlight=False).print(render(status))


def render(status: dict[str, Any]) -> Group:
    """Draw the status as tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    run, validation = status["run"], status["validation"]
    head = Text(f"run {run['name']} ({run['id']}), round {status['round']}")
    if validation["perplexity"] is not None:
        head.append(
            f", validation perplexity {validation['perplexity']:.2f} "
            f"({validation['paths_reporting']} paths, {validation['tokens']:,} tokens)"
        )
    paths = Table(title="paths", title_justify="left")
    for name in ("path", "modules", "state", "peers", "last round", "tokens/s", "held-out loss"):
        paths.add_column(name)
    for path in status["paths"]:
        loss = path["validation_loss"]
        paths.add_row(
            str(path["path"]),
            " ".join(path["modules"]),
            path["state"],
            " ".join(_short(peer) for peer in path["peers"]) or "-",
            "-" if path["last_round"] is None else str(path["last_round"]),
            f"{path['tokens_per_s']:,.0f}",
            "-" if loss is None else f"{loss:.3f}",
        )
    modules = Table(title="modules", title_justify="left")
    for name in ("module", "version", "tokens", "digest", "holders", "agree"):
        modules.add_column(name)
    for module in status["modules"]:
        modules.add_row(
            module["module"],
            str(module["version"]),
            f"{module['tokens']:,}",
            (module["digest"] or "-")[:12],
            str(len(module["holders"])),
            "yes" if module["agree"] else "NO",
        )
    peers = Table(title="peers", title_justify="left")
    for name in ("peer", "path", "state", "tokens/s", "device", "software", "reachable"):
        peers.add_column(name)
    for peer in status["peers"]:
        peers.add_row(
            _short(peer["peer_id"]),
            "-" if peer["path"] is None else str(peer["path"]),
            peer["state"],
            f"{peer['tokens_per_s']:,.0f}",
            peer["device"],
            peer["software"],
            peer["reachable"],
        )
    notes = [
        Text(
            f"score request {one['request']}: have {len(one['done'])} of {one['paths']} scores, "
            f"{len(one['scoring'])} in progress"
        )
        for one in status["score_requests"]
    ]
    successor = status["successor"]
    if successor is not None:
        notes.append(Text(f"succeeded by run {successor['name']} ({successor['id']})"))
    problems = [Text(f"problem: {line}", style="red") for line in status["problems"]]
    return Group(
        head, *notes, paths, modules, peers, *(problems or [Text("healthy", style="green")])
    )


def _short(peer: str) -> str:
    """Shorten a peer id: all of them begin alike."""
    return f"..{peer[-8:]}"


if __name__ == "__main__":
    sys.exit(main())
