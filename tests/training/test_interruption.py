"""A pass ends in its middle when somebody wants the machine back, and changes nothing."""

import pytest
import torch

from dipaco.training.interruption import PassInterrupted, end_passes_when
from support.runs.inner_loops import MODEL, batch_of, flat, loop_of, model_of


@pytest.mark.parametrize("looks", range(2 * MODEL.block_count))
def test_a_step_ends_at_any_block_and_changes_nothing(looks):
    model = model_of()
    answers = iter([False] * looks + [True])
    end_passes_when(lambda: next(answers, False), model)
    loop, undisturbed = loop_of(model), loop_of()
    before = flat(model)
    with pytest.raises(PassInterrupted):
        loop.step(batch_of(), 0)
    assert torch.equal(flat(model), before)
    assert loop.step(batch_of(), 0) == undisturbed.step(batch_of(), 0)
    assert torch.equal(flat(model), flat(undisturbed.model))
