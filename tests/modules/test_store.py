"""The store keeps the last good state and the one before it, whatever happens to files."""

import json
import logging
from pathlib import Path

import pytest
import torch

from dipaco.base.errors import StorageError
from dipaco.modules.layout import ModuleLayout
from dipaco.modules.state import ModuleState, PathProgress, write_state
from dipaco.modules.store import StateStore

LAYOUT = ModuleLayout(("w",), ((4,),))


def state_of(version, module="L0.E0", value=None):
    return ModuleState(
        module=module,
        version=version,
        parameters=torch.full((4,), float(version if value is None else value)),
        momentum=torch.zeros(4),
        progress={1: PathProgress(100 * version, version, 100)} if version else {},
        layout=LAYOUT,
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
    assert loaded is not None
    assert loaded.digest == state_of(3).digest
    assert versions(store) == [3, 2]
    assert store.digests("P12") == (state_of(9, "P12").digest,)


def test_latest_is_the_last_saved_not_the_highest_version(store):
    # A heavier state that won after a network split may have fewer outer steps.
    store.save(state_of(8))
    store.save(state_of(5))
    loaded = store.load_latest("L0.E0", LAYOUT)
    assert loaded is not None
    assert loaded.version == 5


def test_files_for_people_and_for_serving(store):
    path = store.save(state_of(2))
    described = json.loads(path.with_suffix(".json").read_text())
    assert described["module"] == "L0.E0"
    assert described["version"] == 2
    assert described["digest"] == state_of(2).digest
    assert described["tokens"] == 200
    assert described["progress"] == {"1": {"tokens": 200, "last_round": 2, "usual": 100}}
    assert described["saved_at"].endswith("Z")
    assert store.find(state_of(2).digest) == path
    assert store.find("0" * 64) is None


def test_saving_again_writes_nothing(store):
    path = store.save(state_of(1))
    before = path.stat().st_mtime_ns
    assert store.save(state_of(1)) == path
    assert path.stat().st_mtime_ns == before
    store.save(state_of(2))
    store.save(state_of(1))  # back to an older one: it is the newest now
    assert versions(store) == [1, 2]


def test_only_two_states_stay(store):
    for version in range(6):
        store.save(state_of(version))
    names = sorted(file.suffix for file in (store.folder / "L0.E0").iterdir())
    assert names == [".json", ".json", ".safetensors", ".safetensors"]
    assert store.find(state_of(4).digest) is not None
    assert store.find(state_of(3).digest) is None


def test_a_damaged_file_is_reported_once_and_the_previous_used(store, caplog):
    store.save(state_of(1))
    damage(store.save(state_of(2)))
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        loaded = store.load_latest("L0.E0", LAYOUT)
    assert loaded is not None
    assert loaded.version == 1
    assert len(caplog.records) == 1
    assert "damaged state of L0.E0" in caplog.text
    assert "version 1 is used" in caplog.text
    # The damaged one no longer counts among the two that are kept.
    store.save(state_of(3))
    assert versions(store) == [3, 1]


def test_nothing_undamaged(store, caplog):
    damage(store.save(state_of(1)))
    store.save(state_of(2)).write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        assert store.load_latest("L0.E0", LAYOUT) is None
    assert len(caplog.records) == 1
    assert "there is no other" in caplog.text
    store.save(state_of(3))
    assert versions(store) == [3]


def test_a_state_in_the_folder_of_another_module(store):
    other = state_of(1, module="L0.E1")
    folder = store.folder / "L0.E0"
    folder.mkdir()
    write_state(other, folder / f"0000000001-{other.digest}.safetensors")
    assert store.load_latest("L0.E0", LAYOUT) is None


def test_a_missing_json_does_no_harm(store):
    path = store.save(state_of(1))
    path.with_suffix(".json").unlink()
    assert versions(store) == [1]
    assert store.load_latest("L0.E0", LAYOUT) is not None
    store.save(state_of(2))


def test_unreadable_headers_are_left_out_of_the_list(store):
    store.save(state_of(1))
    store.save(state_of(2)).write_bytes(b"rubbish, not a state at all")
    assert versions(store) == [1]


def test_optimizers_are_kept_for_a_return(store):
    assert store.load_optimizer(3) is None
    state = {"kind": "adamw", "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "n": 5}
    for path in (1, 2, 3):
        store.write_optimizer(path, {**state, "n": path})()
    assert store.load_optimizer(1) is None
    loaded = StateStore(store.folder).load_optimizer(3)
    assert loaded is not None
    assert loaded["n"] == 3
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], torch.ones(2))
    store.write_optimizer(3, {**state, "n": 7})()
    again = store.load_optimizer(3)
    assert again is not None
    assert again["n"] == 7
    assert store.load_optimizer(2) is not None
    assert len(list((store.folder / "optimizers").iterdir())) == 2


def test_a_damaged_optimizer_is_no_catastrophe(store, caplog):
    store.write_optimizer(3, {"a": torch.ones(100)})()
    (file,) = (store.folder / "optimizers").iterdir()
    file.write_bytes(file.read_bytes()[:50])
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        assert store.load_optimizer(3) is None
    assert "damaged optimizer state" in caplog.text
    assert not file.exists()


def test_code_in_an_optimizer_file_is_not_run(store, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (str(tmp_path / "sprung"),)

    folder = store.folder / "optimizers"
    folder.mkdir()
    torch.save({"trap": Trap()}, folder / "0000000001-path-3.pt")
    assert store.load_optimizer(3) is None
    assert not (tmp_path / "sprung").exists()


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot use"):
        StateStore(tmp_path / "file")
