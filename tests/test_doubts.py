"""Whose records are believed: a thousand invented peers cost a member a few calls."""

from __future__ import annotations

from dipaco.peer.member.doubts import CALLS_AT_ONCE, CALLS_IN_VAIN, REMEMBERED, Doubts
from support.lone_member import claim, view_of


def doubted(*peers: str) -> Doubts:
    doubts = Doubts("me")
    for _ in range(CALLS_IN_VAIN):
        doubts.called_in_vain(peers)
    return doubts


def test_one_call_in_vain_is_bad_luck_and_some_are_not() -> None:
    doubts = Doubts("me")
    for _ in range(CALLS_IN_VAIN - 1):
        assert not doubts.called_in_vain(["A"])
    assert not doubts.is_doubted("A")
    assert doubts.called_in_vain(["A"])
    assert doubts.is_doubted("A")
    assert not doubts.called_in_vain(["A"])


def test_who_is_doubted_is_left_out_of_the_view_and_nobody_else() -> None:
    view = view_of(0.0, [claim("A"), claim("B")], ["C"])
    assert doubted("X").believed(view) is view
    believed = doubted("A", "C").believed(view)
    assert set(believed.claims) == {"B"}
    assert set(believed.peers) == {"B"}


def test_a_member_never_doubts_itself() -> None:
    view = view_of(0.0, [claim("me")])
    assert doubted("me").believed(view) is view


def test_an_answer_ends_a_doubt_and_the_count_begins_anew() -> None:
    doubts = doubted("A")
    assert doubts.prove(["A"], 5.0)
    assert not doubts.is_doubted("A")
    assert not doubts.prove(["A"], 6.0)
    assert not doubts.called_in_vain(["A"])


def test_a_few_are_called_at_once_those_that_matter_first() -> None:
    view = view_of(0.0, [claim(f"P{n}") for n in range(10)], ["me"])
    calls = Doubts("me").to_call(view, {"P7", "P9"}, 0.0)
    assert len(calls) == CALLS_AT_ONCE
    assert calls[:2] == ("P7", "P9")


def test_everybody_is_called_sooner_or_later() -> None:
    doubts, called = Doubts("me"), set()
    view = view_of(0.0, [claim(f"P{n}") for n in range(10)])
    for _ in range(3):
        calls = doubts.to_call(view, (), 0.0)
        called |= set(calls)
        doubts.called_in_vain(calls)
    assert called == set(view.claims)


def test_who_is_doubted_has_its_turn_whatever_others_claim() -> None:
    """Called while the network was split, and there again: names on a path that matters more are
    called in vain again and again."""
    invented = {f"bare{n}" for n in range(16)}
    doubts = doubted("A", *invented)
    view = view_of(0.0, [claim(name) for name in ("A", *invented)])
    called: set[str] = set()
    for _ in range(5):
        calls = doubts.to_call(view, invented, 0.0)
        called |= set(calls)
        doubts.called_in_vain(calls)
    assert "A" in called


def test_who_is_doubted_has_its_turn_however_many_names_are_new() -> None:
    doubts = doubted("A", "B")
    for turn in range(2):
        invented = {f"bare{turn}.{n}" for n in range(16)}
        view = view_of(0.0, [claim(name) for name in ("A", "B", *invented)])
        calls = doubts.to_call(view, invented, 0.0)
        assert len(calls) == CALLS_AT_ONCE
        assert calls[-1] == ("A", "B")[turn]
        assert invented.issuperset(calls[:-1])
        doubts.called_in_vain(calls)


def test_who_has_shown_itself_once_is_called_before_other_doubted_ones() -> None:
    doubts = Doubts("me")
    doubts.prove(["A"], 0.0)
    for _ in range(5):
        doubts.called_in_vain(["A"])
    invented = {f"bare{n}" for n in range(16)}
    for _ in range(CALLS_IN_VAIN):
        doubts.called_in_vain(invented)
    view = view_of(0.0, [claim(name) for name in ("A", *invented)])
    assert "A" in doubts.to_call(view, invented, 10.0)


def test_who_has_shown_itself_is_left_in_peace_for_a_while() -> None:
    doubts = Doubts("me")
    doubts.prove(["A"], 100.0)
    view = view_of(0.0, [claim("A"), claim("B")])
    assert doubts.to_call(view, (), 90.0) == ("B",)
    assert doubts.to_call(view, (), 110.0) == ("A", "B")


def test_what_is_remembered_is_bounded() -> None:
    doubts = Doubts("me")
    many = [f"P{n}" for n in range(REMEMBERED + 50)]
    doubts.called_in_vain(many)
    doubts.prove([f"Q{n}" for n in range(REMEMBERED + 50)], 1.0)
    assert len(doubts._in_vain) == len(doubts._proven) == REMEMBERED


def test_who_is_forgotten_is_not_doubted() -> None:
    doubts = Doubts("me")
    doubts.called_in_vain(["A"])
    doubts.called_in_vain(["A"])
    assert doubts.is_doubted("A")
    doubts.called_in_vain([f"P{n}" for n in range(REMEMBERED)])
    assert not doubts.is_doubted("A")
