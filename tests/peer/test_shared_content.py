"""Peers of one machine have one copy of what several of them hold."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dipaco.base.errors import ConfigurationError
from dipaco.base.index import Index
from dipaco.base.kept_files import KeptFiles
from dipaco.modules.saved_states import StateStore
from dipaco.peer import trainers
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.pause_command import ControlSettings, _peers
from dipaco.peer.peer_settings import PeerSettings
from dipaco.peer.trainers import trainer_settings
from dipaco.protocol.identity import load_or_create_identity
from support.runs.kept_states import LAYOUT
from support.wire.exchanges import GRID, MODULE, chain_of, file_of, row_of
from support.wire.peers import RUN

SUPPORT = Path(__file__).parents[1]


def test_each_tells_its_own_chain_and_the_steps_lie_there_once(tmp_path):
    index = Index(tmp_path / "index.sqlite")
    steps, branch = chain_of(5), chain_of(2, (1, 2), chain_of(5)[2].name, begin=3)
    one, other = (ChainStore(RUN, GRID.modules(), index, name) for name in ("one", "other"))
    one.serve(MODULE, steps[-1].name, steps)
    other.serve(MODULE, branch[-1].name, [*steps[:3], *branch])
    again = [ChainStore(RUN, GRID.modules(), Index(index.file), name) for name in ("one", "other")]
    assert [chains.chain(MODULE) for chains in again] == [tuple(steps), (*steps[:3], *branch)]
    assert index.read("SELECT count(*) FROM steps") == [(7,)]


def test_a_contribution_of_one_is_not_fetched_by_another(tmp_path):
    row = row_of(0)
    path = ContributionFiles(KeptFiles(tmp_path)).add(row, (file_of(row, b"data"),))
    other = ContributionFiles(KeptFiles(tmp_path))
    assert other.find(row.file) == path
    other.kept.prune(MODULE, 3)
    assert ContributionFiles(KeptFiles(tmp_path)).find(row.file) is None


PROGRAM = """
import sys
from pathlib import Path
from dipaco.base import kept_files
from dipaco.modules.saved_states import StateStore
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from support.runs.kept_states import state_of
from support.wire.exchanges import GRID, MODULE, chain_of, file_of, row_of
from support.wire.peers import RUN

kept_files.SMALL_BYTES = 0  # States go as soon as they are replaced.
folder, me = Path(sys.argv[1]), sys.argv[2]
store = StateStore(folder, me)
kept = store.kept
kept.tidy()
files, chains = ContributionFiles(kept), ChainStore(RUN, GRID.modules(), kept.index, me)
for number, step in enumerate(chain_of(25)):
    row = row_of(number % 4, number, data=b"%d" % (number % 7))
    files.add(row, (file_of(row, b"%d" % (number % 7)),))
    chains.serve(MODULE, step.name, [step])
    store.save(state_of(number))
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    """They have the same work, and one is sometimes ahead of another."""
    others = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path, name], env={**os.environ, "PYTHONPATH": str(SUPPORT)}
        )
        for name in "ab"
    ]
    assert [other.wait(120) for other in others] == [0, 0]
    for name in "ab":
        chains = ChainStore(RUN, GRID.modules(), KeptFiles(tmp_path).index, name)
        assert len(chains.chain(MODULE)) == 25
    kept = KeptFiles(tmp_path)
    kept.prune(MODULE, 24)
    named = {sha256 for (sha256,) in kept.index.read("SELECT sha256 FROM files WHERE kind != 'state'")}
    states = {sha256 for (sha256,) in kept.index.read("SELECT digest FROM states")}
    assert {file.name for file in tmp_path.glob("??/*")} == named | states
    assert (len(named), len(states)) == (3, 2)
    for name in "ab":
        store = StateStore(tmp_path, name)
        assert [head.version for head in store.heads(MODULE)] == []
        assert store.load_latest(MODULE, LAYOUT).version == 24


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
