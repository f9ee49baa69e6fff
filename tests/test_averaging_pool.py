"""The averagers of a peer: one that has ended, or hangs, is replaced by another."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import AveragingRule
from dipaco.peer.averaging import averager
from dipaco.peer.averaging.averager import ExactAverager
from dipaco.peer.averaging.pool import AveragingPool
from support.lone_member import grid_of, small_plan


class Process:
    """An averager's process, as far as the pool looks at it."""

    listens_at = "/unix/tmp/first"

    def __init__(self, replaces: str = "") -> None:
        self.lives, self.hangs = True, False
        self.replaces = replaces

    def is_alive(self) -> bool:
        return self.lives

    def kill(self) -> None:
        self.lives = False

    def join(self, timeout: float) -> None:
        assert not self.lives


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> AveragingPool:
    monkeypatch.setattr(AveragingPool, "_make", lambda self, level, replaces="": Process(replaces))
    plan, nobody = small_plan(), None
    return AveragingPool(nobody, plan, grid_of(plan), AveragingRule(CODECS["none"]))  # type: ignore[arg-type]


def test_one_that_serves_is_used_again(pool: AveragingPool) -> None:
    assert pool.for_level("L0") is pool.for_level("L0")
    assert pool.for_level("L0") is not pool.for_level("L1")


def test_one_that_has_ended_is_replaced(pool: AveragingPool) -> None:
    first: Any = pool.for_level("L0")
    first.lives = False
    second: Any = pool.for_level("L0")
    assert second is not first
    assert second.replaces == first.listens_at, "p2pd still has its handlers"


def test_one_that_hangs_is_ended_and_replaced(pool: AveragingPool) -> None:
    first: Any = pool.for_level("L0")
    first.hangs = True
    assert pool.for_level("L0") is not first
    assert not first.lives


def test_it_hangs_when_it_is_busy_long_after_it_was_told_to_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(averager.time, "monotonic", lambda: now[0])
    one = ExactAverager.__new__(ExactAverager)
    one._pending, one._gave_up_s = None, None
    assert not one.hangs
    one._pending = concurrent.futures.Future()  # type: ignore[assignment]
    now[0] += 10 * averager.HANG_S
    assert not one.hangs, "a long meeting"
    one._gave_up_s = now[0]
    now[0] += averager.HANG_S + 1.0
    assert one.hangs
    one._pending.set_result(None)
    assert not one.hangs
