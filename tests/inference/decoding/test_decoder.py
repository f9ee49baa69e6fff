"""Decoding: what the fused path says is what the path says, in any company; paths mixed."""

import pytest
import torch

from dipaco.inference.decoding.decoder import Decoder
from dipaco.inference.decoding.mixing import decoder_of, mixed_losses
from support.runs.small_paths import KINDS, logits_of, small_path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_it_says_what_the_model_says(kind):
    model = small_path(**kind)
    decoder = Decoder(model, 6)
    texts = [[5 + (3 * slot + place) % 50 for place in range(20)] for slot in range(6)]
    lengths = [12, 1, 7, 3, 9, 12]
    wanted = [logits_of(model, text) for text in texts]
    for slot, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        found = torch.cat(list(decoder.read(slot, text[:length], every=True)))
        torch.testing.assert_close(found, wanted[slot][:length], rtol=1e-4, atol=1e-4)
    for width in (6, 5, 2, 1):  # both ways to multiply
        tokens = [texts[slot][decoder.lengths[slot]] for slot in range(width)]
        found = decoder.step(tokens)
        for slot in range(width):
            expected = wanted[slot][decoder.lengths[slot] - 1]
            torch.testing.assert_close(found[slot], expected, rtol=1e-4, atol=1e-4)


def test_a_text_can_be_copied_and_its_place_taken_by_another():
    decoder = Decoder(small_path(), 3)
    list(decoder.read(2, [7, 8, 9]))
    copied = decoder.copy(2, 3)
    assert decoder.step([None, None, 10])[2].isfinite().all()
    decoder.free(2)
    list(decoder.read(2, [30, 31, 32, 33, 34]))
    decoder.paste(0, copied)
    *_, expected = Decoder(small_path(), 1).read(0, [7, 8, 9, 40])
    assert decoder.lengths == [3, 0, 5]
    torch.testing.assert_close(decoder.step([40])[0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("paths", [2, 3])
def test_a_mixture_weighs_paths_by_what_they_said_before(paths):
    models = [small_path(seed) for seed in range(paths)]
    text = [5, 9, 20, 21, 22, 40, 41, 8, 9, 10]
    targets = torch.tensor(text[1:])[:, None]
    said = [logits_of(model, text)[:-1].log_softmax(-1).gather(1, targets) for model in models]
    nats = -torch.stack(said)[:, None, :, 0]
    # The definition, one token after the other.
    for place in range(len(text) - 1):
        ages = [0.9 ** (place - 1 - before) for before in range(place)]
        evidence = (nats[:, 0, :place] * torch.tensor(ages)).sum(dim=1)
        weights = torch.softmax(-evidence, dim=0)
        expected = -(weights * (-nats[:, 0, place]).exp()).sum().log()
        assert abs(float(mixed_losses(nats)[0, place] - expected)) < 1e-5
    mixture = decoder_of(models, slots=2)
    *_, logits = mixture.read(1, text[:4])
    copied = mixture.copy(1, 4)
    mixture.free(1)
    mixture.paste(0, copied)
    found = [logits[-1]] + [mixture.step([token])[0] for token in text[4:-1]]
    losses = -torch.stack(found).log_softmax(-1)[torch.arange(6), torch.tensor(text[4:])]
    torch.testing.assert_close(losses, mixed_losses(nats)[0, 3:], rtol=1e-4, atol=1e-4)


def test_equal_paths_mixed_are_one_path():
    nats = torch.rand(1, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixed_losses(nats.repeat(2, 1, 1)), nats[0])
