"""The numbers of the threat model, each just below and just above it."""

import asyncio
from pathlib import Path

import pytest

from dipaco.base.token_bucket import Budget, Rate, Rates
from dipaco.peer.exchange.streams.places import Places
from dipaco.protocol.allowances import (
    ADMITTED,
    ASKED,
    CONTRIBUTOR,
    DHT_LARGE,
    DHT_SMALL,
    NOWHERE,
    REQUEST_COST_BYTES,
    SENT,
    STRANGER,
    STREAMS,
    UPLOADS,
    Asker,
    origin_of,
)
from support.waiting import HandClock

KIB, MIB = 1024, 1024**2
ROOT = Path(__file__).parents[2]


def may_use(budget, standing, owner, count):
    try:
        asyncio.run(budget.pay(Asker(standing, owner), count, 0.5))
    except TimeoutError:
        return False
    return True


EACH = [
    *((ASKED, standing, 4 * MIB, 64 * KIB) for standing in (ADMITTED, CONTRIBUTOR)),
    (ASKED, STRANGER, MIB, 32 * KIB),
    *((SENT, standing, 512 * MIB, 16 * MIB) for standing in (STRANGER, ADMITTED, CONTRIBUTOR)),
    *((DHT_SMALL, standing, 32 * MIB, 2 * MIB) for standing in (ADMITTED, CONTRIBUTOR)),
    (DHT_SMALL, STRANGER, 2 * MIB, 64 * KIB),
    *((DHT_LARGE, standing, 32 * MIB, 2 * MIB) for standing in (ADMITTED, CONTRIBUTOR)),
    (DHT_LARGE, STRANGER, 4 * MIB, 32 * KIB),
]


@pytest.mark.parametrize(("rates", "standing", "at_once", "a_second"), EACH)
def test_one_asker_may_use_so_much_at_once_and_so_much_a_second(rates, standing, at_once, a_second):
    clock = HandClock()
    budget = Budget(rates, clock)
    assert not may_use(budget, standing, "a", at_once + a_second)
    assert may_use(budget, standing, "a", at_once)
    assert not may_use(budget, standing, "a", a_second)
    clock.s += 1.0
    assert may_use(budget, standing, "a", a_second)
    assert not may_use(budget, standing, "a", a_second)


TOGETHER = [
    (ASKED, STRANGER, 4 * MIB, 128 * KIB),
    (ASKED, ADMITTED, 64 * MIB, MIB),
    (SENT, STRANGER, 512 * MIB, 16 * MIB),
    (SENT, ADMITTED, 4096 * MIB, 64 * MIB),
    (DHT_SMALL, STRANGER, 4 * MIB, 128 * KIB),
    (DHT_SMALL, ADMITTED, 64 * MIB, 16 * MIB),
    (DHT_LARGE, STRANGER, 4 * MIB, 128 * KIB),
    (DHT_LARGE, ADMITTED, 64 * MIB, 16 * MIB),
]


@pytest.mark.parametrize(("rates", "standing", "at_once", "a_second"), TOGETHER)
def test_all_of_a_standing_may_use_so_much_together(rates, standing, at_once, a_second):
    clock = HandClock()
    budget = Budget(rates, clock)
    assert all(may_use(budget, standing, f"s{number}", at_once / 16) for number in range(16))
    assert not may_use(budget, standing, "new", a_second)
    clock.s += 1.0
    assert may_use(budget, standing, "new", a_second)
    assert not may_use(budget, standing, "newer", a_second)
    # Whose work was found good shares with nobody.
    assert may_use(budget, CONTRIBUTOR, "good", a_second)


def test_what_is_waited_for_in_vain_is_not_charged():
    """Otherwise whoever waits behind others is served after them the next time too."""
    clock = HandClock()
    budget = Budget(Rates({STRANGER: Rate(10, 1)}, {STRANGER: Rate(10, 10)}), clock)
    assert may_use(budget, STRANGER, "a", 10)
    with pytest.raises(TimeoutError):
        asyncio.run(budget.pay(Asker(STRANGER, "b"), 5, 0.01))
    assert budget.debt_s(Asker(STRANGER, "b")) == 0.0
    clock.s += 1.0
    assert may_use(budget, STRANGER, "b", 10)


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("/ip4/203.0.113.5/tcp/31337", "203.0.113.0/24"),
        ("/ip4/203.0.113.250/tcp/1/p2p/12D3KooW", "203.0.113.0/24"),
        ("/ip4/203.0.114.5/udp/31337/quic", "203.0.114.0/24"),
        ("/ip6/2001:db8:aa:bb::1/tcp/31337", "2001:db8:aa::/48"),
        ("/ip6/2001:db8:aa:ffff::2/tcp/31337", "2001:db8:aa::/48"),
        ("/ip6/2001:db8:ab::2/tcp/31337", "2001:db8:ab::/48"),
        ("/ip6/::ffff:203.0.113.9/tcp/1", "203.0.113.0/24"),
        ("/dns4/example.org/tcp/1", NOWHERE),
        ("/ip4", NOWHERE),
        ("", NOWHERE),
    ],
)
def test_a_stranger_counts_by_the_prefix_of_its_address(address, origin):
    assert origin_of(address) == origin


@pytest.mark.parametrize(
    ("bounds", "standing", "each", "together"),
    [
        (STREAMS, CONTRIBUTOR, 16, 256),
        (STREAMS, ADMITTED, 16, 256),
        (STREAMS, STRANGER, 16, 64),
        (UPLOADS, CONTRIBUTOR, 4, 16),
        (UPLOADS, ADMITTED, 4, 16),
        (UPLOADS, STRANGER, 4, 6),
    ],
)
def test_so_many_places_are_for_one_asker_and_for_all(bounds, standing, each, together):
    one, many = Places(bounds, monotonic=HandClock()), Places(bounds, monotonic=HandClock())
    found = [one.take(Asker(standing, "a"), lambda: None) is not None for _ in range(each + 1)]
    assert found == [True] * each + [False]
    taken = [many.take(Asker(standing, f"p{number}"), lambda: None) for number in range(together + 1)]
    assert [place is not None for place in taken] == [True] * together + [False]


def test_a_request_costs_half_a_kilobyte_beside_its_bytes():
    assert REQUEST_COST_BYTES == 512


def shown(rate):
    def size(count):
        unit, name = next((u, n) for u, n in ((1024**3, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if count >= u)
        return f"{count / unit:g} {name}"

    return "" if rate is None else f"{size(rate.burst)}, {size(rate.per_s)}/s"


@pytest.mark.parametrize("limits", [ASKED, SENT, DHT_SMALL, DHT_LARGE, STREAMS, UPLOADS])
def test_the_page_has_the_same_numbers(limits):
    show = shown if limits not in (STREAMS, UPLOADS) else lambda count: "" if count is None else str(count)
    each, together = limits.each, limits.together
    row = (each[STRANGER], together[STRANGER], each[ADMITTED], together.get(ADMITTED), each[CONTRIBUTOR])
    cells = " | ".join(map(show, row)).replace("|  |", "| |")
    assert f"| {cells} |" in (ROOT / "docs/threat-model.md").read_text(encoding="utf-8")


def test_one_prefix_that_takes_all_it_may_leaves_long_answers_to_others():
    """Such an answer is given only where there is enough: readers of a large swarm were kept out for nothing."""
    clock = HandClock()
    budget = Budget(DHT_LARGE, clock)
    answered = 0
    for _ in range(20):
        clock.s += 4.0
        while may_use(budget, STRANGER, "flood", 56 * KIB):
            pass
        answered += may_use(budget, STRANGER, "reader", 300 * KIB)
    assert answered >= 10
