"""`dipaco-peer --check`: does what joining does, and reports each finding in one line.

It joins as a reader, with an identity and a folder that are thrown away: nothing is claimed, served
or kept, and a peer that runs here is not disturbed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from dipaco.base.errors import (
    AddressError,
    ClockError,
    ConfigurationError,
    DipacoError,
    UnreachableError,
)
from dipaco.base.progress import shown_bytes
from dipaco.dht.addresses import parse_listen, port_of
from dipaco.dht.dht_node import check_port_is_free, visible_addresses
from dipaco.modules.base_source import seems_in_hub_cache
from dipaco.modules.frozen_file import base_file_bytes
from dipaco.modules.hub_cache import is_hub_name
from dipaco.peer.exchange.contact.known_peers import peer_of
from dipaco.peer.exchange.contact.reachability import probe
from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.guests import admission_file, admit, check_admission, given_invitation
from dipaco.peer.node.join_run import join_run
from dipaco.peer.node.node import Node
from dipaco.peer.owner.idle import in_use
from dipaco.peer.peer_settings import PeerSettings
from dipaco.peer.texts_at_home import look_at_texts
from dipaco.protocol.admission import Gate
from dipaco.protocol.identity import KEY_FILE, Identity, is_in_use, kept_peer_id
from dipaco.protocol.manifest import SignedManifest
from dipaco.protocol.plan import RunPlan, ShardIndex

from . import needs
from .checks import Check, failed, ok, warning
from .fits import machine_checks
from .this_machine import check_system, check_versions

# A clock that is further off than this is corrected while a peer runs.
_CLOCK_WARNING_S = 1.0
_SET_THE_CLOCK = "set the clock: sudo timedatectl set-ntp true (in WSL: sudo hwclock -s)"

_Found = tuple[RunPlan | None, ShardIndex | None]


def run_doctor(settings: PeerSettings) -> int:
    """Check everything, print it, and return the exit code of the first problem, 0 if none."""
    found = []
    for check in examine_all(settings):
        found.append(check)
        print(check, flush=True)
    print(closing_line(found))
    sys.stdout.flush()
    return exit_code_of(found)


def exit_code_of(found: list[Check]) -> int:
    """Return the exit code with which joining would end."""
    return next((check.error.exit_code for check in found if check.error is not None), 0)


def closing_line(found: list[Check]) -> str:
    """Return the last line of `--check`: how many checks found something."""
    problems = sum(check.verdict == "problem" for check in found)
    warnings = sum(check.verdict == "warning" for check in found)
    if problems:
        return f"{problems} of {len(found)} checks found a problem; begin with the first"
    if warnings:
        return f"a peer can run here; {warnings} of {len(found)} checks warn"
    return "a peer can run here"


def examine_all(settings: PeerSettings) -> Iterator[Check]:
    """Yield every check as soon as it is made. Checks that need CUDA come last: after them nothing
    may be forked."""
    yield check_system()
    yield check_versions()
    is_running = is_in_use(settings.cache_folder / KEY_FILE)
    if is_running:
        remedy = "a second one needs a --cache-dir of its own"
        yield warning("cache folder", f"a peer is running with {settings.cache_folder}", remedy)
    port = _check_port(settings, is_running=is_running)
    yield port
    if settings.when_idle is not None:
        yield _check_idle(settings.when_idle)
    plan, shards = yield from _swarm_checks(settings, port_is_free=port.verdict == "ok")
    yield from machine_checks(settings, plan, shards)


def _check_idle(minutes: float) -> Check:
    try:
        return ok("idle", in_use(minutes)() or "nobody uses this machine now")
    except ConfigurationError as error:
        return failed("idle", error)


def _check_port(settings: PeerSettings, *, is_running: bool) -> Check:
    """Say whether a peer can listen where it is told to."""
    try:
        addresses = settings.listen_maddrs()
        for address in addresses:
            check_port_is_free(address)
    except AddressError as error:
        if is_running:
            return warning("port", str(error).partition("; ")[0], "by the running peer, it seems")
        return failed("port", error)
    if any(address.endswith("/tcp/0") for address in addresses):
        remedy = "a router can forward only one that stays: --port 31337"
        return ok("port", "another free one at each start", remedy)
    return ok("port", f"{', '.join(addresses)}: free")


# -- the swarm


def _swarm_checks(settings: PeerSettings, *, port_is_free: bool) -> Generator[Check, None, _Found]:
    """Join as a reader, yield the checks of each step, and return the run, if there is one."""
    if not settings.initial_peers:
        yield ok("swarm", "no address was given: only this machine is checked")
        return None, None
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
            yield failed(_step_of(error), error)
            return None, None
        try:
            return (yield from _run_checks(settings, node, port_is_free=port_is_free))
        finally:
            node.close()


def _step_of(error: DipacoError) -> str:
    """Name the step of joining that failed, in a word."""
    if isinstance(error, UnreachableError):
        return "neighbours"
    return "clock" if isinstance(error, ClockError) else "run"


def _run_checks(
    settings: PeerSettings, node: Node, *, port_is_free: bool
) -> Generator[Check, None, _Found]:
    plan, grid, connected = node.plan, node.grid, node.exchange.connected_peers()
    others = f"{len(connected)} peer{'s' * (len(connected) != 1)}"
    yield ok("neighbours", f"the swarm answers; connected to {others}")
    yield check_clock(node.clock.offset_s)
    yield ok("run", f"'{plan.name}' ({plan.run_id}), {grid.path_count} paths")
    if plan.about.text:
        yield ok("what for", plan.about.text)
    if plan.admission is None:
        yield check_invitation(settings, node.gate, node.manifest, node.identity)
    if port_is_free:
        addresses, reachable = _how_reached(node, connected)
        port = port_of(parse_listen(settings.listen_maddrs()[0]))
        yield check_reachability(addresses, reachable, port or 31337)
    yield check_line(plan, settings.max_upload_mbps)
    if settings.texts is not None:
        yield check_texts(settings, plan)
    if (source := plan.base_source) is not None:
        size = shown_bytes(base_file_bytes(plan.model))
        yield check_base(source.name, size, is_here=seems_in_hub_cache(source))
    try:
        return plan, node.load_shard_index()
    except DipacoError as error:
        yield failed("shards", error)
        return plan, None


def _how_reached(node: Node, connected: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return this machine's addresses, and whether others can call it there, as a peer asks.

    They call only the admitted. The identity of a check is thrown away, so it takes no place of an
    invitation that its operator gave.
    """
    try:
        if node.plan.admission is not None:
            node.admit()
        addresses = visible_addresses(node.dht)
        asked = tuple(dict.fromkeys((*map(peer_of, node.initial_peers), *connected)))
        return addresses, probe(node.exchange.call_back, asked, addresses)[0]
    except DipacoError:
        return (), "unknown"


def check_invitation(
    settings: PeerSettings, gate: Gate, manifest: SignedManifest, thrown_away: Identity
) -> Check:
    """Say whether this machine is admitted to a run by invitation, or has what admits it.

    An invitation is tried with an identity that is `thrown_away`, so it takes no place.
    """
    own = settings.cache_folder / KEY_FILE
    kept = admission_file(own, gate)
    try:
        invitation = given_invitation(settings.invitation)
        if invitation is None and own.exists() and kept.exists():
            check_admission(gate, kept_peer_id(own), kept.read_bytes())
            return ok("invitation", "the operator has admitted this peer")
        admit(gate, thrown_away, manifest, time.time(), invitation)
    except DipacoError as error:
        return failed("invitation", error)
    return ok("invitation", "it is good for this run, if one of its places is free")


def check_clock(offset_s: float) -> Check:
    """Say how far this machine's clock is from the swarm's: `offset_s` is theirs minus ours."""
    if abs(offset_s) <= _CLOCK_WARNING_S:
        return ok("clock", f"within {max(0.1, abs(offset_s)):.1f} s of the swarm's")
    side = "behind" if offset_s > 0 else "ahead of"
    value = f"{abs(offset_s):.1f} s {side} the swarm's, corrected while a peer runs"
    return warning("clock", value, _SET_THE_CLOCK)


def check_reachability(addresses: tuple[str, ...], reachable: str, port: int) -> Check:
    """Say whether others could call this machine when they were asked to."""
    places = dict.fromkeys(address.partition("/p2p/")[0] for address in addresses)
    shown = ", ".join(places) or "it has no address"
    if reachable == "direct":
        return ok("reachable", f"others have called it: {shown}")
    if reachable == "unknown":
        return ok(
            "reachable", f"a peer says whether others can call it once it has joined: {shown}"
        )
    return warning(
        "reachable",
        f"others cannot call it; it takes part through its own calls: {shown}",
        f"forward TCP port {port} of the router to this machine and give --port {port} "
        f"--announce-maddrs /ip4/ROUTER-ADDRESS/tcp/{port} (WSL: docs/windows.md; containers: "
        "examples/deploy/README.md)",
    )


def check_line(plan: RunPlan, max_upload_mbps: float | None) -> Check:
    """Say what the line has to carry, and whether the owner's limit leaves enough for it."""
    needed = needs.round_mbit_per_s(plan, needs.grid_of(plan))
    shown = f"{needed:,.0f}" if needed >= 10 else f"{needed:.2g}"
    value = f"a round takes {shown} Mbit/s each way on average"
    if slow := needs.too_slow(plan, max_upload_mbps):
        return warning("line", value, slow[0])
    return ok("line", value)


def check_texts(settings: PeerSettings, plan: RunPlan) -> Check:
    """Say whether the run allows the owner's texts, and whether they can be read."""
    try:
        return ok("your texts", look_at_texts(settings, plan))
    except DipacoError as error:
        return failed("your texts", error)


def check_base(name: str, size: str, *, is_here: bool) -> Check:
    """Say where the frozen base of a run with adapters comes from."""
    if is_here:
        return ok("base", f"{name} is in the hub's cache, and is taken from there")
    remedy = f"hf download {name} saves them that download" if is_hub_name(name) else ""
    return ok("base", f"{size} of {name} are fetched once, from mirrors or other peers", remedy)
