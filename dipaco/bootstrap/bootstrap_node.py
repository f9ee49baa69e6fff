"""The bootstrap node: first address of a swarm, server of its blobs, mailbox, keeper of states.

It is a peer that does not train. Nothing depends on it once others are there: peers hold the
blobs and states as well, and store the manifest again themselves. A successor is served into the
swarm of the run before by the address of any peer there (`--initial-peers`); a node that serves
the run before goes on with that one.
"""

from __future__ import annotations

import logging
import random
import threading
import time

from dipaco.base.errors import DipacoError, IntegrityError, ManifestError
from dipaco.base.running import is_debugging
from dipaco.dht.addresses import is_loopback
from dipaco.dht.dht_node import visible_addresses
from dipaco.peer.background import Background
from dipaco.peer.exchange.fetching import max_core_bytes
from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.given_address import keep_line
from dipaco.peer.node.guests import given_invitation
from dipaco.peer.node.join_run import join_run
from dipaco.peer.node.line_for_others import line_for_others
from dipaco.peer.node.node import Node
from dipaco.peer.node_process import NodeProcess, begin_process
from dipaco.peer.presence.own_status import Activity, PeerStatus
from dipaco.peer.presence.refresher import Refresher
from dipaco.peer.reporting.peer_display import Display
from dipaco.peer.shell.shell import Shell
from dipaco.peer.training_peer import install_stop_signals, start_background, write_address_file
from dipaco.protocol.member.knowledge import MemberSettings
from dipaco.protocol.view import SwarmView, present_round
from dipaco.routing.run_folder import RunFolder

from .bootstrap_settings import ServeSettings
from .invite import own_invitation

logger = logging.getLogger("dipaco.bootstrap.bootstrap_node")

# Most seconds between two looks at the swarm; what has changed is shown.
_LOOK_PERIOD_S = 30.0


def run(settings: ServeSettings) -> int:
    """Serve until stopped. Returns the exit code."""
    folder = settings.folder
    if not RunFolder(folder).manifest_path.is_file():
        raise ManifestError(
            f"{folder} holds no manifest.json; prepare a run first: "
            f"dipaco-bootstrap prepare RUN.toml --out {folder}"
        )
    _check_content(RunFolder(folder))
    display = Display(debug=is_debugging())
    stopping = threading.Event()
    joined = install_stop_signals(stopping, display.say)
    process = begin_process(settings, display, stopping)
    node = join_run(
        initial_peers=settings.initial_peers,
        run=None,
        cache_folder=folder,
        listening=Listening(
            host_maddrs=settings.listen_maddrs(),
            announce_maddrs=settings.announce_maddrs,
        ),
        run_folder=folder,
        uplink=process.uplink,
        say=display.say,
    )
    joined.set()
    try:
        node.admit(given_invitation(settings.invitation) or own_invitation(folder, display.say))
        _serve(node, settings, process)
    finally:
        node.close()
        process.events.close()
    return 0


def _check_content(run: RunFolder) -> None:
    """Raise IntegrityError if a blob that all newcomers fetch is damaged: nobody would take it."""
    plan = run.plan()
    for sha256 in max_core_bytes(plan, run.grid(plan)):
        if run.blobs.has(sha256) and not run.blobs.verify(sha256):
            raise IntegrityError(
                f"{run.blobs.path(sha256)} is damaged, so newcomers would refuse it; delete it, "
                f"and prepare the run again with the same command, or copy it from another node"
            )


def _serve(node: Node, settings: ServeSettings, process: NodeProcess) -> None:
    display, events, stopping = process.display, process.events, process.stopping
    node.load_shard_index()
    status = PeerStatus(Activity("serving"))
    background = Background()
    background.on_failure(stopping.set)
    running, blob_keeper = start_background(node, status, background, process)
    refresher = running.refresher
    process.metrics.serve(settings.metrics, display.say)
    addresses = visible_addresses(node.dht)
    write_address_file(settings, addresses)
    if is_loopback(addresses[0]):
        display.say(
            f"only this machine can call {addresses[0]}, because it has no other address; connect "
            "it to a network, or give the address for others with --announce-maddrs"
        )
    line = line_for_others(addresses, node.manifest)
    keep_line(node.cache_folder, line)  # for `dipaco-bootstrap invite`
    display.say(
        f"serving run '{node.plan.name}' ({node.run_id}) from {settings.folder}; "
        "volunteers paste this:",
        line,
    )
    if node.plan.admission is None:
        display.say(
            f"the run is by invitation: make a TEXT with dipaco-bootstrap invite {settings.folder} "
            "--peers 1"
        )
    if node.plan.successor_of is not None:
        display.say(_of_predecessor(node))
    events.emit("serving", run=node.run_id, addresses=list(addresses))
    as_mailbox = MemberSettings(node.me, trains=False)
    shell = Shell(running, as_mailbox)
    looking = background.thread(
        "look",
        lambda: _look_until_stopped(node, refresher, display, stopping),
    )
    looking.start()
    try:
        shell.run()
    finally:
        blob_keeper.stop()
        refresher.stop(withdraw=True)


def _of_predecessor(node: Node) -> str:
    """Say whether the peers of the run before can find this one."""
    before = node.plan.successor_of
    if not node.initial_peers:
        return (
            f"this run succeeds {before}, whose peers cannot see it here: give --initial-peers "
            "with the address of one of them"
        )
    return f"this run succeeds {before}; its peers move here when their round has ended"


def _look_until_stopped(
    node: Node, refresher: Refresher, display: Display, stopping: threading.Event
) -> None:
    """Show the state of the swarm when it is another; look up a random key so that dead peers leave
    the routing."""
    said = ""
    while not stopping.wait(min(_LOOK_PERIOD_S, refresher.period_s)):
        try:
            node.directory.look_up_random_key(random.getrandbits(64))
            node.directory.list_manifests()  # which lets the nodes of a successor into the DHT
            view = refresher.view
        except DipacoError as error:
            logger.warning("%s", error)
            continue
        seen = _seen(node, view)
        if seen != said or is_debugging():
            when = f"{time.strftime('%H:%M:%S')} round {present_round(node.plan, view)}"
            display.say(f"{when}: {seen}")
        said = seen


def _seen(node: Node, view: SwarmView) -> str:
    """Say who else is in the swarm, and what is trained and held."""
    peers, held = len(set(view.present) - {node.me}), len(node.held.all())
    training = [claim for claim in view.claims.values() if claim.state == "training"]
    paths = view.paths(node.grid)
    served = {claim.path for claim in training} & set(paths)
    which = "paths" if len(paths) == node.grid.path_count else "paths near this node"
    return (
        f"{peers} other peer{'s' * (peers != 1)}, {len(served)} of {len(paths)} {which} in "
        f"training, {held} state{'s' * (held != 1)} held here"
    )
