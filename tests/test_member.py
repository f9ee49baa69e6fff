"""A peer's decisions, in a world without faults: what every history begins from."""

from __future__ import annotations

from dipaco.modules.config import GridConfig
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from support.calm_world import CalmWorld
from support.make_plan import make_plan


def world(*modules_per_level: int, duration_s: float = 20.0) -> CalmWorld:
    grid = GridConfig(modules_per_level=modules_per_level or (2, 2))
    return CalmWorld(make_plan(duration_s=duration_s, grid=grid))


def test_four_peers_take_four_paths_and_commit_every_round_together() -> None:
    swarm = world()
    peers = swarm.add(["Pa", "Pb", "Pc", "Pd"])
    swarm.run(110.0)
    assert {peer.member.path for peer in peers} == {0, 1, 2, 3}
    for module in ("L0.E0", "L0.E1", "L1.E0", "L1.E1"):
        holders = [peer for peer in peers if module in peer.member.anchors]
        states = {peer.member.anchors[module] for peer in holders}
        assert len(states) == 1
        state = states.pop()
        assert state.version >= 4
        certificate = swarm.book.get(module, state.digest)
        assert certificate is not None
        assert certificate.signers == {p.name for p in holders}


def test_one_peer_trains_and_commits_alone() -> None:
    swarm = world(1, 1)
    (peer,) = swarm.add(["Pa"])
    swarm.run(70.0)
    assert peer.member.anchors["L0.E0"].version >= 2


def test_a_newcomer_contributes_in_the_second_round_at_the_latest() -> None:
    swarm = world(1, 1)
    swarm.add(["Pa", "Pb"])
    swarm.run(65.0)
    (new,) = swarm.add(["Pc"])
    swarm.run(45.0)
    newest = swarm.book.get("L0.E0", new.member.anchors["L0.E0"].digest)
    assert newest is not None
    assert new.name in newest.signers


def test_a_peer_that_dies_does_not_stop_the_other() -> None:
    swarm = world(1, 1)
    one, two = swarm.add(["Pa", "Pb"])
    swarm.add(["Pz"], trains=False)
    swarm.run(65.0)
    before = one.member.anchors["L0.E0"].version
    two.alive = False
    swarm.run(45.0)
    assert one.member.anchors["L0.E0"].version > before


def test_a_peer_whose_others_are_out_of_sight_is_isolated_and_commits_nothing_shared() -> None:
    swarm = world(1, 1)
    one, two = swarm.add(["Pa", "Pb"])
    swarm.run(65.0)
    before = one.member.anchors["L0.E0"].version
    two.alive = False
    swarm.run(60.0)
    assert one.member.anchors["L0.E0"].version == before
    assert any("isolated" in action.text for action in one.of(a.Warn))  # type: ignore[union-attr]


def test_a_bootstrap_node_keeps_copies_and_trains_nothing() -> None:
    swarm = world(1, 1)
    swarm.add(["Pa"])
    (node,) = swarm.add(["Pz"], trains=False)
    swarm.run(65.0)
    assert node.held["L0.E0"].version >= 1
    assert node.claim is None


def test_leaving_hands_over_and_ends() -> None:
    swarm = world(1, 1)
    (peer,) = swarm.add(["Pa"])
    swarm.add(["Pz"], trains=False)
    swarm.run(65.0)
    before = peer.member.anchors["L0.E0"].version
    peer.happen(e.LeaveWanted())
    swarm.run(5.0)
    assert peer.held["L0.E0"].version == before + 1, "nobody else trains: it need not wait"
    (left,) = peer.of(a.Left)
    assert isinstance(left, a.Left)
    assert set(left.handed_over) == {"L0.E0", "L1.E0"}
    assert peer.claim is not None
    assert peer.claim.state == "leaving"


def test_equal_events_give_equal_actions() -> None:
    one, two = world(), world()
    first = one.add(["Pa", "Pb", "Pc"])
    second = two.add(["Pa", "Pb", "Pc"])
    one.run(70.0)
    two.run(70.0)
    assert [peer.done for peer in first] == [peer.done for peer in second]
