"""Who leaves hands over what others hold too few copies of."""

from __future__ import annotations

from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.keeping import HANDED_TO
from support.family import genesis
from support.lone_member import claim, of, small_plan
from support.lone_trainer import COPIES, LAST, MODULE, ORDER, SERVING, Trainer


def test_who_leaves_hands_over_what_nobody_else_holds() -> None:
    peer = Trainer(serving=SERVING)
    peer.look()
    peer.held = {keeper: [peer.member.anchors[LAST]] for keeper in SERVING[:COPIES]}
    peer.look()
    actions = peer.leave()
    assert {offer.reference.module for offer in of(a.Offer, actions)} == {MODULE}
    assert len(of(a.Offer, actions)) == HANDED_TO
    assert of(a.Left, peer.turn()) == []
    assert "take over" in of(a.Wait, peer.turn())[0].what
    for keeper in ORDER[:COPIES]:
        assert of(a.Left, peer.turn()) == [], "the next one may leave too"
        peer.answer(keeper, is_kept=True)
    (left,) = of(a.Left, peer.turn())
    assert set(left.handed_over) == {MODULE, LAST}
    assert peer.of(a.Warn) == []


def test_who_leaves_counts_on_nobody_who_leaves() -> None:
    peer = Trainer("Pc", serving=("Ps",))
    peer.held = {"Pc": list(peer.member.anchors.values())}
    peer.look()
    peer.claims = [claim("Pc", state="leaving", since_s=1e9)]
    peer.look()
    actions = peer.leave()
    assert {(o.reference.module, o.peer) for o in of(a.Offer, actions)} == {
        (MODULE, "Ps"),
        (LAST, "Ps"),
    }


def test_who_leaves_takes_no_more_copies() -> None:
    peer = Trainer(serving=("Ps",), plan=small_plan((2, 1)))
    other = peer.family.commits(genesis("L0.E1"), range(3), ["Pz"])
    peer.look()
    peer.leave()
    assert peer.happen(e.Offered("Pz", other)) == []


def test_a_copy_that_nobody_else_holds_is_handed_on() -> None:
    peer = Trainer(serving=("Ps", "Pt"), plan=small_plan((2, 1)))
    copy = peer.family.commits(genesis("L0.E1"), range(3), ["Pz"])
    peer.member.known.serve(copy)
    peer.look()
    actions = peer.leave()
    assert copy in [offer.reference for offer in of(a.Offer, actions)]


def test_what_nobody_took_over_is_said() -> None:
    peer = Trainer(serving=("Ps",))
    peer.look()
    peer.leave()
    for module in (MODULE, LAST):
        digest = peer.member.anchors[module].digest
        peer.happen(e.OfferAnswered(module, digest, "Ps", is_kept=False))
    (left,) = of(a.Left, peer.turn())
    assert left.handed_over == ()
    (warning,) = peer.of(a.Warn)
    assert warning.text.startswith(f"{MODULE}, {LAST}: nobody took over")


def test_leaving_does_not_wait_for_ever() -> None:
    peer = Trainer(serving=("Ps",))
    peer.look()
    peer.leave()
    peer.now_s += 9.0
    assert len(of(a.Left, peer.turn())) == 1


def test_leaving_takes_no_longer_when_the_clock_is_put_back() -> None:
    peer = Trainer(serving=("Ps",))
    peer.look()
    peer.now_s += 3600.0
    peer.leave()
    peer.now_s -= 3600.0
    assert of(a.Left, peer.turn()) == []
    peer.now_s += 9.0
    assert len(of(a.Left, peer.turn())) == 1


def test_the_last_peer_of_all_leaves_its_states_on_its_disk_and_says_so() -> None:
    peer = Trainer()
    peer.look()
    (left,) = of(a.Left, peer.leave())
    assert left.handed_over == ()
    assert a.SaveAll() in peer.done
    assert len(peer.of(a.Warn)) == 1
