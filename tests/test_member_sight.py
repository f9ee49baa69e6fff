"""Who trained a module lately and is missing from the newest view alone is called all the same."""

from __future__ import annotations

import pytest
from dipaco.dht.coverage import scope_of
from dipaco.dht.records import refresh_period_s
from dipaco.dht.view import view_of_records
from dipaco.peer.member import actions as a
from dipaco.peer.member.gathering import (
    SIGHT_PERIODS,
    rounds_stood_on,
    where_others_stand,
)
from support.family import genesis
from support.lone_member import ME, LoneMember, claim, knowledge, of, record, small_plan
from support.outer_rounds import MODULE, answers, boundary_s, fail, group


def unseen(peer: LoneMember) -> None:
    """Let the newest view lack the others: the nodes that store their records are slow."""
    peer.claims, peer.serving = [], ["Pz"]
    peer.look()


def test_who_is_missing_from_one_view_is_called_all_the_same() -> None:
    peer = group("Pa")
    unseen(peer)
    (meeting,) = of(a.Average, peer.at(boundary_s(3)))
    assert set(meeting.candidates) == {"Pa", ME}
    assert of(a.TakeOuterStep, peer.averaged(MODULE, ["Pa", ME])) != []


def test_who_is_missing_from_one_view_and_answers_counts() -> None:
    peer = group("Pa")
    unseen(peer)
    peer.at(boundary_s(3))
    for attempt in range(2):
        fail(peer, attempt)
        answers(peer, "Pa")
    assert peer.of(a.TakeOuterStep) == []
    assert len(peer.of(a.CarryOn)) == 1


def test_who_is_missing_from_one_view_and_does_not_answer_holds_nobody_up() -> None:
    peer = group("Pa")
    unseen(peer)
    peer.at(boundary_s(3))
    fail(peer)
    answers(peer)
    assert peer.of(a.TakeOuterStep) == [a.TakeOuterStep(MODULE, 3, alone=True)]


def test_who_was_in_no_view_for_a_while_is_not_called() -> None:
    peer = group("Pa")
    peer.now_s += SIGHT_PERIODS * refresh_period_s(peer.plan.rounds)
    unseen(peer)
    peer.at(boundary_s(4) - 1.0)
    peer.done.clear()
    assert of(a.TakeOuterStep, peer.at(boundary_s(4))) == [a.TakeOuterStep(MODULE, 4, alone=True)]


@pytest.mark.parametrize("goodbye", ["left", "moved"])
def test_who_has_said_goodbye_is_not_called(goodbye: str) -> None:
    peer = group("Pa")
    peer.serving = ["Pz"]
    if goodbye == "left":
        peer.serving.append(record("Pa", "leaving"))
    peer.claims = [claim("Pa", path=99)] if goodbye == "moved" else []
    peer.look()
    assert of(a.TakeOuterStep, peer.at(boundary_s(3))) == [a.TakeOuterStep(MODULE, 3, alone=True)]


def test_others_may_go_on_from_what_they_held_last_or_were_offered_since() -> None:
    peer = group("Pa")
    known = peer.member.known
    newest, second, first, _ = known.book.ancestors(MODULE, known.anchors[MODULE].digest)
    known.note_holder("Px", MODULE, first, is_sure=True)
    assert rounds_stood_on(known, MODULE) == set()  # It never answered: anybody can say so.
    known.meet(["Pk"])
    for digest, is_sure, rounds in (
        (first, True, {0}),
        (second, False, {0, 1}),  # It may have taken it before it was cut off.
        (second, True, {1}),
        (newest, False, {1}),
        ("9" * 64, True, {1}),  # It went on, and where from is not known yet.
        (newest, True, set()),
    ):
        known.note_holder("Pk", MODULE, digest, is_sure=is_sure)
        assert rounds_stood_on(known, MODULE) == rounds


def test_who_trains_and_was_never_seen_to_hold_a_state_may_go_on_from_genesis() -> None:
    peer = group("Pa")
    peer.claims.append(claim("Pn"))
    peer.silent.add("Pn")
    peer.look()
    known = peer.member.known
    assert rounds_stood_on(known, MODULE) == set()  # It never answered.
    known.meet(["Pn"])
    assert rounds_stood_on(known, MODULE) == {-1}
    peer.claims.pop()
    peer.look()
    assert rounds_stood_on(known, MODULE) == {-1}  # Out of sight, without a goodbye.
    known.note_holder("Pn", MODULE, "9" * 64, is_sure=True)
    # Where its state comes from is not known yet: from any before the anchor.
    assert rounds_stood_on(known, MODULE) == {-1, 0, 1}
    assert rounds_stood_on(known, MODULE, is_offered=False, is_grouped=False) == {-1}
    known.note_holder("Pn", MODULE, known.anchors[MODULE].digest, is_sure=True)
    assert rounds_stood_on(known, MODULE) == set()


def test_who_trains_and_cannot_be_called_may_go_on_from_genesis_whether_it_answers_or_not() -> None:
    peer = group("Pa")
    peer.claims.append(claim("Pn", reachable="outgoing"))
    peer.silent.add("Pn")
    peer.look()
    assert rounds_stood_on(peer.member.known, MODULE) == {-1}


def test_what_is_held_by_who_cannot_be_called_counts_though_it_never_shows_itself() -> None:
    """Two such peers take over from each other what the records say that they hold."""
    peer = group("Pa")
    known = peer.member.known
    _, second, first, _ = known.book.ancestors(MODULE, known.anchors[MODULE].digest)
    peer.claims.append(claim("Pn", reachable="outgoing"))
    peer.silent.add("Pn")
    peer.held["Pn"] = [known.book.reference(MODULE, first)]
    peer.look()
    assert rounds_stood_on(known, MODULE) == {0}
    peer.held["Pn"] = [known.book.reference(MODULE, second)]
    peer.look()
    assert rounds_stood_on(known, MODULE) == {1}
    # It speaks for nobody.
    assert "Pn" not in known.standing_on(MODULE, {second})


def test_what_was_offered_long_ago_and_never_shown_is_forgotten_where_another_state_is() -> None:
    peer = group("Pa")
    known = peer.member.known
    _, second, first, _ = known.book.ancestors(MODULE, known.anchors[MODULE].digest)
    known.meet(["Pk"])
    known.note_holder("Pk", MODULE, first, is_sure=True)
    known.note_holder("Pk", MODULE, second, is_sure=False)
    for wait_s, rounds in ((0.0, {0, 1}), (30.0, {0})):
        known.now_s += wait_s
        known.note_holder("Pk", MODULE, first, is_sure=True)
        assert rounds_stood_on(known, MODULE) == rounds


def test_who_trains_and_is_in_sight_may_take_over_what_is_committed_without_it() -> None:
    """A split comes before that shows. Who only keeps copies takes what it is offered."""
    peer = group("Pa")
    known, family = peer.member.known, peer.family
    newest, second, first, _ = known.book.ancestors(MODULE, known.anchors[MODULE].digest)
    peer.claims.append(claim("Pn"))
    peer.serving.append("Pk")
    behind, older = (known.book.reference(MODULE, digest) for digest in (second, first))
    peer.held = {"Pn": [behind], "Pk": [older]}
    peer.look()
    alone = family.commit(known.anchors[MODULE], 3, [ME])
    known.book.add_all(family.chain(alone))
    known.anchors[MODULE] = alone
    assert where_others_stand(known, MODULE).rounds == ({0, 1, 2}, {1, 2}, {1}, {1})
    known.note_holder("Pn", MODULE, newest, is_sure=True)
    assert where_others_stand(known, MODULE).rounds == ({0, 2}, {2}, {2}, {2})


def test_who_was_in_a_group_is_likelier_to_hold_what_it_made_than_whom_that_was_shown() -> None:
    """A split came before its signature did."""
    peer = group("Pa")
    known, family = peer.member.known, peer.family
    newest = known.anchors[MODULE]
    known.note_holder("Pa", MODULE, newest.digest, is_sure=True)
    together = family.commit(newest, 3, [ME, "Pa"], signers=[ME])
    alone = family.commit(together, 4, [ME])
    known.book.add_all(family.chain(family.commit(alone, 5, [ME])))
    known.anchors[MODULE] = family.commit(alone, 5, [ME])
    known.note_holder("Pa", MODULE, alone.digest, is_sure=False)
    *_, grouped, seen = where_others_stand(known, MODULE).rounds
    assert (grouped, seen) == ({2, 3}, {2})
    assert rounds_stood_on(known, MODULE) == {2, 3, 4}


def test_where_a_held_state_comes_from_is_unknown_until_its_chain_is_here() -> None:
    peer = group("Pa")
    known, family = peer.member.known, peer.family
    theirs = family.commit(known.anchors[MODULE], 3, ["Pa"])
    assert where_others_stand(known, MODULE).is_clear
    peer.held = {"Pa": [theirs]}
    peer.look()
    assert not where_others_stand(known, MODULE).is_clear
    known.book.add_all(family.chain(theirs))
    assert where_others_stand(known, MODULE).is_clear


def test_who_parted_at_genesis_goes_on_from_there() -> None:
    peer = group("Pa")
    known, family = peer.member.known, peer.family
    apart = family.commits(genesis(MODULE), (0, 1), ["Pk"])
    known.book.add_all(family.chain(apart))
    known.meet(["Pk"])
    known.note_holder("Pk", MODULE, apart.digest, is_sure=True)
    assert rounds_stood_on(known, MODULE) == {-1}


def test_who_was_in_a_group_may_stand_on_its_commit_whether_it_has_signed_or_not() -> None:
    peer = group("Pa")
    known, family = peer.member.known, peer.family
    anchor = known.anchors[MODULE]
    *_, first, _ = known.book.ancestors(MODULE, anchor.digest)
    known.note_holder("Pa", MODULE, first, is_sure=True)
    assert rounds_stood_on(known, MODULE) == set()  # The view was late: it has signed since.
    last = family.commit(anchor, 3, [ME, "Pa"], signers=[ME])
    alone = family.commit(last, 4, [ME])
    known.book.add_all(family.chain(alone))
    known.anchors[MODULE] = alone
    assert rounds_stood_on(known, MODULE) == {2, 3}


def test_who_says_that_it_trains_a_path_that_does_not_exist_is_read_all_the_same() -> None:
    known = knowledge(small_plan())
    now_s, grid = known.now_s, known.grid
    view = view_of_records(
        now_s=now_s,
        plan=known.plan,
        grid=grid,
        peers=[record("Px", path=10**6), record("Py", path=0)],
        modules={},
        progress=[],
        scope=scope_of(grid.modules(), (0,), grid),
    )
    known.learn(view)
    assert known.trainers_seen("L0.E0") == {"Py"}
    assert known.last_seen_s("Px") == now_s
