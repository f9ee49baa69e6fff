"""Best-path files: one byte string for one content, and nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from dipaco.modules import best_parameters
from dipaco.modules.best_parameters import (
    BestParameters,
    BestParametersStore,
    best_parameters_chunks,
    best_parameters_of,
    claim_holds,
    greatest_best_path_bytes,
    read_best_parameters,
    read_best_parameters_summary,
    write_best_parameters,
)
from dipaco.modules.compose import load_path
from dipaco.modules.config import GridConfig, ModelConfig
from dipaco.modules.errors import IntegrityError, StorageError
from dipaco.modules.evaluate import LossSum
from dipaco.modules.grid import Grid
from dipaco.modules.state import ModuleState, genesis_state
from dipaco.modules.transformer import PathModel, initialise

MODEL = ModelConfig(
    vocabulary_size=32, block_count=3, hidden_size=8, head_count=2, sequence_length=8
)
SCORE = LossSum(123.25, 40)


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid(MODEL, GridConfig(modules_per_level=(2, 2), private_blocks=(1,)))


@pytest.fixture(scope="module")
def states(grid: Grid) -> dict[str, ModuleState]:
    """Every module with parameters of its own."""
    made = {}
    for number, module in enumerate(grid.modules()):
        model = PathModel(MODEL)
        initialise(model, number)
        base = {name: p.detach() for name, p in model.named_parameters()}
        made[module] = genesis_state(module, grid.layout(module), base)
    return made


@pytest.fixture(scope="module")
def best(grid: Grid, states: dict[str, ModuleState]) -> BestParameters:
    return best_parameters_of(grid, 2, 7, SCORE, states)


def content(best: BestParameters) -> bytes:
    return b"".join(bytes(chunk) for chunk in best_parameters_chunks(best))


def test_the_model_is_that_of_the_states(
    grid: Grid, states: dict[str, ModuleState], best: BestParameters
) -> None:
    composed, loaded = PathModel(MODEL), PathModel(MODEL)
    load_path(composed, grid, 2, states)
    best.load_into(loaded)
    for name, parameter in composed.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    assert best.digests == {m: states[m].digest for m in grid.modules_of_path(2)}


def test_bytes_come_back_and_any_tool_reads_them(
    tmp_path: Path, grid: Grid, best: BestParameters
) -> None:
    again = read_best_parameters(content(best), grid, best.sha256, path=2)
    assert content(again) == content(best)
    assert again.held_out_loss == SCORE
    assert again.round_index == 7
    assert again.sha256 == best.sha256
    assert len(content(best)) <= greatest_best_path_bytes(grid)
    store = BestParametersStore(tmp_path / "best", grid)
    assert store.load(2) is None
    held = store.hold(best)
    file = tmp_path / "best" / "P00002.safetensors"
    assert store.size_bytes(held.path) == file.stat().st_size
    assert store.find(held.sha256) == file
    assert read_best_parameters_summary(file).held_out_loss == SCORE
    tensors = safetensors.torch.load_file(file)
    assert set(tensors) == {name for name, _ in PathModel(MODEL).named_parameters()}


def test_one_file_a_path_and_an_earlier_life_is_taken_up(
    tmp_path: Path, grid: Grid, states: dict[str, ModuleState], best: BestParameters
) -> None:
    store = BestParametersStore(tmp_path, grid)
    store.hold(best)
    better = best_parameters_of(grid, 2, 9, LossSum(100.0, 40), states)
    store.hold(better)
    assert store.find(best.sha256) is None
    (tmp_path / "P00001.safetensors").write_bytes(b"damaged")
    (tmp_path / "P00000.safetensors").write_bytes(content(better))  # of path 2
    again = BestParametersStore(tmp_path, grid)
    assert [(h.path, h.sha256, h.round_index) for h in again.load_from_disk()] == [
        (2, better.sha256, 9)
    ]
    again.drop(2)
    assert again.all() == ()
    assert not again.file(2).exists()


def test_what_is_being_replaced_is_found_under_no_hash(
    tmp_path: Path,
    grid: Grid,
    states: dict[str, ModuleState],
    best: BestParameters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = BestParametersStore(tmp_path, grid)
    store.hold(best)
    seen = []

    def write(better: BestParameters, file: Path) -> None:
        write_best_parameters(better, file)
        seen.append(store.find(best.sha256))
        if better.round_index == 11:
            raise StorageError("the disk is full")

    monkeypatch.setattr(best_parameters, "write_best_parameters", write)
    better = best_parameters_of(grid, 2, 9, LossSum(100.0, 40), states)
    store.hold(better)
    assert store.find(better.sha256) == store.file(2)
    with pytest.raises(StorageError):
        store.hold(best_parameters_of(grid, 2, 11, LossSum(90.0, 40), states))
    assert seen == [None, None]


def changed_header(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    """Return the bytes with other content in the header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    inside = json.loads(header["__metadata__"]["best_path"])
    change(inside)
    header["__metadata__"]["best_path"] = json.dumps(inside, sort_keys=True, separators=(",", ":"))
    encoded = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + length :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(path=1), "expected the best of path 2"),
        (lambda h: h.update(path=4), "expected the best of path 2"),
        (lambda h: h.update(round=-1), "ValueError"),
        (lambda h: h.update(nll=float("nan")), "ValueError"),
        (lambda h: h.update(nll=-1.0), "ValueError"),
        (lambda h: h.update(nll=1), "ValueError"),
        (lambda h: h.update(tokens=0), "ValueError"),
        (lambda h: h.update(extra=1), "canonical"),
        (lambda h: h.pop("modules"), "KeyError"),
        (lambda h: h["modules"].pop("P2"), "other modules"),
        (lambda h: h["modules"].update(P2="x"), "ValueError"),
    ],
)
def test_a_header_that_lies_is_refused(
    grid: Grid, best: BestParameters, change: Callable[[dict[str, object]], None], message: str
) -> None:
    with pytest.raises(IntegrityError, match=message):
        read_best_parameters(changed_header(content(best), change), grid, path=2)


def test_other_bytes_are_refused(grid: Grid, best: BestParameters) -> None:
    data = content(best)
    not_finite = bytearray(data)
    not_finite[-4:] = b"\x00\x00\xc0\x7f"
    for bad in (b"", data[:100], data[:-4], data + b"\0" * 4, bytes(not_finite)):
        with pytest.raises(IntegrityError):
            read_best_parameters(bad, grid, path=2)
    with pytest.raises(IntegrityError, match="hash"):
        read_best_parameters(data, grid, "0" * 64)
    other = Grid(MODEL, GridConfig(modules_per_level=(2, 2), private_embedding=True))
    with pytest.raises(IntegrityError):
        read_best_parameters(data, Grid(MODEL.model_copy(update={"block_count": 4}), other.config))


def test_a_claim_holds_when_the_loss_is_found_again() -> None:
    assert claim_holds(LossSum(100.0, 50), LossSum(100.9, 50))
    assert claim_holds(LossSum(100.0, 50), LossSum(60.0, 50))
    assert not claim_holds(LossSum(100.0, 50), LossSum(101.1, 50))
    assert not claim_holds(LossSum(100.0, 50), LossSum(100.0, 49))
    assert not claim_holds(LossSum(100.0, 50), LossSum(float("nan"), 50))
    assert not claim_holds(LossSum(), LossSum())
    with pytest.raises(ValueError, match="need a held-out loss"):
        best_parameters_of(None, 0, 0, LossSum(float("inf"), 1), {})  # type: ignore[arg-type]
