"""Looks instead of seconds."""

import pytest

from dipaco.base.patience import LOOK_S, looks


@pytest.mark.parametrize("limit_s", [0.0, 0.2, 0.5, 1.3, 30.0])
def test_looks_are_short_and_take_the_limit_in_all(limit_s):
    found = list(looks(limit_s))
    assert sum(found) == pytest.approx(limit_s)
    assert 0.0 <= max(found) <= LOOK_S
