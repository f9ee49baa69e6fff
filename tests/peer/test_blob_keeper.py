"""The keeper: it fetches the blobs assigned to this peer, and leaves alone what failed lately."""

import threading
from types import SimpleNamespace

import pytest

from dipaco.peer.background import Background, BackgroundError
from dipaco.peer.keeping.blob_keeper import RETRY_AFTER_S, BlobKeeper
from dipaco.protocol.config import RoundsConfig
from dipaco.protocol.view import SwarmView
from support.runs.make_plan import make_plan
from support.swarms.fake_swarm import ME, FakeFetcher, FakeSwarm, peer_id, peer_record

OTHER = peer_id(2)
WAIT_S = 30.0


class Peer:
    """A keeper that is assigned everything: only it and one other peer are there."""

    def __init__(self):
        self.swarm, self.fetcher = FakeSwarm(), FakeFetcher()
        self.swarm.view = SwarmView(now_s=0.0, peers={ME: peer_record(ME), OTHER: peer_record(OTHER, "training")})
        self.background = Background()
        self.now_s = 0.0
        node = SimpleNamespace(
            me=ME, plan=make_plan(rounds=RoundsConfig(copies=3)), fetcher=self.fetcher, blobs=self.fetcher
        )
        self.keeper = BlobKeeper(node, self.swarm, self.background, monotonic=lambda: self.now_s)


def test_one_blob_a_turn():
    peer = Peer()
    hashes = tuple(str(n) * 64 for n in range(3))
    peer.fetcher.run_blobs, peer.fetcher.served_blobs = hashes, set(hashes[1:])
    peer.keeper.keep()
    assert peer.fetcher.blobs_here == {hashes[1]}
    assert peer.swarm.announced == 1
    peer.keeper.keep()
    assert peer.fetcher.blobs_here == set(hashes[1:])
    assert peer.fetcher.asked == list(hashes)


def test_what_failed_lately_is_skipped():
    peer = Peer()
    peer.fetcher.run_blobs = ("1" * 64,)
    peer.keeper.keep()
    peer.keeper.keep()
    assert peer.fetcher.asked == ["1" * 64]
    peer.fetcher.served_blobs = {"1" * 64}
    peer.now_s += RETRY_AFTER_S + 1
    peer.keeper.keep()
    assert peer.fetcher.blobs_here == {"1" * 64}


def test_a_blob_that_others_are_to_keep_is_left_to_them():
    peer = Peer()
    peer.swarm.view = SwarmView(now_s=0.0, peers={p: peer_record(p) for p in (ME, *map(peer_id, range(40)))})
    hashes = tuple(f"{n:064x}" for n in range(40))
    peer.fetcher.run_blobs, peer.fetcher.served_blobs = hashes, set(hashes)
    for _ in hashes:
        peer.keeper.keep()
    assert len(peer.fetcher.blobs_here) < len(hashes) / 2


def test_an_unforeseen_exception_on_its_thread_is_not_silent():
    peer, failed = Peer(), threading.Event()
    peer.background.on_failure(failed.set)
    peer.swarm.period_s = 0.01

    def break_down(sha256):
        raise KeyError("x")

    peer.fetcher.has = break_down
    peer.fetcher.run_blobs = ("1" * 64,)
    peer.keeper.start()
    assert failed.wait(WAIT_S)
    with pytest.raises(BackgroundError, match="the blob keeper thread failed: KeyError: 'x'"):
        peer.background.check()
    peer.keeper.stop()
