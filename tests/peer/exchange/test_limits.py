"""Places and bytes: what one peer, and all strangers together, can take of this one."""

import asyncio
import itertools

import pytest

from dipaco.base.byte_buckets import REMEMBERED_PEERS, ByteBuckets
from dipaco.peer.exchange.streams.limits import Bounds, Slots, Standing
from dipaco.peer.owner.uplink import Uplink

BOUNDS = Bounds(
    max_total=8, max_per_peer=6, max_strangers=4, max_per_stranger=2, grace_s=10.0, wanted_rate_bytes_s=1000.0
)


class Time:
    """A clock that a test sets."""

    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s


class Places:
    """Slots, and whose were taken away."""

    def __init__(self, bounds=BOUNDS):
        self.time, self.stopped = Time(), list[str]()
        self.slots = Slots(bounds, self.time)

    def take(self, peer, *, is_stranger=False, is_contributor=False):
        standing = Standing.CONTRIBUTOR if is_contributor else Standing.ADMITTED
        standing = Standing.STRANGER if is_stranger else standing
        return self.slots.take(peer, standing, lambda: self.stopped.append(peer))


def test_one_peer_and_strangers_have_so_many_places():
    places = Places()
    assert all(places.take("a") for _ in range(6))
    assert places.take("a") is None
    other = Places()
    assert all(other.take("s", is_stranger=True) for _ in range(2))
    assert other.take("s", is_stranger=True) is None
    assert all(other.take("t", is_stranger=True) for _ in range(2))
    # Somebody who has none gets one of theirs, and the third no more than that.
    assert other.take("u", is_stranger=True) is not None
    assert len(other.stopped) == 1
    # Room for peers that are in.
    assert all(other.take("a") for _ in range(4))


def test_when_all_are_taken_who_has_many_gives_to_who_has_few():
    places = Places()
    for name in "aaaaaabb":
        assert places.take(name)
    assert [places.take(name) is not None for name in "cdef"] == [True] * 4
    assert places.stopped == ["a"] * 4
    # Now each has one or two: nobody has two more than a newcomer but those.
    assert places.take("g") is not None
    assert len(places.stopped) == 5


def test_who_takes_bytes_too_slowly_gives_its_place_and_who_waited_for_us_does_not():
    places = Places(Bounds(2, 1, 1, 1, grace_s=10.0, wanted_rate_bytes_s=1000.0))
    fast, slow = places.take("fast"), places.take("slow")
    assert fast is not None
    assert slow is not None
    places.time.s += 60.0
    fast.moved(100_000)
    assert places.take("new") is not None
    assert places.stopped == ["slow"]
    held_up = Places(Bounds(1, 1, 1, 1, grace_s=10.0, wanted_rate_bytes_s=1000.0))
    slot = held_up.take("a")
    assert slot is not None
    held_up.time.s += 60.0
    slot.excuse(55.0)
    assert held_up.take("b") is None


def test_who_contributed_has_room_before_those_that_an_open_run_lets_in():
    places = Places()
    for number in range(8):
        assert places.take(f"identity {number}")
    assert places.take("new") is None
    assert all(places.take(f"good {number}", is_contributor=True) for number in range(6))
    assert len(places.stopped) == 6
    # A quarter is for the others, who may become contributors.
    assert places.take("good 7", is_contributor=True) is None


def test_a_place_that_was_taken_away_is_given_back_without_harm():
    places = Places()
    slots = [places.take("a") for _ in range(6)] + [places.take("b") for _ in range(2)]
    assert places.take("c")
    for slot in slots:
        assert slot is not None
        places.slots.give_back(slot)
    assert all(places.take("d") for _ in range(6))
    assert places.stopped == ["a"]


def test_a_bucket_gives_a_burst_and_then_its_rate():
    clock = Time()
    buckets = ByteBuckets(1000.0, 100.0, clock)
    assert buckets.take("a", 1000) == 0.0
    assert buckets.take("a", 100) == pytest.approx(1.0)
    assert buckets.take("b", 1000) == 0.0
    clock.s += 11.0
    assert buckets.take("a", 1000) == 0.0
    for number in range(2 * REMEMBERED_PEERS):
        buckets.take(f"p{number}", 10)
    assert len(buckets._empty_at) == REMEMBERED_PEERS


def test_who_asks_for_too_much_waits_no_longer_than_the_limit():
    buckets = ByteBuckets(1000.0, 100.0)

    async def pay():
        await buckets.pay("a", 1000, 1.0)
        await buckets.pay("a", 5, 1.0)
        with pytest.raises(TimeoutError, match="too much"):
            await buckets.pay("a", 1000, 1.0)

    asyncio.run(asyncio.wait_for(pay(), 20.0))


def test_the_line_of_the_owner_is_shared_in_pieces():
    clock = Time()
    uplink, free = Uplink(8.0, clock), Uplink(None)
    assert (uplink.piece_bytes(10**9), free.piece_bytes(10**9)) == (250_000, 10**9)
    assert Uplink(0.01).piece_bytes(10**9) == 4096

    async def send():
        return [await uplink.send(1000) for _ in itertools.repeat(None, 3)]

    assert asyncio.run(send()) == pytest.approx([0.001, 0.002, 0.003])
    assert uplink.sent_bytes == 3000


def test_what_strangers_are_sent_holds_up_nobody_else():
    """They could have so much sent that what a peer tells comes too late: by 64 seconds here."""
    uplink = Uplink(8.0)

    async def serve(order, rank):
        while True:
            await uplink.send(250_000, rank)
            order.append(rank)

    async def live():
        order = []
        strangers = [asyncio.ensure_future(serve(order, 2)) for _ in range(256)]
        await asyncio.sleep(0.1)
        told_s = await uplink.send(2000, 0)
        served = asyncio.ensure_future(serve(order, 1))
        # Who stops waiting holds up nobody either.
        for one in strangers[::2]:
            one.cancel()
        await asyncio.sleep(1.5)
        for one in (*strangers, served):
            one.cancel()
        await asyncio.gather(*strangers, served, return_exceptions=True)
        again_s = await asyncio.wait_for(uplink.send(2000, 2), 5.0)
        assert again_s < 1.0
        return told_s, order

    told_s, order = asyncio.run(live())
    assert told_s < 5.0
    # Of two the one that has just been served waits for the other.
    assert order.count(1) >= 2
    assert order.count(2) <= order.count(1) + 2
