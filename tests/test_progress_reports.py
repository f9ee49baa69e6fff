"""What a trainer tells of its path: how often it is scored."""

from __future__ import annotations

import pytest
from dipaco.modules.evaluate import LossSum
from dipaco.peer.progress import ScoringBudget


@pytest.mark.parametrize(("takes_s", "scored"), [(0.5, 20), (1.0, 20), (2.5, 7), (60.0, 1)])
def test_a_slow_peer_spends_no_more_than_its_share_on_scoring(takes_s: float, scored: int) -> None:
    now_s, times = 0.0, 0

    def score() -> LossSum:
        nonlocal now_s
        now_s += takes_s
        return LossSum(1.0, 1)

    budget = ScoringBudget(0.1, lambda: now_s)
    for round_index in range(20):
        now_s = max(now_s, 10.0 * round_index)
        if budget.is_due():
            assert budget.spend(score) == LossSum(1.0, 1)
            times += 1
    assert times == scored


def test_without_a_bound_every_round_is_scored() -> None:
    budget = ScoringBudget(float("inf"), lambda: 0.0)
    budget.spend(LossSum)
    assert budget.is_due()
