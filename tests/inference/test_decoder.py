"""Decoding: what was read before changes nothing but the cost; paths mixed, and adapters over a base."""

import pytest
import torch

from dipaco.inference.decoder import Decoder
from dipaco.inference.mixing import mixed_losses
from dipaco.modules.frozen_base import FrozenBase
from dipaco.modules.frozen_file import base_shapes
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import AdaptersConfig
from support.runs.small_paths import KINDS, logits_of, small_path

TEXT = [5, 9, 20, 21, 22, 40, 41, 8, 9, 10]


def adapted_path():
    config = small_path(sequence_length=24).config.model_copy(update={"adapters": AdaptersConfig(rank=3, alpha=5)})
    drawn = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=drawn) * 0.4 for name, shape in base_shapes(config).items()}
    model = PathModel(config, FrozenBase(tensors, "float32"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=drawn)
    return model.eval()


MODELS = [*(small_path(**kind) for kind in KINDS), adapted_path()]


@pytest.mark.parametrize("model", MODELS, ids=[*("-".join(map(str, kind.values())) for kind in KINDS), "adapters"])
@pytest.mark.parametrize("read", [1, 4, 9])
def test_it_says_what_the_model_says(model, read):
    wanted, decoder = logits_of(model, TEXT).log_softmax(-1), Decoder([model])
    for _ in range(2):  # a text can be begun anew
        torch.testing.assert_close(decoder.read(TEXT[:read]), wanted[read - 1], rtol=1e-4, atol=1e-4)
        for place in range(read, len(TEXT)):
            torch.testing.assert_close(decoder.step(TEXT[place]), wanted[place], rtol=1e-4, atol=1e-4)
        assert decoder.length == len(TEXT)


@pytest.mark.parametrize("paths", [2, 3])
def test_a_mixture_weighs_paths_by_what_they_said_before(paths):
    models = [small_path(seed) for seed in range(paths)]
    targets = torch.tensor(TEXT[1:])[:, None]
    said = [logits_of(model, TEXT)[:-1].log_softmax(-1).gather(1, targets) for model in models]
    nats = -torch.stack(said)[:, None, :, 0]
    # The definition, one token after the other.
    for place in range(len(TEXT) - 1):
        ages = [0.9 ** (place - 1 - before) for before in range(place)]
        evidence = (nats[:, 0, :place] * torch.tensor(ages)).sum(dim=1)
        weights = torch.softmax(-evidence, dim=0)
        expected = -(weights * (-nats[:, 0, place]).exp()).sum().log()
        assert abs(float(mixed_losses(nats)[0, place] - expected)) < 1e-5
    mixture = Decoder(models)
    for _ in range(2):
        found = [mixture.read(TEXT[:4]), *(mixture.step(token) for token in TEXT[4:-1])]
        losses = -torch.stack(found)[torch.arange(6), torch.tensor(TEXT[4:])]
        torch.testing.assert_close(losses, mixed_losses(nats)[0, 3:], rtol=1e-4, atol=1e-4)


def test_equal_paths_mixed_are_one_path():
    nats = torch.rand(1, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixed_losses(nats.repeat(2, 1, 1)), nats[0])
