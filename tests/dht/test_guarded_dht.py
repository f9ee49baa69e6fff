"""No request to the DHT process is lost, nobody waits for one that will not be answered, and a process that
ends or hangs is started again."""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from dipaco.base.errors import NetworkError
from dipaco.dht import bounded_protocol, channel, dht_process, guarded_dht, process_keeper
from dipaco.dht.addresses import with_ports_of
from dipaco.dht.channel import Channel, framed, read_message
from dipaco.dht.dht_node import visible_addresses
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.peer.exchange.streams.loop_thread import LoopThread
from dipaco.protocol.identity import load_or_create_identity
from support.waiting import wait_until
from support.wire.dht_pair import LOOPBACK

pytestmark = pytest.mark.p2pd

# A call that waits longer than this noticed nothing. The calls' own limits are longer.
NOTICED_S = 60.0
LONG_S = 120.0


def start_dht(*initial_peers, **options):
    dht = GuardedDHT(
        initial_peers,
        host_maddrs=[LOOPBACK],
        startup_timeout=60,
        use_relay=False,
        auto_nat=False,
        nat_port_map=False,
        **options,
    )
    dht.start()
    return dht


@pytest.fixture(scope="module")
def shared_dht():
    dht = start_dht()
    yield dht
    dht.shutdown()


@pytest.fixture
def mortal_dht(caplog, monkeypatch, tmp_path):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(dht_process, "PING_S", 0.2)
    monkeypatch.setattr(dht_process, "PING_LIMIT_S", 5.0)
    identity = load_or_create_identity(tmp_path / "identity.key")
    dht = start_dht(identity_path=str(identity.path), check_if_identity_free=False)
    yield dht
    dht.shutdown()
    identity.release()


# -- what runs in the DHT process


class Bell:
    """Something that a task waits for, and that refers to the task."""

    def __init__(self):
        self.rung = asyncio.get_running_loop().create_future()


BELLS = weakref.WeakSet()
BEGUN = []


async def wait_for_bell(_node):
    bell = Bell()
    BELLS.add(bell)
    return await bell.rung


async def collect_and_ring(_node):
    gc.collect()
    bells = list(BELLS)
    for bell in bells:
        bell.rung.set_result("rung")
    return len(bells)


async def answer_never(_node):
    BEGUN.append("never")
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def begin(_node, name):
    BEGUN.append(name)


async def count_begun(_node, name):
    return BEGUN.count(name)


async def id_of_p2pd(node):
    return node.p2p._child.pid


async def fail(_node, words):
    raise RuntimeError(words)


async def return_something_unheard_of(_node):
    return lambda: None


def raise_end_of_file():
    raise EOFError


class Unreadable:
    """Can be sent, and not read."""

    def __reduce__(self):
        return raise_end_of_file, ()


# -- requests and answers


def test_a_request_is_held_until_it_ends(shared_dht):
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(shared_dht.call, wait_for_bell, limit_s=LONG_S)
        wait_until(lambda: shared_dht.call(collect_and_ring) == 1)
        assert waiting.result(NOTICED_S) == "rung"


def test_a_request_that_waits_for_p2pd_is_held(shared_dht):
    p2pd = shared_dht.call(id_of_p2pd)
    with ThreadPoolExecutor(1) as threads:
        os.kill(p2pd, signal.SIGSTOP)
        try:
            waiting = threads.submit(shared_dht.get_visible_maddrs)
            shared_dht.call(collect_and_ring)
            shared_dht.call(collect_and_ring)
        finally:
            os.kill(p2pd, signal.SIGCONT)
        assert waiting.result(NOTICED_S)


def test_a_request_that_cannot_be_read_is_dropped(shared_dht):
    with pytest.raises(NetworkError, match="did not answer for 1 s"):
        shared_dht.call(begin, Unreadable(), limit_s=1.0)
    assert shared_dht.call(count_begun, "nothing") == 0


def test_an_answer_that_cannot_be_sent_is_an_error(shared_dht):
    with pytest.raises(NetworkError, match="the DHT could not answer: Can't pickle"):
        shared_dht.call(return_something_unheard_of)


def test_a_call_that_is_never_answered_ends_in_a_network_error(shared_dht):
    with pytest.raises(NetworkError, match="the DHT did not answer for 1 s"):
        shared_dht.call(answer_never, limit_s=1.0)
    assert shared_dht.failure is None


def test_what_fails_there_is_a_network_error_here(shared_dht):
    with pytest.raises(NetworkError, match="the DHT could not answer: no luck"):
        shared_dht.call(fail, "no luck")


def test_a_loop_connects_to_p2pd_itself(shared_dht):
    async def replicate():
        replica = await shared_dht.replicate_p2p()
        await replica.shutdown()
        return replica.peer_id

    assert asyncio.run(replicate()) == shared_dht.peer_id


# -- it ends or hangs, and is started again


def error_of_waiting(dht, do):
    """Return what a call says when `do` happens while it waits for its answer."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(dht.call, answer_never, limit_s=LONG_S)
        wait_until(lambda: dht.call(count_begun, "never"))
        do()
        error = waiting.exception(NOTICED_S)
    assert isinstance(error, NetworkError)
    return str(error)


def kill_it(dht):
    os.kill(dht.pid, signal.SIGKILL)


def kill_p2pd(dht):
    os.kill(dht.call(id_of_p2pd), signal.SIGKILL)


def stop_it(dht):
    os.kill(dht.pid, signal.SIGSTOP)


def stop_p2pd(dht):
    os.kill(dht.call(id_of_p2pd), signal.SIGSTOP)


ACCIDENTS = {
    kill_it: "the DHT process has ended; it is being started again",
    kill_p2pd: "the DHT process has ended because p2pd did; it is being started again",
    stop_it: "the DHT process hung for 5 s; it is being started again",
    stop_p2pd: "the DHT process has ended because p2pd did not answer; it is being started again",
}


@pytest.mark.parametrize("happen", ACCIDENTS)
def test_whatever_ends_or_hangs_is_started_again_and_who_waits_hears_of_it(mortal_dht, monkeypatch, happen):
    dht = mortal_dht
    monkeypatch.setattr(guarded_dht, "SILENT_LOOKS", 10)
    peer_id, addresses, pid = dht.peer_id, visible_addresses(dht), dht.pid
    assert error_of_waiting(dht, lambda: happen(dht)) == ACCIDENTS[happen]
    wait_until(lambda: dht.starts > 1)
    # The same peer at the same place.
    assert dht.peer_id == peer_id
    assert visible_addresses(dht) == addresses
    assert dht.failure is None
    assert dht.pid != pid
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_its_keeper_may_be_killed_too(mortal_dht):
    os.kill(mortal_dht._keeper._pid, signal.SIGKILL)
    wait_until(lambda: mortal_dht.starts == 2)
    assert mortal_dht.call(count_begun, "nothing") == 0


def test_a_new_process_is_told_what_the_last_one_was(mortal_dht):
    mortal_dht.keep("first", begin, "early")
    mortal_dht.keep("first", begin, "late")
    heard = []
    mortal_dht.on_restart(lambda: heard.append(mortal_dht.call(count_begun, "late")))
    mortal_dht.on_restart(forgotten := lambda: heard.append("forgotten"))
    mortal_dht.forget(forgotten)
    kill_it(mortal_dht)
    wait_until(lambda: heard)
    assert heard == [1]
    assert mortal_dht.call(count_begun, "early") == 0


def test_what_is_to_be_kept_is_kept_while_there_is_no_process(mortal_dht, monkeypatch):
    monkeypatch.setattr(GuardedDHT, "_begin_again", lambda self, why, real=GuardedDHT._begin_again: (
        told.wait(LONG_S), real(self, why))[1])  # fmt: skip
    told = threading.Event()
    kill_it(mortal_dht)
    wait_until(lambda: mortal_dht._channel.end)
    with pytest.raises(NetworkError, match="it is being started again"):
        mortal_dht.keep("first", begin, "meanwhile")
    told.set()
    wait_until(lambda: mortal_dht.starts == 2)
    # What is kept is told once the process has started.
    wait_until(lambda: mortal_dht.call(count_begun, "meanwhile") == 1)


def test_one_that_stands_on_it_and_fails_has_it_started_once_more(mortal_dht, monkeypatch):
    monkeypatch.setattr(guarded_dht, "RESTART_WAIT_S", 0.0)
    failures = [NetworkError("not yet"), ValueError("nor now")]

    def stand():
        if failures:
            raise failures.pop()

    mortal_dht.on_restart(stand)
    kill_it(mortal_dht)
    wait_until(lambda: mortal_dht.starts == 4)
    assert failures == []


def test_only_when_none_starts_for_an_hour_is_there_a_failure(mortal_dht, monkeypatch):
    assert guarded_dht.RESTART_LIMIT_S == 3600.0
    for name, value in (("RESTART_LIMIT_S", 0.5), ("RESTART_WAIT_S", 0.0), ("LONGEST_RESTART_WAIT_S", 0.0)):
        monkeypatch.setattr(guarded_dht, name, value)
    begun = []

    def cannot(self, limit_s):
        begun.append(limit_s)
        time.sleep(0.01)
        raise NetworkError("no memory")

    monkeypatch.setattr(GuardedDHT, "_begin", cannot)
    kill_it(mortal_dht)
    wait_until(lambda: mortal_dht.failure)
    assert len(begun) >= guarded_dht.LEAST_ATTEMPTS
    assert mortal_dht.failure == "the DHT process has ended, and none could be started for an hour: no memory"
    with pytest.raises(NetworkError, match="no memory; start again"):
        mortal_dht.check()


def test_a_machine_that_slept_for_hours_has_not_tried(mortal_dht, monkeypatch):
    monkeypatch.setattr(guarded_dht, "RESTART_LIMIT_S", -1.0)
    monkeypatch.setattr(guarded_dht, "RESTART_WAIT_S", 0.0)
    failures = [NetworkError("not yet")] * (guarded_dht.LEAST_ATTEMPTS - 1)

    def stand():
        if failures:
            raise failures.pop()

    mortal_dht.on_restart(stand)
    kill_it(mortal_dht)
    wait_until(lambda: not failures and mortal_dht.starts > guarded_dht.LEAST_ATTEMPTS)
    assert mortal_dht.failure is None


def test_who_joins_waits_for_a_peer_that_is_slow_to_answer(mortal_dht, monkeypatch):
    pid, addresses = mortal_dht.pid, [str(a) for a in mortal_dht.get_visible_maddrs()]
    monkeypatch.setattr(guarded_dht, "SILENT_LOOKS", 1000)
    os.kill(pid, signal.SIGSTOP)
    awake = threading.Timer(dht_process.ANSWER_LIMIT_S + 4.0, os.kill, (pid, signal.SIGCONT))
    awake.start()
    dht = start_dht(*addresses)
    awake.join()
    dht.check()
    dht.shutdown()


def test_one_wrong_clock_among_the_addresses_given_ends_nobody(shared_dht, monkeypatch):
    with monkeypatch.context() as patched:
        # It is copied into the new node's process.
        patched.setattr(bounded_protocol, "get_dht_time", lambda: time.time() + 3600.0)
        wrong = start_dht()
    [alone], [right] = ([str(d.get_visible_maddrs()[0])] for d in (wrong, shared_dht))
    dht = start_dht(alone, right)
    dht.check()
    dht.shutdown()
    with pytest.raises(RuntimeError, match="local time must be within"):
        start_dht(alone)
    wrong.shutdown()


def test_a_hung_dht_process_is_shut_down_in_bounded_time(mortal_dht):
    pid = mortal_dht.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    mortal_dht.shutdown()
    assert time.monotonic() - started < 3 * guarded_dht.SHUTDOWN_LIMIT_S
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    with pytest.raises(NetworkError, match=r"the DHT process was ended$"):
        mortal_dht.check()


# -- the parts


def test_writing_to_a_process_that_reads_nothing_is_bounded(monkeypatch):
    monkeypatch.setattr(channel, "WRITE_LIMIT_S", 0.2)
    ours, theirs = socket.socketpair()
    asking = Channel(ours)
    asked = asking.ask(begin, (bytes(2**22),))
    with pytest.raises(NetworkError, match="takes no requests"):
        asked.result(NOTICED_S)
    with pytest.raises(NetworkError, match="takes no requests"):
        asking.ask(begin, ()).result(NOTICED_S)
    theirs.close()


def test_long_requests_of_many_threads_arrive_whole():
    ours, theirs = socket.socketpair()
    asking = Channel(ours)
    sent = [bytes([number]) * (400_000 + number) for number in range(16)]

    async def receive():
        reader, _ = await asyncio.open_unix_connection(sock=theirs)
        return [await read_message(reader) for _ in sent]

    with ThreadPoolExecutor(8) as threads:
        for message in sent:
            threads.submit(asking.send, message)
        assert sorted(asyncio.run(receive())) == sorted(sent)
    asking.close("over")


def test_answers_come_in_any_order_and_in_pieces():
    ours, theirs = socket.socketpair()
    asking = Channel(ours)
    first, second = asking.ask(begin, ()), asking.ask(begin, ())
    answers = framed((2, True, "two")) + framed((7, True, "nobody asked")) + framed((1, False, "no"))
    for place in range(0, len(answers), 3):
        theirs.sendall(answers[place : place + 3])
    assert second.result(NOTICED_S) == "two"
    assert str(first.exception(NOTICED_S)) == "no"
    theirs.close()
    wait_until(lambda: asking.end)
    assert asking.end == "the DHT process has ended"


def test_a_keeper_ends_one_child_before_it_forks_another():
    keeper = process_keeper.ProcessKeeper(lambda connected: int(bool(connected.recv(1))))
    first, one = keeper.start()
    second, other = keeper.start()
    assert one.recv(1) == b""
    wait_until(lambda: not os.path.exists(f"/proc/{first}"))
    assert os.path.exists(f"/proc/{second}")
    keeper.close()
    assert other.recv(1) == b""
    wait_until(lambda: not os.path.exists(f"/proc/{second}"))


def test_ports_are_kept_where_it_is_plain_which():
    places = ["/ip4/127.0.0.1/tcp/5", "/ip4/10.0.0.1/tcp/5", "/ip6/::1/tcp/6"]
    listening = ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0", "/ip4/0.0.0.0/tcp/9"]
    assert with_ports_of(places, listening) == ("/ip4/0.0.0.0/tcp/5", "/ip6/::/tcp/6", "/ip4/0.0.0.0/tcp/9")
    assert with_ports_of([], listening) == tuple(listening)
    assert with_ports_of([*places, "/ip4/10.0.0.2/tcp/7"], listening[:1]) == tuple(listening[:1])


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
