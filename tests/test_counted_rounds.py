"""Rounds of fixed steps are counted: they end when everybody is done, and the clock is a limit."""

from __future__ import annotations

from dipaco.modules.config import GridConfig, ModelConfig, RoundsConfig
from dipaco.modules.grid import Grid
from dipaco.peer.member.rounds import Boundary, CountedPosition, RoundSchedule
from hypothesis import given
from hypothesis import strategies as st

START_S, DURATION_S, MATCHMAKING_S = 1000.0, 100.0, 2.0
MODEL = ModelConfig(vocabulary_size=64, block_count=4, hidden_size=16, head_count=2)


def make_position(
    inner_steps: int = 8,
    private: tuple[int, ...] = (),
    offsets: tuple[float, ...] | None = None,
    entered_s: float = START_S,
    round_index: int = 3,
) -> CountedPosition:
    rounds = RoundsConfig(
        duration_s=DURATION_S, inner_steps=inner_steps, matchmaking_s=MATCHMAKING_S
    )
    grid = Grid(MODEL, GridConfig(modules_per_level=(2, 2), private_blocks=private), offsets)
    position = CountedPosition(RoundSchedule(rounds, grid, START_S))
    position.enter(entered_s, round_index)
    return position


def take_steps(position: CountedPosition, now_s: float) -> int:
    taken = 0
    while position.may_step(now_s):
        position.stepped()
        taken += 1
    return taken


def test_a_round_is_over_as_soon_as_its_steps_and_levels_are() -> None:
    """No time passes at all: nobody waits for the clock."""
    position = make_position(private=(1,))
    seen = []
    for _ in range(3):
        for _ in range(3):
            take_steps(position, START_S)
            for boundary in position.due(START_S, step_s=1.0):
                seen.append((boundary.round_index, boundary.level, position.steps_in_round))
                assert not position.round_ended(())
                position.closed(boundary)
        assert position.round_ended(())
        position.next_round(START_S, 0)
    levels = (("L0", 2), ("L1", 5), ("P", 8))
    assert seen == [(index, level, steps) for index in (3, 4, 5) for level, steps in levels]


def test_steps_wait_for_the_outer_round_before_them() -> None:
    position = make_position()
    assert position.due(START_S, 0.0) == []
    assert take_steps(position, START_S) == 4
    (boundary,) = position.due(START_S + 1.0, 0.0)
    # Not even the limit opens the gate: the outer round has one of its own.
    assert not position.may_step(START_S + 10 * DURATION_S)
    assert position.due(START_S + 10 * DURATION_S, 0.0) == []
    position.closed(boundary)
    assert take_steps(position, START_S) == 4


def test_a_slow_peer_takes_the_boundary_at_the_limit_and_gives_the_steps_up() -> None:
    position = make_position()
    position.stepped()
    assert position.due(START_S + 49.9, 0.0) == []
    (boundary,) = position.due(START_S + 50.0, 0.0)
    assert (boundary.level, position.missing_steps("L0")) == ("L0", 3)
    position.closed(boundary)
    assert take_steps(position, START_S + 60.0) == 4
    assert [b.level for b in position.due(START_S + 60.0, 0.0)] == ["L1"]


def test_groups_close_half_a_window_after_the_limit_and_never_at_once() -> None:
    position = make_position()
    take_steps(position, START_S)
    (boundary,) = position.due(START_S + 3.0, 0.0)
    window_s = 0.45 * DURATION_S
    assert boundary == Boundary(START_S + 3.0, 3, "L0", START_S + 50.0 + window_s / 2)
    late = make_position(offsets=(0.01, 1.0))
    (boundary,) = late.due(START_S + 90.0, 0.0)
    assert boundary.meet_until_s == START_S + 90.0 + MATCHMAKING_S


def test_the_limit_counts_from_the_moment_of_entering() -> None:
    position = make_position(entered_s=START_S + 1234.0)
    assert position.due(START_S + 1234.0 + 49.0, 0.0) == []
    assert [b.level for b in position.due(START_S + 1234.0 + 50.0, 0.0)] == ["L0"]


def test_levels_that_end_together_meet_together() -> None:
    position = make_position(offsets=(1.0, 1.0))
    take_steps(position, START_S)
    assert [b.level for b in position.due(START_S, 0.0)] == ["L0", "L1"]


def test_steps_behind_the_last_level_belong_to_the_round() -> None:
    position = make_position(offsets=(0.25, 0.5))
    for level in ("L0", "L1"):
        take_steps(position, START_S)
        (boundary,) = position.due(START_S, 0.0)
        assert boundary.level == level
        position.closed(boundary)
    assert not position.round_ended(())
    assert take_steps(position, START_S) == 4
    assert position.round_ended(())


def test_a_boundary_comes_again_from_a_newer_anchor() -> None:
    position = make_position()
    take_steps(position, START_S)
    (boundary,) = position.due(START_S, 0.0)
    assert position.due(START_S, 0.0) == []
    position.again(boundary)
    assert [b.level for b in position.due(START_S + 1.0, 0.0)] == ["L0"]


def test_the_first_round_waits_for_a_trainer_on_every_path_or_its_limit() -> None:
    position = make_position(entered_s=START_S - 30.0, round_index=0)
    assert not position.may_step(START_S + DURATION_S - 0.1)
    assert position.may_step(START_S + DURATION_S)
    position.open(START_S - 20.0)
    assert not position.may_step(START_S - 0.1)
    assert position.may_step(START_S)
    opened_late = make_position(entered_s=START_S + 5.0, round_index=0)
    opened_late.open(START_S + 40.0)
    # The limits count from there.
    assert opened_late.due(START_S + 40.0 + 49.9, 0.0) == []
    assert opened_late.due(START_S + 40.0 + 50.0, 0.0)


def test_a_run_that_has_begun_keeps_nobody_waiting() -> None:
    assert make_position(entered_s=START_S + 5.0, round_index=1).may_step(START_S + 5.0)


def test_the_others_being_further_takes_a_peer_along() -> None:
    position = make_position(round_index=3)
    position.next_round(START_S, 9)
    assert position.round_index == 9
    position.next_round(START_S, 2)
    assert position.round_index == 10


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0.0, 60.0), st.booleans()), min_size=1, max_size=60),
)
def test_no_round_ends_before_its_levels_and_every_boundary_comes_in_time(
    inner_steps: int, turns: list[tuple[float, bool]]
) -> None:
    position = make_position(inner_steps, private=(1,))
    now_s, entered_s, running, closed = START_S, START_S, [], set()
    for waits_s, ends in turns:
        now_s += waits_s
        may = position.may_step(now_s)
        if may:
            position.stepped()
        came = position.due(now_s, 0.0)
        running += came
        # Either it may go on, or a boundary has come, or others are waited for: never the clock.
        assert may or running or position.may_step(now_s) or position.round_ended(())
        for boundary in came:
            done = position.missing_steps(boundary.level) == 0
            assert done or now_s >= position.latest_s(boundary.level)
            assert boundary.meet_until_s >= now_s + MATCHMAKING_S
            latest_s = entered_s + DURATION_S + 0.225 * DURATION_S
            assert boundary.meet_until_s <= max(latest_s, now_s + MATCHMAKING_S)
        if ends and running:
            closed.add(running[0].level)
            position.closed(running.pop(0))
        assert position.steps_in_round <= inner_steps
        ended = position.round_ended([boundary.level for boundary in running])
        assert not ended or closed == {"L0", "L1", "P"}
        if ended:
            position.next_round(now_s, 0)
            entered_s, closed = now_s, set()
