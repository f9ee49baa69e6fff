"""How others reach this peer: two of them are asked to call back at the addresses it announces.

A peer that is asked opens a plain connection, because libp2p would use the existing one, and looks
for the greeting of a libp2p node. It calls only addresses from which it sees the caller come, so
nobody can send it to others, and it makes few calls. A firewall cannot be seen from inside: what
was not tried is `unknown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from multiaddr import Multiaddr

from dipaco.base.errors import DipacoError
from dipaco.peer.exchange.streams.messages import MAX_CALLED_BACK, CallBackReply
from dipaco.protocol.records import Reachability
from dipaco.protocol.view import SwarmView

logger = logging.getLogger("dipaco.peer.exchange.contact.reachability")

Host = ipaddress.IPv4Address | ipaddress.IPv6Address

# A libp2p node says this first on every TCP connection.
GREETING = b"\x13/multistream/1.0.0\n"
_DIAL_LIMIT_S = 4.0
# For a peer that is asked: how many calls it makes back at once, and how often to one caller.
CALLS_AT_ONCE = 4
CALL_PERIOD_S = 15.0
_REMEMBERED_CALLERS = 1024
# For a peer that asks: how many answers must agree, and how many peers are asked until they do.
_ANSWERS = 2
QUESTIONS = 6
# It asks again after this, or sooner: its addresses have changed, or nobody could tell.
AGAIN_S = 900.0
SOON_S = 30.0


# -- addresses


def tcp_address(address: str) -> tuple[Host, int] | None:
    """Return the host and TCP port of an address; None if it names none, or goes over a relay."""
    try:
        parsed = Multiaddr(address)
        names = {protocol.name for protocol in parsed.protocols()}
        if "tcp" not in names or "p2p-circuit" in names:
            return None
        name = "ip4" if "ip4" in names else "ip6"
        host = ipaddress.ip_address(str(parsed.value_for_protocol(name)))
        return host, int(parsed.value_for_protocol("tcp"))
    except Exception:
        return None


def hosts_of(addresses: Iterable[str]) -> set[Host]:
    """Return the hosts that some addresses name."""
    return {found[0] for address in addresses if (found := tcp_address(address)) is not None}


def to_call(announced: Iterable[str], hosts: Container[Host]) -> tuple[tuple[Host, int], ...]:
    """Return which of a caller's addresses may be called: `hosts` from which it is seen to come."""
    places = (tcp_address(address) for address in announced)
    found_places = [place for place in places if place is not None and place[0] in hosts]
    return tuple(dict.fromkeys(found_places))[:MAX_CALLED_BACK]


# -- who is asked


async def greets(host: Host, port: int) -> bool:
    """Tell whether a libp2p node answers there. Bounded."""
    writer = None
    try:
        async with asyncio.timeout(_DIAL_LIMIT_S):
            reader, writer = await asyncio.open_connection(str(host), port)
            return await reader.readexactly(len(GREETING)) == GREETING
    except (OSError, EOFError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


class CallingBack:
    """Calls others back, few at a time and each seldom. Lives on the exchange's event loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._under_way = 0
        self._called: OrderedDict[str, float] = OrderedDict()

    async def answer(
        self, peer: str, announced: Sequence[str], seen: Sequence[str]
    ) -> CallBackReply:
        """Call the addresses that `peer` announces, if it is `seen` to come from there."""
        hosts = hosts_of(seen)
        is_near = bool(hosts) and not any(host.is_global for host in hosts)
        now = self._monotonic()
        last = self._called.get(peer)
        is_too_soon = last is not None and now < last + CALL_PERIOD_S
        if not hosts or is_too_soon or self._under_way >= CALLS_AT_ONCE:
            return CallBackReply(result="untried", near=is_near)
        places = to_call(announced, hosts)
        if not places:
            return CallBackReply(result="elsewhere", near=is_near)
        self._called[peer] = now
        self._called.move_to_end(peer)
        while len(self._called) > _REMEMBERED_CALLERS:
            self._called.popitem(last=False)
        self._under_way += 1
        try:
            answers = await asyncio.gather(*(greets(host, port) for host, port in places))
        finally:
            self._under_way -= 1
        return CallBackReply(result="reached" if any(answers) else "silent", near=is_near)


# -- who asks


AskToCall = Callable[[str, Sequence[str]], CallBackReply]
"""Asks a peer to call this one at some addresses (`Exchange.call_back`). Raises a `DipacoError`
without an answer."""


def _conclude(answers: Sequence[CallBackReply], own: Sequence[str]) -> bool | None:
    """Return whether the peers that were asked can call a peer that announces `own`.

    None until one answer is `_ANSWERS` ahead of the other, or all have answered. Neighbours in the
    same private network are ignored if there are others.
    """
    far = [answer for answer in answers if not answer.near]
    is_public = any(map(_is_global, own))
    balance = 0
    for answer in far or answers:
        if answer.result == "reached":
            balance += 1
        elif answer.result == "silent" or (answer.result == "elsewhere" and not is_public):
            # It is seen where it announces no address, so others have none at which to call it.
            balance -= 1
    return balance > 0 if balance else None


def probe(
    ask: AskToCall, peers: Sequence[str], own: Sequence[str]
) -> tuple[Reachability, tuple[CallBackReply, ...]]:
    """Ask some of `peers`, in order, until enough agree; returns what follows, and the answers."""
    answers: list[CallBackReply] = []
    direct = sorted((a for a in own if "/p2p-circuit" not in a), key=_is_global, reverse=True)
    for peer in peers[:QUESTIONS]:
        try:
            answers.append(ask(peer, direct[:MAX_CALLED_BACK]))
        except DipacoError as error:
            logger.debug("%s does not call back: %s", peer, error)
        told = [answer for answer in answers if answer.result != "untried"]
        if len(told) >= _ANSWERS and _conclude(told, direct) is not None:
            break
    can_be_called = _conclude(answers, direct)
    if can_be_called is None:
        return "unknown", tuple(answers)
    if can_be_called:
        return "direct", tuple(answers)
    return "outgoing", tuple(answers)


class ReachabilityWatch:
    """Probes in the background: soon after the start, when addresses change, and now and then.

    :param addresses: asks p2pd for this peer's addresses
    :param thread: `Background.thread`
    :param tell: hears, on another thread, the addresses and how others reach them
    """

    def __init__(
        self,
        ask: AskToCall,
        me: str,
        addresses: Callable[[], tuple[str, ...]],
        thread: Callable[[str, Callable[[], None]], threading.Thread],
        tell: Callable[[tuple[str, ...], Reachability], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._me = ask, me
        self._addresses, self._thread, self._tell = addresses, thread, tell
        self._monotonic = monotonic
        self._under_way = False
        self._tried: tuple[str, ...] = ()
        self._found: Reachability = "unknown"
        self._again_s = float("-inf")
        self._looked_s = float("-inf")

    def on_view(self, view: SwarmView) -> None:
        """Begin to probe if it is due. Returns at once."""
        if self._under_way or self._monotonic() < self._looked_s + SOON_S:
            return
        others = [
            (not any(map(_is_global, record.addresses)), random.random(), peer)
            for peer, record in view.peers.items()
            if peer != self._me and record.state != "leaving"
        ]
        if not others:
            return
        self._under_way = True
        self._looked_s = self._monotonic()
        # Those in the same network as this peer can tell less than those in the wide world.
        peers = tuple(peer for *_, peer in sorted(others))
        self._thread("reachability", lambda: self._look(peers)).start()

    def _look(self, peers: tuple[str, ...]) -> None:
        try:
            with contextlib.suppress(DipacoError):
                own = self._addresses()
                if own != self._tried or self._monotonic() >= self._again_s:
                    self._probe(peers, own)
        finally:
            self._under_way = False

    def _probe(self, peers: tuple[str, ...], own: tuple[str, ...]) -> None:
        found, answers = probe(self._ask, peers, own)
        logger.debug("reachability: %s, after %s", found, [answer.result for answer in answers])
        if found == "unknown":
            # The earlier result stands, unless it was about other addresses.
            found = self._found if own == self._tried else "unknown"
            self._again_s = self._monotonic() + SOON_S
        else:
            self._again_s = self._monotonic() + AGAIN_S
        if (own, found) != (self._tried, self._found):
            self._tried, self._found = own, found
            self._tell(own, found)


def _is_global(address: str) -> bool:
    return any(host.is_global for host in hosts_of([address]))
