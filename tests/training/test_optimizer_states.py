"""AdamW states lie on the disk for a return to their path."""

import logging
from pathlib import Path

import torch

from dipaco.training.optimizer_states import load_optimizer, write_optimizer


def test_optimizers_are_kept_for_a_return(tmp_path):
    assert load_optimizer(tmp_path, 3) is None
    state = {"kind": "adamw", "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "n": 5}
    for path in (1, 2, 3):
        write_optimizer(tmp_path, path, {**state, "n": path})()
    assert load_optimizer(tmp_path, 1) is None
    loaded = load_optimizer(tmp_path, 3)
    assert loaded["n"] == 3
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], torch.ones(2))
    write_optimizer(tmp_path, 3, {**state, "n": 7})()
    again = load_optimizer(tmp_path, 3)
    assert again["n"] == 7
    assert load_optimizer(tmp_path, 2) is not None
    assert len(list(tmp_path.glob("*.pt"))) == 2


def test_a_damaged_optimizer_is_no_catastrophe(tmp_path, caplog):
    write_optimizer(tmp_path, 3, {"a": torch.ones(100)})()
    (file,) = tmp_path.glob("*.pt")
    file.write_bytes(file.read_bytes()[:50])
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        assert load_optimizer(tmp_path, 3) is None
    assert "damaged optimizer state" in caplog.text
    assert not file.exists()


def test_code_in_an_optimizer_file_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (str(tmp_path / "sprung"),)

    torch.save({"trap": Trap()}, tmp_path / "path-3.pt")
    assert load_optimizer(tmp_path, 3) is None
    assert not (tmp_path / "sprung").exists()
