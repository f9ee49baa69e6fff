"""Where a peer stands in the rounds, by the clock and with fixed steps."""

from hypothesis import given
from hypothesis import strategies as st

from dipaco.protocol.config import GridConfig, ModelConfig, RoundsConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.member.rounds import Rounds, RoundSchedule

MODEL = ModelConfig(vocabulary_size=64, block_count=4, hidden_size=16, head_count=2)


def make_schedule(inner_steps=0):
    rounds = RoundsConfig(duration_s=10.0, inner_steps=inner_steps)
    grid = Grid(MODEL, GridConfig(modules_per_level=(2, 2), private_blocks=(1,)))
    return RoundSchedule(rounds, grid, start_s=1000.0)


@given(st.floats(0, 5000, allow_nan=False), st.sampled_from(["L0", "L1", "P"]))
def test_the_round_that_has_passed_ended_before_now_and_the_next_one_did_not(now_s, level):
    schedule = make_schedule()
    passed = schedule.passed(level, now_s)
    assert passed == -1 or schedule.boundary(passed, level).time_s <= now_s
    assert schedule.boundary(passed + 1, level).time_s > now_s


def test_no_round_ends_before_the_run_starts():
    rounds = Rounds.of(make_schedule())
    rounds.enter(955.0, 0)
    for now_s in (955.0, 990.0, 1000.0, 1003.3):
        assert rounds.due(now_s, 0.0) == []
    assert rounds.present_round == 0
    assert [b.round_index for b in rounds.due(1003.5, 0.0)] == [0]


def test_by_the_clock_each_boundary_comes_once_and_missed_ones_do_not_come():
    rounds = Rounds.of(make_schedule())
    rounds.enter(1000.5, 0)
    assert rounds.due(1002.9, 0.8) == [], "half a step is not as long"
    assert [b.level for b in rounds.due(1003.0, 0.8)] == ["L0"]
    assert rounds.due(1003.5, 0.0) == []
    assert [b.level for b in rounds.due(1010.0, 0.0)] == ["L1", "P"]
    for level in ("L0", "L1", "P"):
        assert not rounds.has_ended()
        rounds.over(level)
    assert rounds.has_ended()
    rounds.next_round()
    assert rounds.present_round == 1
    # It slept for five rounds: of each level the last boundary comes, and no other.
    assert {b.level: b.round_index for b in rounds.due(1064.0, 0.0)} == {"L0": 6, "L1": 5, "P": 5}


def test_a_clock_that_was_ahead_and_is_put_back_loses_no_rounds_to_come():
    rounds = Rounds.of(make_schedule())
    rounds.enter(1000.5, 0)
    assert rounds.due(1034.0, 0.0)
    rounds.due(1001.0, 0.0)
    assert [(b.level, b.round_index) for b in rounds.due(1003.5, 0.0)] == [("L0", 0)]


def test_with_fixed_steps_the_next_steps_wait_for_the_outer_round():
    rounds = Rounds.of(make_schedule(inner_steps=3))
    rounds.enter(1000.0, 0)
    assert not rounds.may_step(1000.0)
    rounds.open(1000.0)
    assert rounds.may_step(1000.0)
    rounds.steps_in_round += 1
    assert [b.level for b in rounds.due(1000.1, 0.0)] == ["L0"]
    assert not rounds.may_step(1000.1)
    rounds.over("L0")
    assert rounds.may_step(1000.1)
    for _ in range(2):
        rounds.steps_in_round += 1
        for boundary in rounds.due(1000.2, 0.0):
            rounds.over(boundary.level)
    assert rounds.has_ended()
    rounds.next_round()
    assert (rounds.present_round, rounds.steps_in_round) == (1, 0)


def test_the_first_counted_round_waits_for_the_others_for_one_duration():
    rounds = Rounds.of(make_schedule(inner_steps=3))
    rounds.enter(1500.0, 0)
    assert not rounds.may_step(1509.0)
    assert rounds.may_step(1510.0)
    rounds.enter(1500.0, 4)
    assert rounds.may_step(1500.0)


def test_no_boundary_but_the_next_comes_early_however_long_a_step_takes():
    schedule = make_schedule()
    rounds = Rounds.of(schedule)
    rounds.enter(schedule.start_s, 0)
    step_s = 5 * schedule.duration_s
    for now in range(20):
        now_s = schedule.start_s + now * step_s
        for boundary in rounds.due(now_s, step_s):
            assert boundary.time_s <= now_s + schedule.duration_s
