"""The store keeps the last good state and the one before it, whatever happens to files."""

import logging
import shutil
import subprocess
import sys

import pytest
import torch

from dipaco.base import kept_files
from dipaco.base.errors import StorageError
from dipaco.base.kept_files import SavedState
from dipaco.modules.layout import ModuleLayout
from dipaco.modules.saved_states import StateStore
from dipaco.modules.state import ModuleState, PathProgress, write_state
from dipaco.protocol.chain.steps import Head

LAYOUT = ModuleLayout(("w",), ((4,),))


def state_of(version, module="L0.E0", value=None):
    return ModuleState(
        module=module,
        version=version,
        parameters=torch.full((4,), float(version if value is None else value)),
        momentum=torch.zeros(4),
        progress={1: PathProgress(100 * version, version, 100, 100 * version)} if version else {},
        layout=LAYOUT,
        usual_norm=1.5,
    )


@pytest.fixture
def store(tmp_path):
    return StateStore(tmp_path / "states")


def versions(store):
    return [summary.version for summary in store.summaries("L0.E0")]


def damage(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def test_latest_state_comes_back(store):
    assert store.load_latest("L0.E0", LAYOUT) is None
    assert store.summaries("L0.E0") == []
    for version in range(4):
        store.save(state_of(version))
    store.save(state_of(9, module="P12"))
    loaded = StateStore(store.folder).load_latest("L0.E0", LAYOUT)
    assert loaded.digest == state_of(3).digest
    assert versions(store) == [3, 2]
    assert store.digests("P12") == (state_of(9, "P12").digest,)


def test_latest_is_the_last_saved_not_the_highest_version(store):
    # A heavier state that won after a network split may have fewer outer steps.
    store.save(state_of(8))
    store.save(state_of(5))
    loaded = store.load_latest("L0.E0", LAYOUT)
    assert loaded.version == 5


def test_what_the_index_tells_of_a_state(store):
    head = Head("L0.E0", "5" * 64, 2, 7, 4, state_of(2).digest, state_of(2).byte_size)
    path = store.save(state_of(2), head)
    assert store.heads("L0.E0") == [head]
    assert store.digest_after("L0.E0", head.step) == head.digest
    assert store.digest_after("L0.E0", "6" * 64) is None
    assert store.find(state_of(2).digest) == path
    assert store.find("0" * 64) is None
    # Of a state that was fetched by its digest alone nobody said after which step it is.
    store.save(state_of(3))
    assert store.heads("L0.E0") == [head]


def test_saving_again_writes_nothing(store):
    path = store.save(state_of(1))
    before = path.stat().st_mtime_ns
    assert store.save(state_of(1)) == path
    assert path.stat().st_mtime_ns == before
    store.save(state_of(2))
    store.save(state_of(1))  # back to an older one: it is the newest now
    assert versions(store) == [1, 2]


@pytest.fixture
def at_once(monkeypatch):
    """What is replaced goes at once, as large states do."""
    monkeypatch.setattr(kept_files, "SMALL_BYTES", 0)


def files_in(store):
    return sorted(file.name for file in store.folder.glob("??/*"))


def test_only_two_states_stay(store, at_once):
    for version in range(6):
        store.save(state_of(version))
    assert files_in(store) == sorted(state_of(version).digest for version in (4, 5))
    assert store.find(state_of(4).digest) is not None
    assert store.find(state_of(3).digest) is None


def test_a_small_state_is_served_a_while_after_another_took_its_place(tmp_path):
    now = [1e9]
    store = StateStore(tmp_path / "states")
    store.kept._now = lambda: now[0]
    for version in range(5):
        store.save(state_of(version))
        now[0] += 14.0
    # 0 was no longer one of the last two 28 s before the last was saved.
    assert files_in(store) == sorted(state_of(version).digest for version in range(5))
    store.save(state_of(5))
    assert files_in(store) == sorted(state_of(version).digest for version in range(1, 6))


def test_what_was_fetched_and_never_saved_goes_after_a_while(store, tmp_path):
    now = [1e9]
    store.kept._now = lambda: now[0]
    store.kept.tidy()
    fetched = state_of(7)
    write_state(fetched, store.kept.path(fetched.digest))
    store.kept.enter(fetched.digest, "fetched", "L0.E0")
    now[0] += 599.0
    store.save(state_of(8))
    assert store.find(fetched.digest) is not None
    now[0] += 2.0
    store.save(state_of(9))
    assert store.find(fetched.digest) is None


def test_what_one_peer_of_a_machine_forgets_stays_for_the_others(tmp_path, at_once):
    one, other = (StateStore(tmp_path / "states", name) for name in ("one", "other"))
    path = one.save(state_of(1))
    written = path.stat().st_mtime_ns
    assert other.save(state_of(1)) == path
    assert path.stat().st_mtime_ns == written, "it is here already"
    one.save(state_of(2))
    one.save(state_of(3))
    assert other.find(state_of(1).digest) == path
    assert other.digests("L0.E0") == tuple(state_of(version).digest for version in (3, 2, 1))
    one.remove("L0.E0")
    assert files_in(one) == [path.name]
    other.remove("L0.E0")
    assert files_in(one) == []


def test_states_are_found_without_an_index_and_where_nothing_can_be_written(store, tmp_path):
    for version in (3, 4):
        store.save(state_of(version))
    store.save(state_of(9, "P12"))
    copy = tmp_path / "copy"
    shutil.copytree(store.folder, copy, ignore=shutil.ignore_patterns("index*"))
    read_only = f'mount --bind {copy} {copy} && mount -o remount,bind,ro {copy} && exec "$@"'
    program = (
        "import sys; from pathlib import Path; from dipaco.modules.saved_states import StateStore;"
        "store = StateStore(Path(sys.argv[1]));"
        "print(*store.digests('L0.E0'), *store.digests('P12'), len(store.summaries('L0.E0')))"
    )
    said = subprocess.run(
        ["unshare", "-rm", "sh", "-c", read_only, "sh", sys.executable, "-c", program, str(copy)],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert said.split() == [*(state_of(v).digest for v in (4, 3)), state_of(9, "P12").digest, "2"]
    # A peer that goes on there makes an index of them.
    again = StateStore(copy, "peer")
    again.kept.tidy()
    again.save(state_of(5))
    assert StateStore(copy).digests("L0.E0") == tuple(state_of(version).digest for version in (5, 4))


def test_an_index_that_is_only_read_is_not_touched(store):
    store.save(state_of(1))
    store.kept.index.close()
    before = {file: file.stat().st_mtime_ns for file in store.folder.rglob("*")}
    assert StateStore(store.folder).newest_digest("L0.E0") == state_of(1).digest
    assert {file: file.stat().st_mtime_ns for file in store.folder.rglob("*")} == before


def test_a_damaged_file_is_reported_once_and_the_previous_used(store, caplog):
    store.save(state_of(1))
    damaged = store.save(state_of(2))
    damage(damaged)
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        loaded = store.load_latest("L0.E0", LAYOUT)
    assert loaded.version == 1
    assert damaged.is_file()  # It may be another one's, who finds out.
    assert len(caplog.records) == 1
    assert "damaged state of L0.E0" in caplog.text
    assert "version 1 is used" in caplog.text


def test_nothing_undamaged(store, caplog):
    damage(store.save(state_of(1)))
    store.save(state_of(2)).write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        assert store.load_latest("L0.E0", LAYOUT) is None
    assert len(caplog.records) == 1
    assert "there is no other" in caplog.text


def test_a_state_that_is_of_another_module(store):
    other = state_of(1, module="L0.E1")
    path = store.save(other)
    store.kept.save_state(1, "L0.E0", SavedState(other.digest, 1, path.stat().st_size))
    assert store.load_latest("L0.E0", LAYOUT) is None


def test_unreadable_headers_are_left_out_of_the_list(store):
    store.save(state_of(1))
    store.save(state_of(2)).write_bytes(b"rubbish, not a state at all")
    assert versions(store) == [1]


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot use"):
        StateStore(tmp_path / "file").save(state_of(1))
