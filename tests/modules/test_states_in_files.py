"""Large arrays in memory of their own, and states that lie in their files."""

import math

import pytest
import torch

from dipaco.modules.device import LEAST_OWN_VALUES, LOOKED_AT_VALUES, all_finite, own_pages
from dipaco.modules.layout import ModuleLayout
from dipaco.modules.state import ModuleState, PathProgress, read_state, write_state

SIZE = LEAST_OWN_VALUES + 3
LAYOUT = ModuleLayout(("w",), ((SIZE,),))


@pytest.mark.parametrize("count", [0, 5, SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_pages_are_zeros_that_may_be_written(count, dtype):
    flat = own_pages(count, dtype)
    assert (flat.shape, flat.dtype) == ((count,), dtype)
    assert not flat.any()
    assert bool((flat.add_(1) == 1).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_anywhere(bad):
    flat = torch.linspace(-1e38, 1e38, LOOKED_AT_VALUES + 2)
    assert all_finite(flat)
    assert all_finite(flat[:0])
    for place in (0, LOOKED_AT_VALUES // 2, -1):
        spoilt = flat.clone()
        spoilt[place] = bad
        assert not all_finite(spoilt)


def made_state(value=1.0):
    parameters = torch.full((SIZE,), value)
    return ModuleState("L0.E0", 1, parameters, parameters / 2, {0: PathProgress(5, 0, 5, 5)}, LAYOUT, 1.5)


def test_a_state_lies_in_its_file_for_all_who_hold_it(tmp_path):
    state, file = made_state(), tmp_path / "state"
    numbers, digest = state.parameters.clone(), state.digest
    write_state(state, file)
    saved = read_state(file, LAYOUT, digest)
    state.rest_on(saved)
    assert state.parameters.data_ptr() == saved.parameters.data_ptr()
    file.unlink()  # What is mapped stays readable.
    assert torch.equal(state.parameters, numbers)
    assert torch.equal(state.momentum, numbers / 2)
    with pytest.raises(ValueError, match="is another one"):
        state.rest_on(made_state(2.0))
