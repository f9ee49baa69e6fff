"""Places are shared among clients: nobody waits behind all that another one asked for."""

import asyncio

import pytest

from dipaco.inference.serve.api_error import ApiError
from dipaco.inference.serve.fair_places import FairPlaces, client_of


class Clients:
    """Clients that ask for places, and let them go when they are told to."""

    def __init__(self, places, queue):
        self.places = FairPlaces(places, queue)
        self.served = []
        self.asked = {}
        self.ends = {}

    async def ask(self, name, weight=1):
        """Ask as the client of the first letter."""

        async def work():
            async with self.places.take(name[0], weight):
                self.served.append(name)
                await self.ends[name].wait()

        self.ends[name] = asyncio.Event()
        self.asked[name] = asyncio.create_task(work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, *names):
        """Let these go."""
        for name in names:
            self.ends[name].set()
        for _ in range(5):
            await asyncio.sleep(0)


def test_one_client_takes_all_places_but_one():
    async def scene():
        clients = Clients(3, 100)
        for number in range(50):
            await clients.ask(f"a{number}")
        assert clients.served == ["a0", "a1"]
        await clients.ask("b0")
        assert clients.served == ["a0", "a1", "b0"]
        # Who has fewest is next, however many others wait.
        await clients.ask("c0")
        await clients.end("a0")
        assert clients.served[3:] == ["c0"]
        await clients.end("b0", "c0")
        assert clients.served[4:] == ["a2"]
        await clients.end(*clients.ends)
        await asyncio.gather(*clients.asked.values())
        assert (len(clients.served), clients.places.taken, clients.places.waiting) == (52, 0, 0)

    asyncio.run(scene())


def test_a_full_queue_has_room_for_another_client():
    async def scene():
        clients = Clients(2, 4)
        for number in range(5):
            await clients.ask(f"a{number}")
        await clients.ask("a5")
        with pytest.raises(ApiError, match="--queue") as caught:
            await clients.asked["a5"]
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "overloaded", 1)
        await clients.ask("b0")
        await clients.ask("b1")
        # The last one of who has most waiting goes.
        with pytest.raises(ApiError, match="--queue"):
            await clients.asked["a4"]
        assert clients.served == ["a0", "b0"]
        assert clients.places.waiting == 4
        await clients.end(*clients.ends)
        assert clients.places.taken == 0

    asyncio.run(scene())


def test_who_needs_several_places_is_not_overtaken():
    async def scene():
        clients = Clients(4, 9)
        for name in ("a0", "b0", "c0"):
            await clients.ask(name)
        await clients.ask("d0", 2)
        await clients.ask("e0")
        assert clients.served == ["a0", "b0", "c0"]
        await clients.end("a0")
        assert clients.served[3:] == ["d0"]
        await clients.end("b0")
        assert clients.served[4:] == ["e0"]
        await clients.end(*clients.ends)

    asyncio.run(scene())


def test_who_leaves_the_queue_or_comes_up_just_then_keeps_no_place():
    async def scene():
        clients = Clients(2, 9)
        for name in ("a0", "a1", "a2"):
            await clients.ask(name)
        clients.asked["a1"].cancel()
        await clients.end()
        clients.ends["a0"].set()
        await asyncio.sleep(0)
        # It has its place now, and has not been told yet.
        clients.asked["a2"].cancel()
        await clients.end()
        assert (clients.served, clients.places.taken, clients.places.waiting) == (["a0"], 0, 0)

    asyncio.run(scene())


def test_who_somebody_is():
    assert client_of("203.0.113.5") == client_of("::ffff:203.0.113.5") == "203.0.113.5"
    assert client_of("2001:db8:1:2:3::4") == client_of("2001:db8:1:2::9") != client_of("2001:db8:1:3::9")
    assert client_of(None) == ""
