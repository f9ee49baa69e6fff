"""Scores add up however the rows are divided, stored or padded."""

import logging

import numpy as np
import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import PAD_TOKEN
from dipaco.training.scoring import row_losses, scoring_at_once, sum_losses
from support.runs.inner_loops import model_of


def rows_of():
    rows = torch.randint(4, 64, (7, 16), generator=torch.Generator().manual_seed(0))
    rows[1, 9:] = PAD_TOKEN
    rows[4, 3:] = PAD_TOKEN
    rows[5, :] = PAD_TOKEN
    return rows


@pytest.mark.parametrize("skip", [0, 1, 4, 16])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_rows_are_scored_as_one_by_one(skip, batch):
    model, rows = model_of(), rows_of()
    with torch.no_grad():
        single = [sum_losses(model, row[None], skip) for row in rows]
    at_once = scoring_at_once(torch.device("cpu"), batch)
    losses, counts = row_losses(model, rows, skip, at_once)
    np.testing.assert_allclose(losses, [total for total, _ in single], rtol=1e-5)
    assert counts.tolist() == [count for _, count in single]
    nll, count = sum_losses(model, rows, skip, at_once)
    assert nll == pytest.approx(losses.sum())
    assert count == counts.sum()
    assert isinstance(nll, float)
    assert isinstance(count, int)


def test_token_files_can_be_scored_directly(tmp_path):
    model, rows = model_of(), rows_of()
    rows.numpy().astype("<u2").tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", dtype="<u2", mode="r", shape=(7, 16))
    assert sum_losses(model, mapped, 4) == sum_losses(model, rows, 4)


def test_the_same_rows_give_the_same_bits_and_leave_no_trace():
    model, rows = model_of(), rows_of()
    first = sum_losses(model, rows, 4)
    assert sum_losses(model, rows, 4) == first
    assert all(parameter.grad is None for parameter in model.parameters())


class SmallMemory(PathModel):
    max_rows = 2

    def hidden_states(self, tokens):
        if len(tokens) > self.max_rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().hidden_states(tokens)


def test_memory_decides_how_many_rows_at_once_and_it_is_remembered(caplog):
    at_once = scoring_at_once(torch.device("cpu"), 8)
    expected = sum_losses(model_of(), rows_of(), 4)
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        for _ in range(2):
            nll, count = sum_losses(model_of(cls=SmallMemory), rows_of(), 4, at_once)
            assert nll == pytest.approx(expected[0], rel=1e-6)
            assert count == expected[1]
    assert at_once.count == 2
    assert len(caplog.records) == 2  # 8 to 4 to 2, in the first of both alone
    nothing = model_of(cls=SmallMemory)
    nothing.max_rows = 0
    with pytest.raises(ConfigurationError, match="does not fit"):
        sum_losses(nothing, rows_of(), 4)
