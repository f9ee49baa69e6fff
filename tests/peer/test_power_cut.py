"""The power fails while a peer writes a file, whichever it is.

It starts again, says a line at most, and loses nothing but what is in that file.
"""

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dipaco.base import kept_files
from dipaco.base.errors import AdmissionError, ConfigurationError, StorageError
from dipaco.base.files import atomic_file
from dipaco.base.index import INDEX_FILE
from dipaco.base.kept_files import KeptFiles
from dipaco.dht.dht_node import note_port, take_port
from dipaco.peer.exchange.fetching import ContentFetcher
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.keeping.path_files import PathFiles
from dipaco.peer.node.given_address import keep_addresses, kept_addresses
from dipaco.peer.node.guests import REVOCATIONS, admit, open_gate
from dipaco.peer.node.node import make_folder
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.owner.upload_budget import UploadBudget
from dipaco.peer.reporting.event_log import EventLog
from dipaco.protocol.admission import Gate
from dipaco.protocol.identity import load_or_create_identity
from dipaco.protocol.invitations import Terms, make_invitation, opened
from dipaco.protocol.manifest import sign_manifest, verify_manifest
from dipaco.protocol.revocations import sign_revocations
from dipaco.routing.run_folder import RunFolder
from dipaco.training.optimizer_states import load_optimizer, write_optimizer
from support.programs.power_cut import CUTS, Disk, cut
from support.runs.kept_states import LAYOUT, Life, state_of
from support.runs.make_plan import make_plan
from support.runs.tiny_run import make_tiny_run
from support.wire.exchanges import MODULE, OPERATOR, chain_of, file_of, row_of
from support.wire.peers import identity, peer

NOW_S = 1_000_000.0

every_cut = pytest.mark.parametrize("how", CUTS)
BESIDE = CUTS[-1]


# -- chains and states


def test_the_step_of_a_state_that_is_safe_is_safe_too(tmp_path, monkeypatch):
    """Where all machines lose their power at once, nobody else can say which step it is of."""
    steps = chain_of(4)
    disk = Disk(monkeypatch)
    first = Life(tmp_path)
    first.take(*steps)
    disk.lose_power(tmp_path)
    again = Life(tmp_path)
    assert [head.version for head in again.taken_up] == [4]
    assert again.chains.chain(MODULE) == tuple(steps)


def test_wherever_the_last_transactions_end_the_state_and_its_chain_are_of_one_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "SMALL_BYTES", 0)  # What is replaced goes at once.
    steps = chain_of(6)
    life = Life(tmp_path / "life")
    life.take(*steps)
    log, seen = tmp_path / "life" / "store" / f"{INDEX_FILE}-wal", []
    for left in [*range(0, log.stat().st_size, 3001), log.stat().st_size]:
        folder = tmp_path / str(left)
        shutil.copytree(tmp_path / "life", folder)
        os.truncate(folder / "store" / log.name, left)
        again = Life(folder)
        told = again.chains.chain(MODULE)
        assert told == tuple(steps[: len(told)])
        for head in again.taken_up:
            assert head.step == told[-1].name
            assert head.version == len(told)
        seen += [head.version for head in again.taken_up]
        again.take(*steps[len(told) :])
        assert [head.version for head in Life(folder).taken_up] == [6]
        shutil.rmtree(folder)
    assert set(seen) >= {5, 6}


@every_cut
def test_of_states_the_one_before_is_held_and_the_next_is_written_again(tmp_path, how, caplog):
    steps = chain_of(4)
    first = Life(tmp_path)
    first.take(*steps[:3])
    newest = first.store.find(state_of(3).digest)
    cut(newest, how)
    with caplog.at_level(logging.WARNING):
        again = Life(tmp_path)
    assert [head.version for head in again.taken_up] == [3 if how == BESIDE else 2]
    assert len(caplog.records) == (0 if how == BESIDE else 1)
    # What the others tell is taken again, and lies on the disk for the next life.
    if how != BESIDE:
        again.take(steps[2])
    for digest in again.store.digests(MODULE):
        assert again.store.load(MODULE, LAYOUT, digest).digest == digest
    assert [head.version for head in Life(tmp_path).taken_up] == [3]


@every_cut
def test_a_chain_is_told_up_to_where_the_index_is_whole_and_no_state_is_lost(tmp_path, how, caplog):
    steps = chain_of(4)
    life = Life(tmp_path)
    life.take(*steps)
    life.kept.index.close()
    cut(tmp_path / "store" / INDEX_FILE, how)
    with caplog.at_level(logging.WARNING):
        again = Life(tmp_path)
    assert len(caplog.records) == (0 if how in ("nothing", BESIDE) else 1)
    told = again.chains.chain(MODULE)
    assert told == tuple(steps[: len(told)])
    assert set(again.store.digests(MODULE)) == {state_of(3).digest, state_of(4).digest}
    # Its chain is told by others, and the state is here and need not be fetched.
    again.chains.serve(MODULE, steps[-1].name, steps)
    if not again.taken_up:
        again.take(steps[-1])
    assert [head.version for head in Life(tmp_path).taken_up] == [4]


@every_cut
def test_an_optimizer_begins_afresh(tmp_path, how, caplog):
    write_optimizer(tmp_path, 3, {"moments": torch.ones(100)})()
    cut(tmp_path / "path-3.pt", how)
    found = load_optimizer(tmp_path, 3)
    assert (found is None) == (how != BESIDE)
    assert [len(line.splitlines()) for line in caplog.messages] == ([] if how == BESIDE else [1])
    write_optimizer(tmp_path, 3, {"moments": torch.zeros(100)})()
    assert load_optimizer(tmp_path, 3) is not None


# -- contributions


@every_cut
def test_a_contribution_that_is_no_longer_whole_is_fetched_again(tmp_path, how):
    row, other = row_of(0, data=b"work" * 100), row_of(1, data=b"other work")
    files = ContributionFiles(KeptFiles(tmp_path))
    paths = [files.add(r, (file_of(r, d),)) for r, d in ((row, b"work" * 100), (other, b"other work"))]
    cut(paths[0], how)
    again = ContributionFiles(KeptFiles(tmp_path))
    again.kept.tidy()
    assert again.find(other.file) == paths[1]
    found = again.find(row.file)
    assert (found is None) == (how != BESIDE)
    came = tmp_path / "came"
    came.write_bytes(file_of(row, b"work" * 100))
    assert again.install(row, came).read_bytes() == file_of(row, b"work" * 100)
    again.kept.prune(MODULE, 100)
    assert not list(tmp_path.glob("??/[!.]*"))


# -- blobs


class Fetcher(ContentFetcher):
    """Has every blob of a run from its operator's folder."""

    def __init__(self, source, own):
        self.blobs, self.source, self.said = own.blobs, source, []
        self._say = self.said.append

    def blob(self, sha256, what="a blob"):
        if not self.blobs.has(sha256):
            self.blobs.add_bytes(self.source.blobs.read(sha256))
        return self.blobs.path(sha256)


@every_cut
@pytest.mark.parametrize("what", ["the base model", "the shard of path 1", "the held-out split of path 1"])
def test_a_blob_that_is_no_longer_whole_is_fetched_again(tmp_path, how, what):
    source = make_tiny_run(tmp_path / "source", documents_per_path=8)
    plan, own = source.plan(), RunFolder(tmp_path / "own")
    index = source.shard_index(plan)
    fetcher = Fetcher(source, own)
    node = SimpleNamespace(
        plan=plan,
        grid=source.grid(plan),
        run_folder=own,
        blobs=own.blobs,
        fetcher=fetcher,
        load_shard_index=lambda: index,
    )
    sha256 = {
        "the base model": plan.blobs.base,
        "the shard of path 1": index.paths[1].train_sha256,
        "the held-out split of path 1": index.paths[1].validation_sha256,
    }[what]
    fetcher.blob(plan.blobs.shards)
    cut(fetcher.blob(sha256), how)
    files = PathFiles(node)
    data, state = files.take(1), files.genesis_state(MODULE)
    assert data.validation.shape == torch.Size(source.validation_tokens(plan, 1).shape)
    assert state.digest == source.genesis_state(plan, MODULE).digest
    assert fetcher.said == ([] if how == BESIDE else [f"{what} is damaged on this disk and is fetched again"])
    assert own.blobs.verify(sha256)


# -- who this peer is, and who is in


@every_cut
def test_a_key_is_never_made_anew_in_the_place_of_another(tmp_path, how):
    file = tmp_path / "identity.key"
    first = load_or_create_identity(file)
    first.release()
    cut(file, how)
    left = file.read_bytes()
    if how == BESIDE:
        again = load_or_create_identity(file)
        again.release()
        assert again.peer_id == first.peer_id
    else:
        with pytest.raises(StorageError, match="move it away to have a new identity made"):
            load_or_create_identity(file)
    assert file.read_bytes() == left


@every_cut
@pytest.mark.parametrize("is_open", [True, False])
def test_an_admission_is_made_again_where_what_it_is_made_of_is_here(tmp_path, how, is_open):
    plan = make_plan()
    text = None
    if is_open:
        plan = opened(plan, OPERATOR, places=2)
    else:
        text = make_invitation(Terms(plan.run_id, 2, 0), OPERATOR).to_text()
    manifest = verify_manifest(sign_manifest(plan, OPERATOR))
    gate = Gate.of(manifest)
    me = dataclasses.replace(identity(0), path=tmp_path / "identity.key")
    admit(gate, me, manifest, NOW_S, text)
    [file] = tmp_path.iterdir()
    cut(file, how)
    if not is_open and how != BESIDE:
        with pytest.raises(AdmissionError, match="give it with --invitation"):
            admit(gate, me, manifest, NOW_S, None)
    kept = admit(gate, me, manifest, NOW_S, text)
    gate.check_own(peer(0), kept)
    assert admit(gate, me, manifest, NOW_S, None) == kept == file.read_bytes()


@every_cut
def test_a_list_of_revoked_invitations_is_not_used(tmp_path, how, caplog):
    plan = make_plan()
    manifest = verify_manifest(sign_manifest(plan, OPERATOR))
    file = tmp_path / REVOCATIONS
    file.write_bytes(sign_revocations(plan.run_id, 1, {"a" * 16: 9}, OPERATOR))
    cut(file, how)
    with caplog.at_level(logging.WARNING):
        gate = open_gate(manifest, tmp_path)
    assert gate.revoked == ({"a" * 16} if how == BESIDE else set())
    assert len(caplog.records) == (0 if how == BESIDE else 1)


# -- what is remembered


@every_cut
def test_addresses_that_are_whole_are_used(tmp_path, how):
    one, other = (f"/ip4/203.0.113.{n}/tcp/31337/p2p/{peer(n)}" for n in (1, 2))
    keep_addresses(tmp_path, (one, other))
    cut(tmp_path / "address", how)
    if how in ("half", "all but one byte", BESIDE):
        found = kept_addresses(tmp_path)
        assert found[0] == one
        assert set(found) <= {one, other}
    else:
        with pytest.raises(ConfigurationError, match="no address is given"):
            kept_addresses(tmp_path)


@every_cut
def test_what_was_sent_is_counted_from_nothing(tmp_path, how):
    uplink = Uplink(None)
    UploadBudget(tmp_path, uplink, 1.0).close()
    cut(tmp_path / "upload.json", how)
    again = UploadBudget(tmp_path, uplink, 1.0)
    uplink.sent_bytes += 5
    assert again.reason() == ""
    again.close()
    assert json.loads((tmp_path / "upload.json").read_text())[1] == 5


@every_cut
def test_a_port_is_taken(tmp_path, how, monkeypatch):
    monkeypatch.setattr("dipaco.dht.dht_node._taken", {})
    take_port(42_000)
    note_port(tmp_path / "port", 42_000)
    cut(tmp_path / "port", how)
    monkeypatch.setattr("dipaco.dht.dht_node._taken", {})
    assert 1024 <= take_port(42_000, tmp_path / "port") < 2**16


@every_cut
def test_events_go_on_in_a_line_of_their_own(tmp_path, how):
    file = tmp_path / "events.jsonl"
    log = EventLog(file)
    log.emit("joined", run="a")
    log.close()
    cut(file, how)
    again = EventLog(file)
    again.emit("left", run="b")
    again.close()
    assert json.loads(file.read_bytes().splitlines()[-1])["event"] == "left"


# -- what is left over


def test_what_was_never_finished_or_written_down_is_removed_at_the_next_start(tmp_path):
    row = row_of(0)
    kept = ContributionFiles(KeptFiles(tmp_path / "store")).add(row, (file_of(row, b"data"),))
    old, young = tmp_path / ".upload.json.1-a.tmp", tmp_path / ".known_peers.json.1-b.tmp"
    unknown = kept.with_name(kept.name[:2] + "0" * 62)
    for file in (old, young, unknown, kept.with_name(f".{kept.name}.1-c.tmp")):
        file.touch()
        os.utime(file, (0, 0)) if file != young else None
    gone = ContributionFiles(KeptFiles(tmp_path / "store")).add(row_of(1), (file_of(row_of(1), b"data"),))
    gone.unlink()
    make_folder(tmp_path)
    again = KeptFiles(tmp_path / "store")
    again.tidy()
    assert young.exists(), "another program may be writing it"
    assert not old.exists()
    assert list(kept.parent.iterdir()) == [kept]
    assert again.index.read("SELECT sha256 FROM files") == [(row.file,)]


def test_a_file_that_another_process_is_writing_is_not_removed(tmp_path):
    with atomic_file(tmp_path / "state") as file:
        file.write(b"half")
        [temporary] = tmp_path.iterdir()
        os.utime(temporary, (0, 0))
        program = "import sys; from pathlib import Path; from dipaco.base.files import *; "
        program += "remove_stale_temporaries(Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=60)
        assert temporary.exists()
    assert (tmp_path / "state").read_bytes() == b"half"
