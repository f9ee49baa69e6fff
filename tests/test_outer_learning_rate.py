"""The learning rate of outer steps, by a module's own steps."""

from __future__ import annotations

import math

import pytest
from dipaco.modules.config import OuterConfig
from dipaco.modules.outer import outer_learning_rate
from hypothesis import given
from hypothesis import strategies as st

GOLDEN_RATES = [
    "0x1.999999999999ap-1",
    "0x1.999999999999ap-1",
    "0x1.639d29fc76773p-1",
    "0x1.c28f5c28f5c2ap-2",
    "0x1.7bc8c8b1fd2dbp-3",
    "0x1.47ae147ae147cp-4",
]


def rates(steps: int, **fields: object) -> list[float]:
    config = OuterConfig.model_validate({"learning_rate": 0.8, **fields})
    return [outer_learning_rate(config, version) for version in range(steps)]


def test_the_schedule_by_a_modules_own_steps() -> None:
    assert rates(5) == [0.8] * 5
    assert rates(4, warmup_steps=2) == [0.4, 0.8, 0.8, 0.8]
    linear = rates(8, warmup_steps=2, decay="linear", decay_steps=4, floor_ratio=0.5)
    assert linear == pytest.approx([0.4, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4])
    cosine = rates(7, decay_steps=4, floor_ratio=0.25)
    expected = [0.8 * (0.25 + 0.75 * (1 + math.cos(math.pi * n / 4)) / 2) for n in range(5)]
    assert cosine == pytest.approx([*expected, 0.2, 0.2], rel=1e-14)
    whole = rates(9, warmup_steps=3, decay_steps=5)
    assert rates(5, warmup_steps=3, decay_steps=5, first_step=4) == whole[4:]


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_the_decay_is_the_cosine_within_rounding_and_never_rises(steps: int, version: int) -> None:
    config = OuterConfig(learning_rate=1.0, decay_steps=steps, floor_ratio=0.0)
    rate, after = (outer_learning_rate(config, version + n) for n in (0, 1))
    done = min(version, steps) / steps
    assert rate == pytest.approx((1 + math.cos(math.pi * done)) / 2, abs=1e-15)
    assert 0 <= after <= rate + 1e-15


def test_the_rates_have_these_bits() -> None:
    """Peers on any machine must agree: these are the doubles, written exactly."""
    found = [rate.hex() for rate in rates(6, warmup_steps=1, decay_steps=4, floor_ratio=0.1)]
    assert found == GOLDEN_RATES
