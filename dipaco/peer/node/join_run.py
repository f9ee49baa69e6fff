"""Joining a run: the steps in their order. The first one that fails says so in one line.

Peers (`peer/training_peer.py`), bootstrap nodes (`bootstrap/bootstrap_node.py`) and readers
(`peer/reader.py`) begin with `join_run`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from dipaco.base.errors import DipacoError
from dipaco.dht.addresses import split_operator
from dipaco.dht.dht_node import find_run, select_run
from dipaco.dht.directory import Directory
from dipaco.peer.exchange.contact.clock import Clock, measure_clock
from dipaco.peer.exchange.contact.known_peers import KnownPeers, peer_of
from dipaco.peer.exchange.exchange import Exchange
from dipaco.peer.exchange.streams.transport import HivemindTransport
from dipaco.peer.owner.uplink import Uplink
from dipaco.protocol.identity import KEY_FILE, Identity, load_or_create_identity
from dipaco.protocol.manifest import MANIFEST_FILE, SignedManifest, verify_manifest
from dipaco.routing.run_folder import RunFolder

from .entrance import Entrance, Listening
from .node import Membership, Node, make_folder, open_run

logger = logging.getLogger("dipaco.peer.node.join_run")

# Of the addresses given, when there are several runs to choose from.
_MAX_ASKED = 4


def join_run(
    *,
    initial_peers: tuple[str, ...],
    run: str | None,
    cache_folder: Path,
    listening: Listening | None = None,
    run_folder: Path | None = None,
    runs_folder: Path | None = None,
    uplink: Uplink | None = None,
    say: Callable[[str], None] = logger.info,
) -> Node:
    """Join a swarm and a run of it, and return the joined node.

    `Entrance` says which peers it goes through. A bootstrap node gives the `run_folder` with its
    manifest instead of looking for a run. Peers of this machine that have the same `runs_folder`,
    by default the `cache_folder`, share blobs, states and contributions. With an operator's
    fingerprint in `initial_peers` only runs of that operator count.

    Raises the `DipacoError` of the step that failed; what was started is stopped again.
    """
    given, operator = split_operator(initial_peers)
    listening = listening or Listening()
    own_manifest = RunFolder(run_folder).manifest_path.read_bytes() if run_folder else None
    make_folder(cache_folder)
    identity, may_be_a_copy = _identity(cache_folder / KEY_FILE, listening, say)
    runs_folder = runs_folder or cache_folder
    known = KnownPeers(cache_folder)
    entrance = Entrance(identity, given, known, listening, say, may_be_a_copy=may_be_a_copy)
    try:
        entered = entrance.come_in(
            lambda: own_manifest or _remembered_run(known, runs_folder, given, run, operator)
        )
    except BaseException:
        identity.release()
        raise
    exchange = Exchange(HivemindTransport(entered.dht, uplink))
    membership = Membership(identity, entered.dht, exchange, Clock(), entered.through, say)
    try:
        exchange.start()
        entered.dht.on_restart(exchange.connect_again)
        if entered.through:
            membership.clock = _swarm_clock(exchange, entered.through, say)
        manifest = _find_manifest(membership, run, operator, entered.manifest or own_manifest)
        path = run_folder or runs_folder / manifest.plan.run_id
        node = open_run(
            membership,
            manifest,
            path,
            cache_folder,
            runs_folder,
            write_manifest=run_folder is None,
        )
        node.serve_run()
        return node
    except BaseException:
        membership.close()
        raise


def _identity(
    key_file: Path, listening: Listening, say: Callable[[str], None]
) -> tuple[Identity, bool]:
    """Return this process's identity, and whether another machine may have it too.

    No other machine has one that is made here; its owner is told to keep the key.
    """
    may_be_a_copy = key_file.exists()
    identity = load_or_create_identity(key_file, say)
    if not may_be_a_copy and not listening.client_mode:
        say(
            f"made {key_file}, by which others know this peer: back it up, and use it on one "
            "machine at a time"
        )
    return identity, may_be_a_copy


def _swarm_clock(exchange: Exchange, through: tuple[str, ...], say: Callable[[str], None]) -> Clock:
    """Return the swarm's time, and say by how much this machine's clock is off, if it matters."""
    clock = measure_clock(exchange, through)
    if abs(clock.offset_s) > 0.5:
        say(f"clock: {clock.offset_s:+.2f} s against the swarm, corrected")
    return clock


def _find_manifest(
    membership: Membership, run: str | None, operator: str | None, own_manifest: bytes | None
) -> SignedManifest:
    """Return the manifest given, or the one of the run asked for, waiting a bounded time."""
    if own_manifest is not None:
        return verify_manifest(own_manifest)
    directory = Directory(membership.dht, membership.identity, None)

    def served() -> set[str]:
        """Return the runs of those whose addresses were given, as far as they answer."""
        runs = set()
        for address in membership.initial_peers[:_MAX_ASKED]:
            with contextlib.suppress(DipacoError):
                runs.add(membership.exchange.hello(peer_of(address)).run or "")
        return runs

    return find_run(directory, run, operator=operator, served=served)


def _remembered_run(
    known: KnownPeers,
    runs_folder: Path,
    given: tuple[str, ...],
    run: str | None,
    operator: str | None,
) -> bytes | None:
    """Return the manifest of the run that this peer was in with those at these addresses, if any.

    Raises as `select_run` does when they are several.
    """
    manifests = []
    for found in known.runs_with(given):
        with contextlib.suppress(OSError, DipacoError):
            file = runs_folder / found / MANIFEST_FILE
            manifests.append(verify_manifest(file.read_bytes()))
    return select_run(manifests, run, operator=operator).envelope if manifests else None
