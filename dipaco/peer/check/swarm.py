"""What the swarm says of this machine: who answers, its clock, the run. Only asks.

Joins as a reader, with an identity and a folder that are thrown away: nothing is claimed or
served, and a peer that runs here is not disturbed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from dipaco.base.errors import AddressError, DipacoError, NetworkError
from dipaco.dht.addresses import split_operator
from dipaco.dht.dht_node import check_port_is_free, visible_addresses
from dipaco.peer.exchange.contact.diagnosis import Finding, examine
from dipaco.peer.exchange.contact.known_peers import peer_of
from dipaco.peer.exchange.contact.reachability import probe
from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.join_run import join_run
from dipaco.peer.node.node import Node
from dipaco.peer.peer_settings import PeerSettings
from dipaco.protocol.plan import RunPlan, ShardIndex


@dataclass(frozen=True)
class SwarmReport:
    """What was found; `failure` says why there is no run."""

    plan: RunPlan | None = None
    shards: ShardIndex | None = None
    failure: DipacoError | None = None
    addresses: tuple[str, ...] = ()
    reachable: str = "unknown"


def ports_taken(addresses: tuple[str, ...]) -> list[DipacoError]:
    """Return why a peer could not listen at some of these addresses."""
    taken: list[DipacoError] = []
    for address in addresses:
        try:
            check_port_is_free(address)
        except AddressError as error:
            taken.append(error)
    return taken


def ask_neighbours(settings: PeerSettings) -> tuple[Finding, ...]:
    """Say hello to every address that was given; bounded. Raises `DipacoError`."""
    return examine(split_operator(settings.initial_peers)[0])


def ask_swarm(settings: PeerSettings, *, port_is_free: bool) -> SwarmReport:
    """Find the run and try the line; bounded, and everything that was started is ended."""
    with tempfile.TemporaryDirectory(prefix="dipaco-check-") as folder:
        try:
            node = join_run(
                initial_peers=settings.initial_peers,
                run=settings.run,
                cache_folder=Path(folder),
                listening=Listening(
                    host_maddrs=settings.listen_maddrs() if port_is_free else (),
                    announce_maddrs=settings.announce_maddrs if port_is_free else (),
                    client_mode=True,
                ),
                say=lambda line: None,
            )
        except DipacoError as error:
            return SwarmReport(failure=error)
        try:
            return _look_around(node)
        finally:
            node.close()


def _look_around(node: Node) -> SwarmReport:
    shards, failure = None, None
    try:
        shards = node.load_shard_index()
    except DipacoError as error:
        failure = error
    try:
        addresses = visible_addresses(node.dht)
    except NetworkError:
        addresses = ()
    return SwarmReport(
        plan=node.plan,
        shards=shards,
        failure=failure,
        addresses=addresses,
        reachable=how_reached(node, addresses),
    )


def how_reached(node: Node, addresses: tuple[str, ...]) -> str:
    """Have others call this machine back, as a peer does."""
    given = map(peer_of, node.initial_peers)
    try:
        others = (*given, *node.exchange.connected_peers())
    except NetworkError:
        return "unknown"
    return probe(node.exchange, tuple(dict.fromkeys(others)), addresses)[0]
