import pytest
import torch

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.modules.compose import load_path
from dipaco.modules.grow import Growth, check_genesis, check_genesis_index, path_parameters
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState, PathProgress
from dipaco.modules.transformer import EMBEDDING, PathModel
from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.grid import Grid

MODEL = ModelConfig(vocabulary_size=16, block_count=4, hidden_size=8, head_count=1, sequence_length=8)


def grid_of(levels, model=MODEL, **fields):
    return Grid(model, GridConfig.model_validate({"modules_per_level": levels, **fields}))


def trained(grid):
    """States as after some training: every number of every module is another one."""
    states = {}
    for number, module in enumerate(grid.modules()):
        layout, generator = layout_of(grid, module), torch.Generator().manual_seed(number)
        states[module] = ModuleState(
            module,
            7,
            torch.randn(layout.size, generator=generator),
            torch.randn(layout.size, generator=generator),
            {path: PathProgress(64, 6, 16, 64) for path in grid.paths_of_module(module)},
            layout,
            1.5,
        )
    return states


def grown(old, new):
    before = trained(old)
    return before, {state.module: state for state in Growth(old, new).states(before.__getitem__)}


def both(state, name):
    return (state.layout.views(state.parameters)[name], state.layout.views(state.momentum)[name])


def model_of(grid, path, states):
    model = PathModel(grid.model)
    load_path(model, grid, path, states)
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("fields", [{}, {"private_blocks": (1, 3), "private_embedding": True}])
def test_the_same_grid_carries_everything_over_bit_for_bit(fields):
    grid = grid_of((2, 2), **fields)
    before, after = grown(grid, grid)
    assert tuple(after) == grid.modules()
    for module, state in after.items():
        assert torch.equal(state.parameters, before[module].parameters)
        assert torch.equal(state.momentum, before[module].momentum)
        assert (state.version, state.tokens, dict(state.progress)) == (0, 0, {})
        assert state.usual_norm == pytest.approx(float(state.parameters.norm()) / 4)


def test_a_dense_model_is_forked_into_every_path():
    dense = grid_of((1,))
    grid = grid_of((2, 4), private_blocks=(2,), private_head=True)
    before, after = grown(dense, grid)
    expected = path_parameters(dense, 0, before.__getitem__)
    for path in range(8):
        for name, value in model_of(grid, path, after).items():
            assert torch.equal(value, expected[name]), name
    for state in after.values():
        for name in state.layout.names:
            assert torch.equal(both(state, name)[1], both(before["L0.E0"], name)[1])


def test_every_path_of_a_grown_grid_begins_as_its_origin():
    fields = {"private_blocks": (1,), "private_embedding": True}
    old, new = grid_of((2, 2), **fields), grid_of((4, 4), **fields)
    before, after = grown(old, new)
    growth = Growth(old, new)
    assert [growth.origin_path(path) for path in range(16)] == [
        2 * (first // 2) + second // 2 for first in range(4) for second in range(4)
    ]
    for path in range(16):
        origin = model_of(old, growth.origin_path(path), before)
        assert all(torch.equal(v, origin[n]) for n, v in model_of(new, path, after).items())
    assert torch.equal(after["L1.E3"].parameters, before["L1.E1"].parameters)
    assert torch.equal(after["L1.E1"].momentum, before["L1.E0"].momentum)
    assert growth.unused() == ()


def test_an_added_path_begins_as_a_copy_and_the_others_go_on():
    fields = {"private_blocks": (1,), "private_embedding": True}
    old, new = grid_of((2, 2), added_paths=1, **fields), grid_of((2, 2), added_paths=3, **fields)
    before = trained(old)
    growth = Growth(old, new, copied=(2, 4))
    after = {state.module: state for state in growth.states(before.__getitem__)}
    assert [growth.origin_path(path) for path in range(7)] == [0, 1, 2, 3, 4, 2, 4]
    for path in range(7):
        origin = model_of(old, growth.origin_path(path), before)
        assert all(torch.equal(v, origin[n]) for n, v in model_of(new, path, after).items())
    for module in old.modules():
        assert torch.equal(after[module].parameters, before[module].parameters)
        assert torch.equal(after[module].momentum, before[module].momentum)
    assert torch.equal(after["L1.E3"].momentum, before["L1.E0"].momentum)
    assert growth.unused() == ()


def test_another_grid_has_no_place_for_added_paths():
    old, new = grid_of((2, 2), added_paths=1), grid_of((4, 2))
    assert Growth(old, new).unused() == ("L0.E2", "L1.E2")
    assert Growth(old, grid_of((8,))).origin_path(7) == 3


def test_paths_survive_another_number_of_levels():
    flat, grid = grid_of((4,)), grid_of((2, 2))
    before, after = grown(grid, flat)
    for path in range(4):
        origin = model_of(grid, path, before)
        assert all(torch.equal(v, origin[n]) for n, v in model_of(flat, path, after).items())
    # The other way paths have to share: a level takes evenly spread alternatives.
    _, shared = grown(flat, grid)
    flat_states = trained(flat)
    for level in (0, 1):
        for number in (0, 1):
            state = shared[f"L{level}.E{number}"]
            for name in state.layout.names:
                assert torch.equal(both(state, name)[0], both(flat_states[f"L0.E{2 * number}"], name)[0])
    assert Growth(flat, grid).unused() == ("L0.E1", "L0.E3")


def test_private_becomes_shared_as_the_mean_and_shared_becomes_private_as_a_copy():
    old = grid_of((2, 2), private_blocks=(1,), private_embedding=True)
    new = grid_of((2, 2), private_blocks=(2,))
    before, after = grown(old, new)
    name = "model.layers.1.self_attn.q_proj.weight"
    for index, part in ((0, "parameters"), (1, "momentum")):
        mean = (both(before["P2"], name)[index].double() + both(before["P3"], name)[index]) / 2
        assert torch.equal(both(after["L0.E1"], name)[index], mean.float()), part
        embedding = both(before["P0"], EMBEDDING)[index].double()
        embedding = (embedding + both(before["P1"], EMBEDDING)[index]) / 2
        assert torch.equal(both(after["L0.E0"], EMBEDDING)[index], embedding.float())
    name = "model.layers.2.self_attn.q_proj.weight"
    for path in range(4):
        assert torch.equal(both(after[f"P{path}"], name)[0], both(before[f"L1.E{path % 2}"], name)[0])


def test_growing_is_deterministic():
    old, new = grid_of((2, 2), private_blocks=(1,)), grid_of((4, 2))
    first, second = (grown(old, new)[1] for _ in range(2))
    assert {m: s.digest for m, s in first.items()} == {m: s.digest for m, s in second.items()}


def test_another_model_is_refused():
    other = MODEL.model_copy(update={"hidden_size": 16})
    with pytest.raises(ConfigurationError, match="hidden_size is 16, but .* trained with 8"):
        Growth(grid_of((2, 2)), grid_of((2, 2), other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("L1.E0"), "names no state of module L1.E0"),
        (lambda index: index.update({"L9.E9": "0" * 64}), "'L9.E9', no module"),
        (lambda index: index.update({"L0.E0": "nonsense"}), "not a table of modules"),
        (lambda index: index.update({"L0.E0": 3}), "not a table of modules"),
    ],
)
def test_a_wrong_index_is_refused(change, message):
    grid = grid_of((2, 2))
    index = dict.fromkeys(grid.modules(), "0" * 64)
    assert check_genesis_index(index, grid) == index
    change(index)
    with pytest.raises(IntegrityError, match=message):
        check_genesis_index(index, grid)
    with pytest.raises(IntegrityError, match="not a table"):
        check_genesis_index(["L0.E0"], grid)


def test_a_run_begins_with_version_0_of_the_right_module():
    grid = grid_of((2, 2))
    before, after = grown(grid, grid)
    assert check_genesis(after["L0.E0"], "L0.E0") is after["L0.E0"]
    with pytest.raises(IntegrityError, match="a state of L0.E0 for L0.E1"):
        check_genesis(after["L0.E0"], "L0.E1")
    with pytest.raises(IntegrityError, match="version 7"):
        check_genesis(before["L0.E0"], "L0.E0")
