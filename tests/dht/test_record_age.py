"""How long records stand, and that a newer one is not read as the one it replaces."""

import pytest

from dipaco.protocol.config import RoundsConfig
from dipaco.protocol.records import refresh_period_s


@pytest.mark.parametrize(
    ("duration_s", "inner_steps", "period_s"),
    [(3.0, 0, 1.0), (60.0, 0, 15.0), (300.0, 0, 75.0), (1e5, 0, 600.0), (1e5, 88, 20.0)],
)
def test_records_are_renewed_by_the_round(duration_s, inner_steps, period_s):
    rounds = RoundsConfig(duration_s=duration_s, inner_steps=inner_steps)
    assert refresh_period_s(rounds) == period_s
