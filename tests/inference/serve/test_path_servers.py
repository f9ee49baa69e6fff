"""Which paths have a server: as memory allows, each in its turn, and newer states beside old ones."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from dipaco.inference.serve.api_error import ApiError
from dipaco.inference.serve.gguf_files import Looked, PathStates
from dipaco.inference.serve.llama_server import LlamaServerError
from dipaco.inference.serve.path_servers import PathServers


class FakeServer:
    """A server that starts when it is let."""

    def __init__(self, path, version, world):
        self.path, self.version, self._world = path, version, world
        self.is_alive = True

    def wait_until_ready(self):
        assert self._world.may_start.wait(timeout=60)
        if self.path in self._world.broken:
            raise LlamaServerError("llama.cpp did not start: signal 6")

    async def is_silent(self, limit_s):
        return self.is_alive and (self.path, self.version) in self._world.silent

    def reason(self):
        return "signal 6"

    def close(self):
        self.is_alive = False
        self._world.closed.append((self.path, self.version))


class FakeFile:
    def __init__(self, path, version):
        self.path, self.version = path, version
        self.states = PathStates((f"{path}.{version}",), ())

    def remove(self):
        self.is_removed = True


class World:
    """Files of paths, and the servers that were started for them."""

    def __init__(self):
        self.may_start = threading.Event()
        self.may_start.set()
        self.version, self.missing, self.broken, self.silent = {}, set(), set(), set()
        self.started, self.closed, self.files = [], [], []

    def write(self, path):
        if path in self.missing:
            raise OSError("there is no state of its module")
        self.files.append(FakeFile(path, self.version.get(path, 0)))
        return self.files[-1]

    def look_again(self, served):
        changed = {p for p, states in served.items() if states.digests != (f"{p}.{self.version.get(p, 0)}",)}
        return Looked(frozenset(changed), ("nobody is in sight",) if self.missing else ())

    def launch(self, file):
        self.started.append((file.path, file.version))
        return FakeServer(file.path, file.version, self)

    def alive(self):
        return sorted(set(self.started) - set(self.closed))


@asynccontextmanager
async def servers_of(world, capacity=2, refresh_s=0, silent_s=60):
    servers = PathServers(world, world.launch, capacity=capacity, refresh_s=refresh_s, silent_s=silent_s)
    servers.start()
    try:
        yield servers
    finally:
        await servers.close()
        assert world.alive() == []
        assert all(file.is_removed for file in world.files)


class User:
    """Somebody who uses the server of a path until told to stop."""

    def __init__(self, servers, *paths):
        self._end, self.has_begun, self.server = asyncio.Event(), asyncio.Event(), None
        self.task = asyncio.create_task(self._use(servers, paths))

    async def _use(self, servers, paths):
        async with servers.use(paths) as self.server:
            self.has_begun.set()
            await self._end.wait()

    async def begun(self):
        await asyncio.wait_for(self.has_begun.wait(), 60)
        return self

    async def end(self):
        self._end.set()
        await asyncio.wait_for(self.task, 60)


async def eventually(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def scene(act, **options):
    """Run a scene with servers over a world."""

    async def run():
        world = World()
        async with servers_of(world, **options) as servers:
            await asyncio.wait_for(act(world, servers), 120)

    asyncio.run(run())


def test_a_path_is_started_once_for_all_who_ask():
    async def act(world, servers):
        users = [User(servers, 1) for _ in range(3)]
        for user in users:
            await user.begun()
        assert world.started == [(1, 0)]
        assert servers.served.keys() == {1}
        for user in users:
            await user.end()

    scene(act)


def test_the_least_recently_used_makes_room_once_its_answers_have_ended():
    async def act(world, servers):
        first, second = [await User(servers, path).begun() for path in (0, 1)]
        await second.end()
        await first.end()
        await (await User(servers, 2).begun()).end()
        assert world.alive() == [(0, 0), (2, 0)]
        busy = [await User(servers, path).begun() for path in (0, 2)]
        third = User(servers, 3)
        await eventually(lambda: 0 not in servers.served)
        again = User(servers, 0)
        # Its answer goes on, and who asks for it now comes after the one who waits for the room.
        assert (0, 0) not in world.closed
        await busy[0].end()
        await third.begun()
        assert world.alive() == [(2, 0), (3, 0)]
        await third.end()
        await busy[1].end()
        await (await again.begun()).end()

    scene(act)


def test_one_place_serves_all_paths_in_the_order_of_asking():
    async def act(world, servers):
        order = []

        async def use(path):
            async with servers.use([path]):
                order.append(path)

        asked = [0, 1, 0, 1, 2, 0, 1, 0, 1]
        await asyncio.gather(*map(use, asked))
        assert order == [0] * 4 + [1] * 4 + [2]
        assert world.started == [(0, 0), (1, 0), (2, 0)]

    scene(act, capacity=1)


def test_newer_states_are_taken_over_while_answers_of_older_ones_go_on():
    async def act(world, servers):
        old = await User(servers, 1).begun()
        await (await User(servers, 0).begun()).end()
        world.version[1] = 1
        await servers.look_again()
        await eventually(lambda: servers.served[1].digests == ("1.1",))
        assert world.closed == []
        new = await User(servers, 1).begun()
        assert (old.server.states.digests, new.server.states.digests) == (("1.0",), ("1.1",))
        await old.end()
        await eventually(lambda: world.closed == [(1, 0)])
        # Newer ones that do not start keep nobody from using those that are there.
        world.version[1], world.broken = 2, {1}
        await servers.look_again()
        await eventually(lambda: (1, 2) in world.closed)
        await (await User(servers, 1).begun()).end()
        await new.end()

    scene(act)


def test_it_looks_for_newer_states_by_itself():
    async def act(world, servers):
        await (await User(servers, 1).begun()).end()
        world.version[1] = 1
        await eventually(lambda: servers.served[1].digests == ("1.1",))

    scene(act, refresh_s=0.05)


def test_the_next_best_path_answers_where_one_cannot_be_had():
    async def act(world, servers):
        world.missing = {3}
        user = await User(servers, 3, 0).begun()
        assert user.server.path == 0
        await user.end()
        with pytest.raises(ApiError, match="path 3: there is no state of its module") as caught:
            await User(servers, 3).task
        assert (caught.value.status, caught.value.code) == (503, "path_unavailable")
        assert "no state" in servers.unavailable[3]
        world.missing = set()
        await servers.look_again()
        await (await User(servers, 3).begun()).end()

    scene(act)


def test_a_server_that_has_ended_is_started_anew():
    async def act(world, servers):
        user = await User(servers, 1).begun()
        user.server.server.is_alive = False
        world.version[1] = 5
        again = await User(servers, 1).begun()
        assert again.server.states.digests == ("1.5",)
        await user.end()
        await again.end()

    scene(act, capacity=2)


def test_a_server_that_hangs_is_ended_and_started_anew():
    async def act(world, servers):
        other, user = [await User(servers, path).begun() for path in (0, 1)]
        world.silent = {(1, 0)}
        world.version[1] = 1
        await eventually(lambda: world.closed)
        await user.end()
        again = await User(servers, 1).begun()
        assert again.server.states.digests == ("1.1",)
        for one in (again, other):
            await one.end()
        assert (0, 0) not in world.closed
        world.silent = {(0, 0)}
        await eventually(lambda: 0 not in servers.served)

    scene(act, silent_s=0.05)


def test_who_stops_waiting_keeps_no_server_from_ending():
    async def act(world, servers):
        world.may_start.clear()
        user = User(servers, 1)
        await eventually(lambda: world.started)
        user.task.cancel()
        world.may_start.set()
        await eventually(lambda: 1 in servers.served)
        await (await User(servers, 2).begun()).end()
        assert world.alive() == [(2, 0)]

    scene(act, capacity=1)


def test_who_stops_waiting_is_forgotten():
    async def act(world, servers):
        world.may_start.clear()
        first = User(servers, 1)
        await eventually(lambda: world.started)
        user = User(servers, 2)
        await eventually(lambda: 2 in servers._waiting)
        user.task.cancel()
        world.may_start.set()
        await (await first.begun()).end()
        await eventually(lambda: not servers._asked)
        assert servers._waiting == {}

    scene(act)


def test_it_ends_while_a_path_is_started():
    async def act(world, servers):
        world.may_start.clear()
        user = User(servers, 1)
        await eventually(lambda: world.started)
        await servers.close()
        with pytest.raises(ApiError, match="shutting down"):
            await user.task
        world.may_start.set()

    scene(act)
