"""Getting what others have: shards, states and chains of certificates.

What is simplified: a shard can be had from any machine that has it, whole, and the base model from
nowhere in particular. Holders are asked one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dipaco.dht.certificates import Certificate
from dipaco.peer.member import actions, events

from .work import SimulatedState
from .world import Body

# How long a holder may say nothing.
STALL_S = 12.0
HOLDERS_OF_SHARD = 4


class Fetching:
    """Of one life of one machine."""

    def __init__(self, machine: Body) -> None:
        self._machine = machine
        self._world = machine.world
        self.fetched: dict[tuple[actions.Purpose, str], SimulatedState] = {}
        """By purpose and digest, since the path in training began: as `peer.errands` keeps it."""
        self.looked_into: set[str] = set()
        """Digests of states and chains that are being fetched."""
        self._coming: dict[str, list[actions.FetchState]] = {}
        """Of states that are being fetched, what else they are wanted for."""

    def _deliver(self, most_s: float, event: events.Event) -> None:
        delay_s = self._world.engine.between(0.1, 1.0) * most_s
        self._machine.later(delay_s, self._machine.deliver, event)

    def path(self, action: actions.FetchPath) -> None:
        """Get the shard of a path."""
        path, shards = action.path, self._machine.disk.shards

        def done(answer: Any) -> None:
            if answer is None:
                reason = f"could not fetch the shard of path {path}"
                self._machine.deliver(events.PathFailed(path, reason))
                return
            self._machine.have_shard(path)
            self._machine.deliver(events.PathReady(path))

        if path in shards:
            self._deliver(0.5, events.PathReady(path))
            return
        if self._world.engine.chance(self._world.conditions.path_fails):
            self._machine.later(self._world.engine.between(1.0, STALL_S), done, None)
            return
        self._try_holders(self._holders_of_shard(path), "shard", path, done)

    def _holders_of_shard(self, path: int) -> list[str]:
        had = self._world.shard_holders.get(path, {}).values()
        holders = [
            machine.peer
            for machine in sorted(had, key=lambda machine: machine.number)
            if machine is not self._machine and path in machine.disk.shards
        ]
        self._world.engine.random.shuffle(holders)
        return holders[:HOLDERS_OF_SHARD]

    def _try_holders(
        self, holders: list[str], what: str, content: Any, done: Callable[[Any], None]
    ) -> None:
        """Ask one after the other until one gives; `done` with what it gave, or with None."""
        left = list(holders)

        def next_one(answer: Any) -> None:
            if answer is not None or not left:
                done(answer)
                return
            self._world.network.call(
                self._machine.peer, left.pop(0), what, content, next_one, limit_s=STALL_S
            )

        if left:
            next_one(None)
        else:
            self._machine.later(self._world.engine.between(0.1, 1.0), done, None)

    def state(self, action: actions.FetchState) -> None:
        """Get a state, from the disk if it is there; what is on its way is not sent for twice."""
        wanted, machine = action.reference, self._machine
        if wanted.version == 0:
            genesis = self._world.stock.genesis[wanted.module]
            self.fetched[action.purpose, genesis.reference.digest] = genesis
            self._deliver(0.5, self._state_fetched(genesis, (), action.purpose))
            return
        own = self.find(wanted.digest)
        if own is not None:
            chain = machine.book.chain(wanted.module, wanted.digest)
            self.fetched[action.purpose, wanted.digest] = own
            self._deliver(0.2, self._state_fetched(own, chain, action.purpose))
            return
        self.looked_into.add(wanted.digest)
        if wanted.digest in self._coming:
            self._coming[wanted.digest].append(action)
            return
        self._coming[wanted.digest] = []

        def done(answer: Any) -> None:
            handle(answer)
            for other in self._coming.pop(wanted.digest):
                self.state(other)

        def handle(answer: Any) -> None:
            if answer is None:
                reason = f"none of {len(action.holders)} holders could serve it"
                machine.deliver(
                    events.FetchFailed(wanted.module, wanted.digest, reason, action.purpose)
                )
                return
            state, chain = answer
            assert state.reference.digest == wanted.digest
            self.fetched[action.purpose, wanted.digest] = state
            checked = tuple(c for c in chain if self._world.is_signed(c))
            machine.deliver(self._state_fetched(state, checked, action.purpose))

        holders = [peer for peer in action.holders if peer != machine.peer]
        self._try_holders(holders, "state", wanted, done)

    @staticmethod
    def _state_fetched(
        state: SimulatedState, chain: tuple[Certificate, ...], purpose: actions.Purpose
    ) -> events.StateFetched:
        return events.StateFetched(state.reference, state.progress, chain, purpose)

    def chain(self, action: actions.FetchChain) -> None:
        """Get the certificates of a state."""

        def done(answer: Any) -> None:
            checked = tuple(c for c in answer or () if self._world.is_signed(c))
            self._machine.deliver(events.ChainFetched(action.reference, checked))

        self.looked_into.add(action.reference.digest)
        holders = [peer for peer in action.holders if peer != self._machine.peer]
        self._try_holders(holders, "chain", action.reference, done)

    def find(self, digest: str) -> SimulatedState | None:
        """Return a state that was fetched, or is held here."""
        found = (state for (_, fetched), state in self.fetched.items() if fetched == digest)
        return next(found, None) or self._machine.find(digest)
