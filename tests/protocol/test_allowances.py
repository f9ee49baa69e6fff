"""The numbers of the threat model, each just below and just above it."""

import asyncio

import pytest

from dipaco.base.token_bucket import Budget
from dipaco.peer.exchange.streams.places import Places
from dipaco.protocol.allowances import (
    ADMITTED,
    ASKED,
    CONTRIBUTOR,
    DHT_ANSWERS,
    REQUEST_COST_BYTES,
    SENT,
    STRANGER,
    STREAMS,
    UPLOADS,
)

KIB, MIB = 1024, 1024**2


class Clock:
    s = 0.0

    def __call__(self):
        return self.s


def may_use(budget, standing, owner, count):
    try:
        asyncio.run(budget.pay(standing, owner, count, 0.5))
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("rates", "standing", "at_once", "a_second"),
    [
        *((ASKED, standing, 4 * MIB, 64 * KIB) for standing in (STRANGER, ADMITTED, CONTRIBUTOR)),
        *((SENT, standing, 512 * MIB, 16 * MIB) for standing in (STRANGER, ADMITTED, CONTRIBUTOR)),
        *((DHT_ANSWERS, standing, 32 * MIB, 2 * MIB) for standing in (ADMITTED, CONTRIBUTOR)),
        (DHT_ANSWERS, STRANGER, 4 * MIB, 256 * KIB),
    ],
)
def test_one_peer_may_use_so_much_at_once_and_so_much_a_second(rates, standing, at_once, a_second):
    clock = Clock()
    budget = Budget(rates, clock)
    assert not may_use(budget, standing, "a", at_once + a_second)
    assert may_use(budget, standing, "a", at_once)
    assert not may_use(budget, standing, "a", a_second)
    clock.s += 1.0
    assert may_use(budget, standing, "a", a_second)
    assert not may_use(budget, standing, "a", a_second)


@pytest.mark.parametrize(
    ("rates", "at_once", "a_second"),
    [(ASKED, 4 * MIB, 64 * KIB), (SENT, 512 * MIB, 16 * MIB), (DHT_ANSWERS, 4 * MIB, 256 * KIB)],
)
def test_all_strangers_may_use_so_much_together(rates, at_once, a_second):
    clock = Clock()
    budget = Budget(rates, clock)
    assert all(may_use(budget, STRANGER, f"s{number}", at_once / 8) for number in range(8))
    assert not may_use(budget, STRANGER, "new", a_second)
    clock.s += 1.0
    assert may_use(budget, STRANGER, "new", a_second)
    assert not may_use(budget, STRANGER, "newer", a_second)
    assert may_use(budget, ADMITTED, "member", at_once)


@pytest.mark.parametrize(
    ("bounds", "standing", "each", "together"),
    [
        (STREAMS, CONTRIBUTOR, 16, 256),
        (STREAMS, ADMITTED, 16, 256),
        (STREAMS, STRANGER, 4, 64),
        (UPLOADS, CONTRIBUTOR, 4, 16),
        (UPLOADS, ADMITTED, 4, 16),
        (UPLOADS, STRANGER, 2, 6),
    ],
)
def test_so_many_places_are_for_one_peer_and_for_all(bounds, standing, each, together):
    one, many = Places(bounds, Clock()), Places(bounds, Clock())
    assert [one.take("a", standing, lambda: None) is not None for _ in range(each + 1)] == [True] * each + [False]
    taken = [many.take(f"p{number}", standing, lambda: None) for number in range(together + 1)]
    assert [place is not None for place in taken] == [True] * together + [False]


def test_a_request_costs_half_a_kilobyte_beside_its_bytes():
    assert REQUEST_COST_BYTES == 512
