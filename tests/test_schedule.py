"""Boundaries by the clock; those of counted rounds are in `test_counted_rounds.py`."""

from __future__ import annotations

from dipaco.modules.config import GridConfig, ModelConfig, RoundsConfig
from dipaco.modules.grid import Grid
from dipaco.peer.member.rounds import ClockPosition, RoundSchedule
from hypothesis import given
from hypothesis import strategies as st

MODEL = ModelConfig(vocabulary_size=64, block_count=4, hidden_size=16, head_count=2)


def make_schedule(private: tuple[int, ...] = ()) -> RoundSchedule:
    rounds = RoundsConfig(duration_s=10.0, matchmaking_s=1.0)
    grid = Grid(MODEL, GridConfig(modules_per_level=(2, 2), private_blocks=private))
    return RoundSchedule(rounds, grid, start_s=1000.0)


def test_boundaries_follow_the_design() -> None:
    schedule = make_schedule()
    assert schedule.boundary(3, "L0").time_s == 1035.0
    assert schedule.boundary(3, "L1").time_s == 1040.0
    assert schedule.round_at(1034.9) == 3
    assert schedule.round_at(999.0) == -1


@given(st.floats(0, 5000, allow_nan=False), st.sampled_from(["L0", "L1", "P"]))
def test_next_boundary_is_the_first_after_now(now: float, level: str) -> None:
    schedule = make_schedule(private=(1,))
    boundary = schedule.next_boundary(level, now)
    assert boundary.time_s > now
    assert boundary.round_index >= 0
    if boundary.round_index:
        assert schedule.boundary(boundary.round_index - 1, level).time_s <= now


def test_clock_mode_never_waits_and_takes_every_boundary_once() -> None:
    position = ClockPosition(make_schedule())
    position.enter(1001.0, 0)
    seen = []
    now = 1001.0
    while now < 1045.0:
        assert position.may_step(now)
        for boundary in position.due(now, step_s=0.1):
            seen.append((boundary.round_index, boundary.level))
            position.closed(boundary)
        if position.round_ended({}):
            position.next_round(now, 0)
        now += 0.1
    expected = [(r, level) for r in range(4) for level in ("L0", "L1")]
    assert seen == [*expected, (4, "L0")] or seen == expected


def test_a_late_step_counts_the_boundary_that_it_would_miss() -> None:
    position = ClockPosition(make_schedule())
    position.enter(1001.0, 0)
    assert not position.due(1004.0, step_s=1.0)
    assert [b.level for b in position.due(1004.6, step_s=1.0)] == ["L0"]
    assert not position.due(1004.9, step_s=1.0)


def test_sleeping_through_rounds_leaves_one_boundary_a_level() -> None:
    position = ClockPosition(make_schedule())
    position.enter(1001.0, 0)
    due = position.due(1057.0, step_s=0.1)
    assert {b.level for b in due} == {"L0", "L1"}
    assert not position.due(1057.1, step_s=0.1)
