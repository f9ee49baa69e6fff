"""Which source may send next: none has all slots, and one that dripped comes last."""

import asyncio

from dipaco.peer.exchange.files.download_slots import REMEMBERED_SOURCES, DownloadSlots


class Queue:
    """Slots, and in which order sources got theirs."""

    def __init__(self, max_total, max_per_source):
        self.slots = DownloadSlots(max_total, max_per_source)
        self.served = []
        self.tasks = {}

    async def ask(self, *names):
        """Ask for a slot for sources; a name may end with a number of its own."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._one(name))
        await self.settle()

    async def _one(self, name):
        await self.slots.acquire(name.partition(" ")[0])
        self.served.append(name)

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)

    async def give_back(self, source):
        self.slots.release(source)
        await self.settle()


def on_a_loop(test):
    def run():
        asyncio.run(asyncio.wait_for(test(), 60.0))

    run.__name__ = test.__name__
    return run


@on_a_loop
async def test_one_source_has_no_more_than_its_share():
    queue = Queue(8, 2)
    await queue.ask("a 1", "a 2", "a 3", "b 1")
    assert queue.served == ["a 1", "a 2", "b 1"]
    assert not queue.slots.has_room("a")
    assert queue.slots.is_wanted("a")
    assert not queue.slots.is_wanted("b"), "a slot of b's would not help a"
    await queue.give_back("a")
    assert queue.served[-1] == "a 3"


@on_a_loop
async def test_sources_that_never_delivered_leave_room_for_those_that_did():
    queue = Queue(8, 2)
    queue.slots.delivered("honest")
    await queue.ask(*(f"s{number}" for number in range(8)))
    assert len(queue.served) == 6
    await queue.ask("honest")
    assert queue.served[-1] == "honest"


@on_a_loop
async def test_who_was_slow_comes_last_and_who_delivered_first():
    queue = Queue(1, 1)
    for name in ("slow", "slow", "slower", "slower", "slower"):
        queue.slots.was_slow(name)
    queue.slots.delivered("good")
    await queue.ask("first", "slower", "slow", "new", "good")
    for name in ("first", "good", "new", "slow"):
        assert queue.served[-1] == name
        await queue.give_back(name)
    assert queue.served[-1] == "slower"
    queue.slots.delivered("slower")
    assert len(queue.slots._known) == 3


@on_a_loop
async def test_who_gives_up_waiting_holds_nothing():
    queue = Queue(1, 1)
    await queue.ask("a", "b", "c")
    queue.tasks["b"].cancel()
    await queue.give_back("a")
    assert queue.served == ["a", "c"]
    # Also where the slot and the end of patience come together.
    waiting = asyncio.create_task(queue.slots.acquire("d"))
    await queue.settle()
    queue.slots.release("c")
    waiting.cancel()
    await queue.settle()
    assert queue.slots.has_room("e")


def test_what_is_remembered_is_bounded():
    slots = DownloadSlots(1, 1)
    for number in range(2 * REMEMBERED_SOURCES):
        slots.was_slow(f"s{number}")
    assert len(slots._known) == REMEMBERED_SOURCES
