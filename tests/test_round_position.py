"""Where a peer stands in the rounds, with made-up times."""

from __future__ import annotations

from dipaco.modules.config import GridConfig, ModelConfig, RoundsConfig
from dipaco.modules.grid import Grid
from dipaco.peer.member.rounds import RoundPosition, RoundSchedule, round_position

START_S, DURATION_S = 1000.0, 12.0


def _position(inner_steps: int) -> RoundPosition:
    """Two shared levels and a private one: boundaries at 4, 8 and 12 s of a round."""
    model = ModelConfig(
        vocabulary_size=320,
        block_count=4,
        hidden_size=16,
        head_count=2,
        feed_forward_size=32,
        sequence_length=32,
    )
    grid = Grid(model, GridConfig(modules_per_level=(2, 2), private_blocks=(3,)))
    rounds = RoundsConfig(duration_s=DURATION_S, inner_steps=inner_steps, matchmaking_s=0.5)
    return round_position(RoundSchedule(rounds, grid, START_S))


def test_by_the_clock_the_next_boundary_is_due() -> None:
    position = _position(inner_steps=0)
    position.enter(START_S + 5.0, 0)
    assert position.may_step(START_S + 5.0)
    assert [b.level for b in position.due(START_S + 8.0, 0.0)] == ["L1"]


def test_other_work_may_take_the_time_until_the_next_boundary() -> None:
    position = _position(inner_steps=0)
    position.enter(START_S + 5.0, 0)
    assert position.slack_s(START_S + 5.0, step_s=1.0) == 3.0
    assert position.slack_s(START_S + 9.0, step_s=1.0) < 0


def test_fixed_steps_other_work_leaves_time_for_the_steps() -> None:
    """6 steps a round: 2 before the boundary of L0, 4 before that of L1, all before the last."""
    position = _position(inner_steps=6)
    position.enter(START_S, 1)
    assert position.slack_s(START_S, step_s=1.0) == 4.0 - 2.0
    for _ in range(2):
        position.stepped()
    assert position.slack_s(START_S + 2.0, step_s=1.0) == 2.0
    (boundary,) = position.due(START_S + 2.0, 0.0)
    position.closed(boundary)
    assert position.slack_s(START_S + 2.0, step_s=0.5) == 6.0 - 2 * 0.5


def test_after_the_clock_was_put_back_boundaries_come_that_have_not_come_yet() -> None:
    position = _position(inner_steps=0)
    position.enter(START_S, 0)
    assert [b.round_index for b in position.due(START_S + 4.0, 0.0)] == [0]
    ahead_s = START_S + 3600.0
    position.due(ahead_s, 0.0)
    assert position.due(START_S + 16.0, 0.0) == []
    position.clock_went_back(START_S + 16.0 - 0.1)
    came = [(b.level, b.round_index) for b in position.due(START_S + 16.0, 0.0)]
    assert came == [("L0", 1)]
    # What came once does not come again.
    position.clock_went_back(START_S + 3.9)
    assert "L0" not in [boundary.level for boundary in position.due(START_S + 16.0, 0.0)]


def test_after_the_clock_was_put_back_boundaries_come_again_that_came_to_nothing() -> None:
    """By a clock that is hours ahead nobody else comes: those rounds are still to be trained."""
    position = _position(inner_steps=0)
    position.enter(START_S, 0)
    ahead = [b for b in position.due(START_S + 15.0, 0.0) if b.level == "L0"]
    position.clock_went_back(START_S + 3.0)
    assert "L0" not in [b.level for b in position.due(START_S + 4.0, 0.0)]
    position.came_to_nothing(ahead[0])
    position.clock_went_back(START_S + 3.0)
    assert [b for b in position.due(START_S + 4.0, 0.0) if b.level == "L0"] == ahead


def test_fixed_steps_the_limit_of_a_round_is_not_put_off_with_the_clock() -> None:
    position = _position(inner_steps=6)
    position.enter(START_S + 3600.0, 1)
    assert position.due(START_S + 3.0, 0.0) == []
    position.clock_went_back(START_S + 3.0)
    assert position.due(START_S + 6.9, 0.0) == []
    assert [b.level for b in position.due(START_S + 7.0, 0.0)] == ["L0"]
