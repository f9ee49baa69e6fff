"""How long records stand, and that a newer one is not read as the one it replaces."""

from __future__ import annotations

import pytest

from dipaco.protocol.config import RoundsConfig
from dipaco.protocol.records import HeldState, ModuleRecord, refresh_period_s


@pytest.mark.parametrize(
    ("duration_s", "inner_steps", "period_s"),
    [(3.0, 0, 1.0), (60.0, 0, 15.0), (300.0, 0, 75.0), (1e5, 0, 600.0), (1e5, 88, 20.0)],
)
def test_records_are_renewed_by_the_round(
    duration_s: float, inner_steps: int, period_s: float
) -> None:
    rounds = RoundsConfig(duration_s=duration_s, inner_steps=inner_steps)
    assert refresh_period_s(rounds) == period_s


def test_what_was_worked_out_of_a_record_is_not_that_of_its_copy() -> None:
    said = ModuleRecord.model_construct(
        peer_id="A",
        module="L0.E0",
        path=1,
        state="training",
        since_s=1.0,
        round=2,
        reachable="direct",
        held=HeldState(step="b" * 64, version=1, weight=2, round=0, digest="a" * 64, bytes=1),
    )
    assert said.claim is not None
    assert said.claim.state == "training"
    assert said.holding is not None
    goodbye = said.model_copy(update={"state": "leaving", "held": None})
    assert goodbye.claim is not None
    assert goodbye.claim.state == "leaving"
    assert goodbye.holding is None
    assert goodbye.age > said.age
