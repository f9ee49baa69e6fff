"""The directory over two real DHT nodes on loopback: publish, read, withdraw, refuse, fail."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dipaco.dht.directory import Directory
from dipaco.dht.guarded_dht import CALL_LIMIT_S
from dipaco.dht.identity import load_or_create_identity
from dipaco.dht.manifest import load_or_create_operator_key, sign_manifest
from dipaco.dht.node import join_dht, select_run
from dipaco.dht.records import (
    BlobRecord,
    ClaimRecord,
    HoldingRecord,
    ProgressEntry,
    ProgressRecord,
    record_key,
    record_subkey,
)
from dipaco.modules.errors import AddressError, NetworkError, RunSelectionError, UnreachableError
from support.dht_pair import LOOPBACK, TestNode, node_pair, start_node, wait_until
from support.make_plan import make_plan

NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LIFE_S = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestNode, TestNode]]:
    with node_pair(tmp_path_factory.mktemp("pair")) as nodes:
        yield nodes


def claim(node: TestNode, path: int) -> ClaimRecord:
    return ClaimRecord(
        peer_id=node.peer_id, path=path, state="training", since_s=time.time(), round=0
    )


def holding(node: TestNode, module: str) -> HoldingRecord:
    return HoldingRecord(
        peer_id=node.peer_id,
        module=module,
        version=1,
        digest="a" * 64,
        tokens=5,
        round=0,
        bytes=9,
    )


def directory_of(node: TestNode, number: int) -> Directory:
    """Return a directory of a run that no other test uses."""
    return Directory(node.dht, node.identity, f"{number:016x}")


def paths_of(directory: Directory) -> dict[str, int]:
    return {record.peer_id: record.path for record in directory.read_claims()}


def test_what_one_publishes_the_other_reads(pair: tuple[TestNode, TestNode]) -> None:
    first, second = pair
    assert first.directory.publish_claim(claim(first, 1), LIFE_S)
    assert second.directory.publish_claim(claim(second, 2), LIFE_S)
    expected = {first.peer_id: 1, second.peer_id: 2}
    assert paths_of(first.directory) == paths_of(second.directory) == expected
    assert first.directory.publish_claim(claim(first, 3), LIFE_S)
    assert paths_of(second.directory)[first.peer_id] == 3


def test_a_withdrawn_claim_is_gone_at_once_and_can_come_back(
    pair: tuple[TestNode, TestNode],
) -> None:
    mine, theirs = (directory_of(node, 2) for node in pair)
    mine.publish_claim(claim(pair[0], 1), LIFE_S)
    assert paths_of(theirs)
    assert mine.withdraw_claim()
    assert paths_of(theirs) == paths_of(mine) == {}
    assert mine.publish_claim(claim(pair[0], 2), LIFE_S)
    assert paths_of(theirs) == {pair[0].peer_id: 2}


def test_a_restarted_peer_overwrites_what_its_earlier_life_published(
    pair: tuple[TestNode, TestNode],
) -> None:
    before, reader = directory_of(pair[0], 3), directory_of(pair[1], 3)
    before.publish_claim(claim(pair[0], 1), 500.0)
    restarted = directory_of(pair[0], 3)
    assert restarted.publish_claim(claim(pair[0], 2), LIFE_S)
    assert paths_of(reader) == {pair[0].peer_id: 2}


def test_records_expire(pair: tuple[TestNode, TestNode]) -> None:
    mine, theirs = (directory_of(node, 4) for node in pair)
    life_s = 1.0
    # On a slow machine a second may pass before it is read.
    while not (mine.publish_claim(claim(pair[0], 1), life_s) and paths_of(theirs)):
        life_s *= 2
        assert life_s < LIFE_S
    wait_until(lambda: not paths_of(theirs), 2 * LIFE_S)


def test_holdings_of_many_modules_are_stored_and_read_together(
    pair: tuple[TestNode, TestNode],
) -> None:
    mine, theirs = (directory_of(node, 5) for node in pair)
    modules = tuple(f"L0.E{n}" for n in range(40))
    with mine.together():
        for module in modules:
            assert mine.publish_holding(holding(pair[0], module), LIFE_S)
    theirs.publish_holding(holding(pair[1], "L0.E1"), LIFE_S)
    found = theirs.read_holdings((*modules, "L9.E9"))
    assert {module: len(records) for module, records in found.items()} == {
        **dict.fromkeys(modules, 1),
        "L0.E1": 2,
        "L9.E9": 0,
    }
    mine.withdraw_holding("L0.E1")
    assert [h.peer_id for h in theirs.read_holdings(["L0.E1"])["L0.E1"]] == [pair[1].peer_id]


def test_blob_holders_are_the_others(pair: tuple[TestNode, TestNode]) -> None:
    sha256 = "b" * 64
    for node in pair:
        record = BlobRecord(peer_id=node.peer_id, sha256=sha256, bytes=3)
        assert node.directory.publish_blob(record, LIFE_S)
    first, second = pair
    assert first.directory.find_blob_holders(sha256) == (second.peer_id,)
    assert second.directory.find_blob_holders(sha256) == (first.peer_id,)
    assert first.directory.find_blob_holders("c" * 64) == ()


def test_forged_and_misplaced_records_enter_no_node(pair: tuple[TestNode, TestNode]) -> None:
    first, second = pair
    run_id = f"{6:016x}"
    mine, reader = directory_of(first, 6), directory_of(second, 6)
    mine.publish_claim(claim(first, 1), LIFE_S)
    key = record_key("claims", run_id)
    owner = first.identity.public_key
    forger = second.identity.public_key

    def store(where: str, subkey: Any, value: Any, life_s: float = 100.0) -> bool:
        return bool(second.dht.store(where, value, time.time() + life_s, subkey=subkey))

    lie = claim(first, 3).model_dump()
    assert not store(key, record_subkey("claims", run_id, None, owner), lie)
    assert not store(key, record_subkey("claims", run_id, None, forger), lie)
    honest = claim(second, 3).model_dump()
    own_subkey = record_subkey("claims", run_id, None, forger)
    assert not store("another key", own_subkey, honest)
    assert not store(key, own_subkey, honest, life_s=1e6)
    assert not store(key, own_subkey, {**honest, "path": -1})
    assert not store(key, "a free subkey", honest)
    assert not second.dht.store(key, honest, time.time() + 100)
    assert paths_of(reader) == paths_of(mine) == {first.peer_id: 1}


def test_threads_and_long_records_share_the_pipe(pair: tuple[TestNode, TestNode]) -> None:
    first, second = pair
    entries = tuple(
        ProgressEntry(
            path=n,
            last_round=n,
            tokens=n,
            validation_nll=1.0,
            validation_tokens=1,
            train_loss=float(n),
        )
        for n in range(64)
    )
    record = ProgressRecord(peer_id=first.peer_id, entries=entries)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        directory = directory_of(first, 100 + number)
        try:
            for _ in range(5):
                assert directory.publish_progress(record, LIFE_S)
                assert len(directory.read_progress()[0].entries) == 64
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert directory_of(second, 103).read_progress()[0].entries == entries


# -- runs


def test_runs_are_listed_and_selected(pair: tuple[TestNode, TestNode], tmp_path: Path) -> None:
    first, second = pair
    reader = Directory(second.dht, second.identity, None)
    assert reader.list_manifests() == []
    with pytest.raises(RunSelectionError, match="holds no run"):
        select_run(reader, None)
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    plans = [make_plan(name="one"), make_plan(name="two", seed=1)]
    Directory(first.dht, first.identity, plans[0].run_id).publish_manifest(
        sign_manifest(plans[0], key), LIFE_S
    )
    assert select_run(reader, None).plan == plans[0]
    # Any peer may store it again.
    again = Directory(second.dht, second.identity, plans[0].run_id)
    assert again.publish_manifest(reader.list_manifests()[0].envelope, 2 * LIFE_S)
    Directory(first.dht, first.identity, plans[1].run_id).publish_manifest(
        sign_manifest(plans[1], key), LIFE_S
    )
    with pytest.raises(RunSelectionError, match="several runs.*one.*two.*--run"):
        select_run(reader, None)
    assert select_run(reader, "two").plan == plans[1]
    assert select_run(reader, plans[0].run_id).plan == plans[0]
    assert select_run(reader, plans[0].run_id[:8]).plan == plans[0]
    with pytest.raises(RunSelectionError, match="no run.*one.*two"):
        select_run(reader, "three")


def test_a_successor_of_the_same_operator_is_chosen(
    pair: tuple[TestNode, TestNode], tmp_path: Path
) -> None:
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    stranger = load_or_create_operator_key(tmp_path / "stranger.pem")
    old = make_plan(name="old", seed=2)
    new = make_plan(name="new", seed=3, start_s=2000.0, successor_of=old.run_id)
    usurper = make_plan(name="usurper", seed=4, start_s=2000.0, successor_of=old.run_id)

    class Listing(Directory):
        def list_manifests(self) -> list[Any]:
            from dipaco.dht.manifest import verify_manifest

            return [verify_manifest(envelope) for envelope in envelopes]

    listing = Listing(pair[0].dht, pair[0].identity, None)
    envelopes = [sign_manifest(old, key), sign_manifest(new, key)]
    assert select_run(listing, None).plan == new
    assert select_run(listing, "old").plan == old
    envelopes = [sign_manifest(old, key), sign_manifest(usurper, stranger)]
    with pytest.raises(RunSelectionError, match="several runs"):
        select_run(listing, None)


# -- joining


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense", "not a multiaddress"),
        ("/ip4/127.0.0.1/tcp/9", "does not end with /p2p/"),
        ("/ip4/300.0.0.1/tcp/9/p2p/" + NOBODY, "not a multiaddress"),
        ("/ip4/127.0.0.1/tcp/9/p2p/short", "not a multiaddress"),
    ],
)
def test_a_malformed_address_is_shown_beside_an_example(
    tmp_path: Path, address: str, message: str
) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    with pytest.raises(AddressError, match=message) as caught:
        join_dht([address], identity=identity)
    assert address in str(caught.value)
    assert "/ip4/203.0.113.5/tcp/31337/p2p/" in str(caught.value)
    identity.release()


def test_when_nobody_answers_it_says_so(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
    with pytest.raises(UnreachableError, match="none of .*tcp/9.* answered"):
        join_dht([address], identity=identity, host_maddrs=(LOOPBACK,))
    identity.release()


def test_one_living_address_of_several_is_enough(
    pair: tuple[TestNode, TestNode], tmp_path: Path
) -> None:
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
    third = start_node(tmp_path, dead, pair[0].address, client_mode=True)
    try:
        pair[0].directory.publish_claim(claim(pair[0], 1), LIFE_S)
        assert paths_of(third.directory)[pair[0].peer_id] == 1
    finally:
        third.close()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"tcp/{port}.*--port"):
            join_dht([], identity=identity, host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
    identity.release()


def test_port_zero_cannot_be_announced(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    with pytest.raises(AddressError, match="announces port 0"):
        join_dht([], identity=identity, announce_maddrs=("/ip4/203.0.113.5/tcp/0",))
    identity.release()


# -- failing


def test_a_dead_dht_process_is_a_network_error_and_not_a_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    node = start_node(tmp_path)
    node.directory.publish_claim(claim(node, 1), LIFE_S)
    assert node.directory.failure is None
    assert node.dht.pid is not None
    os.kill(node.dht.pid, signal.SIGSTOP)
    failures: list[BaseException] = []
    begun = threading.Event()

    def read() -> None:
        begun.set()
        try:
            node.directory.read_claims()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    os.kill(node.dht.pid, signal.SIGKILL)
    reader.join(60)
    assert not reader.is_alive()
    assert isinstance(failures[0], NetworkError)
    assert node.directory.failure == "the DHT process has ended"
    started = time.monotonic()
    with pytest.raises(NetworkError, match="has ended"):
        node.directory.publish_claim(claim(node, 2), LIFE_S)
    assert time.monotonic() - started < CALL_LIMIT_S
    node.identity.release()
