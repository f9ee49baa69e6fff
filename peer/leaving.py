"""Handing over on leaving: states that nobody else holds go to the peers that keep them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

from dipaco.dht.policy import keepers
from dipaco.modules.errors import DipacoError

from .node import Node
from .publisher import Publisher
from .states import HeldState

logger = logging.getLogger("dipaco.peer.leaving")

POLL_S = 0.2
CALL_TIMEOUT_S = 2.0
MAX_OFFERS_AT_ONCE = 8


def hand_over(
    node: Node, publisher: Publisher, modules: tuple[str, ...], deadline: float
) -> tuple[str, ...]:
    """Offer the newest states of `modules` to their keepers and wait until they have them.

    Bounded by `deadline` (monotonic seconds). Returns the modules that others hold at the end;
    the rest is on this peer's disk and is served when it comes back.
    """
    waiting: dict[str, tuple[HeldState, list[str]]] = {}
    try:
        view = publisher.view
    except DipacoError:
        return ()
    others = tuple(sorted(peer for peer in view.peers if peer != node.me))
    safe = []
    chosen: dict[str, tuple[HeldState, tuple[str, ...]]] = {}
    for module in modules:
        held = node.held.get(module)
        if held is None or held.version == 0:
            continue
        holders = {h.peer_id for h in view.holdings.get(module, ()) if h.digest == held.digest}
        if holders - {node.me}:
            safe.append(module)
            continue
        chosen[module] = (held, keepers(module, others, node.plan.rounds.copies))
    for module, accepted in _offer_all(node, chosen, deadline).items():
        if accepted:
            waiting[module] = (chosen[module][0], accepted)
    while waiting and time.monotonic() < deadline:
        for module, (held, peers) in list(waiting.items()):
            if any(_holds(node, peer, held) for peer in peers):
                safe.append(module)
                del waiting[module]
        if waiting:
            time.sleep(POLL_S)
    left = sorted(set(chosen) - set(safe))
    if left:
        logger.warning(
            "%s: nobody took the newest state over in time; it stays in %s",
            ", ".join(left),
            node.states.directory,
        )
    return tuple(safe)


def _offer_all(
    node: Node, chosen: dict[str, tuple[HeldState, tuple[str, ...]]], deadline: float
) -> dict[str, list[str]]:
    """Offer all states at once, since some peer may not answer; return who takes what."""

    def offer(peer: str, held: HeldState) -> bool:
        timeout_s = max(0.1, min(CALL_TIMEOUT_S, deadline - time.monotonic()))
        try:
            return node.exchange.offer(peer, held, timeout_s)
        except DipacoError as error:
            logger.debug("%s did not take %s: %s", peer, held.module, error)
            return False

    with ThreadPoolExecutor(max_workers=MAX_OFFERS_AT_ONCE) as pool:
        offers = [
            (module, peer, pool.submit(offer, peer, held))
            for module, (held, peers) in chosen.items()
            for peer in peers
        ]
        accepted: dict[str, list[str]] = {module: [] for module in chosen}
        for module, peer, answer in offers:
            if answer.result():
                accepted[module].append(peer)
    return accepted


def _holds(node: Node, peer: str, held: HeldState) -> bool:
    try:
        holding = node.exchange.holdings(peer, held.module, CALL_TIMEOUT_S)
    except DipacoError:
        return False
    return holding is not None and holding.digest == held.digest
