import numpy as np
import pytest
import torch

from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import ModelConfig
from dipaco.routing.routers.document_routing import prefix_features

CONFIG = ModelConfig(vocabulary_size=50, block_count=2, hidden_size=16, head_count=2, sequence_length=32)


@pytest.fixture(scope="module")
def model():
    model = PathModel(CONFIG)
    initialise(model, 0)
    return model


def _documents(count):
    generator = np.random.default_rng(0)
    return [generator.integers(4, 50, int(n)).tolist() for n in generator.integers(1, 20, count)]


def test_mean_of_the_last_hidden_states(model):
    documents = _documents(30)
    features = prefix_features(model, documents, 8, batch=7)
    assert features.shape == (30, 16)
    assert features.dtype == np.float32
    for document, row in zip(documents, features, strict=True):
        with torch.no_grad():
            hidden = model.hidden_states(torch.tensor([document[:8]]))[0]
        np.testing.assert_allclose(row, hidden.mean(0).numpy(), rtol=1e-4, atol=1e-6)


def test_only_the_prefix_counts(model):
    documents = _documents(10)
    longer = [document + [9] * 50 if len(document) >= 8 else document for document in documents]
    np.testing.assert_array_equal(prefix_features(model, documents, 8), prefix_features(model, longer, 8))


def test_mode_is_kept_and_arrays_are_taken(model):
    model.train()
    lists = prefix_features(model, _documents(3), 8)
    assert model.training
    arrays = [np.array(document, dtype="<u2") for document in _documents(3)]
    np.testing.assert_array_equal(lists, prefix_features(model, arrays, 8))
    assert prefix_features(model, [], 8).shape == (0, 16)
    with pytest.raises(ValueError, match="without tokens"):
        prefix_features(model, [[5], []], 8)
