"""Why joining failed: a plain libp2p client looks at each address and says it in one line.

Hivemind's join fails with the same words for a closed port, a mistyped peer id and another
protocol. This asks each address itself, without a DHT.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from dipaco.base.errors import AddressError, DipacoError, ProtocolVersionError, UnreachableError
from dipaco.peer.exchange.streams.loop_thread import LoopThread
from dipaco.peer.exchange.streams.reasons import dial_reason
from dipaco.peer.exchange.streams.transport import HivemindTransport
from dipaco.protocol.identity import Identity

from .hello import say_hello
from .known_peers import peer_of

logger = logging.getLogger("dipaco.peer.exchange.contact.diagnosis")

_DAEMON_TIMEOUT_S = 60.0
# How long this waits for an answer under this peer's own identity.
_ANSWER_S, _LOOKS, _LOOK_S = 5.0, 10, 0.2
_AGAIN, _AGAIN_AFTER_S = 2, 3.0


def diagnose(initial_peers: Sequence[str]) -> None:
    """Find out why joining through `initial_peers` failed, and raise it.

    Called once `join_dht` has failed. Raises `ProtocolVersionError` when those that answer speak no
    protocol of ours, and `UnreachableError` when none answers. Returns when a peer answers: then
    the failure was another one, or has passed.
    """
    errors = examine(initial_peers)
    if None in errors.values():
        return
    for error in errors.values():
        if isinstance(error, ProtocolVersionError):
            raise error
    raise UnreachableError(
        f"no peer answers at {'; '.join(f'{address} ({e})' for address, e in errors.items())}; "
        "that machine may be off, and its swarm goes on without it: ask anybody in it for the "
        "line that 'dipaco-peer status' prints for a friend"
    )


def examine(addresses: Sequence[str], timeout_s: float = 15.0) -> dict[str, DipacoError | None]:
    """Say hello to every address and return what is wrong with it, None if it answers.

    Peers are asked all at once, several addresses of one peer one after the other: libp2p dials
    all that it knows of a peer, and would blame one address for another. `timeout_s` bounds each
    question.
    """
    groups: dict[str, list[str]] = {}
    for address in dict.fromkeys(addresses):
        groups.setdefault(peer_of(address), []).append(address)
    found: dict[str, DipacoError | None] = dict.fromkeys(addresses)

    async def examine_peer(p2p: P2P, group: Sequence[str]) -> None:
        for address in group:
            found[address] = await _examine(p2p, address, timeout_s)

    async def run() -> None:
        async with _plain_client() as p2p:
            await asyncio.gather(*(examine_peer(p2p, group) for group in groups.values()))

    thread = LoopThread("diagnosis")
    thread.start()
    try:
        thread.call(run(), _DAEMON_TIMEOUT_S + 3 * len(addresses) * timeout_s + 5.0)
    finally:
        thread.stop()
    return found


def check_identity_is_free(identity: Identity, through: Sequence[str]) -> None:
    """Raise `AddressError` if another machine answers under this identity.

    A copy of a cache folder has the identity too. This is called before the node listens; the peers
    that it joins through know where the other machine is called. If nothing can be found out, the
    peer may join.
    """

    async def run() -> list[str]:
        me = PeerID.from_base58(identity.peer_id)
        async with _plain_client() as p2p:
            await asyncio.gather(
                *(_dial(p2p, *_split(address), _ANSWER_S) for address in through),
                return_exceptions=True,
            )
            for _ in range(_LOOKS):
                try:
                    await _dial(p2p, identity.peer_id, None, _ANSWER_S)
                    break
                except ControlFailure as error:
                    # Those that were dialled say what they are a moment later.
                    if "any peer in table" not in str(error):
                        return []
                    await asyncio.sleep(_LOOK_S)
            found = [info.addrs for info in await p2p.list_peers() if info.peer_id == me]
            return [str(address) for addresses in found for address in addresses]

    thread = LoopThread("identity")
    thread.start()
    try:
        found = thread.call(run(), _DAEMON_TIMEOUT_S + 4 * _ANSWER_S)
        for _ in range(_AGAIN):
            # For some moments, an earlier process of this peer may still answer.
            if found:
                time.sleep(_AGAIN_AFTER_S)
                found = thread.call(run(), _DAEMON_TIMEOUT_S + 4 * _ANSWER_S)
    except (DipacoError, OSError, TimeoutError) as error:
        logger.debug("whether the identity is free: %r", error)
        return
    finally:
        thread.stop()
    if found:
        raise AddressError(
            f"the identity {identity.path} is in use by another machine, at {found[0]}: both "
            f"would do one peer's work. Delete {identity.path} here: the next start makes a new one"
        )


@contextlib.asynccontextmanager
async def _plain_client() -> AsyncIterator[P2P]:
    """Start a p2pd of its own that only calls; raises UnreachableError if it does not start."""
    try:
        p2p = await P2P.create(
            no_listen=True,
            dht_mode="client",
            auto_nat=False,
            nat_port_map=False,
            tls=False,  # as in the DHT process
            startup_timeout=_DAEMON_TIMEOUT_S,
        )
    except Exception as error:
        raise UnreachableError(f"the libp2p daemon does not start: {error}") from error
    try:
        yield p2p
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(p2p.shutdown(), 2.0)


async def _dial(p2p: P2P, peer: str, where: Multiaddr | None, timeout_s: float) -> None:
    """Connect to a peer, at an address or wherever others know it."""
    # P2P has no public call to dial an address; Hivemind's own identity check does the same.
    addresses = [] if where is None else [where]
    await asyncio.wait_for(p2p._client.connect(PeerID.from_base58(peer), addresses), timeout_s)


async def _examine(p2p: P2P, address: str, timeout_s: float) -> DipacoError | None:
    try:
        peer, where = _split(address)
        await _dial(p2p, peer, where, timeout_s)
        await say_hello(HivemindTransport(None, p2p=p2p), peer, timeout_s)
    except DipacoError as error:
        return error
    except Exception as error:
        logger.debug("%s: %r", address, error)
        return UnreachableError(dial_reason(error, address.rpartition("/p2p/")[0]))
    return None


def _split(address: str) -> tuple[str, Multiaddr]:
    """Split ".../p2p/<peer id>" into the peer id and the address to dial."""
    where, found, peer = address.rpartition("/p2p/")
    try:
        if not found or not where:
            raise ValueError("no /p2p/ part")
        PeerID.from_base58(peer)
        return peer, Multiaddr(where)
    except Exception:
        raise UnreachableError(
            "it is not a peer's address, such as /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW..."
        ) from None
