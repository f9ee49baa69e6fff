"""No request to the DHT process is lost, and nobody waits for one that will not be answered."""

import asyncio
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
from hivemind import DHT
from hivemind.utils.mpfuture import MPFuture, SharedBytes

from dipaco.base.errors import NetworkError
from dipaco.dht import bounded_protocol, guarded_dht
from dipaco.dht.dht_node import visible_addresses
from dipaco.dht.guarded_dht import GuardedDHT, own_future_locks, receive_request
from dipaco.peer.exchange.streams.loop_thread import LoopThread
from support.wire.dht_pair import LOOPBACK, wait_until

pytestmark = pytest.mark.p2pd

# A call that waits longer than this noticed nothing. The calls' own limits are longer.
NOTICED_S = 60.0
LONG_S = 120.0


def start_dht(*initial_peers):
    return GuardedDHT(
        initial_peers,
        start=True,
        host_maddrs=[LOOPBACK],
        startup_timeout=60,
        use_relay=False,
        auto_nat=False,
        nat_port_map=False,
    )


@pytest.fixture(scope="module")
def shared_dht():
    dht = start_dht()
    yield dht
    dht.shutdown()


@pytest.fixture
def fresh_futures_again():
    """What the test before killed may have held the lock with which all processes answer."""
    MPFuture.reset_backend()


@pytest.fixture
def mortal_dht(fresh_futures_again, caplog):
    caplog.set_level(logging.CRITICAL)
    dht = start_dht()
    yield dht
    dht.shutdown()


# -- what runs in the DHT process


class Bell:
    """Something that a task waits for, and that refers to the task."""

    def __init__(self):
        self.rung = asyncio.get_running_loop().create_future()


BELLS = weakref.WeakSet()
BEGUN = []


async def wait_for_bell(_dht, _node):
    bell = Bell()
    BELLS.add(bell)
    return await bell.rung


async def collect_and_ring(_dht, _node):
    gc.collect()
    bells = list(BELLS)
    for bell in bells:
        bell.rung.set_result("rung")
    return len(bells)


async def answer_never(_node):
    BEGUN.append("never")
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def answer_the_second(_node, name):
    BEGUN.append(name)
    if BEGUN.count(name) < 2:
        await asyncio.get_running_loop().create_future()
    return BEGUN.count(name)


async def begin(_node, name):
    BEGUN.append(name)


async def count_begun(_node, name):
    return BEGUN.count(name)


async def id_of_p2pd(node):
    return node.p2p._child.pid


async def fail(_node, words):
    raise RuntimeError(words)


def raise_end_of_file():
    raise EOFError


class Unreadable:
    """Can be sent, and not read."""

    def __reduce__(self):
        return raise_end_of_file, ()


# -- requests and answers


def test_a_request_is_held_until_it_ends(shared_dht):
    waiting = shared_dht.run_coroutine(wait_for_bell, return_future=True)
    assert shared_dht.run_coroutine(collect_and_ring) == 1
    assert waiting.result(NOTICED_S) == "rung"


def test_a_request_that_waits_for_p2pd_is_held(shared_dht):
    p2pd = shared_dht.call(id_of_p2pd)
    os.kill(p2pd, signal.SIGSTOP)
    try:
        visible = partial(DHT._get_visible_maddrs, latest=True)
        waiting = shared_dht.run_coroutine(visible, return_future=True)
        # Two more requests: Hivemind refers to the newest.
        shared_dht.run_coroutine(collect_and_ring)
        shared_dht.run_coroutine(collect_and_ring)
    finally:
        os.kill(p2pd, signal.SIGCONT)
    assert waiting.result(NOTICED_S)


def test_a_request_that_cannot_be_read_is_dropped(shared_dht, caplog):
    shared_dht._outer_pipe.send(("_get", [], {"key": Unreadable()}))
    assert shared_dht.call(count_begun, "nothing") == 0


def test_a_call_that_is_never_answered_ends_in_a_network_error(shared_dht):
    with pytest.raises(NetworkError, match="the DHT did not answer for 1 s"):
        shared_dht.call(answer_never, limit_s=1.0)
    assert shared_dht.failure is None


def test_a_lost_answer_is_asked_for_again(shared_dht, monkeypatch):
    monkeypatch.setattr(guarded_dht, "ASK_AGAIN_AFTER_S", 0.2)
    assert shared_dht.call(answer_the_second, "again", limit_s=LONG_S) == 2


def test_who_was_suspended_while_it_waited_waits_on(shared_dht, monkeypatch):
    # At every look more has passed than the call's limit; what is asked again is answered.
    clock = SimpleNamespace(monotonic=partial(next, itertools.count(0.0, 1000.0)))
    monkeypatch.setattr(guarded_dht, "time", clock)
    assert shared_dht.call(answer_the_second, "suspended") == 2


def test_a_late_answer_to_the_first_asking_counts(shared_dht, monkeypatch):
    monkeypatch.setattr(guarded_dht, "ASK_AGAIN_AFTER_S", 0.2)
    asked = []

    def ask(return_future):
        assert return_future
        asked.append(MPFuture())
        if len(asked) == 2:
            asked[0].set_result(1)
        return asked[-1]

    assert shared_dht._answer(ask, False, LONG_S) == 1


def test_what_fails_there_is_a_network_error_here(shared_dht):
    with pytest.raises(NetworkError, match="the DHT could not answer: no luck"):
        shared_dht.call(fail, "no luck")


def test_hivemind_asks_through_the_same_door(shared_dht):
    assert shared_dht.peer_id == shared_dht.call(_peer_id)
    assert shared_dht.client_mode is False
    addresses = visible_addresses(shared_dht)
    assert [str(address) for address in shared_dht.get_visible_maddrs()] == list(addresses)
    replica = asyncio.run(_replicate(shared_dht))
    assert replica == shared_dht.peer_id


async def _peer_id(node):
    return node.peer_id


async def _replicate(dht):
    replica = await dht.replicate_p2p()
    await replica.shutdown()
    return replica.peer_id


# -- ends and hangs while somebody waits


def error_of_waiting(dht, do):
    """Return what a call raises when `do` happens while it waits for its answer."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(dht.call, answer_never, limit_s=LONG_S)
        wait_until(lambda: dht.call(count_begun, "never"))
        do()
        error = waiting.exception(NOTICED_S)
    assert isinstance(error, NetworkError)
    return error


def test_who_waits_notices_that_the_dht_process_was_killed(mortal_dht):
    assert mortal_dht.pid is not None
    pid = mortal_dht.pid
    error = error_of_waiting(mortal_dht, lambda: os.kill(pid, signal.SIGKILL))
    assert str(error) == "the DHT process has ended; start again"
    assert mortal_dht.failure == "the DHT process has ended"
    with pytest.raises(NetworkError, match="the DHT process has ended"):
        visible_addresses(mortal_dht)


def test_who_waits_notices_that_p2pd_was_killed(mortal_dht):
    p2pd = mortal_dht.call(id_of_p2pd)
    error = error_of_waiting(mortal_dht, lambda: os.kill(p2pd, signal.SIGKILL))
    assert str(error) == "the DHT process has ended because p2pd did; start again"
    assert mortal_dht.failure == "the DHT process has ended because p2pd did"


def test_who_waits_notices_that_the_dht_process_hangs(mortal_dht, monkeypatch):
    assert mortal_dht.pid is not None
    pid = mortal_dht.pid

    def stop():
        os.kill(pid, signal.SIGSTOP)
        # From here on no beat comes, however slow the machine is.
        monkeypatch.setattr(guarded_dht, "SILENT_LOOKS", 3)

    error = error_of_waiting(mortal_dht, stop)
    assert "the DHT process hung for" in str(error)
    assert mortal_dht.failure is not None
    wait_until(lambda: not mortal_dht.is_alive())


def test_who_waits_notices_that_p2pd_hangs(fresh_futures_again, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    ping = GuardedDHT._ping_p2pd

    async def ping_when_it_hangs(dht):
        # A p2pd that is only starved is not taken for one that hangs.
        while "to hang" not in BEGUN:
            await asyncio.sleep(0.01)
        await ping(dht)

    monkeypatch.setattr(GuardedDHT, "_ping_p2pd", ping_when_it_hangs)
    monkeypatch.setattr(guarded_dht, "PING_S", 0.2)
    monkeypatch.setattr(guarded_dht, "PING_LIMIT_S", 1.0)
    dht = start_dht()
    p2pd = dht.call(id_of_p2pd)

    def stop():
        os.kill(p2pd, signal.SIGSTOP)
        dht.call(begin, "to hang")

    error = error_of_waiting(dht, stop)
    assert "because p2pd did not answer" in str(error)
    dht.shutdown()


def test_a_dht_process_that_ends_while_it_starts_is_noticed(fresh_futures_again, monkeypatch):
    async def hang(_self):
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(GuardedDHT, "_serve", hang)
    dht = GuardedDHT(start=False)
    dht.run_in_background(await_ready=False)
    dht.kill()
    with pytest.raises(NetworkError, match="ended while it started"):
        dht.wait_until_ready(LONG_S)


def test_who_joins_waits_for_a_peer_that_is_slow_to_answer(mortal_dht, monkeypatch):
    assert mortal_dht.pid is not None
    pid, addresses = mortal_dht.pid, [str(a) for a in mortal_dht.get_visible_maddrs()]
    monkeypatch.setattr(guarded_dht, "SILENT_LOOKS", 1000)
    os.kill(pid, signal.SIGSTOP)
    awake = threading.Timer(guarded_dht.ANSWER_LIMIT_S + 4.0, os.kill, (pid, signal.SIGCONT))
    awake.start()
    dht = start_dht(*addresses)
    awake.join()
    assert dht.is_alive()
    dht.shutdown()


def test_one_wrong_clock_among_the_addresses_given_ends_nobody(shared_dht, monkeypatch):
    with monkeypatch.context() as patched:
        # It is copied into the new node's process.
        patched.setattr(bounded_protocol, "get_dht_time", lambda: time.time() + 3600.0)
        wrong = start_dht()
    [alone], [right] = ([str(d.get_visible_maddrs()[0])] for d in (wrong, shared_dht))
    dht = start_dht(alone, right)
    assert dht.is_alive()
    dht.shutdown()
    with pytest.raises(Exception, match="local time must be within"):
        start_dht(alone)
    wrong.shutdown()


def test_a_hung_dht_process_is_shut_down_in_bounded_time(mortal_dht):
    assert mortal_dht.pid is not None
    os.kill(mortal_dht.pid, signal.SIGSTOP)
    mortal_dht.shutdown()
    assert not mortal_dht.is_alive()


# -- the parts


def test_writing_into_a_pipe_that_nobody_reads_is_bounded():
    reader, writer = multiprocessing.Pipe(duplex=False)
    requests = guarded_dht._RequestWriter(writer)
    with pytest.raises(guarded_dht._PipeStuck):
        requests.send(bytes(2**20), limit_s=0.2)
    reader.close()


def test_long_requests_of_many_threads_arrive_whole():
    receiving, sending = multiprocessing.Pipe(duplex=False)
    writer = guarded_dht._RequestWriter(sending)
    requests = [bytes([number]) * (40_000 + number) for number in range(16)]
    with ThreadPoolExecutor(8) as threads:
        sent = [threads.submit(writer.send, request) for request in requests]
        received = [ForkingPickler.loads(receive_request(receiving.fileno())) for _ in requests]
        for future in sent:
            future.result(NOTICED_S)
    assert sorted(received) == sorted(requests)


def _die_with_the_lock(locked):
    own_future_locks()
    SharedBytes._lock.acquire()
    locked.set()
    threading.Event().wait(LONG_S)


def test_a_process_killed_while_it_makes_a_future_stops_nobody():
    fork = multiprocessing.get_context("fork")
    locked = fork.Event()
    child = fork.Process(target=_die_with_the_lock, args=(locked,), daemon=True)
    child.start()
    assert locked.wait(NOTICED_S)
    child.kill()
    child.join(NOTICED_S)
    maker = threading.Thread(target=MPFuture, daemon=True)
    maker.start()
    maker.join(NOTICED_S)
    assert not maker.is_alive()


def test_a_call_of_a_loop_thread_ends_with_what_the_loop_stands_on():
    gone = threading.Event()

    def check():
        if gone.is_set():
            raise NetworkError("p2pd is gone")

    async def wait_for_ever():
        gone.set()
        await asyncio.get_running_loop().create_future()

    thread = LoopThread("test", check)
    thread.start()
    started = time.monotonic()
    with pytest.raises(NetworkError, match="p2pd is gone"):
        thread.call(wait_for_ever(), LONG_S)
    assert time.monotonic() - started < LONG_S / 2
    thread.stop()
