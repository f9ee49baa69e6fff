"""So much at once and so much a second: for one, for many, and in which order those who wait are served."""

import asyncio
from types import SimpleNamespace

import pytest

from dipaco.base import token_bucket
from dipaco.base.token_bucket import REMEMBERED_OWNERS, Budget, Line, Rate, Rates, TokenBuckets
from dipaco.peer.owner.uplink import Uplink
from support.waiting import HandClock


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20.0))


def test_a_bucket_gives_a_burst_and_then_its_rate():
    clock = HandClock()
    buckets = TokenBuckets(Rate(1000.0, 100.0), clock)
    assert buckets.take("a", 1000) == 0.0
    assert buckets.take("a", 100) == pytest.approx(1.0)
    assert buckets.take("b", 1000) == 0.0
    clock.s += 11.0
    assert buckets.take("a", 1000) == 0.0
    for number in range(2 * REMEMBERED_OWNERS):
        buckets.take(f"p{number}", 10)
    assert len(buckets._full_at_s) == REMEMBERED_OWNERS


def test_who_asks_for_too_much_waits_no_longer_than_the_limit():
    budget = Budget(Rates({"member": Rate(1000.0, 100.0)}, {}))

    async def pay():
        await budget.pay(("member", "a"), 1000, 1.0)
        for _ in range(100):
            with pytest.raises(TimeoutError, match="too much"):
                await budget.pay(("member", "a"), 1000, 1.0)
        await budget.pay(("member", "a"), 5, 1.0)

    run(pay())


def test_of_those_who_wait_at_a_line_the_lowest_rank_is_next_and_then_who_came_first():
    served = []

    async def one(line, owner):
        await line.pay(owner, 1.0)
        served.append(owner)

    async def live():
        line = Line(Rate(1.0, 100.0), {"a": 2, "b": 2, "late": 0}.__getitem__)
        line.take(5.0)
        # All begin in one turn of the loop, in this order, however slow the machine is.
        *tasks, gone = [asyncio.create_task(one(line, owner)) for owner in ("a", "b", "late", "late")]
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*tasks)

    run(live())
    assert served == ["a", "late", "b"]


def test_a_class_has_so_much_together_and_who_has_used_least_goes_first():
    served = []
    rates = Rates(each={"member": Rate(100, 1), "guest": Rate(100, 1)}, together={"guest": Rate(120, 100)})
    budget = Budget(rates)

    async def one(owner):
        await budget.pay(("guest", owner), 10, 20.0)
        served.append(owner)

    async def live():
        for owner in ("a", "b"):
            await budget.pay(("member", owner), 100, 0.01)
        await budget.pay(("guest", "greedy"), 90, 0.01)
        await budget.pay(("guest", "modest"), 20, 0.01)
        budget.take(("guest", "other"), 50)
        with pytest.raises(TimeoutError):
            await budget.pay(("guest", "new"), 10, 0.01)
        with pytest.raises(TimeoutError, match="too much"):
            await budget.pay(("guest", "greedy"), 50, 0.01)
        waiting = [asyncio.create_task(one(owner)) for owner in ("other", "greedy", "modest", "new")]
        await asyncio.gather(*waiting)

    run(live())
    assert served == ["other", "new", "modest", "greedy"], "the first of them held the line already"


def test_the_line_of_the_owner_is_shared_in_pieces(monkeypatch):
    clock = HandClock()

    async def sleep(seconds):
        clock.s += seconds

    monkeypatch.setattr(token_bucket, "asyncio", SimpleNamespace(sleep=sleep))
    uplink, free = Uplink(8.0, clock), Uplink(None, clock)
    assert (uplink.piece_bytes(10**9), free.piece_bytes(10**9)) == (250_000, 10**9)
    assert Uplink(0.01).piece_bytes(10**9) == 4096

    async def send():
        return [await uplink.send(250_000) for _ in range(3)], await free.send(10**12)

    waited_s, free_s = run(send())
    assert uplink.sent_bytes == 750_000
    # A piece at once, and then 1 MB a second.
    assert waited_s == pytest.approx([0.0, 0.25, 0.25])
    assert free_s == 0.0


def test_what_strangers_are_sent_holds_up_nobody_else():
    """They could have so much sent that what a peer tells comes too late: by 64 seconds here."""
    uplink, order = Uplink(8.0), []

    async def serve(rank):
        while True:
            await uplink.send(250_000, rank)
            order.append(rank)

    async def live():
        strangers = [asyncio.ensure_future(serve(2)) for _ in range(256)]
        await asyncio.sleep(0.1)
        told_s = await uplink.send(2000, 0)
        served = asyncio.ensure_future(serve(1))
        # Who stops waiting holds up nobody either.
        for one in strangers[::2]:
            one.cancel()
        while order.count(1) < 3:
            await asyncio.sleep(0.01)
        for one in (*strangers, served):
            one.cancel()
        await asyncio.gather(*strangers, served, return_exceptions=True)
        await uplink.send(2000, 2)
        return told_s

    assert run(live()) < 10.0
    # The line is never held for strangers while a member waits: of two pieces one is the member's.
    assert order.count(2) <= order.count(1) + 4
