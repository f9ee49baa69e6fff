"""Whom a peer that cannot lead asks again and again for a leader, and how often."""

from __future__ import annotations

from collections import Counter

from dipaco.peer.member.calls import Call, Join, MeetingAction, Refused, Standing
from dipaco.peer.member.leader_search import SELDOMEST_ASKED, LeaderSearch

SILENT = tuple(f"bare{number}" for number in range(30))


class Search:
    """One that cannot lead among others, asked in pauses."""

    def __init__(self, *asked: str, refusing: tuple[str, ...] = ()) -> None:
        self.refusing = refusing
        self.asked: list[str] = []
        candidates = (*asked, "me")
        own = Standing(len(asked), "me")
        self.search = LeaderSearch(
            own, Join(b"", b""), candidates, asked, frozenset(asked), asks_all=True,
            absent_is_no=False, patience_s=1.0, first_number=0, act=self._act,
        )  # fmt: skip

    def _act(self, action: MeetingAction) -> None:
        if isinstance(action, Call):
            self.asked.append(action.peer)

    def pause(self, now_s: float) -> Counter[str]:
        """Ask everybody there is, let them answer or not, and return who was asked how often."""
        self.asked.clear()
        self.search.ask_again()
        for beat in range(20):
            self.search.ask_next(now_s + beat)
            for peer in self.refusing:
                call = self.search.find(peer)
                if call is not None:
                    self.search.answered(call, peer, Refused("no"))
            self.search.notice_silence(now_s + beat)
        return Counter(self.asked)


def test_who_never_answers_is_asked_less_and_less_often_and_never_given_up() -> None:
    search = Search(*SILENT)
    pauses = [search.pause(30.0 * number) for number in range(8 * SELDOMEST_ASKED)]
    asked = Counter[str]()
    for pause in pauses:
        asked.update(pause)
    assert set(asked) == set(SILENT)
    assert max(asked.values()) <= len(pauses) / SELDOMEST_ASKED + SELDOMEST_ASKED
    for begin in range(0, len(pauses), SELDOMEST_ASKED):
        assert set(SILENT) <= set().union(*pauses[begin : begin + SELDOMEST_ASKED])


def test_who_answers_is_asked_each_time() -> None:
    search = Search("liar", *SILENT, refusing=("liar",))
    pauses = [search.pause(30.0 * number) for number in range(4 * SELDOMEST_ASKED)]
    assert all(pause["liar"] for pause in pauses)
