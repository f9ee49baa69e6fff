"""The grid gives every parameter to one module, and paths and modules find each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco.base.errors import ConfigurationError
from dipaco.modules.layout import ModuleLayout, layout_of, parameter_counts
from dipaco.modules.transformer import EMBEDDING, FINAL_NORM, HEAD, PathModel
from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.grid import Grid


def small_model(**overrides):
    values = {"vocabulary_size": 32, "block_count": 4, "hidden_size": 16, "head_count": 2, "sequence_length": 16}
    return ModelConfig.model_validate({**values, **overrides})


def grid_of(model=None, **values):
    return Grid(model or small_model(), GridConfig.model_validate(values))


def test_first_level_is_the_most_significant_digit():
    grid = grid_of(modules_per_level=(2, 3))
    assert grid.path_count == 6
    assert grid.modules() == ("L0.E0", "L0.E1", "L1.E0", "L1.E1", "L1.E2")
    assert grid.modules_of_path(5) == ("L0.E1", "L1.E2")
    assert grid.modules_of_path(1) == ("L0.E0", "L1.E1")
    assert grid.paths_of_module("L0.E1") == (3, 4, 5)
    assert grid.paths_of_module("L1.E0") == (0, 3)
    assert grid.level_names == ("L0", "L1")


def test_private_modules_come_last():
    grid = grid_of(modules_per_level=(2, 2), private_blocks=(0, 3), private_embedding=True)
    assert grid.level_names == ("L0", "L1", "P")
    assert grid.modules_of_path(2) == ("L0.E1", "L1.E0", "P2")
    assert grid.modules()[-4:] == ("P0", "P1", "P2", "P3")
    assert grid.paths_of_module("P3") == (3,)
    assert grid.level_of("P3") == "P"
    assert layout_of(grid, "P3") == layout_of(grid, "P") != layout_of(grid, "L0")
    assert EMBEDDING in layout_of(grid, "P").names
    assert FINAL_NORM in layout_of(grid, "L1").names
    assert grid.level_offset("P") == 1.0
    assert grid.level_offset("L0") == pytest.approx(1 / 3)


def test_an_added_path_has_a_module_of_its_own_in_every_level():
    grid = grid_of(modules_per_level=(2, 3), private_head=True, added_paths=2)
    assert (grid.path_count, grid.config.combination_count) == (8, 6)
    assert grid.modules_of_path(5) == ("L0.E1", "L1.E2", "P5")
    assert grid.modules_of_path(6) == ("L0.E2", "L1.E3", "P6")
    assert grid.modules_of_path(7) == ("L0.E3", "L1.E4", "P7")
    assert grid.paths_of_module("L1.E4") == (7,)
    assert grid.paths_of_module("L0.E1") == (3, 4, 5)
    assert not grid.has_module("L0.E4")
    sizes = [layout_of(grid, module).size for module in grid.modules()]
    assert parameter_counts(grid)["total"] == sum(sizes)


def test_where_embedding_norm_and_head_belong():
    untied = small_model(tied_embedding=False)
    shared = grid_of(untied)
    assert EMBEDDING in layout_of(shared, "L0.E0").names
    assert {FINAL_NORM, HEAD} <= set(layout_of(shared, "L1.E0").names)
    private = grid_of(untied, private_head=True)
    assert set(layout_of(private, "P").names) == {FINAL_NORM, HEAD}
    assert set(layout_of(grid_of(private_head=True), "P").names) == {FINAL_NORM}


def test_paper_arithmetic_of_path_specific_modules():
    # DiPaCo 8x8: blocks 0, 5, 6, 11 and the embedding are private.
    model = small_model(block_count=12)
    grid = grid_of(model, modules_per_level=(8, 8), private_blocks=(0, 5, 6, 11), private_embedding=True)
    counts = parameter_counts(grid)
    block = sum(p.numel() for p in PathModel(model).model.layers[0].parameters())
    embedding = 32 * 16
    assert counts["private"] == 4 * block + embedding
    assert counts["shared"] == 8 * 4 * block + 8 * (4 * block + 16)
    assert counts["total"] == counts["shared"] + 64 * counts["private"]
    assert counts["path"] == sum(p.numel() for p in PathModel(model).parameters())


def test_steps_before_is_exact_for_thirds():
    grid = grid_of(private_blocks=(0,))
    assert [grid.steps_before(level, 9) for level in grid.level_names] == [3, 6, 9]
    assert [grid.steps_before(level, 4) for level in grid.level_names] == [1, 2, 4]


def test_given_offsets():
    grid = Grid(small_model(), GridConfig(), (0.25, 1.0))
    assert grid.level_offset("L0") == 0.25
    for wrong in ((0.5,), (0.0, 1.0), (0.5, 1.5)):
        with pytest.raises(ConfigurationError, match="level_offsets"):
            Grid(small_model(), GridConfig(), wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modules_per_level": (2,) * 5}, "5 levels do not fit in 4 blocks"),
        ({"private_blocks": (4,)}, "blocks 0 to 3"),
        ({"private_blocks": (-1,)}, "private_blocks"),
        ({"level_starts": (0, 4)}, "level_starts"),
        ({"level_starts": (1, 2)}, "level_starts"),
        ({"level_starts": (0, 0)}, "level_starts"),
        ({"level_starts": (0,)}, "level_starts"),
        ({"private_blocks": (0, 1), "private_embedding": True}, "level L0 has no shared"),
        ({"private_blocks": (2, 3), "private_head": True}, "level L1 has no shared"),
    ],
)
def test_impossible_grids(values, message):
    with pytest.raises(ConfigurationError, match=message):
        grid_of(**values)


def test_more_paths_than_anybody_trains_are_refused_before_a_grid_is_made():
    for modules in ((1024, 1024, 2), (1024,) * 1024):
        with pytest.raises(ValueError, match="more than 32768 paths"):
            GridConfig(modules_per_level=modules)


def test_a_level_may_live_from_the_embedding_alone():
    grid = grid_of(private_blocks=(0, 1))
    assert layout_of(grid, "L0").names == (EMBEDDING,)


def test_unknown_names_are_refused():
    grid = grid_of()
    for module in ("L0.E2", "P0", "L2.E0", "", "L0", "L0.E00"):
        assert not grid.has_module(module)
        with pytest.raises(ConfigurationError, match="does not exist"):
            grid.paths_of_module(module)
    for path in (-1, 4):
        with pytest.raises(ConfigurationError, match="paths 0 to 3"):
            grid.modules_of_path(path)


def test_views_share_memory_and_cover_everything():
    layout = ModuleLayout(("a", "b", "c"), ((2, 3), (4,), ()))
    flat = torch.arange(11.0)
    views = layout.views(flat)
    assert torch.equal(views["a"], torch.arange(6.0).view(2, 3))
    assert views["c"].item() == 10
    views["b"].zero_()
    assert flat[6:10].eq(0).all()
    with pytest.raises(ValueError, match="11 elements"):
        layout.views(torch.zeros(10))
    with pytest.raises(ValueError, match="sorted"):
        ModuleLayout(("b", "a"), ((1,), (1,)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_parameter_belongs_to_exactly_one_module_of_a_path(data):
    blocks = data.draw(st.integers(1, 6))
    levels = data.draw(st.integers(1, min(3, blocks)))
    model = small_model(block_count=blocks, tied_embedding=data.draw(st.booleans()))
    config = GridConfig(
        modules_per_level=tuple(data.draw(st.integers(1, 4)) for _ in range(levels)),
        private_blocks=tuple(data.draw(st.sets(st.integers(0, blocks - 1)))),
        private_embedding=data.draw(st.booleans()),
        private_head=data.draw(st.booleans()),
        added_paths=data.draw(st.integers(0, 2)),
    )
    try:
        grid = Grid(model, config)
    except ConfigurationError:
        return
    expected = {name: tuple(p.shape) for name, p in PathModel(model).named_parameters()}
    path = data.draw(st.integers(0, grid.path_count - 1))
    owned = [
        (name, shape)
        for module in grid.modules_of_path(path)
        for layout in [layout_of(grid, module)]
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    ]
    assert len(owned) == len(expected)
    assert dict(owned) == expected
    for module in grid.modules():
        paths = grid.paths_of_module(module)
        assert list(paths) == sorted(set(paths))
        assert all(module in grid.modules_of_path(other) for other in paths)
    assert math.prod(config.modules_per_level) + config.added_paths == grid.path_count
    for level in grid.level_names:
        of_level = [m for m in grid.modules() if grid.level_of(m) == level]
        covered = sorted(path for m in of_level for path in grid.paths_of_module(m))
        assert covered == list(range(grid.path_count))
