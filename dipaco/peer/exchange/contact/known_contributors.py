"""Peers that contributed to the last steps stay known (design 4.8, the DHT stays small).

The DHT finds peers; it does not decide who exists: a node next to a key can leave out records, but
nobody can leave out rows of the chain. So a peer that has a row in one of the last steps is known,
with the addresses that it gave last, until several calls in a row to it have failed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from dipaco.base.waits import BriefLock
from dipaco.protocol.chain.steps import Step

# How many of the last contributors of a module are kept, and addresses of how many peers in all.
MAX_PEERS_OF_MODULE, MAX_PEERS = 128, 2048
# Calls fail in bunches: those that fail within this time of each other are one failure.
FAILURES, APART_S = 3, 5.0


class KnownContributors:
    """Peers by the modules that they contributed to. Thread-safe.

    :param given: addresses of the peers through which this one joined
    """

    def __init__(
        self,
        given: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given, self._monotonic = given, monotonic
        self._lock = BriefLock()
        self._rounds: dict[str, dict[str, int]] = {}
        """The last round of each peer, by module."""
        self._addresses: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._failures: dict[str, tuple[int, float]] = {}
        """How often calls to a peer have failed since it was last heard of, and when the last."""

    def contributed(self, peer: str, module: str, round_index: int) -> None:
        """Note that a peer has a row in the step of a module and round that was taken."""
        with self._lock:
            peers = self._rounds.setdefault(module, {})
            peers[peer] = max(round_index, peers.get(peer, round_index))
            self._failures.pop(peer, None)
            while len(peers) > MAX_PEERS_OF_MODULE:
                del peers[min(peers, key=lambda other: (peers[other], other))]

    def step_taken(self, step: Step) -> None:
        """Note the peers of a step that was taken."""
        for row in step.rows:
            self.contributed(row.peer, row.module, row.round_index)

    def failed(self, peer: str) -> None:
        """Note that a direct call to a peer has failed: after several it is known no more."""
        with self._lock:
            count, last_s = self._failures.get(peer, (0, -APART_S))
            now_s = self._monotonic()
            if now_s - last_s < APART_S or not self._is_known(peer):
                return
            self._failures[peer] = count + 1, now_s
            if count + 1 >= FAILURES:
                del self._failures[peer]
                for peers in self._rounds.values():
                    peers.pop(peer, None)

    def answered(self, peer: str) -> None:
        """Note that a direct call to a peer has reached it."""
        with self._lock:
            self._failures.pop(peer, None)

    def called(self, peer: str, has_answered: bool) -> None:
        """Note what became of a direct call."""
        (self.answered if has_answered else self.failed)(peer)

    def note_addresses(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        """Remember where peers are, as they say in their signed records."""
        with self._lock:
            for peer, places in addresses.items():
                if places:
                    self._addresses[peer] = places
                    self._addresses.move_to_end(peer)
            too_many = len(self._addresses) - MAX_PEERS
            if too_many > 0:
                others = [peer for peer in self._addresses if not self._is_known(peer)]
                for peer in others[:too_many]:
                    del self._addresses[peer]

    def has_contributed(self, peer: str) -> bool:
        """Tell whether a peer has a row in one of the last steps."""
        with self._lock:
            return self._is_known(peer)

    def of_modules(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return those that contributed to any of these, with their addresses, the last first."""
        with self._lock:
            newest: dict[str, int] = {}
            for module in modules:
                for peer, round_index in self._rounds.get(module, {}).items():
                    newest[peer] = max(round_index, newest.get(peer, round_index))
            order = sorted(newest, key=lambda peer: (-newest[peer], peer))
            return {peer: self._addresses.get(peer, ()) for peer in order}

    def known_directly(self, modules: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Return whom to ask where the DHT shows nobody: who contributed to any of these modules,
        and until there is somebody, the peers through which this one joined."""
        return self.of_modules(modules) or self._given

    def all(self) -> dict[str, tuple[str, ...]]:
        """Return everybody, as `of_modules` does."""
        return self.of_modules(list(self._rounds))

    def _is_known(self, peer: str) -> bool:
        return any(peer in peers for peers in self._rounds.values())
