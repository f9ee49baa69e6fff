"""How long an all-reduce may take: its attempt, or all of the window if it is nearly done."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from dipaco.peer.averaging.parts import AveragingFailed, AveragingRequest
from dipaco.peer.averaging.service import run_in_time

# Nothing waits for as long as this.
LATER_S = 300.0


class Reduce:
    """An all-reduce that ends when it is told to."""

    owed_bytes = 1000

    def __init__(self, share: float, needed_s: float = 0.0) -> None:
        self.share_averaged, self.needed_s = share, needed_s
        self.ends = asyncio.Event()
        self.was_cancelled = False
        self.owed: list[int] = []

    async def run(self) -> None:
        try:
            await self.ends.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        self.share_averaged = 1.0


def request(attempt_s: float, window_s: float) -> AveragingRequest:
    now_s, rules = time.time(), None
    return AveragingRequest(
        rules,  # type: ignore[arg-type]
        "key", ("Pa", "Pb"), 1.0, None, now_s, now_s, now_s + attempt_s, now_s + window_s,
    )  # fmt: skip


def live(reduce: Reduce, asked: AveragingRequest, *, ends_at_look: int) -> float:
    """Run it; it ends when it has said for the n-th time what it owes."""

    def owe(count: int, limit_s: float) -> None:
        reduce.owed.append(count)
        if len(reduce.owed) == ends_at_look:
            reduce.ends.set()

    made: Any = reduce
    return asyncio.run(run_in_time(made, asked, owe))


def test_what_ends_soon_is_checked_within_its_attempt() -> None:
    asked = request(LATER_S, 2 * LATER_S)
    reduce = Reduce(0.0)
    assert live(reduce, asked, ends_at_look=1) == asked.end_s
    assert reduce.owed == [1000, 1]


def test_what_is_nearly_done_goes_on_with_the_window_and_so_do_its_checks() -> None:
    asked = request(0.05, LATER_S)
    reduce = Reduce(0.75)
    assert live(reduce, asked, ends_at_look=2) == asked.latest_s
    assert reduce.owed == [250, 250, 1]


@pytest.mark.parametrize(("share", "window_s"), [(0.0, LATER_S), (1e-4, 1.0)])
def test_what_would_not_end_in_time_is_given_up_with_its_attempt(
    share: float, window_s: float
) -> None:
    """So that those who are fast enough can meet again without the others."""
    reduce = Reduce(share)
    with pytest.raises(AveragingFailed, match="did not end in time"):
        live(reduce, request(0.05, window_s), ends_at_look=9)
    assert reduce.was_cancelled


def test_the_window_is_the_end() -> None:
    reduce = Reduce(0.9)
    with pytest.raises(AveragingFailed, match="did not end in time"):
        live(reduce, request(0.05, 0.1), ends_at_look=9)
    assert reduce.was_cancelled


def test_who_is_told_beforehand_that_lines_are_slow_has_the_window_at_once() -> None:
    asked = request(100.0, LATER_S)
    assert live(Reduce(0.0, needed_s=90.0), asked, ends_at_look=1) == asked.latest_s
