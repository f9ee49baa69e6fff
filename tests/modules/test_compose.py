"""Modules go into a model and come out of it unchanged, in place."""

import pytest
import torch

from dipaco.modules.compose import add_to_module, gather_module, lent_parameters, load_path, scatter_module
from dipaco.modules.layout import layout_of
from dipaco.modules.state import genesis_state
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.grid import Grid

MODEL = ModelConfig(vocabulary_size=32, block_count=3, hidden_size=16, head_count=2, sequence_length=16)
GRID = Grid(MODEL, GridConfig(modules_per_level=(2, 2), private_blocks=(1,)))


def model_of(seed):
    model = PathModel(MODEL)
    initialise(model, seed)
    return model


def states_of(seed=0):
    """Every module from another base, so that a mix-up shows."""
    return {
        module: genesis_state(module, layout_of(GRID, module), dict(model_of(seed + i).named_parameters()))
        for i, module in enumerate(GRID.modules())
    }


def test_a_path_is_its_modules():
    model, states = model_of(99), states_of()
    kept = dict(model.named_parameters())
    for path in range(GRID.path_count):
        load_path(model, GRID, path, states)
        for module in GRID.modules_of_path(path):
            assert torch.equal(gather_module(model, GRID, module), states[module].parameters)
    # In place: optimizers and compiled functions hold these very tensors.
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_missing_module_changes_nothing():
    model, states = model_of(99), states_of()
    before = [p.detach().clone() for p in model.parameters()]
    del states["P3"]
    with pytest.raises(KeyError, match="P3"):
        load_path(model, GRID, 3, states)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_gathered_parameters_are_a_copy():
    model = model_of(0)
    flat = gather_module(model, GRID, "L0.E1")
    before = flat.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(flat, before)
    assert not flat.requires_grad
    scatter_module(model, GRID, "L0.E1", flat)
    flat.zero_()
    assert torch.equal(gather_module(model, GRID, "L0.E1"), before)


def test_scatter_touches_only_its_module():
    model = model_of(0)
    others = {m: gather_module(model, GRID, m) for m in ("L1.E0", "P0")}
    scatter_module(model, GRID, "L0.E0", torch.zeros(layout_of(GRID, "L0").size))
    for module, flat in others.items():
        assert torch.equal(gather_module(model, GRID, module), flat)
    with pytest.raises(ValueError, match="elements"):
        scatter_module(model, GRID, "L0.E0", torch.zeros(3))


def test_parameters_are_lent_without_a_copy_and_come_back():
    model, path = model_of(0), 0
    states = {
        module: genesis_state(module, layout_of(GRID, module), dict(model_of(1).named_parameters()))
        for module in GRID.modules_of_path(path)
    }
    own = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    with lent_parameters(model, GRID, path, states):
        for module, state in states.items():
            for name, view in layout_of(GRID, module).views(state.parameters).items():
                assert model.get_parameter(name).data_ptr() == view.data_ptr()
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == own[name][0]
        assert torch.equal(parameter, own[name][1])
    del states[GRID.modules_of_path(path)[0]]
    with pytest.raises(KeyError), lent_parameters(model, GRID, path, states):
        pass


def test_progress_since_a_snapshot_is_put_on_a_new_anchor():
    model = model_of(0)
    snapshot = gather_module(model, GRID, "L1.E0")
    anchor = gather_module(model_of(1), GRID, "L1.E0")
    kept = anchor.clone(), snapshot.clone()
    local = snapshot.clone()
    local[:100] += 0.5
    scatter_module(model, GRID, "L1.E0", local)
    add_to_module(model, GRID, "L1.E0", anchor, snapshot)
    merged = gather_module(model, GRID, "L1.E0")
    assert torch.equal(merged, (local - snapshot) + anchor)
    assert torch.equal(merged[100:], anchor[100:])  # exactly, where nothing was trained since
    assert torch.equal(anchor, kept[0])
    assert torch.equal(snapshot, kept[1])
