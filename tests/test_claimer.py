"""Claiming a path: the least served one, and giving way to who came at the same moment."""

from __future__ import annotations

from typing import Any

from dipaco.dht.policy import Decision, rendezvous
from dipaco.dht.records import ClaimRecord
from dipaco.dht.view import SwarmView
from dipaco.modules.grid import Grid
from dipaco.peer.claimer import MAX_LOOKS, Claimer
from dipaco.peer.publisher import Claim, PeerStatus
from support.fake_swarm import ME, FakeEvents, FakeSwarm, FakeTime, Impatient, claim, peer_id
from support.make_plan import make_plan


class Peer:
    """A claimer whose claim is in the view after every refresh."""

    def __init__(self, *others: ClaimRecord, pinned: int | None = None) -> None:
        plan = make_plan()
        self.others = {other.peer_id: other for other in others}
        self.swarm, self.status, self.events = FakeSwarm(), PeerStatus(), FakeEvents()
        self.claimed: list[Claim] = []
        self.swarm.on_refresh = self._publish
        self.stopping = Impatient()
        log: Any = self.events
        self.claimer = Claimer(
            Grid(plan.model, plan.grid),
            self.swarm,
            self.status,
            FakeTime(2000.0).clock,
            log,
            me=ME,
            pinned=pinned,
        )

    def _publish(self) -> None:
        claims = dict(self.others)
        path = self.status.claim.training_path
        if path is not None:
            claims[ME] = claim(ME, path, self.status.claim.state, since_s=2000.0)
            if self.status.claim not in self.claimed:
                self.claimed.append(self.status.claim)
        self.swarm.view = SwarmView(now_s=2000.0, claims=claims)


def before_me(path: int) -> str:
    """Return a peer that rendezvous hashing puts before this one on `path`."""
    return next(p for p in map(peer_id, range(99)) if rendezvous(p, path) < rendezvous(ME, path))


def test_it_claims_the_path_that_nobody_trains() -> None:
    peer = Peer(*(claim(peer_id(path), path) for path in (0, 1, 3)))
    decision = peer.claimer.claim(peer.stopping)
    assert decision.path == 2
    assert peer.status.claim == Claim("joining", 2, 2000.0, decision.reason)
    assert peer.events.of("claimed") == [{"path": 2, "reason": decision.reason}]


def test_it_gives_way_to_a_newcomer_that_hashing_puts_first() -> None:
    other = before_me(0)
    peer = Peer(claim(other, 0, "joining", since_s=2000.0))
    decision = peer.claimer.claim(peer.stopping, Decision(0, "looks free"))
    assert decision.path != 0
    assert [said.path for said in peer.claimed] == [0, decision.path]
    assert peer.status.claim.path == decision.path


def test_a_pinned_peer_gives_way_to_nobody() -> None:
    peer = Peer(claim(before_me(1), 1, "joining", since_s=2000.0), pinned=1)
    assert peer.claimer.claim(peer.stopping).path == 1
    assert peer.status.claim.pinned


def test_it_gives_way_a_few_times_only() -> None:
    """Wherever it goes, somebody before it goes too."""
    peer = Peer()

    def everybody_follows() -> None:
        path = peer.status.claim.training_path
        if path is not None:
            other = before_me(path)
            peer.others = {other: claim(other, path, "joining", since_s=2000.0)}
        peer._publish()

    peer.swarm.on_refresh = everybody_follows
    decision = peer.claimer.claim(peer.stopping)
    assert len(peer.events.of("claimed")) == 1
    assert len(peer.claimed) <= MAX_LOOKS
    assert decision.path in range(4)


def test_a_move_that_failed_is_taken_back() -> None:
    peer = Peer()
    peer.claimer.claim(peer.stopping, Decision(1, "better"))
    peer.claimer.take_back(3)
    assert (peer.status.claim.state, peer.status.claim.path) == ("training", 3)
    peer.claimer.say("leaving")
    assert (peer.status.claim.path, peer.status.claim.training_path) == (3, None)
