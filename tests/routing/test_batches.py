import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dipaco.base.errors import CorpusError
from dipaco.routing.batches import BatchStream, batch_indices


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_every_epoch_is_a_permutation(batch, sequences, path):
    steps = -(-3 * sequences // batch)
    stream = np.concatenate([batch_indices(7, path, step, batch, sequences) for step in range(steps)])
    for epoch in range(3):
        piece = stream[epoch * sequences : (epoch + 1) * sequences]
        assert sorted(piece.tolist()) == list(range(sequences))


def test_frozen_draws():
    """These numbers may never change: a run in progress would draw other data."""
    assert batch_indices(0, 0, 0, 8, 10).tolist() == [3, 2, 1, 8, 6, 0, 7, 4]
    assert batch_indices(0, 0, 1, 8, 10).tolist() == [5, 9, 7, 6, 4, 5, 3, 9]


def test_streams_differ():
    first = batch_indices(0, 0, 0, 50, 1000).tolist()
    for other in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        assert batch_indices(*other, 50, 1000).tolist() != first


def test_empty_shard_names_the_path():
    with pytest.raises(CorpusError, match="path 3 is empty"):
        batch_indices(0, 3, 0, 4, 0)
    with pytest.raises(ValueError, match="0 or more"):
        batch_indices(0, 3, -1, 4, 10)


def test_batch_stream():
    tokens = np.arange(60, dtype="<u2").reshape(10, 6)
    stream = BatchStream(tokens, seed=1, path=2, batch_sequences=4)
    batch = stream.batch(3)
    assert batch.dtype == torch.int64
    assert batch.shape == (4, 6)
    assert stream.batches_per_epoch == 3
    assert (batch[:, 0] // 6).tolist() == batch_indices(1, 2, 3, 4, 10).tolist()
    batch[:] = 0
    assert tokens[1, 0] == 6
