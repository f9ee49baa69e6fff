"""The directory over two real DHT nodes on loopback: publish, read, withdraw, refuse, fail."""

import logging
import os
import signal
import threading
import time

import pytest

from dipaco.base.errors import AddressError, ManifestError, NetworkError, RunSelectionError
from dipaco.dht import quotas
from dipaco.dht.addresses import split_operator
from dipaco.dht.dht_node import select_run
from dipaco.dht.directory import Directory
from dipaco.protocol.coverage import scope_of, whole_scope
from dipaco.protocol.manifest import load_or_create_operator_key, operator_fingerprint, sign_manifest, verify_manifest
from dipaco.protocol.record_keys import record_key, record_subkey
from dipaco.protocol.records import BlobRecord, HeldState, ModuleRecord, ProgressEntry, ProgressRecord
from support.runs.make_plan import make_plan
from support.waiting import wait_until
from support.wire import dht_pair
from support.wire.dht_pair import (
    GRID,
    PLAN,
    RUN_ID,
    node_pair,
    paths_of,
    peer_record,
    publish,
    publish_manifest,
    start_node,
    view_by,
)
from support.wire.peers import identity

NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LIFE_S = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quotas, "SERVED_RUNS", 64)
        with node_pair(tmp_path_factory.mktemp("pair")) as nodes:
            yield nodes


def claim(node, path):
    return peer_record(node.peer_id, path)


def holding(node, module):
    return ModuleRecord(
        peer_id=node.peer_id,
        state="serving",
        path=None,
        round=0,
        reachable="direct",
        module=module,
        held=HeldState(step="b" * 64, version=1, weight=2, round=0, digest="a" * 64, bytes=9),
    )


def directory_of(node, number):
    """Return a directory of a run that no other test uses."""
    return dht_pair.directory_of(node, f"{number:016x}")


def test_what_one_publishes_the_other_reads(pair):
    first, second = pair
    assert publish(first.directory, "peers", "0", claim(first, 1), LIFE_S)
    assert publish(second.directory, "peers", "0", claim(second, 2), LIFE_S)
    expected = {first.peer_id: 1, second.peer_id: 2}
    assert paths_of(first.directory) == paths_of(second.directory) == expected
    assert publish(first.directory, "peers", "0", claim(first, 3), LIFE_S)
    assert paths_of(second.directory)[first.peer_id] == 3


def test_who_said_goodbye_claims_nothing_at_once_and_can_come_back(pair):
    mine, theirs = (directory_of(node, 2) for node in pair)
    said = claim(pair[0], 1)
    publish(mine, "peers", "0", said, LIFE_S)
    assert paths_of(theirs)
    assert publish(mine, "peers", "0", said.model_copy(update={"state": "leaving"}), LIFE_S)
    for reader in (mine, theirs):
        assert not view_by(reader).claimants(1)
    assert publish(mine, "peers", "0", claim(pair[0], 2), LIFE_S)
    assert paths_of(theirs) == {pair[0].peer_id: 2}


def test_a_restarted_peer_overwrites_what_its_earlier_life_published(pair):
    before, reader = directory_of(pair[0], 3), directory_of(pair[1], 3)
    publish(before, "peers", "0", claim(pair[0], 1), 500.0)
    restarted = directory_of(pair[0], 3)
    assert publish(restarted, "peers", "0", claim(pair[0], 2), LIFE_S)
    assert paths_of(reader) == {pair[0].peer_id: 2}


def test_records_expire(pair):
    mine, theirs = (directory_of(node, 4) for node in pair)
    life_s = 1.0
    # On a slow machine a second may pass before it is read.
    while not (publish(mine, "peers", "0", claim(pair[0], 1), life_s) and paths_of(theirs)):
        life_s *= 2
        assert life_s < LIFE_S
    wait_until(lambda: not paths_of(theirs), 2 * LIFE_S)


def test_holdings_of_many_modules_are_stored_and_read_together(pair):
    mine, theirs = (directory_of(node, 5) for node in pair)
    modules = GRID.modules()[:12]
    assert mine.store(mine.entry("modules", module, holding(pair[0], module), LIFE_S) for module in modules)
    publish(theirs, "modules", "L0.E1", holding(pair[1], "L0.E1"), LIFE_S)
    found = view_by(theirs).holdings
    assert {module: len(records) for module, records in found.items()} == {
        **dict.fromkeys(GRID.modules(), 0),
        **dict.fromkeys(modules, 1),
        "L0.E1": 2,
    }
    publish(mine, "modules", "L0.E1", None, LIFE_S)
    assert [h.peer_id for h in view_by(theirs).holdings["L0.E1"]] == [pair[1].peer_id]


def test_a_view_reads_its_scope_and_no_more(pair):
    mine, theirs = (directory_of(node, 7) for node in pair)
    publish(mine, "peers", "0", claim(pair[0], 1), LIFE_S)
    for module in ("L0.E0", "L1.E1"):
        said = holding(pair[0], module).model_copy(update={"state": "training", "path": 1, "since_s": 5.0})
        publish(mine, "modules", said.module, said, LIFE_S)
    by_module = view_by(theirs, scope_of(("L1.E1",), (), GRID))
    assert by_module.claims[pair[0].peer_id].path == 1
    assert (set(by_module.holdings), dict(by_module.peers)) == ({"L1.E1"}, {})
    by_bucket = view_by(theirs, scope_of((), (0,), GRID))
    assert by_bucket.claims[pair[0].peer_id].path == 1
    assert (dict(by_bucket.holdings), set(by_bucket.peers)) == ({}, {pair[0].peer_id})
    assert not view_by(theirs, scope_of((), (1,), GRID)).claims


def test_what_stands_there_is_written_again_when_it_has_changed_or_aged(pair, monkeypatch):
    node = pair[0]
    directory = directory_of(node, 8)
    written = []
    store = directory._try_to_store

    def count(entries):
        written.append(len(entries))
        return store(entries)

    monkeypatch.setattr(directory, "_try_to_store", count)
    now_s = time.time()
    monkeypatch.setattr("dipaco.dht.directory.get_dht_time", lambda: now_s)
    record = claim(node, 1)
    publish(directory, "peers", "0", record, LIFE_S)
    busier = record.model_copy(update={"tokens_per_s": 5.0, "bytes_up": 9})
    publish(directory, "peers", "0", busier, LIFE_S)
    now_s += LIFE_S / 7
    publish(directory, "peers", "0", busier, LIFE_S)
    assert written == [1]
    publish(directory, "peers", "0", claim(node, 2), LIFE_S)
    assert written == [1, 1]
    now_s += LIFE_S / 5
    publish(directory, "peers", "0", claim(node, 2), LIFE_S)
    assert written == [1, 1, 1]


def test_an_old_withdrawal_does_not_hide_what_a_peer_says_itself():
    """Attack: the nodes next to a key have nothing of a peer but what it took back there."""
    other, name = identity(1), record_key("modules", RUN_ID, "L0.E0")
    subkey = record_subkey("modules", RUN_ID, "L0.E0", other.public_key)
    said = ModuleRecord.model_validate(
        {
            **peer_record(other.peer_id, 0).model_dump(include=set(ModuleRecord.model_fields)),
            "module": "L0.E0",
            "held": None,
        }
    ).model_dump()

    class Nodes:
        def call(self, function, *arguments):
            if len(arguments) == 1:
                return {name: {subkey: (None, 1.0)}}
            return {name: {subkey: (said, 2.0)}}, {other.peer_id}

    places = {other.peer_id: ()}
    reader = Directory(Nodes(), identity(0), RUN_ID, known_directly=lambda modules: places)
    assert paths_of(reader) == {other.peer_id: 0}


def test_blob_holders_are_the_others(pair):
    sha256 = "b" * 64
    for node in pair:
        record = BlobRecord(peer_id=node.peer_id, sha256=sha256, bytes=3)
        assert publish(node.directory, "blobs", record.sha256, record, LIFE_S)
    first, second = pair
    assert first.directory.find_blob_holders(sha256) == (second.peer_id,)
    assert second.directory.find_blob_holders(sha256) == (first.peer_id,)
    assert first.directory.find_blob_holders("c" * 64) == ()


async def store_one(node, key, value, expiration_s, subkey):
    return await node.store(key, value, expiration_s, subkey=subkey)


def test_forged_and_misplaced_records_enter_no_node(pair):
    first, second = pair
    run_id = f"{6:016x}"
    mine, reader = directory_of(first, 6), directory_of(second, 6)
    publish(mine, "peers", "0", claim(first, 1), LIFE_S)
    key = record_key("peers", run_id, "0")
    owner = first.identity.public_key
    forger = second.identity.public_key

    def store(where, subkey, value, life_s=100.0):
        return bool(second.dht.call(store_one, where, value, time.time() + life_s, subkey))

    lie = claim(first, 3).model_dump()
    assert not store(key, record_subkey("peers", run_id, "0", owner), lie)
    assert not store(key, record_subkey("peers", run_id, "0", forger), lie)
    honest = claim(second, 3).model_dump()
    own_subkey = record_subkey("peers", run_id, "0", forger)
    assert not store("another key", own_subkey, honest)
    assert not store(key, own_subkey, honest, life_s=1e6)
    assert not store(key, own_subkey, {**honest, "path": -1})
    assert not store(key, "a free subkey", honest)
    assert not second.dht.call(store_one, key, honest, time.time() + 100, None)
    assert paths_of(reader) == paths_of(mine) == {first.peer_id: 1}


def test_threads_and_long_records_share_the_pipe(pair):
    first, second = pair
    entries = tuple(
        ProgressEntry(path=n, last_round=n, tokens=n, validation_nll=1.0, validation_tokens=1, train_loss=float(n))
        for n in range(64)
    )
    failures = []

    def work(number):
        directory = directory_of(first, 100 + number)
        try:
            for size in range(60, 65):
                record = ProgressRecord(peer_id=first.peer_id, entries=entries[:size])
                assert publish(directory, "progress", "0", record, LIFE_S)
                assert len(view_by(directory).progress) == size
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    found = view_by(directory_of(second, 103)).progress
    assert [service.tokens for service in found.values()] == [entry.tokens for entry in entries]


def test_no_record_makes_a_path_served_that_is_seen_to_wait(pair):
    first, second = pair
    writer, reader = directory_of(first, 110), directory_of(second, 110)
    rounds = []
    for now in (5, 9):
        entry = ProgressEntry(path=1, last_round=now, tokens=1, validation_nll=0.0, validation_tokens=0, train_loss=1)
        record = ProgressRecord(peer_id=first.peer_id, entries=(entry,))
        assert publish(writer, "progress", "0", record, LIFE_S)
        now_s = PLAN.start_s + (now + 0.5) * PLAN.rounds.duration_s
        view = reader.read_view(PLAN, GRID, now_s, whole_scope(GRID))
        rounds.append((view.progress[1].last_round, view.last_round(1)))
    assert rounds == [(5, 5), (9, 5)]


# -- runs


def test_runs_are_listed_and_selected(pair, tmp_path):
    first, second = pair
    reader = Directory(second.dht, second.identity, None)
    assert reader.list_manifests() == []
    with pytest.raises(RunSelectionError, match="holds no run"):
        select_run(reader.list_manifests(), None)
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    plans = [make_plan(name="one"), make_plan(name="two", seed=1)]
    publish_manifest(Directory(first.dht, first.identity, plans[0].run_id), sign_manifest(plans[0], key), LIFE_S)
    assert select_run(reader.list_manifests(), None).plan == plans[0]
    # Any peer may store it again.
    again = Directory(second.dht, second.identity, plans[0].run_id)
    assert publish_manifest(again, reader.list_manifests()[0].envelope, 2 * LIFE_S)
    publish_manifest(Directory(first.dht, first.identity, plans[1].run_id), sign_manifest(plans[1], key), LIFE_S)
    with pytest.raises(RunSelectionError, match="several runs.*one.*two.*--run"):
        select_run(reader.list_manifests(), None)
    assert select_run(reader.list_manifests(), "two").plan == plans[1]
    assert select_run(reader.list_manifests(), plans[0].run_id).plan == plans[0]
    assert select_run(reader.list_manifests(), plans[0].run_id[:8]).plan == plans[0]
    with pytest.raises(RunSelectionError, match="no run.*one.*two"):
        select_run(reader.list_manifests(), "three")


def test_a_successor_of_the_same_operator_is_chosen(tmp_path):
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    stranger = load_or_create_operator_key(tmp_path / "stranger.pem")
    old = make_plan(name="old", seed=2)
    new = make_plan(name="new", seed=3, start_s=2000.0, successor_of=old.run_id)
    usurper = make_plan(name="usurper", seed=4, start_s=2000.0, successor_of=old.run_id)

    first, second, other = (
        verify_manifest(sign_manifest(plan, signer)) for plan, signer in ((old, key), (new, key), (usurper, stranger))
    )
    assert select_run([first, second], None).plan == new
    assert select_run([first, second], "old").plan == old
    with pytest.raises(RunSelectionError, match="several runs"):
        select_run([first, other], None)


def test_junk_runs_do_not_hide_the_run_of_the_address_that_was_given(tmp_path):
    key, stranger = (load_or_create_operator_key(tmp_path / f"{n}.pem") for n in range(2))
    old = make_plan(name="real", seed=1)
    real = make_plan(name="real", seed=1, start_s=2000.0, successor_of=old.run_id)
    junk = [sign_manifest(make_plan(name="real", seed=100 + n), stranger) for n in range(160)]
    manifests = [verify_manifest(e) for e in (*junk, *(sign_manifest(p, key) for p in (old, real)))]

    with pytest.raises(RunSelectionError, match="and 154 more; choose one") as caught:
        select_run(manifests, None, served=lambda: {"0" * 16})
    assert len(str(caught.value)) < 500
    # A peer of the run before leads to the run that succeeds it.
    assert select_run(manifests, None, served=lambda: {old.run_id}).plan == real
    mine, theirs = operator_fingerprint(key), operator_fingerprint(stranger)
    assert select_run(manifests, None, operator=mine).plan == real
    with pytest.raises(ManifestError, match=f"pins operator {'1' * 16}, but .* {theirs}"):
        select_run(manifests, None, operator="1" * 16)


def test_nobody_else_signs_a_run_in_place_of_its_operator(pair, tmp_path):
    """The id of a run is the hash of its plan, which anybody can sign."""
    first, second = pair
    key, stranger = (load_or_create_operator_key(tmp_path / f"{n}.pem") for n in range(2))
    plan = make_plan(name="mine", seed=5)
    publish_manifest(Directory(first.dht, first.identity, plan.run_id), sign_manifest(plan, key), LIFE_S)
    forger = Directory(second.dht, second.identity, plan.run_id)
    publish_manifest(forger, sign_manifest(plan, stranger), 100 * LIFE_S)
    found = Directory(second.dht, second.identity, None).list_manifests()
    mine = operator_fingerprint(key)
    assert mine in [manifest.operator_fingerprint for manifest in found]
    assert select_run(found, None, operator=mine).plan == plan


def test_an_address_may_name_the_operator():
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
    pinned = f"{address}/operator/{'a' * 16}"
    assert split_operator([address, address]) == ((address, address), None)
    assert split_operator([address, pinned, pinned]) == ((address,) * 3, "a" * 16)
    for wrong in ("", "A" * 16, "a" * 15, "a" * 16 + "/p2p/x"):
        with pytest.raises(AddressError, match="no fingerprint of an operator"):
            split_operator([f"{address}/operator/{wrong}"])
    with pytest.raises(AddressError, match="different operators: a{16}, b{16}"):
        split_operator([pinned, f"{address}/operator/{'b' * 16}"])


def test_one_living_address_of_several_is_enough(pair, tmp_path):
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
    third = start_node(tmp_path, dead, pair[0].address, client_mode=True)
    try:
        publish(pair[0].directory, "peers", "0", claim(pair[0], 1), LIFE_S)
        assert paths_of(third.directory)[pair[0].peer_id] == 1
    finally:
        third.close()


# -- failing


def test_a_dead_dht_process_is_a_network_error_and_not_a_hang(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    node = start_node(tmp_path)
    publish(node.directory, "peers", "0", claim(node, 1), LIFE_S)
    os.kill(node.dht.pid, signal.SIGSTOP)
    failures = []
    begun = threading.Event()

    def read():
        begun.set()
        try:
            view_by(node.directory)
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    os.kill(node.dht.pid, signal.SIGKILL)
    reader.join(60)
    assert not reader.is_alive()
    assert isinstance(failures[0], NetworkError)
    assert node.directory.failure is None
    node.close()
    with pytest.raises(NetworkError, match="was ended"):
        publish(node.directory, "peers", "0", claim(node, 2), LIFE_S)


def test_a_node_whose_dht_process_was_killed_is_in_the_swarm_again(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    with node_pair(tmp_path) as (first, second):
        publish(first.directory, "peers", "0", claim(first, 1), LIFE_S)
        address = first.address
        os.kill(first.dht.pid, signal.SIGKILL)
        wait_until(lambda: first.dht.starts == 2)
        # It knows nobody, and stores nothing yet.
        assert paths_of(first.directory) == {}
        first.directory.call_peers({second.peer_id: (second.address,)}, 30.0)
        assert paths_of(first.directory) == {first.peer_id: 1}
        publish(second.directory, "peers", "0", claim(second, 2), LIFE_S)
        assert paths_of(first.directory) == {first.peer_id: 1, second.peer_id: 2}
        # What it said is said again, with its admission; others reach it where it was.
        first.directory.say_all_again()
        assert publish(first.directory, "peers", "0", claim(first, 1), LIFE_S)
        assert first.address == address
        os.kill(second.dht.pid, signal.SIGKILL)
        wait_until(lambda: second.dht.starts == 2)
        second.directory.call_peers({first.peer_id: (address,)}, 30.0)
        assert paths_of(second.directory) == {first.peer_id: 1, second.peer_id: 2}
