"""What every process of the swarm has, training or not: identity, DHT, exchange, clock, run.

A `Membership` is a place in the swarm, a `Node` one with a run. `Node.open_successor`
puts the next run on the same place, so nobody leaves the swarm to move.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import ProtocolVersionError, StorageError
from dipaco.base.files import atomic_write, link_or_copy, remove_stale_temporaries, set_by
from dipaco.base.index import Index
from dipaco.base.kept_files import KEPT_ROUNDS
from dipaco.dht.directory import Directory
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.modules.contributions import CODECS
from dipaco.modules.layout import layout_of
from dipaco.modules.outer import OuterRule
from dipaco.modules.saved_states import StateStore
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.contact.clock import Clock
from dipaco.peer.exchange.contact.hello import SOFTWARE
from dipaco.peer.exchange.contact.known_contributors import KnownContributors
from dipaco.peer.exchange.contact.known_peers import peer_of
from dipaco.peer.exchange.exchange import Exchange
from dipaco.peer.exchange.fetching import ContentFetcher
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.exchange.served_run import ServedRun
from dipaco.peer.exchange.verify import RowCheck
from dipaco.protocol.admission import Gate
from dipaco.protocol.chain.steps import MARK_BYTES, Step
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import Identity
from dipaco.protocol.manifest import MANIFEST_FILE, SignedManifest
from dipaco.protocol.member.rounds import RoundSchedule
from dipaco.protocol.plan import PROTOCOL_VERSION, RunPlan, ShardIndex, protocol_remedy
from dipaco.protocol.record_errors import RecordError
from dipaco.routing.run_folder import RunFolder

from .guests import admit, open_gate
from .states import States

logger = logging.getLogger("dipaco.peer.node.node")

# How many steps of a chain on the disk have their peers known from the start.
_REMEMBERED_STEPS = 3


@dataclass
class Membership:
    """This process's place in the swarm, whatever run it works on. Close it with `close`."""

    identity: Identity
    dht: GuardedDHT
    exchange: Exchange
    clock: Clock
    """The swarm's time."""
    initial_peers: tuple[str, ...] = ()
    """The addresses that this process joined through."""
    say: Callable[[str], None] = logger.info
    """Tells the person at this machine what takes long."""

    def close(self) -> None:
        """Stop the exchange and the DHT; bounded."""
        with contextlib.suppress(Exception):
            self.exchange.stop()
        with contextlib.suppress(Exception):
            self.dht.shutdown()


@dataclass(kw_only=True)
class Node(Membership):
    """A joined process with its run. Close it with `close`."""

    directory: Directory
    manifest: SignedManifest
    plan: RunPlan
    grid: Grid
    schedule: RoundSchedule
    run_folder: RunFolder
    blobs: BlobStore
    states: StateStore
    held: States
    chains: ChainStore
    contributions: ContributionFiles
    check: RowCheck
    fetcher: ContentFetcher
    contributors: KnownContributors
    cache_folder: Path
    """What is this peer's alone."""
    runs_folder: Path
    """Where the folders of runs are, also those that succeed this one."""
    earlier: Node | None = None
    """The run that this process worked on before, whose content it still serves."""
    trained_modules: frozenset[str] = frozenset()
    """What this process trains at present, for others who ask."""
    shard_index: ShardIndex | None = None
    _rule: OuterRule | None = None

    @property
    def gate(self) -> Gate:
        """The gate of the run, which says who is admitted."""
        assert self.directory.gate is not None
        return self.directory.gate

    def admit(self, invitation: str | None = None) -> None:
        """Get this peer admitted: with an invitation, or in an open run with the run's own; see
        `guests.admit`."""
        now_s = self.clock.now()
        admission = admit(self.gate, self.identity, self.manifest, now_s, invitation)
        self.directory.be_admitted(admission)
        self.serve_run()

    @property
    def rule(self) -> OuterRule:
        """How a step is computed. Raises a `DipacoError` when nobody gives the shard index."""
        if self._rule is None:
            self._rule = OuterRule.of(self.plan, self.load_shard_index())
        return self._rule

    @property
    def me(self) -> str:
        """This peer's id."""
        return self.identity.peer_id

    @property
    def folder(self) -> Path:
        """Where the run's files are on this machine."""
        return self.run_folder.path

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.plan.run_id

    def load_shard_index(self) -> ShardIndex:
        """Fetch the shard index if it is not here, and make shards and genesis states known to
        the fetcher."""
        if self.shard_index is None:
            plan, files, fetcher = self.plan, self.run_folder, self.fetcher
            what = "the shard index"
            fetcher.needed_blob(plan.blobs.shards, what)
            index = fetcher.sound(plan.blobs.shards, what, lambda: files.shard_index(plan))
            fetcher.use_shards(index)
            self.check.empty_paths = frozenset(
                shard.path for shard in index.paths if not shard.train_sequences
            )
            if plan.blobs.genesis is not None:
                what = "the genesis index"
                fetcher.needed_blob(plan.blobs.genesis, what)
                found = fetcher.sound(plan.blobs.genesis, what, lambda: files.genesis_index(plan))
                fetcher.use_genesis(found or {})
            self.shard_index = index
        return self.shard_index

    def open_successor(self, manifest: SignedManifest) -> Node:
        """Open the run that succeeds this one, in this process; nothing is served of it yet.

        What both runs consist of is not fetched again. Raises `StorageError` when the disk is full.
        `release` undoes it.
        """
        path = self.runs_folder / manifest.plan.run_id
        node = open_run(self, manifest, path, self.cache_folder, self.runs_folder, earlier=self)
        for sha256 in node.fetcher.all_blobs():
            if self.blobs.has(sha256):
                link_or_copy(self.blobs.path(sha256), node.blobs.path(sha256))
        self._hand_revocations_on(node)
        return node

    def _hand_revocations_on(self, successor: Node) -> None:
        """Pass the revocations on: a peer that is out stays out of a successor with the same
        invitations."""
        mine, next_one = self.gate, successor.gate
        if mine.envelope is not None and mine.run_id == next_one.run_id:
            successor.directory.revoke(mine.envelope)

    def serve_run(self) -> None:
        """Let the exchange serve this run, and by hash what was served before it."""
        self.held.earlier = self.earlier.held if self.earlier is not None else None
        self.exchange.serve_run(
            ServedRun(
                self.run_id,
                self.held,
                self.chains,
                self.check,
                self.contributions if self.directory.admission is not None else None,
                self.directory.admission,
                lambda module: module in self.trained_modules,
                self.contributors,
            )
        )

    def earlier_manifests(self) -> tuple[SignedManifest, ...]:
        """Return the manifests of the runs that this process came here through."""
        earlier = self.earlier
        return () if earlier is None else (*earlier.earlier_manifests(), earlier.manifest)

    def release(self) -> None:
        """Close the index of the run's store."""
        self.states.kept.index.close()

    def close(self) -> None:
        """Stop the exchange and the DHT, and close what is open on the disk; bounded."""
        super().close()
        node: Node | None = self
        while node is not None:
            node.release()
            node = node.earlier


def open_run(
    membership: Membership,
    manifest: SignedManifest,
    path: Path,
    cache_folder: Path,
    runs_folder: Path,
    *,
    write_manifest: bool = True,
    earlier: Node | None = None,
) -> Node:
    """Open a run's folder and everything that uses it. Raises a `DipacoError`.

    Several peers of one machine may share a folder: what each of them keeps is under its id.
    """
    plan = manifest.plan
    _check_protocol(plan)
    make_folder(path)
    if write_manifest:
        atomic_write(path / MANIFEST_FILE, [manifest.envelope])
    me = membership.identity.peer_id
    grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
    files = RunFolder(path, me)
    blobs, states, kept = files.blobs, files.states, files.states.kept
    blobs.tidy()
    kept.tidy()
    gate = open_gate(manifest, path)
    contributors = KnownContributors(_by_peer(membership.initial_peers))
    kept.kept_s = KEPT_ROUNDS * plan.rounds.duration_s
    kept.has_contributed = contributors.has_contributed
    directory = Directory(
        membership.dht,
        membership.identity,
        plan.run_id,
        gate,
        manifest,
        known_directly=contributors.known_directly,
        on_called=contributors.called,
    )
    directory.serve(grid)
    given = map(peer_of, membership.initial_peers)
    fetcher = ContentFetcher(
        directory, membership.exchange, blobs, kept, plan, grid, given, membership.say
    )
    max_bytes = functools.cache(functools.partial(_max_row_bytes, plan, grid))
    check = RowCheck(plan, grid, gate, max_bytes=max_bytes, now=membership.clock.now)
    chains = _open_chains(plan, grid, kept.index, me, contributors, gate)
    return Node(
        identity=membership.identity,
        dht=membership.dht,
        exchange=membership.exchange,
        clock=membership.clock,
        initial_peers=membership.initial_peers,
        say=membership.say,
        directory=directory,
        manifest=manifest,
        plan=plan,
        grid=grid,
        schedule=RoundSchedule(plan.rounds, grid, plan.start_s),
        run_folder=files,
        blobs=blobs,
        states=states,
        held=States(grid, states, blobs, chains),
        chains=chains,
        contributions=ContributionFiles(kept),
        check=check,
        fetcher=fetcher,
        contributors=contributors,
        cache_folder=cache_folder,
        runs_folder=runs_folder,
        earlier=earlier,
    )


def _check_protocol(plan: RunPlan) -> None:
    """Raise ProtocolVersionError when the run speaks another protocol than this program."""
    if plan.protocol_version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"run '{plan.name}' speaks protocol {plan.protocol_version}, this is "
            f"{SOFTWARE} with protocol {PROTOCOL_VERSION}; {protocol_remedy(plan.protocol_version)}"
        )


def _by_peer(addresses: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return addresses by the peer that each is of."""
    found: dict[str, tuple[str, ...]] = {}
    for address in addresses:
        found[peer_of(address)] = (*found.get(peer_of(address), ()), address)
    return found


def _open_chains(
    plan: RunPlan, grid: Grid, index: Index, me: str, contributors: KnownContributors, gate: Gate
) -> ChainStore:
    """Open the chains, whose contributors are known from now on, beginning with those on the disk:
    they have places and room before others."""

    def served(step: Step, admissions: Mapping[str, bytes]) -> None:
        contributors.step_taken(step)
        for peer, admission in admissions.items():
            with contextlib.suppress(RecordError):
                gate.verify(peer, admission)
                gate.contributed(peer, step.round_index)

    chains = ChainStore(
        plan.run_id,
        grid.modules(),
        index,
        me,
        has_contributed=contributors.has_contributed,
        on_served=served,
    )
    for module in chains.modules:
        for step in chains.steps(module, _REMEMBERED_STEPS):
            served(step, chains.admissions_of(step.peers))
    return chains


def _max_row_bytes(plan: RunPlan, grid: Grid, module: str) -> int:
    """Return the most bytes that a contribution to a module may have."""
    codec = CODECS[plan.contributions.codec]
    return MARK_BYTES + codec.file_bytes(layout_of(grid, module).size)


def make_folder(path: Path) -> None:
    """Create a folder, or say which one cannot be created; what was never finished in it goes."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        remove_stale_temporaries(path)
    except OSError as error:
        raise StorageError(
            f"cannot create {path}: {error.strerror}{set_by(path)}; choose another place with "
            f"--cache-dir"
        ) from None
