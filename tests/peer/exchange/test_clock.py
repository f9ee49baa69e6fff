"""Swarm time: measuring neighbours' clocks, agreeing on one, refusing one that is far off."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco.base.errors import ClockError
from dipaco.peer.exchange.contact.clock import (
    MAX_CLOCK_OFFSET_S,
    MAX_DOUBTFUL_S,
    MAX_GIVEN,
    MAX_NEIGHBOURS,
    Clock,
    ClockSample,
    agreed_offset_s,
    check_offset,
    measure_clock,
    sample_of,
)

offsets = st.floats(-4.0, 4.0)
delays = st.floats(0.0, 2.0)


class FakeNeighbours:
    """Peers whose clocks are ahead of ours by known amounts."""

    def __init__(self, ahead_s):
        self.ahead_s = dict(ahead_s)
        self.asked = ()

    def connected_peers(self):
        return tuple(sorted(self.ahead_s))

    def clock_samples(self, peers, count, timeout_s):
        self.asked = tuple(peers)
        noisy = ((0.9, 0.4), (0.01, 0.0))
        return {
            peer: tuple(ClockSample(self.ahead_s[peer] + error, delay) for delay, error in noisy)
            for peer in peers
            if peer in self.ahead_s
        }


@given(offsets, delays, delays, st.floats(0.0, 1.0))
def test_a_sample_is_wrong_by_half_the_asymmetry_at_most(ahead_s, there_s, back_s, busy_s):
    asked = 1000.0
    received = asked + there_s + ahead_s
    sent = received + busy_s
    sample = sample_of(asked, received, sent, sent - ahead_s + back_s)
    assert sample.delay_s == pytest.approx(there_s + back_s, abs=1e-6)
    assert abs(sample.offset_s - ahead_s) <= sample.delay_s / 2 + 1e-6


@given(st.lists(offsets, min_size=2, max_size=9))
def test_peers_that_see_the_same_clocks_agree_on_the_time(clocks):
    times = [
        own + agreed_offset_s([other - own for j, other in enumerate(clocks) if j != i]) for i, own in enumerate(clocks)
    ]
    assert times == pytest.approx([statistics.median(clocks)] * len(clocks))


def measured(clock, neighbours, given=()):
    """Measure where all are admitted."""
    return clock.measure(neighbours, given, lambda peer: True)


@pytest.mark.parametrize("lie_s", [4.9, -4.9, 60.0, -1e6])
def test_who_is_not_admitted_moves_no_clock_and_ends_nothing(lie_s):
    neighbours = FakeNeighbours({"given": 0.25, "friend": 0.25})
    neighbours.ahead_s.update({f"liar {number}": lie_s for number in range(14)})
    clock = Clock(system_time=lambda: 100.0)
    for _ in range(2):
        assert clock.measure(neighbours, ["given"], lambda peer: peer == "friend") == 2
        assert clock.offset_s == pytest.approx(0.25)
    assert measure_clock(neighbours, ["/ip4/127.0.0.1/tcp/1/p2p/given"]).offset_s == 0.125


def test_one_wrong_clock_moves_nothing():
    clock = Clock(system_time=lambda: 100.0)
    assert measured(clock, FakeNeighbours({"a": 0.0, "b": 0.0, "liar": 1e6})) == 3
    assert clock.now() == 100.0


def test_the_wrong_one_corrects_itself():
    clock = Clock(system_time=lambda: 100.0)
    measured(clock, FakeNeighbours({"a": 2.0, "b": 2.1, "c": 1.9}))
    assert clock.now() == pytest.approx(101.95)
    assert clock.offset_s == pytest.approx(1.95)


@pytest.mark.parametrize(("ahead_s", "word"), [(7.25, "behind"), (-7.25, "ahead of")])
def test_a_clock_that_is_far_off_is_an_error_with_its_remedy(ahead_s, word):
    clock = Clock(offset_s=0.5)
    with pytest.raises(ClockError, match=rf"7\.2 s {word}.*timedatectl set-ntp true"):
        measured(clock, FakeNeighbours({"a": ahead_s, "b": ahead_s}))
    assert clock.offset_s == 0.5


def test_the_limit_itself_is_allowed():
    check_offset(MAX_CLOCK_OFFSET_S)
    check_offset(-MAX_CLOCK_OFFSET_S)
    with pytest.raises(ClockError):
        check_offset(MAX_CLOCK_OFFSET_S + 0.01)


def test_nobody_answers(caplog):
    neighbours = FakeNeighbours({})
    clock = measure_clock(neighbours, ["/ip4/127.0.0.1/tcp/1/p2p/QmSomebody"])
    assert clock.offset_s == 0.0
    assert neighbours.asked == ("QmSomebody",)
    assert "no neighbour told the time" in caplog.text


def crowd(honest, liars):
    """Honest peers, and liars whose ids were ground to be the first in any order."""
    peers = {f"QmHonest{n:02}": 0.01 * (n % 3) for n in range(honest)}
    return FakeNeighbours({**peers, **{f"Qm0000{name}": ahead for name, ahead in liars.items()}})


LIARS = [f"Liar{n}" for n in range(8)]


@pytest.mark.parametrize("lie_s", [4.9, -4.9, 60.0])
def test_liars_with_the_smallest_ids_are_drawn_like_others(lie_s):
    """Of 92 peers 8 lie; even if all were drawn, they are no two thirds of 15."""
    neighbours = crowd(84, dict.fromkeys(LIARS, lie_s))
    drawn = set()
    for _ in range(40):
        clock = Clock(system_time=lambda: 100.0)
        measured(clock, neighbours)
        assert abs(clock.offset_s) < MAX_DOUBTFUL_S + 0.1
        drawn.add(neighbours.asked)
    assert len(drawn) > 1


@pytest.mark.parametrize("lie_s", [4.9, -4.9, 60.0, -1e6])
@pytest.mark.parametrize("honest", [5, 6, 7])
def test_a_small_majority_of_liars_moves_a_newcomer_little_and_keeps_nobody_out(lie_s, honest, caplog):
    clock = Clock(system_time=lambda: 100.0)
    measured(clock, crowd(honest, dict.fromkeys(LIARS, lie_s)))
    assert abs(clock.offset_s) <= MAX_DOUBTFUL_S
    assert "timedatectl set-ntp true" in caplog.text


@pytest.mark.parametrize(("said_s", "moved_s"), [(0.9, 0.9), (1.1, 1.0), (-0.9, -0.9), (-1.1, -1.0)])
def test_neighbours_that_disagree_move_a_clock_by_a_second_at_most(said_s, moved_s):
    clock = Clock(system_time=lambda: 100.0)
    sign = 1 if said_s > 0 else -1
    measured(clock, FakeNeighbours({"a": said_s, "b": 2.0 * sign, "c": -3.0 * sign, "d": 4.0 * sign}))
    assert clock.offset_s == pytest.approx(moved_s)


def test_most_in_one_voice_correct_a_wrong_clock():
    clock = Clock(system_time=lambda: 100.0)
    ahead = {f"Qm{n}": 3.0 for n in range(10)}
    measured(clock, FakeNeighbours({**ahead, "QmLiar1": -4.9, "QmLiar2": 900.0}))
    assert clock.offset_s == pytest.approx(3.0)


def test_a_clock_that_was_set_moves_step_by_step():
    clock = Clock(system_time=lambda: 100.0)
    measured(clock, FakeNeighbours({"a": 0.0, "b": 0.0}))
    neighbours = FakeNeighbours(dict.fromkeys("abcd", 2.0))
    moved = []
    for _ in range(5):
        measured(clock, neighbours)
        moved.append(clock.offset_s)
    assert moved == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_given_peers_are_asked_but_do_not_fill_the_sample():
    neighbours = crowd(40, {})
    given = [f"QmGiven{n}" for n in range(9)]
    measured(Clock(), neighbours, given)
    assert len(neighbours.asked) == MAX_NEIGHBOURS
    assert len(set(given) & set(neighbours.asked)) == MAX_GIVEN


class Machine:
    """A machine whose clock can be set."""

    def __init__(self):
        self.steady_s, self.system_s = 50.0, 1000.0
        self.pause_s = 0.0
        """For so long it stands still between two readings, once."""
        self.clock = Clock(system_time=lambda: self.system_s, steady_time=self._steady)
        self.clock.now()

    def _steady(self):
        now_s = self.steady_s
        self.wait(self.pause_s)
        self.pause_s = 0.0
        return now_s

    def wait(self, seconds):
        self.steady_s += seconds
        self.system_s += seconds


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_wrongly_while_it_runs_is_refused_and_nobody_sees_the_jump(jump_s):
    machine = Machine()
    measured(machine.clock, FakeNeighbours(dict.fromkeys("abc", 0.0)))
    machine.wait(10.0)
    machine.system_s += jump_s
    machine.wait(10.0)
    assert machine.clock.now() == pytest.approx(1020.0, abs=0.1)
    assert machine.clock.offset_s == pytest.approx(-jump_s, abs=0.1)
    assert machine.clock.has_jumped
    with pytest.raises(ClockError, match="ahead of" if jump_s > 0 else "behind"):
        measured(machine.clock, FakeNeighbours(dict.fromkeys("abc", -jump_s)))
    assert machine.clock.has_jumped
    assert machine.clock.now() == pytest.approx(1020.0, abs=0.1)


def test_a_clock_that_is_set_right_while_it_runs_is_followed():
    """A machine that was asleep may learn the time only after it wakes."""
    machine = Machine()
    measured(machine.clock, FakeNeighbours(dict.fromkeys("abc", 0.0)))
    machine.system_s += 3600.0
    assert measured(machine.clock, FakeNeighbours({})) == 0
    assert machine.clock.now() == pytest.approx(1000.0, abs=0.1)
    measured(machine.clock, FakeNeighbours(dict.fromkeys("abc", 0.25)))
    assert machine.clock.now() == pytest.approx(4600.25, abs=0.1)
    assert not machine.clock.has_jumped


def test_a_clock_that_is_set_back_to_what_it_was_is_followed():
    machine = Machine()
    for jump_s in (3600.0, -3600.0):
        machine.system_s += jump_s
        assert machine.clock.now() == pytest.approx(1000.0, abs=0.1)
    measured(machine.clock, FakeNeighbours(dict.fromkeys("abc", 0.0)))
    assert machine.clock.now() == pytest.approx(1000.0, abs=0.1)


def test_what_was_measured_before_the_clock_was_set_says_nothing_of_the_time_after():
    machine = Machine()
    measured(machine.clock, FakeNeighbours(dict.fromkeys("abc", 0.0)))

    class Slow(FakeNeighbours):
        def clock_samples(self, peers, count, timeout_s):
            found = super().clock_samples(peers, count, timeout_s)
            machine.system_s += 3600.0
            return found

    assert measured(machine.clock, Slow(dict.fromkeys("abc", 0.0))) == 0
    assert machine.clock.now() == pytest.approx(1000.0, abs=0.1)
    # The neighbours are asked again, and say that it is wrong.
    assert machine.clock.has_jumped
    with pytest.raises(ClockError, match="ahead of"):
        measured(machine.clock, FakeNeighbours(dict.fromkeys("abc", -3600.0)))


def test_sleep_and_a_stop_between_two_readings_are_no_jump():
    machine = Machine()
    machine.wait(7200.0)
    machine.clock.now()
    machine.pause_s = 45.0
    assert machine.clock.now() == pytest.approx(8245.0, abs=0.1)
    assert not machine.clock.has_jumped
    assert machine.clock.offset_s == 0.0
