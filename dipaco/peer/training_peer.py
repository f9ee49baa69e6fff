"""Building a training peer from its settings, and tearing it down again."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import atomic_write
from dipaco.base.running import is_debugging, stop_signals
from dipaco.dht.dht_node import be_client, note_port, visible_addresses
from dipaco.modules.device import (
    be_nice,
    choose_device,
    device_name,
    gpus_left,
    limit_memory,
    prepare_process,
)
from dipaco.modules.layout import parameter_counts
from dipaco.modules.memory import release_memory
from dipaco.peer.check.fits import contributions_limit, fitting_batch
from dipaco.peer.check.needs import too_slow
from dipaco.peer.check.this_machine import (
    how_to_use_gpu,
    look_for_gpu_hardware,
    open_many_files,
)
from dipaco.peer.exchange.contact.hello import SOFTWARE
from dipaco.peer.exchange.contact.known_peers import KnownPeers
from dipaco.peer.exchange.contact.reachability import ReachabilityWatch
from dipaco.peer.keeping.blob_keeper import BlobKeeper
from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.given_address import keep_addresses, keep_line
from dipaco.peer.node.guests import RevocationList, given_invitation
from dipaco.peer.node.join_run import join_run
from dipaco.peer.node.line_for_others import line_for_others
from dipaco.peer.node.node import Node
from dipaco.peer.owner.idle import in_use
from dipaco.peer.owner.keep_awake import KeepAwake
from dipaco.peer.owner.pause_reasons import (
    Aside,
    FullDisk,
    Hours,
    Reason,
    on_battery,
    outside_of,
    programs_of,
    while_running,
)
from dipaco.peer.owner.pauses import Pauses, install_pause_signals
from dipaco.peer.owner.upload_budget import UploadBudget
from dipaco.peer.presence.own_status import PeerStatus
from dipaco.peer.presence.refresher import Refresher
from dipaco.peer.presence.twin import TwinWatch
from dipaco.peer.reporting.event_log import EventLog
from dipaco.peer.reporting.peer_display import Display
from dipaco.peer.shell.running_node import RunningNode
from dipaco.peer.shell.session import Session
from dipaco.protocol.config import RoundsConfig
from dipaco.protocol.records import Reachability
from dipaco.training.interruption import PassInterrupted
from dipaco.training.trainer import PathTrainer

from .background import Background
from .kept_flags import keep_flags
from .node_process import NodeProcess, begin_process
from .peer_settings import NodeSettings, PeerSettings
from .texts_at_home import check_texts_are_allowed, texts_at_home

logger = logging.getLogger("dipaco.peer.training_peer")

# Promise 10: Ctrl+C leaves within ten seconds, whatever hangs.
LEAVE_LIMIT_S = 9.0
# Before the swarm is joined there is nothing to leave.
GIVE_UP_LIMIT_S = 3.0


def run_peer(settings: PeerSettings, runs_folder: Path | None = None, sharers: int = 1) -> int:
    """Join and train until stopped. Returns the exit code.

    So many peers of this machine have what lies in `runs_folder` in common.
    """
    display = Display(debug=is_debugging())
    stopping = threading.Event()
    joined = install_stop_signals(stopping, display.say)
    invitation = given_invitation(settings.invitation)
    install_pause_signals(settings.cache_folder)
    prepare_process(settings.threads)
    open_many_files()
    process = begin_process(settings, display, stopping)
    events = process.events
    awake = KeepAwake()
    if settings.keep_awake:
        events.add_listener(awake.on_event)
    node: Node | None = None
    try:
        node = join_run(
            initial_peers=settings.initial_peers,
            run=settings.run,
            cache_folder=settings.cache_folder,
            listening=Listening(
                host_maddrs=settings.listen_maddrs(), announce_maddrs=settings.announce_maddrs
            ),
            runs_folder=runs_folder,
            uplink=process.uplink,
            say=display.say,
        )
        joined.set()
        note_port(settings.port_file)
        node.admit(invitation)
        keep_addresses(settings.cache_folder, settings.initial_peers)
        if settings.texts is not None:
            check_texts_are_allowed(node.plan)
        keep_flags(runs_folder or settings.cache_folder, settings.typed)
        if settings.path is not None and settings.path >= node.grid.path_count:
            raise ConfigurationError(
                f"--path {settings.path}: this run has paths 0 to {node.grid.path_count - 1}"
            )
        following: Node | None = node
        while following is not None:
            node = following
            _greet(node, display)
            settings, following = _train(settings, node, process, sharers)
            display.stop()
            node = following or node
    finally:
        display.stop()
        awake.release()
        if node is not None:
            node.close()
        events.close()
    return 0


def _greet(node: Node, display: Display) -> None:
    plan = node.plan
    counts = parameter_counts(node.grid)
    over = f" over {plan.base_source.name}" if plan.base_source is not None else ""
    display.say(
        f"run '{plan.name}' ({node.run_id}), manifest {node.manifest.plan.fingerprint}, signed by "
        f"{node.manifest.operator_fingerprint}"
    )
    if plan.about.text:
        display.say(f"what it is for: {plan.about.text}")
    display.say(
        f"{node.grid.path_count} paths of {counts['path'] / 1e6:.1f} M parameters{over}, "
        f"{counts['total'] / 1e6:.1f} M in all; {_round_text(plan.rounds)}"
    )
    display.say(f"this peer is {node.me}, its files are in {node.folder}")


def _round_text(rounds: RoundsConfig) -> str:
    if rounds.inner_steps:
        return f"a round is {rounds.inner_steps} steps, at most {rounds.duration_s:.0f} s"
    return f"a round is {rounds.duration_s:.0f} s"


def _train(
    settings: PeerSettings, node: Node, process: NodeProcess, sharers: int
) -> tuple[PeerSettings, Node | None]:
    """Start the background work, then run the session.

    Returns the node of the successor that the peer moves to, if it does, and the settings there.
    """
    display, events = process.display, process.events
    shards = node.load_shard_index()
    micro_batch_size = fitting_batch(settings, node.plan, shards, node.folder)
    # Limits for one peer are shared by all of them.
    node.states.kept.max_bytes = sharers * contributions_limit(settings, node.plan, shards)
    budget = None
    if settings.max_upload_gb_month is not None:
        folder, most = settings.cache_folder, settings.max_upload_gb_month
        budget = UploadBudget(folder, process.uplink, most)
    for line in too_slow(node.plan, settings.max_upload_mbps):
        logger.warning("%s", line)
    device, reason = choose_device(settings.device)
    limit_memory(device, settings.vram_gb)
    pauses = Pauses(settings.cache_folder, _reasons_to_pause(settings, budget, events))
    _warn_of_unused_gpu(settings, device, reason)
    display.say(_device_line(device, reason, gpus_left(device, settings.device)))
    try:
        texts = texts_at_home(settings, node, device, display.say, process.stopping.is_set)
    except PassInterrupted:
        return settings, None
    status = PeerStatus(device=device_name(device), name=settings.name, team=settings.team)
    running, blob_keeper = start_background(node, status, Background(), process)
    if budget is not None:
        running.refresher.refresh_too(lambda directory: budget.save())
    process.metrics.serve(settings.metrics, display.say)
    display.start(node, running.refresher, status)
    trainer = _new_trainer(settings, node, device, micro_batch_size, process.stopping)
    session = Session(settings, running, trainer, pauses, texts)
    # This is done later than the other processes and what answers others, because these have to be
    # quick.
    be_nice(settings.nice, device)
    write_address_file(settings, visible_addresses(node.dht))
    try:
        successor = session.run()
    finally:
        blob_keeper.stop()
        if budget is not None:
            budget.close()
        pauses.close()
    if successor is None:
        return settings, None
    settings = _settings_in_successor(settings, successor, session.rounds_done, display)
    del session, trainer
    release_memory(device)
    return settings, successor


def _device_line(device: torch.device, reason: str, idle_gpus: int) -> str:
    """Return whether the GPU trains, and why it is that device. `idle_gpus` are the others."""
    if device.type == "cpu":
        return f"this peer trains on the CPU ({device_name(device)}): {reason}"
    line = f"this peer trains on the GPU: {device_name(device)} ({device})"
    if idle_gpus:
        words = " ".join(f"cuda:{index}" for index in range(idle_gpus + 1))
        line += f"; {idle_gpus} more are idle here: --devices {words} starts a peer on each"
    return line


def _warn_of_unused_gpu(settings: PeerSettings, device: torch.device, reason: str) -> None:
    """Warn if the CPU trains although the machine has a GPU, which PyTorch cannot use."""
    maker = look_for_gpu_hardware() if settings.device == "auto" else ""
    if device.type == "cpu" and maker:
        said = "THIS MACHINE HAS AN %s GPU THAT IS NOT USED: %s; %s"
        logger.warning(said, maker, reason, how_to_use_gpu(maker))


def _new_trainer(
    settings: PeerSettings,
    node: Node,
    device: torch.device,
    micro_batch_size: int | None,
    stopping: threading.Event,
) -> PathTrainer:
    """Return the trainer of the session's paths, as the settings ask for it."""
    return PathTrainer(
        node.plan,
        node.grid,
        device,
        new_model=lambda: node.fetcher.sound(
            node.plan.blobs.base,
            "the base model",
            lambda: node.run_folder.path_model(node.plan, device),
        ),
        optimizer=settings.optimizer,
        micro_batch_size=micro_batch_size,
        compile_model=settings.compile_model and device.type == "cuda",
        is_interrupted=stopping.is_set,
    )


def _reasons_to_pause(
    settings: PeerSettings, budget: UploadBudget | None, events: EventLog
) -> list[Reason]:
    """Return the reasons for which a peer is asked to pause; the first one that holds is shown.

    Raises ConfigurationError for what this machine cannot tell.
    """
    reasons: list[Reason] = []
    if settings.hours is not None:
        reasons += [outside_of(Hours.parse(settings.hours))]
    if settings.on_battery == "pause":
        reasons += [on_battery()]
    if settings.pause_while is not None:
        reasons += [Aside(while_running(programs_of(settings.pause_while)))]
    if settings.when_idle is not None:
        reasons += [in_use(settings.when_idle)]
    disk = FullDisk(settings.cache_folder, lambda said: events.emit("disk", what=said))
    return [*reasons, *([budget.reason] if budget is not None else []), disk]


def _settings_in_successor(
    settings: PeerSettings, successor: Node, rounds_done: int, display: Display
) -> PeerSettings:
    """Return the settings for the next run: what is left of --max-rounds, and --path if the run has
    it."""
    if settings.max_rounds is not None:
        settings = replace(settings, max_rounds=settings.max_rounds - rounds_done)
    if settings.path is not None and settings.path >= successor.grid.path_count:
        display.say(
            f"the successor has no path {settings.path} (--path); this peer chooses another"
        )
        settings = replace(settings, path=None)
    return settings


def start_background(
    node: Node, status: PeerStatus, background: Background, process: NodeProcess
) -> tuple[RunningNode, BlobKeeper]:
    """Start publishing, reading and keeping copies. Also used by the bootstrap node."""
    events = process.events
    # Say to which run the following events belong, and which peer tells them, so that a log is
    # enough by itself.
    events.emit(
        "run",
        run=node.run_id,
        peer_id=node.me,
        operator=node.manifest.operator_fingerprint,
        plan=node.plan.model_dump(mode="json"),
        name=status.name,
        software=SOFTWARE,
        device=status.device,
    )
    node.held.load_from_disk()
    node.serve_run()
    status.addresses = visible_addresses(node.dht)
    refresher = Refresher(node, status, background)
    running = RunningNode(node, status, refresher, background, events, process.stopping)
    process.metrics.follow(node, refresher, status)
    blob_keeper = BlobKeeper(node, refresher, background)
    refresher.refresh_too(RevocationList(node.gate, node.folder).read)
    twin = TwinWatch(
        node.me, node.clock.now(), lambda others: events.emit("twin", addresses=list(others))
    )
    twin.said(status.addresses)
    refresher.on_view(twin.on_view)
    _watch_reachability(running, twin)
    known = KnownPeers(node.cache_folder)
    refresher.on_view(
        lambda view: known.note(
            node.run_id, node.initial_peers, view, node.me, node.contributors.all()
        )
    )
    refresher.start()
    refresher.refresh()
    blob_keeper.start()
    return running, blob_keeper


def _watch_reachability(running: RunningNode, twin: TwinWatch) -> None:
    """Find out how others can call this node, and publish it."""
    node, status, refresher = running.node, running.status, running.refresher

    def tell(addresses: tuple[str, ...], reachable: Reachability) -> None:
        has_changed = reachable != status.reachable
        if has_changed:
            line = line_for_others(addresses, node.manifest) if reachable == "direct" else ""
            keep_line(node.cache_folder, line)
            running.events.emit("reachable", how=reachable, addresses=list(addresses), line=line)
        twin.said(addresses)
        status.addresses, status.reachable = addresses, reachable
        refresher.announce()
        refresher.look_often()
        if has_changed:
            # If it fails now, the next DHT process is told.
            be_client(node.dht, reachable == "outgoing")

    watch = ReachabilityWatch(
        node.exchange.call_back,
        node.me,
        lambda: visible_addresses(node.dht, attempts=1),
        running.background.thread,
        tell,
    )
    refresher.on_view(watch.on_view)


def write_address_file(settings: NodeSettings, addresses: Sequence[str]) -> None:
    """Write a node's addresses, one a line, for scripts that start other peers."""
    if settings.address_file is not None:
        atomic_write(settings.address_file, "".join(f"{a}\n" for a in addresses).encode())


def install_stop_signals(stopping: threading.Event, say: Callable[[str], None]) -> threading.Event:
    """First Ctrl+C (SIGTERM, a closed terminal): leave cleanly, in bounded time. Second: at once.

    Returns an event for the caller to set once the swarm is joined: until then there is nothing
    to leave, and the first Ctrl+C raises `KeyboardInterrupt`.
    """
    joined = threading.Event()
    process = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # A forked child; it ignores Ctrl+C, and SIGTERM comes from its parent.
            os._exit(128 + number)
        if stopping.is_set():
            _exit_at_once()
        stopping.set()
        # Whatever hangs, a transfer or a network that does not answer, must not delay leaving; and
        # an exception that is raised in a hook of a library is lost.
        limit_s = LEAVE_LIMIT_S if joined.is_set() else GIVE_UP_LIMIT_S
        limit = threading.Timer(limit_s, _exit_at_once)
        limit.daemon = True
        limit.start()
        if not joined.is_set():
            say("stopped before the swarm was joined")
            raise KeyboardInterrupt
        say("leaving; press Ctrl+C again to exit at once")
        sys.stdout.flush()

    for number in stop_signals():
        signal.signal(number, stop)
    return joined


def _exit_at_once() -> None:
    try:
        for child in multiprocessing.active_children():
            child.kill()
    finally:
        # Another thread may be waiting for the same children; they end with this process anyway.
        os._exit(130)
