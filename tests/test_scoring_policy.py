"""Who scores which path: examples, and whole swarms that lose peers while they score."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from dipaco.dht.records import Claim, ScoreEntry, ScoresRecord
from dipaco.dht.score_request import ScoreRequest
from dipaco.dht.scoring_policy import ScoringBoard, build_board, keeps_scoring, path_to_score
from dipaco.dht.view import SwarmView
from hypothesis import given
from hypothesis import strategies as st

PEERS = tuple("Qm" + "1" * 43 + letter for letter in "ABCDEF")
SHA = "a" * 64
PATIENCE_S = 2.0
REQUEST = ScoreRequest(run_id="0" * 16, documents_sha256=SHA, documents=9, made_s=100.0)


def claim(peer: str, path: int, since_s: float = 1.0, state: str = "training") -> Claim:
    values = {"peer_id": peer, "path": path, "state": state, "since_s": since_s, "round": 0}
    return Claim.model_validate(values)


def view_of(*claims: Claim) -> SwarmView:
    return SwarmView(now_s=0.0, claims={c.peer_id: c for c in claims})


def scoring(path: int, since_s: float = 100.0) -> ScoreEntry:
    return ScoreEntry(path=path, state="scoring", sha256=None, since_s=since_s)


def done(path: int) -> ScoreEntry:
    return ScoreEntry(path=path, state="done", sha256=SHA, since_s=100.0)


def choose(
    board: ScoringBoard, view: SwarmView, me: str, open_s: float = 0.0, idle_s: float = 0.0
) -> int | None:
    return path_to_score(
        board,
        view,
        me,
        open_s=dict.fromkeys(range(board.path_count), open_s),
        idle_s=idle_s,
        patience_s=PATIENCE_S,
    )


def test_the_oldest_trainer_scores_its_path_at_once_and_a_replica_waits() -> None:
    view = view_of(claim(PEERS[0], 1, since_s=5.0), claim(PEERS[1], 1, since_s=3.0))
    board = ScoringBoard(2)
    assert choose(board, view, PEERS[1]) == 1
    assert choose(board, view, PEERS[0]) is None
    assert choose(board, view, PEERS[0], open_s=2.5, idle_s=2.5) is not None


def test_a_path_that_nobody_trains_goes_to_one_peer_after_a_while() -> None:
    view = view_of(claim(PEERS[0], 0), claim(PEERS[1], 1))
    board = ScoringBoard(3, {PEERS[0]: (done(0),), PEERS[1]: (done(1),)})
    assert [choose(board, view, peer) for peer in PEERS[:2]] == [None, None]
    first = [choose(board, view, peer, open_s=2.0) for peer in PEERS[:2]]
    assert sorted(first, key=str) == [2, None]
    later = [choose(board, view, peer, open_s=4.0, idle_s=2.0) for peer in PEERS[:2]]
    assert later == [2, 2]


def test_a_busy_peer_is_not_waited_for() -> None:
    view = view_of(claim(PEERS[0], 0), claim(PEERS[1], 1))
    board = ScoringBoard(3, {PEERS[0]: (scoring(0),), PEERS[1]: (done(1),)})
    assert choose(board, view, PEERS[1], open_s=2.0) == 2


def test_own_path_first_and_nothing_when_all_is_done() -> None:
    view = view_of(claim(PEERS[0], 2))
    assert choose(ScoringBoard(4), view, PEERS[0], open_s=9.0, idle_s=9.0) == 2
    everything = tuple(done(path) for path in range(4))
    board = ScoringBoard(4, {PEERS[1]: everything, PEERS[2]: everything})
    assert choose(board, view, PEERS[0], open_s=9.0, idle_s=9.0) is None
    assert board.open_paths() == ()


def test_a_second_peer_scores_what_one_has_and_only_then() -> None:
    view = view_of(claim(PEERS[0], 0), claim(PEERS[1], 1))
    # Whoever says that it has scored all keeps nobody from scoring.
    board = ScoringBoard(2, {PEERS[2]: (done(0), done(1))})
    assert board.open_paths() == (0, 1)
    assert [choose(board, view, peer) for peer in PEERS[:2]] == [0, 1]
    board = ScoringBoard(2, {PEERS[2]: (done(0),), PEERS[0]: (scoring(0),)})
    assert board.open_paths() == (1,)
    assert keeps_scoring(board, PEERS[0], 0)
    # A trainer that has scored its path is not waited for.
    board = ScoringBoard(1, {PEERS[0]: (done(0),)})
    assert choose(board, view, PEERS[1], open_s=2.0) == 0
    board = ScoringBoard(1, {PEERS[0]: (done(0),), PEERS[1]: (scoring(0),)})
    assert board.open_paths() == ()
    assert board.busy() == {PEERS[1]}


def test_of_two_scorers_the_earlier_goes_on_and_two_done_scores_end_both() -> None:
    board = ScoringBoard(2, {PEERS[0]: (scoring(1, 120.0),), PEERS[1]: (scoring(1, 110.0),)})
    assert [keeps_scoring(board, peer, 1) for peer in PEERS[:3]] == [False, True, True]
    one = ScoringBoard(2, {**board.entries, PEERS[2]: (done(1),)})
    assert [keeps_scoring(one, peer, 1) for peer in PEERS[:2]] == [False, True]
    finished = ScoringBoard(2, {**one.entries, PEERS[3]: (done(1),)})
    assert not keeps_scoring(finished, PEERS[1], 1)
    assert finished.scoring() == {}


def test_what_cannot_be_is_not_on_the_board() -> None:
    record = ScoresRecord(
        peer_id=PEERS[0],
        request=REQUEST.request_id,
        entries=(scoring(0, 50.0), scoring(1, 1e9), scoring(2, 101.0), done(7)),
    )
    board = build_board(REQUEST, 4, [record], now_s=110.0)
    assert [entry.path for entry in board.entries[PEERS[0]]] == [2]


def test_nobody_is_believed_to_score_faster_than_can_be() -> None:
    request = ScoreRequest(run_id="0" * 16, documents_sha256=SHA, documents=10**6, made_s=100.0)
    everything = ScoresRecord(
        peer_id=PEERS[0],
        request=request.request_id,
        entries=(scoring(9), *(done(path) for path in range(9))),
    )

    def believed(now_s: float) -> int:
        return len(build_board(request, 10, [everything], now_s).done())

    # A hundred seconds a path, and a little for clocks.
    assert believed(150.0) == 1
    assert believed(350.0) == 3
    assert believed(2000.0) == 9
    assert build_board(request, 10, [everything], 101.0).scoring() == {9: (PEERS[0],)}


@dataclass
class Peer:
    """A peer of the simulated swarm, with the state that `peer/scoring/answering.py` keeps."""

    peer_id: str
    path: int
    entries: dict[int, ScoreEntry] = field(default_factory=dict)
    left: int = 0
    idle_since_s: float = 100.0
    seen_open_s: dict[int, float] = field(default_factory=dict)

    @property
    def current(self) -> int | None:
        return next((p for p, e in self.entries.items() if e.state == "scoring"), None)

    def step(self, board: ScoringBoard, view: SwarmView, now_s: float, work: int) -> None:
        """Look at a board that may be old, then give way, begin, or go on."""
        current = self.current
        if current is not None and not keeps_scoring(board, self.peer_id, current):
            del self.entries[current]
            self.idle_since_s = now_s
        self.seen_open_s = {p: self.seen_open_s.get(p, now_s) for p in board.open_paths()}
        if self.current is None:
            path = path_to_score(
                board,
                view,
                self.peer_id,
                open_s={p: now_s - since for p, since in self.seen_open_s.items()},
                idle_s=now_s - self.idle_since_s,
                patience_s=PATIENCE_S,
                exclude=self.entries,
            )
            if path is not None:
                self.entries[path] = scoring(path, now_s)
                self.left = work
        elif self.left > 0:
            self.left -= 1
        else:
            path = self.current
            assert path is not None
            self.entries[path] = done(path)
            self.idle_since_s = now_s


@given(
    path_count=st.integers(1, 8),
    trained=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    deaths=st.lists(st.integers(0, 40), max_size=6),
    work=st.integers(0, 6),
    seed=st.integers(0, 2**16),
)
def test_every_path_is_scored_while_one_peer_lives(
    path_count: int, trained: list[int], deaths: list[int], work: int, seed: int
) -> None:
    """Boards are up to 1 s old and differ between peers; peers die and their records expire."""
    draw = random.Random(seed)
    peers = [Peer(PEERS[n], path % path_count) for n, path in enumerate(trained)]
    died_s = {peer.peer_id: 100.0 + at for peer, at in zip(peers[1:], deaths, strict=False)}
    boards: list[ScoringBoard] = [ScoringBoard(path_count)]
    together: dict[tuple[int, ...], int] = {}
    bound_s = 40 + 2 * (path_count + 2) * (work + 4 * PATIENCE_S + 4)
    now_s = 100.0
    while now_s < 100.0 + bound_s:
        # A record lives for 3 s after its owner died.
        seen = [p for p in peers if now_s < died_s.get(p.peer_id, 1e9) + 3.0]
        living = [p for p in peers if now_s < died_s.get(p.peer_id, 1e9)]
        view = view_of(*(claim(p.peer_id, p.path) for p in seen))
        boards.append(
            ScoringBoard(path_count, {p.peer_id: tuple(p.entries.values()) for p in seen})
        )
        draw.shuffle(living)
        for peer in living:
            peer.step(draw.choice(boards[-2:]), view, now_s, work)
        at_work = [peer.current for peer in living if peer.current is not None]
        for path in range(path_count):
            twice = at_work.count(path) > 1
            together[(path,)] = together.get((path,), 0) + 1 if twice else 0
            assert together[(path,)] <= 3, f"two peers keep scoring path {path}"
        if not at_work and len(boards[-1].done()) == path_count:
            lost = [p for p in peers if p not in living and now_s < died_s[p.peer_id] + 3.0]
            if not lost and all(now_s > at for at in died_s.values()):
                return
        now_s += 1.0
    raise AssertionError(f"not all of {path_count} paths were scored: {boards[-1]}")
