"""Peers of one machine have one copy of what several of them hold."""

import os
import signal

import pytest
import torch

from dipaco.base.blobs import BlobStore, SharedContent
from dipaco.base.errors import ConfigurationError
from dipaco.modules.layout import ModuleLayout
from dipaco.modules.state import ModuleState
from dipaco.modules.store import StateStore
from dipaco.peer import trainers
from dipaco.peer.pause_command import ControlSettings, _peers
from dipaco.peer.peer_settings import PeerSettings
from dipaco.peer.trainers import trainer_settings
from dipaco.protocol.identity import load_or_create_identity

TEXT = b"what all of them need"


@pytest.fixture
def shared(tmp_path):
    return SharedContent(tmp_path / "content")


def files(shared):
    return [f for f in shared.folder.rglob("*") if f.is_file() and f.parent.name != "turns"]


def test_a_blob_of_one_is_the_blob_of_all_and_one_file(shared, tmp_path):
    one, other = (BlobStore(tmp_path / name, shared) for name in "ab")
    sha = one.add_bytes(TEXT)
    assert other.has(sha)
    assert other.read(sha) == TEXT
    assert one.path(sha).samefile(other.path(sha))
    assert one.path(sha).stat().st_nlink == 3


def test_what_two_have_fetched_at_once_becomes_one_file(shared, tmp_path):
    one, alone = BlobStore(tmp_path / "a", shared), BlobStore(tmp_path / "b")
    sha = one.add_bytes(TEXT)
    alone.add_bytes(TEXT)
    assert not one.path(sha).samefile(alone.path(sha))
    shared.give(sha, alone.path(sha))
    assert one.path(sha).samefile(alone.path(sha))


def test_a_damaged_blob_that_is_removed_does_not_come_back(shared, tmp_path):
    one, other = (BlobStore(tmp_path / name, shared) for name in "ab")
    sha = one.add_bytes(TEXT)
    one.path(sha).write_bytes(b"damaged")
    assert not other.verify(sha)
    other.remove(sha)
    assert not other.has(sha)


def test_a_state_is_written_once_and_goes_with_its_last_holder(shared, tmp_path):
    one, other = (StateStore(tmp_path / name, shared=shared) for name in "ab")
    layout = ModuleLayout(("w",), ((4,),))
    state = ModuleState("L0.E0", 1, torch.ones(4), torch.zeros(4), {}, layout)
    assert one.save(state).samefile(other.save(state))
    assert len(files(shared)) == 1
    one.remove(state.module)
    shared.prune()
    assert len(files(shared)) == 1
    other.remove(state.module)
    shared.prune()
    assert files(shared) == []


def test_where_files_cannot_be_linked_each_has_its_own(shared, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    one, other = (BlobStore(tmp_path / name, shared) for name in "ab")
    sha = one.add_bytes(TEXT)
    assert not other.has(sha)
    assert other.add_bytes(TEXT) == sha
    assert other.read(sha) == TEXT


def test_one_at_a_time_fetches(shared):
    with shared.turn("ab" * 32) as mine, shared.turn("ab" * 32) as too:
        assert mine
        assert not too
    with shared.turn("ab" * 32) as mine, shared.turn("ab" + "cd" * 31) as other:
        assert mine
        assert other


def test_what_is_for_the_machine_is_divided_among_its_trainers(tmp_path):
    settings = PeerSettings(
        initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWRA4F8vNLh1ueZWQYE3pafBEKj1FVw2XWGM1pwogTS83H",),
        devices=("cuda:0", "cuda:1"),
        cache_folder=tmp_path,
        threads=5,
        port=4000,
        name="attic",
        max_upload_mbps=10.0,
        log_json=tmp_path / "log.jsonl",
        metrics="[::]:9400",
    )
    first, second = trainer_settings(settings)
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert (first.threads, first.max_upload_mbps) == (2, 5.0)
    assert (first.port, second.port) == (4000, 4001)
    assert (first.name, second.name) == ("attic 0", "attic 1")
    assert second.cache_folder == tmp_path / "trainer-1"
    assert second.log_json == tmp_path / "log-1.jsonl"
    assert (first.metrics, second.metrics) == ("[::]:9400", "[::]:9401")
    assert second.devices == ()


def test_flags_of_one_peer_are_refused_for_several(tmp_path):
    peers = ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWRA4F8vNLh1ueZWQYE3pafBEKj1FVw2XWGM1pwogTS83H",)
    with pytest.raises(ConfigurationError, match=r"--device is for one peer.*own --cache-dir"):
        trainer_settings(PeerSettings(initial_peers=peers, devices=("cpu", "cpu"), device="cpu"))
    with pytest.raises(ConfigurationError, match="--devices 'gpu' is not a device"):
        PeerSettings(initial_peers=peers, devices=("gpu",))


def test_who_presses_ctrl_c_while_the_first_joins_starts_no_other(tmp_path, monkeypatch):
    started = []
    heard = []

    class Joining(trainers._Trainer):
        """A trainer without a process; while it joins, somebody stops the whole."""

        def start(self):
            started.append(len(started))

        def joins_in_time(self):
            os.kill(os.getpid(), signal.SIGINT)
            return True

        def signal(self, number):
            heard.append(number)

    monkeypatch.setattr(trainers, "_Trainer", Joining)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    peers, devices = (
        ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWRA4F8vNLh1ueZWQYE3pafBEKj1FVw2XWGM1pwogTS83H",),
        ("cpu", "cpu", "cpu"),
    )
    settings = PeerSettings(initial_peers=peers, devices=devices, cache_folder=tmp_path)
    try:
        assert trainers.run_trainers(settings) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert started == [0]
    assert heard == [signal.SIGINT] * 3


def test_pause_means_every_trainer_that_runs(tmp_path):
    keys = [tmp_path / f"trainer-{number}" / "identity.key" for number in range(3)]
    running = [load_or_create_identity(key, lambda line: None) for key in keys[:2]]
    load_or_create_identity(keys[2], lambda line: None).release()
    settings = ControlSettings(cache_folder=tmp_path)
    assert [one.cache_folder.name for one in _peers(settings)] == ["trainer-0", "trainer-1"]
    for identity in running:
        identity.release()
    assert _peers(settings) == [settings]
