"""Joining the DHT, and finding a run in it."""

from __future__ import annotations

import contextlib
import logging
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from hivemind.p2p import p2p_daemon

from dipaco.base.errors import (
    AddressError,
    ClockError,
    DipacoError,
    IntegrityError,
    ManifestError,
    NetworkError,
    RunSelectionError,
    StorageError,
    UnreachableError,
)
from dipaco.base.files import atomic_write, sha256_of_file
from dipaco.protocol.identity import Identity
from dipaco.protocol.manifest import SignedManifest, current_runs, newest_run

from .addresses import is_loopback, listening_everywhere, parse_listen, port_of
from .bounded_protocol import introduce
from .directory import Directory
from .guarded_dht import GuardedDHT
from .record_validator import record_validators

logger = logging.getLogger("dipaco.dht.dht_node")

_STARTUP_TIMEOUT_S = 60.0
_ADDRESSES_LIMIT_S = 15.0
_DEFAULT_PORT = 31337
_PORTS_TRIED = 100
# The SHA-256 of p2pd v0.5.0.hivemind1 as it was released, which Hivemind 1.1.12 comes with.
_P2PD_SHA256 = {
    "x86_64": "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8",
    "aarch64": "046f18480c785a84bdf139d7486086d379397ca106cb2f0191598da32f81447a",
}
# For a run to appear.
MANIFEST_WAIT_S = 20.0
# Runs in one message; anybody can announce some.
_MAX_LISTED = 8
# Of this process, by the first that was tried: what holds the port's name, and the port.
_taken: dict[int, tuple[socket.socket, int]] = {}


def check_port_is_free(address: str) -> None:
    """Raise `AddressError` when another program listens at an address already."""
    parsed = parse_listen(address)
    port = port_of(parsed)
    if not port:
        return
    for name, family in (("ip4", socket.AF_INET), ("ip6", socket.AF_INET6)):
        try:
            host = parsed.value_for_protocol(name)
        except Exception:
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As p2pd does it: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise AddressError(
                    f"cannot listen at {address}: {error.strerror}; stop the program that uses "
                    f"the port, or give another (--port {port + 1}; --port 0 takes a free one)"
                ) from None


def take_port(first: int = _DEFAULT_PORT, last_time: Path | None = None) -> int:
    """Return the first port from `first` on that no other node and no program uses; before those,
    the one that this node had, which stands in the file `last_time`: others know it there.

    p2pd would share a port with another p2pd that starts at the same moment, and each would get
    calls for the other. So a node holds a name for its port as long as it lives: an abstract
    socket, which the kernel removes with it. Raises `AddressError` when all are taken.
    """
    if first in _taken:
        return _taken[first][1]
    for port in (*_noted_port(last_time), *range(first, first + _PORTS_TRIED)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0dipaco-port-{port}")
            for address in listening_everywhere(port):
                check_port_is_free(address)
        except (OSError, AddressError):
            name.close()
            continue
        _taken[first] = name, port
        return port
    raise AddressError(
        f"ports {first} to {first + _PORTS_TRIED - 1} are all in use; give a free one with --port"
    )


def note_port(file: Path, first: int = _DEFAULT_PORT) -> None:
    """Keep the port that `take_port` took, if it took one, for the next time."""
    if first in _taken:
        with contextlib.suppress(StorageError):
            atomic_write(file, str(_taken[first][1]).encode())


def _noted_port(file: Path | None) -> list[int]:
    try:
        port = int(file.read_bytes()[:9]) if file is not None else 0
    except (OSError, ValueError):
        return []
    return [port] if 1024 <= port < 2**16 else []


def join_dht(
    initial_peers: Sequence[str],
    *,
    identity: Identity,
    host_maddrs: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    announce_maddrs: Sequence[str] = (),
    client_mode: bool = False,
    is_first: bool = False,
) -> GuardedDHT:
    """Start this node's DHT process and p2pd, and join through `initial_peers` if there are any.

    With `is_first` nobody is called now.

    Raises `AddressError` for an address that cannot be used, `UnreachableError` when nobody
    answered, `ClockError` when the others refuse this machine's time, and `NetworkError` when
    the network layer itself does not start. No process is left behind then.
    """
    check_p2pd()
    for address in () if client_mode else host_maddrs:
        check_port_is_free(address)
    dht = GuardedDHT(
        () if is_first else initial_peers,
        given=initial_peers,
        host_maddrs=host_maddrs,
        announce_maddrs=list(announce_maddrs) or None,
        client_mode=client_mode,
        identity_path=str(identity.path),
        # Our lock on the identity file replaces Hivemind's check, which starts a second p2pd.
        check_if_identity_free=False,
        record_validators=record_validators(identity),
        startup_timeout=_STARTUP_TIMEOUT_S,
        # The daemon must not give up while a slow machine still imports.
        idle_timeout=120.0,
        use_relay=False,
    )
    try:
        dht.start(_STARTUP_TIMEOUT_S + 15.0)
    except Exception as error:
        dht.shutdown()
        logger.debug("joining failed", exc_info=True)
        raise _explain(error, initial_peers) from None
    except BaseException:
        dht.shutdown()
        raise
    return dht


def visible_addresses(dht: GuardedDHT, attempts: int = 5) -> tuple[str, ...]:
    """Return the addresses at which others can reach this node, loopback last.

    p2pd learns them a moment after it has started, so it is asked a few times.
    """
    for _ in range(attempts):
        try:
            found = dht.get_visible_maddrs(limit_s=_ADDRESSES_LIMIT_S)
            addresses = [str(address) for address in found]
        except NetworkError as error:
            if dht.failure is not None:
                raise
            logger.debug("visible addresses: %s", error)
            addresses = []
        if addresses:
            return tuple(sorted(set(addresses), key=lambda a: (is_loopback(a), a)))
        time.sleep(0.5)
    raise NetworkError("the network layer reports no addresses; start again with --debug")


def check_p2pd(program: Path | None = None) -> None:
    """Raise `IntegrityError` unless p2pd, which speaks with strangers, is the released one."""
    file = program or Path(p2p_daemon.__file__).parents[1] / "hivemind_cli" / "p2pd"
    wanted = _P2PD_SHA256.get(platform.machine()) if sys.platform == "linux" else None
    try:
        found = sha256_of_file(file)
    except OSError as error:
        found = error.strerror or "it cannot be read"
    if wanted is not None and found != wanted:
        raise IntegrityError(
            f"{file} is not the p2pd that Hivemind was released with (SHA-256 {found[:64]}); "
            "pip install --force-reinstall --no-deps hivemind==1.1.12"
        )


def be_client(dht: GuardedDHT, is_client: bool) -> None:
    """Ask others to leave this node out of their routing tables, for they cannot call it, or not.

    Raises `NetworkError`.
    """
    dht.keep("client", introduce, b"", is_client)


def _explain(error: Exception, initial_peers: Sequence[str]) -> DipacoError:
    """Turn a failed join into an error that says what to do; Hivemind only gives a message."""
    reason = (str(error).splitlines() or [""])[-1] or type(error).__name__
    lower = reason.lower()
    if "local time must be within" in lower:
        return ClockError(
            f"this machine's clock is {_clock_difference(reason)} the swarm's; set it, for example "
            "with: sudo timedatectl set-ntp true"
        )
    if "address already in use" in lower or "failed to listen" in lower:
        return AddressError(f"cannot listen here: {reason}; give another --port")
    if "can't access this node" in lower:
        return UnreachableError(
            "the swarm answers but cannot reach this machine; open its port in the firewall and "
            "forward it (--port, --announce-maddrs)"
        )
    unanswered = "bootstrap" in lower or isinstance(error, TimeoutError | FutureTimeoutError)
    if initial_peers and unanswered:
        return UnreachableError(
            f"none of {', '.join(initial_peers)} answered; check address, port and firewall, or "
            "try another peer's address"
        )
    return NetworkError(f"the network layer did not start: {reason}")


def _clock_difference(reason: str) -> str:
    """Read both clocks from Hivemind's message: "... (local: 1700000030.1, peer: 1700000000.2)"."""
    clocks = re.search(r"local: ([\d.]+), peer: ([\d.]+)", reason)
    if clocks is None:
        return "too far from"
    difference_s = float(clocks[1].rstrip(".")) - float(clocks[2].rstrip("."))
    return f"{abs(difference_s):.1f} s {'ahead of' if difference_s > 0 else 'behind'}"


def find_run(
    directory: Directory,
    run: str | None,
    *,
    operator: str | None = None,
    served: Callable[[], Collection[str]] = frozenset,
) -> SignedManifest:
    """Return the run that is meant among those in the DHT; see `select_run`, also for what is
    raised. A bootstrap node that has just started publishes its manifest within seconds."""
    deadline = time.monotonic() + MANIFEST_WAIT_S
    while True:
        manifests = directory.list_manifests()
        try:
            return select_run(manifests, run, operator=operator, served=served)
        except DipacoError:
            if manifests or time.monotonic() > deadline:
                raise
        time.sleep(1.0)


def select_run(
    manifests: Sequence[SignedManifest],
    run: str | None,
    *,
    operator: str | None = None,
    served: Callable[[], Collection[str]] = frozenset,
) -> SignedManifest:
    """Return which of these runs `run` (id, its beginning, or name) means, or the only one.

    With `operator`, only runs that this one signed count. A run with a successor signed by the same
    operator counts only when it is asked for. Anybody can announce runs: of several, that one is
    meant which those take part in whose addresses were given (`served` asks them for its id).
    Raises `RunSelectionError`, listing the runs, when there is not exactly one, and `ManifestError`
    when all there are have other operators.
    """
    if not manifests:
        raise RunSelectionError(
            "this DHT holds no run; check the address, or start a bootstrap node: "
            "dipaco-bootstrap serve DIR"
        )
    if operator is not None:
        manifests = _signed_by(operator, manifests)
    if run is None:
        current = current_runs(manifests)
        if len(current) > 1:
            asked = set(served())
            meant = {
                newest_run(m, manifests).plan.run_id for m in manifests if m.plan.run_id in asked
            }
            current = [m for m in current if m.plan.run_id in meant] or current
        if len(current) > 1:
            raise RunSelectionError(
                f"this DHT holds several runs: {_listed(manifests)}; choose one with --run ID"
            )
        return current[0]
    exact = [m for m in manifests if m.plan.run_id == run]
    matching = exact or [
        m for m in manifests if m.plan.run_id.startswith(run) or m.plan.name == run
    ]
    if len(matching) != 1:
        found = "no run" if not matching else "more than one run"
        raise RunSelectionError(
            f"--run {run} matches {found}; this DHT holds: {_listed(manifests)}"
        )
    return matching[0]


def _signed_by(operator: str, manifests: Sequence[SignedManifest]) -> list[SignedManifest]:
    signed = [m for m in manifests if m.operator_fingerprint == operator]
    if not signed:
        other = manifests[0]
        more = f" and {len(manifests) - 1} more" if len(manifests) > 1 else ""
        raise ManifestError(
            f"the address pins operator {operator}, but run '{other.plan.name}'{more} is signed by "
            f"{other.operator_fingerprint}; do not join, ask the operator for the address"
        )
    return signed


def _listed(manifests: Sequence[SignedManifest]) -> str:
    shown = [f"{m.plan.run_id} '{m.plan.name}'" for m in manifests[:_MAX_LISTED]]
    more = len(manifests) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
