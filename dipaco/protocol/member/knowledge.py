"""What the parts of a member share: what it has learned, and the list of what it wants done."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from dipaco.protocol.grid import Grid
from dipaco.protocol.keeping import keepers
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.view import SwarmView

from .actions import Action
from .rounds import RoundSchedule

# A peer that has moved is believed for so many rounds that it trained the path that it left.
_CLAIMED_ROUNDS = 2


@dataclass(frozen=True)
class MemberSettings:
    """A member's id, and what its owner wants."""

    me: str
    """The peer id."""
    pinned: int | None = None
    """Train this path and no other."""
    max_rounds: int | None = None
    """Leave after so many rounds."""
    trains: bool = True
    """A bootstrap node trains nothing; it is a mailbox and keeps copies."""
    follows: bool = True
    """Move to a successor of the run."""
    own_texts: Mapping[int, int] = field(default_factory=dict)
    """Sequences of the owner's texts by path, if the peer trains on them: it trains no other."""

    @property
    def obeys_owner(self) -> bool:
        """Whether its path does not depend on where others are, so that nobody waits for it to
        move."""
        return self.pinned is not None or bool(self.own_texts)


class Knowledge:
    """One for each member; its parts read it, and `do` what they want done."""

    def __init__(self, settings: MemberSettings, plan: RunPlan, grid: Grid) -> None:
        self.settings, self.plan, self.grid = settings, plan, grid
        self.me = settings.me
        self.schedule = RoundSchedule(plan.rounds, grid, plan.start_s)
        self.gather_s, self.grace_s = plan.rounds.gather_limit_s, plan.rounds.grace_limit_s
        self.now_s = 0.0
        self._view = SwarmView(now_s=0.0)
        self.has_view = False
        self.path: int | None = None
        """The path in training."""
        self._unseen: dict[str, frozenset[str]] = {}
        self.edition = 0
        """Counts up with what is known of others: what was worked out of it before is old then."""
        self._claimed_s: dict[tuple[str, int], float] = {}
        """When a view last showed such a claim, by peer and path."""
        self._claimants: set[str] = set()
        self.random = Random(int.from_bytes(hashlib.sha256(self.me.encode()).digest()[:8], "big"))
        self.actions: list[Action] = []

    def do(self, action: Action) -> None:
        """Add an action to those that are wanted."""
        self.actions.append(action)

    @property
    def view(self) -> SwarmView:
        """The swarm as it was last read."""
        return self._view

    @view.setter
    def view(self, view: SwarmView) -> None:
        self._view = view
        self.edition += 1
        oldest_s = self.now_s - _CLAIMED_ROUNDS * self.schedule.duration_s
        self._claimed_s = {key: s for key, s in self._claimed_s.items() if s >= oldest_s}
        self._claimed_s.update({(p, c.path): self.now_s for p, c in view.claims.items()})
        self._claimants = {peer for peer, _ in self._claimed_s}

    def has_claimed(self, peer: str, path: int | None = None) -> bool:
        """Tell whether a peer has claimed a path lately, or any path."""
        if path is None:
            return peer in self._claimants
        return peer == self.me or (peer, path) in self._claimed_s

    def unseen(self, module: str) -> frozenset[str]:
        """Return recent contributors that the view does not show, and that are there
        (`contributors`)."""
        return self._unseen.get(module, frozenset())

    def note_unseen(self, module: str, peers: frozenset[str]) -> None:
        """Note who contributed lately, is there, and is not in the view."""
        if peers != self.unseen(module):
            self._unseen[module] = peers
            self.edition += 1

    @property
    def can_be_called(self) -> bool:
        """Whether others can call this peer, as far as it knows."""
        return self.view.reachable(self.me) != "outgoing"

    def is_callable(self, peer: str) -> bool:
        """Tell whether others can call a peer that is in sight."""
        if peer == self.me:
            return self.can_be_called
        claim, record = self.view.claims.get(peer), self.view.peers.get(peer)
        if claim is None and record is None:
            return any(peer in unseen for unseen in self._unseen.values())
        is_here = record.state != "leaving" if record is not None else claim is not None
        return is_here and self.view.reachable(peer) != "outgoing"

    def trainers(self, module: str) -> frozenset[str]:
        """Return the peers that train a path through a module, this one included if it does."""
        found = self.view.group(self.grid, module, joining=False) | self.unseen(module)
        is_mine = self.path is not None and module in self.grid.modules_of_path(self.path)
        return found | {self.me} if is_mine else found - {self.me}

    def claimants(self, module: str) -> frozenset[str]:
        """Return, as `trainers`, also the peers that are about to train a path through a module."""
        return self.view.group(self.grid, module, joining=True) | self.trainers(module)

    def holders(self, module: str) -> tuple[str, ...]:
        """Return the other peers that announce a state of a module, in order."""
        held = self.view.holdings.get(module, ())
        return tuple(sorted({holding.peer_id for holding in held} - {self.me}))

    def callable_others(self) -> list[str]:
        """Return the other peers in sight that can be called, in order."""
        others = (self.view.peers.keys() | self.view.claims.keys()) - {self.me}
        return [peer for peer in sorted(others) if self.is_callable(peer)]

    def keepers(self, module: str, count: int) -> tuple[str, ...]:
        """Return the callable peers that keep a module that they do not train, in order."""
        able = {*self.callable_others(), *([self.me] if self.can_be_called else [])}
        return keepers(module, able - self.claimants(module), count)


def mailbox_order(module: str, round_index: int, peers: frozenset[str] | set[str]) -> list[str]:
    """Order peers for one round of a module, without anybody agreeing on anything."""
    place = f"{module}/{round_index}/"
    return sorted(peers, key=lambda peer: hashlib.sha256((place + peer).encode()).digest())
