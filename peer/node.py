"""What every process of the swarm has, training or not: identity, DHT, exchange, clock, run.

`Node.join` does the steps of joining in order and stops at the first that fails with one clear
line. Peers (`session.py`), bootstrap nodes (`dipaco.bootstrap.serve`) and read-only clients
(`client.py`) stand on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from dipaco.dht.directory import Directory
from dipaco.dht.identity import Identity, load_or_create_identity
from dipaco.dht.manifest import SignedManifest, verify_manifest
from dipaco.dht.node import join_dht, select_run
from dipaco.dht.process_guard import GuardedDHT
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import (
    AddressError,
    DipacoError,
    NetworkError,
    ProtocolVersionError,
    StorageError,
    UnreachableError,
)
from dipaco.modules.files import atomic_write
from dipaco.modules.grid import Grid
from dipaco.modules.store import StateStore
from dipaco.routing.plan import PROTOCOL_VERSION, RunPlan, ShardIndex
from dipaco.routing.run_directory import RunDirectory

from .clock import Clock, measure_clock
from .diagnosis import diagnose
from .exchange import Exchange
from .fetching import ContentFetcher
from .schedule import RoundSchedule
from .states import HeldStates

logger = logging.getLogger("dipaco.peer.node")

SOFTWARE = f"dipaco/{version('dipaco')}"
MANIFEST_WAIT_S = 20.0


@dataclass
class Node:
    """A joined process. Close it with `close`."""

    identity: Identity
    dht: GuardedDHT
    directory: Directory
    exchange: Exchange
    clock: Clock
    manifest: SignedManifest
    plan: RunPlan
    grid: Grid
    schedule: RoundSchedule
    run_directory: RunDirectory
    blobs: BlobStore
    states: StateStore
    held: HeldStates
    fetcher: ContentFetcher
    initial_peers: tuple[str, ...] = ()
    _lock_file: int | None = None
    shard_index: ShardIndex | None = None

    @property
    def me(self) -> str:
        """This peer's id."""
        return self.identity.peer_id

    @property
    def directory_path(self) -> Path:
        """Where the run's files are on this machine."""
        return self.run_directory.path

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.plan.run_id

    def load_shard_index(self) -> ShardIndex:
        """Fetch the shard index if it is not here, and make the shards known to the fetcher."""
        if self.shard_index is None:
            self.fetcher.blob(self.plan.blobs.shards, "the shard index")
            self.shard_index = self.run_directory.shard_index(self.plan)
            self.fetcher.use_shards(self.shard_index)
        return self.shard_index

    def shard_sequences(self) -> dict[int, int]:
        """Return the training sequences of every path."""
        return {shard.path: shard.train_sequences for shard in self.load_shard_index().paths}

    def close(self) -> None:
        """Stop the exchange and the DHT; bounded."""
        with contextlib.suppress(Exception):
            self.exchange.stop()
        with contextlib.suppress(Exception):
            self.dht.shutdown()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def join_run(
    *,
    initial_peers: tuple[str, ...],
    run: str | None,
    cache_directory: Path,
    identity_path: Path | None = None,
    host_maddrs: tuple[str, ...] = (),
    announce_maddrs: tuple[str, ...] = (),
    client_mode: bool = False,
    own_manifest: bytes | None = None,
    run_directory: Path | None = None,
    say: Callable[[str], None] = logger.info,
) -> Node:
    """Join a swarm and a run of it, and return the joined node.

    A bootstrap node gives `own_manifest` and its `run_directory` instead of looking a run up.
    Raises the `DipacoError` of the step that failed; what was started is stopped again.
    """
    make_directory(cache_directory)
    identity = load_or_create_identity(identity_path or cache_directory / "identity.key")
    try:
        dht = join_dht(
            initial_peers,
            identity=identity,
            host_maddrs=host_maddrs or ("/ip4/0.0.0.0/tcp/0",),
            announce_maddrs=announce_maddrs,
            client_mode=client_mode,
        )
    except UnreachableError:
        identity.release()
        diagnose(initial_peers)
        raise
    except BaseException:
        identity.release()
        raise
    exchange = Exchange(dht, software=SOFTWARE, protocol_version=PROTOCOL_VERSION)
    lock_file: int | None = None
    try:
        exchange.start()
        clock = Clock()
        if initial_peers:
            clock = measure_clock(exchange, initial_peers)
            if abs(clock.offset_s) > 0.5:
                say(f"clock: {clock.offset_s:+.2f} s against the swarm, corrected")
        manifest = _find_manifest(dht, identity, run, own_manifest)
        plan = manifest.plan
        if plan.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(
                f"run '{plan.name}' speaks protocol {plan.protocol_version}, this is "
                f"{SOFTWARE} with protocol {PROTOCOL_VERSION}; install a matching version"
            )
        path = run_directory or cache_directory / plan.run_id
        make_directory(path)
        lock_file = _lock_directory(path)
        if run_directory is None:
            atomic_write(path / "manifest.json", [manifest.envelope])
        grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
        files = RunDirectory(path)
        blobs, states = files.blobs, files.states
        held = HeldStates(grid, states, blobs)
        directory = Directory(dht, identity, plan.run_id)
        fetcher = ContentFetcher(directory, exchange, blobs, BlobStore(path / "incoming"))
        fetcher.use_plan(plan, grid, clock.now)
        exchange.set_source(held, plan.run_id)
        return Node(
            identity=identity,
            dht=dht,
            directory=directory,
            exchange=exchange,
            clock=clock,
            manifest=manifest,
            plan=plan,
            grid=grid,
            schedule=RoundSchedule(plan.rounds, grid, plan.start_s),
            run_directory=files,
            blobs=blobs,
            states=states,
            held=held,
            fetcher=fetcher,
            initial_peers=initial_peers,
            _lock_file=lock_file,
        )
    except BaseException:
        exchange.stop()
        dht.shutdown()
        if lock_file is not None:
            os.close(lock_file)
        raise


def _find_manifest(
    dht: GuardedDHT, identity: Identity, run: str | None, own_manifest: bytes | None
) -> SignedManifest:
    """Return the manifest given, or the one of the run asked for, waiting a bounded time."""
    if own_manifest is not None:
        return verify_manifest(own_manifest)
    directory = Directory(dht, identity, None)
    deadline = time.monotonic() + MANIFEST_WAIT_S
    while True:
        try:
            return select_run(directory, run)
        except DipacoError:
            # A bootstrap node that has just started publishes its manifest within seconds.
            if directory.list_manifests() or time.monotonic() > deadline:
                raise
            threading.Event().wait(1.0)


def make_directory(path: Path) -> None:
    """Create a directory, or say which one cannot be had."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot create {path}: {error.strerror}; choose another place with --cache-dir"
        ) from None


def _lock_directory(path: Path) -> int:
    """Keep a second process out of a run's directory while this one lives."""
    descriptor = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise AddressError(
            f"another process uses {path}; give this one its own --cache-dir"
        ) from None
    return descriptor


def visible_addresses(dht: GuardedDHT, attempts: int = 5) -> tuple[str, ...]:
    """Return the addresses at which others can reach this node, loopback last.

    p2pd learns them a moment after it has started, so this is asked for again a few times.
    """
    for _ in range(attempts):
        try:
            addresses = [str(address) for address in dht.get_visible_maddrs(latest=True)]
        except Exception as error:
            logger.debug("get_visible_maddrs: %r", error)
            addresses = []
        if addresses:
            return tuple(sorted(set(addresses), key=lambda a: ("/127.0.0.1/" in a, a)))
        threading.Event().wait(0.5)
    raise NetworkError("the network layer does not tell its addresses; start again with --debug")
