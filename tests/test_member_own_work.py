"""What becomes of the own work in a module when a state that others made is taken over."""

from __future__ import annotations

from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from support.adopter import MODULE, ROUND_S
from support.adopter import Adopter as Peer
from support.lone_member import ME, of


def missed(peer: Peer, *group: str) -> StateReference:
    """Let a meeting break here after the group had formed, and go well elsewhere."""
    peer.now_s = peer.plan.start_s + 3.5 * ROUND_S
    peer.turn()
    peer.average_failed(MODULE, members=group)
    return peer.family.commit(peer.anchor, 3, group)


def test_own_work_that_the_group_merged_is_merged_by_name() -> None:
    peer = Peer("Pa", "Pc")
    state = missed(peer, "Pa", ME, "Pc")
    peer.answered(MODULE, {"Pa": state})
    peer.happen(e.ChainFetched(state, peer.family.chain(state)))
    actions = peer.bring(state)
    assert [(adopted.on_top, adopted.is_merged) for adopted in of(a.Adopt, actions)] == [((), True)]


def test_own_work_that_the_group_left_out_stays_on_top() -> None:
    peer = Peer("Pa", "Pc")
    missed(peer, "Pa", ME, "Pc")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.answered(MODULE, {"Pa": state})
    peer.happen(e.ChainFetched(state, peer.family.chain(state)))
    actions = peer.bring(state)
    found = [(adopted.on_top, adopted.is_merged) for adopted in of(a.Adopt, actions)]
    assert found == [((3,), False)]


def committed(peer: Peer, round_index: int, *group: str) -> StateReference:
    peer.now_s = peer.plan.start_s + (round_index + 0.5) * ROUND_S
    peer.turn()
    peer.averaged(MODULE, group)
    return peer.stepped(MODULE, group, round_index)


def test_a_fork_that_loses_is_put_back_from_its_first_round_on() -> None:
    peer = Peer("Pa", "Pc", "Pd", "Pe")
    both = committed(peer, 3, "Pa", ME, "Pc", "Pd", "Pe")
    committed(peer, 4, "Pa", ME, "Pc")
    committed(peer, 5, "Pa", ME, "Pc")
    winner = peer.family.commits(both, (4, 5), ["Pd", "Pe", "Pf", "Pg"])
    adopted = peer.adopts(winner, "Pd")
    assert (adopted.on_top, adopted.is_merged, adopted.weight) == ((4, 5), False, 1.0)


def test_what_both_sides_have_is_not_put_back() -> None:
    peer = Peer("Pa", "Pc", "Pd", "Pe")
    both = committed(peer, 3, "Pa", ME, "Pc", "Pd", "Pe")
    assert peer.adopts(peer.family.commit(both, 4, ["Pa", "Pc"]), "Pa").on_top == ()


def test_work_of_long_ago_is_shortened() -> None:
    peer = Peer("Pa")
    peer.now_s += 7 * ROUND_S
    state = peer.family.commits(peer.anchor, range(3, 11), ["Pa", "Pc"])
    assert peer.adopts(state, "Pa").weight == 0.5
