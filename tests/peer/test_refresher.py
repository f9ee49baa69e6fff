"""The refresher: what it says of this peer, whom it calls, and what it does without the DHT."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import ClockError, NetworkError
from dipaco.base.patience import since_start_s
from dipaco.peer.background import Background, BackgroundError
from dipaco.peer.exchange.contact.known_contributors import KnownContributors
from dipaco.peer.presence import refresher
from dipaco.peer.presence.own_status import Activity, PeerStatus
from dipaco.peer.presence.refresher import Refresher
from dipaco.protocol.config import GridConfig, RoundsConfig
from dipaco.protocol.coverage import scope_of
from dipaco.protocol.grid import Grid
from dipaco.protocol.view import SwarmView
from support.runs.make_plan import make_plan
from support.swarms.fake_swarm import (
    ME,
    FakeDirectory,
    FakeEvents,
    FakeExchange,
    FakeRun,
    FakeTime,
    head,
    peer_id,
    peer_record,
)
from support.waiting import wait_until

OTHER = peer_id(1)


class FakeDHT:
    """A DHT process that is started again at once."""

    def __init__(self):
        self.listeners = []
        self.on_restart = self.listeners.append

    def forget(self, listener):
        self.listeners[:] = [other for other in self.listeners if other != listener]

    def restart(self):
        for listener in self.listeners:
            listener()


class FakeNode(FakeRun):
    """What is told of a node, and what its neighbours are looked after with."""

    def __init__(self, peer):
        super().__init__(peer.plan, peer.time.clock)
        self.directory, self.blobs, self.exchange = peer.directory, peer.blobs, FakeExchange()
        self.held = SimpleNamespace(all=lambda: tuple(peer.held.values()))
        self.fetcher = SimpleNamespace(all_blobs=tuple)
        self.manifest = SimpleNamespace(envelope=b"manifest", plan=peer.plan)
        self.earlier_manifests = tuple
        self.initial_peers, self.contributors = (), KnownContributors()
        self.dht = FakeDHT()
        self.check = SimpleNamespace(is_in=lambda peer: True)


class Peer:
    """A refresher that runs on its own thread against a directory in memory."""

    def __init__(self, folder, sizes=(2, 2), *, inner_steps=0):
        # Nothing is read in these tests but what they wait for: it is due every ten minutes, or
        # every 20 s when rounds have fixed steps.
        self.plan = make_plan(
            grid=GridConfig(modules_per_level=sizes), rounds=RoundsConfig(duration_s=4000.0, inner_steps=inner_steps)
        )
        self.grid = Grid(self.plan.model, self.plan.grid)
        self.time = FakeTime()
        self.directory = FakeDirectory()
        self.events = FakeEvents()
        self.held = {"L0.E0": head("L0.E0")}
        self.blobs = BlobStore(folder / "blobs")
        self.status = PeerStatus()
        self.background = Background()
        self.node = FakeNode(self)
        self.refresher = Refresher(self.node, self.status, self.background)
        self.refresher.start()
        self.refresher.refresh()

    def claim(self, path, *, pinned=False):
        """Claim a path now."""
        self.status.claim = Activity("joining", path, self.time.clock.now(), pinned=pinned)


@pytest.fixture
def peer(tmp_path):
    peer = Peer(tmp_path)
    yield peer
    peer.refresher.stop(withdraw=False)


def test_a_half_written_claim_is_never_published(peer):
    """A record is signed at every look at the clock while claims are made and moved."""
    main, inside = threading.current_thread(), threading.Lock()

    def publish_meanwhile():
        if threading.current_thread() is main and inside.acquire(blocking=False):
            peer.refresher.refresh()
            inside.release()

    peer.time.on_look = publish_meanwhile
    for path, now_s in enumerate((1000.0, 2000.0, 3000.0)):
        peer.time.now_s = now_s
        peer.claim(path)
    peer.time.now_s = 4000.0
    peer.claim(1, pinned=True)
    peer.time.now_s = 5000.0
    peer.claim(2)
    peer.refresher.refresh()
    said = [(c.path, c.since_s, c.pinned) for c in peer.directory.claims if c is not None]
    whole = [(0, 1000.0, False), (1, 2000.0, False), (2, 3000.0, False), (1, 4000.0, True)]
    assert list(dict.fromkeys(said)) == [*whole, (2, 5000.0, False)]


def test_it_publishes_reads_and_withdraws(peer):
    peer.claim(1, pinned=True)
    peer.status.waiting_for = "L0: have 1, need 2 [of L0.E0]" + " and more" * 20
    view = peer.refresher.refresh()
    assert view.claims[ME].path == 1
    waits_for = peer.directory.peers[-1].waits_for
    assert waits_for.startswith("L0: have 1, need 2 ?of L0.E0?")
    assert len(waits_for) == 96
    assert peer.directory.holdings["L0.E0"].head == head("L0.E0")
    assert peer.directory.peers[-1].state == "joining"
    assert peer.directory.manifests == [b"manifest"]
    peer.status.claim = Activity("leaving", 1)
    peer.refresher.refresh()
    assert peer.directory.claims[-1] is None
    peer.refresher.stop(withdraw=True)
    assert peer.directory.holdings == {}


def test_who_leaves_says_goodbye_and_does_not_vanish(peer):
    """The last one left would believe itself cut off, and take no step for eight rounds."""
    peer.claim(1)
    peer.refresher.refresh()
    peer.status.claim = Activity("leaving", 1)
    peer.refresher.stop(withdraw=True)
    said = [peer.directory.peers[-1], *peer.directory.modules.values()]
    assert {(record.state, record.reachable) for record in said} == {("leaving", "outgoing")}
    assert said[0].addresses == ()
    assert {record.held for record in said[1:]} == {None}
    assert set(peer.directory.modules) == {"L0.E0", "L1.E1"}


def test_what_is_looked_at_once_is_not_in_the_view_of_others(tmp_path):
    """In a run of 128 paths, so of two buckets: even paths, and odd ones."""
    peer = Peer(tmp_path, (8, 16))
    seen = []
    peer.refresher.on_view(seen.append)
    far = peer_record(OTHER, "training").model_copy(update={"path": 3})
    peer.directory.others = SwarmView(now_s=0.0, peers={OTHER: far})
    own = scope_of(("L0.E1",), (0,), peer.grid)
    peer.refresher.watch(own)
    wide = peer.refresher.refresh((1,))
    assert wide.scope == own.with_buckets((1,))
    assert set(wide.peers) == {OTHER}
    assert peer.refresher.view.scope == seen[-1].scope == own
    assert not peer.refresher.view.peers
    assert peer.refresher.refresh().scope == own
    peer.refresher.stop(withdraw=False)


def test_what_changed_is_published_without_reading(peer):
    reads = peer.directory.reads
    published = threading.Event()
    entry = peer.directory.entry

    def note(kind, item, record, life_s):
        entry(kind, item, record, life_s)
        if kind == "peers" and record.path == 1:
            published.set()

    peer.directory.entry = note
    peer.claim(1)
    peer.refresher.announce()
    assert published.wait(60.0)
    assert peer.directory.reads == reads


def test_with_fixed_steps_every_change_is_a_reason_to_read(tmp_path):
    peer = Peer(tmp_path, inner_steps=3)
    for round_index in (1, 2, 3):
        reads = peer.directory.reads
        peer.status.round_index = round_index
        peer.refresher.announce()
        wait_until(lambda before=reads: peer.directory.reads != before)
    peer.refresher.stop(withdraw=False)


def test_a_read_that_fails_answers_nobody_with_what_was_read_before_and_is_tried_again(peer):
    """Two newcomers of a slow DHT would both take their claims for seen, and train one path."""
    peer.directory.error = NetworkError("the DHT is slow")
    before = peer.refresher.view
    for _ in range(2):
        with pytest.raises(NetworkError, match="the DHT is slow"):
            peer.refresher.refresh()
    assert peer.refresher.view.now_s == before.now_s
    peer.directory.error = None
    peer.directory.others = SwarmView(now_s=0.0, peers={OTHER: peer.directory.peers[-1]})
    assert set(peer.refresher.refresh().peers) == {OTHER}
    peer.background.check()


def test_a_dht_that_died_ends_the_peer(peer):
    peer.directory.error, peer.directory.failure = NetworkError("no answer"), "p2pd has ended"
    with pytest.raises(NetworkError, match="p2pd has ended; start again to rejoin"):
        peer.refresher.refresh()
    with pytest.raises(NetworkError, match="p2pd has ended; start again to rejoin"):
        peer.background.check()


@pytest.mark.parametrize("has_jumped", [True, False])
def test_a_clock_that_was_set_wrongly_ends_the_peer_and_what_others_say_alone_does_not(peer, monkeypatch, has_jumped):
    measured = threading.Event()

    def measure(*_):
        measured.set()
        raise ClockError("an hour ahead")

    monkeypatch.setattr(peer.time.clock, "measure", measure)
    peer.time.clock.has_jumped = has_jumped
    failed = threading.Event()
    peer.background.on_failure(failed.set)
    peer.refresher.refresh()
    if not has_jumped:
        peer.refresher._neighbours.measure_clock()
        peer.background.check()
        return
    assert measured.wait(60.0)
    assert failed.wait(60.0)
    # It still says so, and not after the test.
    for thread in [thread for thread in threading.enumerate() if thread.name == "clock"]:
        thread.join(60.0)
    with pytest.raises(ClockError, match="an hour ahead"):
        peer.background.check()


def test_an_unforeseen_exception_is_raised_by_who_waits(peer):
    peer.directory.error = KeyError("x")
    with pytest.raises(BackgroundError, match="the refresher thread failed: KeyError: 'x'"):
        peer.refresher.refresh()
    with pytest.raises(BackgroundError, match="report it"):
        peer.background.check()


def test_peers_that_went_missing_are_called(peer):
    record = peer.directory.peers[-1]
    peer.directory.others = SwarmView(now_s=0.0, peers={OTHER: record})
    peer.refresher.refresh()
    peer.directory.others = SwarmView(now_s=0.0)
    peer.refresher.refresh()
    peer.refresher.refresh()
    assert set(peer.directory.called) == {OTHER}


def test_after_a_sleep_of_the_machine_the_records_are_renewed_at_once(peer, monkeypatch):
    """A wait does not count a sleep: it would go on for up to ten minutes after it."""
    monkeypatch.setattr(refresher, "LOOK_AT_CLOCK_S", 0.05)
    peer.refresher.refresh()  # The next wait has begun after that.
    heard = threading.Event()
    peer.refresher.on_view(lambda view: heard.set())
    peer.refresher.announce()
    assert not heard.wait(0.2)
    asleep_s = peer.refresher.period_s + 1.0
    monkeypatch.setattr(refresher, "since_start_s", lambda: since_start_s() + asleep_s)
    assert heard.wait(60)


def test_after_its_dht_process_was_started_again_it_calls_all_it_knows_and_says_everything_again(peer):
    given, seen, contributor = (peer_id(number) for number in (2, 3, 4))
    place = ("/ip4/203.0.113.7/tcp/1",)
    peer.refresher._neighbours._addresses[given] = place
    peer.directory.others = SwarmView(now_s=0.0, peers={p: peer_record(p) for p in (seen, ME)})
    peer.refresher.refresh()
    peer.node.contributors.contributed(contributor, "L0.E0", 1)
    assert peer.directory.called == []
    reads, blobs = peer.directory.reads, len(peer.directory.manifests)
    peer.node.dht.restart()
    peer.refresher.refresh()
    assert set(peer.directory.called) == {contributor, seen, given}
    assert (peer.directory.anew, len(peer.directory.manifests)) == (1, blobs + 1)
    assert peer.directory.reads > reads
    peer.refresher.stop(withdraw=False)
    assert peer.node.dht.listeners == []


def test_who_looks_at_the_swarm_while_the_peer_leaves_hears_so_at_once(peer):
    """The thread that waits would keep the process for as long as a look may take."""
    reading, answer = threading.Event(), threading.Event()
    read = peer.directory.read_view

    def read_slowly(*arguments):
        reading.set()
        answer.wait(60.0)
        return read(*arguments)

    peer.directory.read_view = read_slowly
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(peer.refresher.refresh)
        assert reading.wait(60.0)
        second = threads.submit(peer.refresher.refresh)
        leaving = threading.Thread(target=peer.refresher.stop, kwargs={"withdraw": True})
        leaving.start()
        for looking in (first, second):
            with pytest.raises(NetworkError, match="this peer is leaving"):
                looking.result(10.0)
        answer.set()
        leaving.join(60.0)
