"""A process comes into a swarm through the addresses that it is given.

If nobody answers there, it tries those of the last time, and then it starts the swarm again as its
first peer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from dipaco.base.errors import UnreachableError
from dipaco.dht.addresses import listening_everywhere
from dipaco.dht.dht_node import join_dht, visible_addresses
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.peer.exchange.contact.diagnosis import check_identity_is_free, diagnose
from dipaco.peer.exchange.contact.known_peers import KnownPeers
from dipaco.protocol.identity import Identity
from dipaco.protocol.manifest import verify_manifest


@dataclass(frozen=True, kw_only=True)
class Listening:
    """How others reach this process."""

    host_maddrs: tuple[str, ...] = ()
    """Where it listens; by default at a free port of every interface."""
    announce_maddrs: tuple[str, ...] = ()
    """The addresses that others are told instead."""
    client_mode: bool = False
    """Whether it only reads, so that nobody calls it."""


@dataclass(frozen=True)
class Entered:
    """The swarm that a process came into."""

    dht: GuardedDHT
    through: tuple[str, ...]
    """The addresses that it was joined through."""
    manifest: bytes | None = None
    """The manifest of the run whose swarm this process starts again."""


@dataclass(frozen=True)
class Entrance:
    """A process that comes into a swarm: its identity and the addresses that it can try."""

    identity: Identity
    given: tuple[str, ...]
    """The addresses that it was given."""
    known: KnownPeers
    listening: Listening
    say: Callable[[str], None]
    may_be_a_copy: bool
    """Whether another machine may use the same identity."""

    def come_in(self, last_manifest: Callable[[], bytes | None]) -> Entered:
        """Join through the addresses given.

        If none of them answers, those that were in their swarm the last time are tried. If none of
        these answers either, a node that knows the run becomes the first one of its swarm, and the
        others find it: `last_manifest` returns the manifest of that run, or None.

        Raises the `DipacoError` of the step that failed.
        """
        try:
            return Entered(self._join(self.given), self.given)
        except UnreachableError as error:
            unreachable = error
        remembered = self.known.beside(self.given)
        through = (*remembered, *self.given)
        if remembered:
            self.say(
                f"nobody answers there; trying peers that were there before: {len(remembered)}"
            )
            with contextlib.suppress(UnreachableError):
                return Entered(self._join(remembered), through)
        manifest = last_manifest()
        try:
            diagnose(self.given)
        except UnreachableError as error:
            unreachable = error
        if manifest is None or self.listening.client_mode:
            raise unreachable
        dht = self._join(through, is_first=True)
        self.say(
            f"nobody of run '{verify_manifest(manifest).plan.name}' answers: this peer starts the "
            f"swarm again with what is on its disk, listens at "
            f"{' '.join(visible_addresses(dht)[:1])} and keeps calling. Others come back with "
            "their usual command, in any order"
        )
        return Entered(dht, through, manifest)

    def _join(self, through: tuple[str, ...], *, is_first: bool = False) -> GuardedDHT:
        if self.may_be_a_copy and through and not is_first:
            check_identity_is_free(self.identity, through)
        listening = self.listening
        return join_dht(
            through,
            identity=self.identity,
            host_maddrs=listening.host_maddrs or listening_everywhere(0),
            announce_maddrs=listening.announce_maddrs,
            client_mode=listening.client_mode,
            is_first=is_first,
        )
