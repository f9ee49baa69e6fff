"""Many paths over one base: what they say together is what each of them says alone."""

import pytest
import torch

from dipaco.inference.decoding.adapter_decoder import AdapterDecoder, SharedDecoder, step_together
from dipaco.inference.decoding.decoder import Decoder
from dipaco.inference.decoding.mixing import MixedDecoder, decoder_of
from dipaco.modules.compose import load_path
from dipaco.modules.frozen_base import FrozenBase
from dipaco.modules.frozen_file import base_shapes
from dipaco.modules.layout import layout_of
from dipaco.modules.state import genesis_state
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import AdaptersConfig, GridConfig, ModelConfig
from dipaco.protocol.grid import Grid
from support.runs.small_paths import logits_of

ADAPTERS = AdaptersConfig(rank=3, alpha=5)
CONFIG = ModelConfig(
    vocabulary_size=64, hidden_size=32, block_count=2, head_count=4, kv_head_count=2,
    feed_forward_size=48, sequence_length=24, adapters=ADAPTERS,
)  # fmt: skip
# Path 3 shares a module with path 2 and one with path 1.
GRID = Grid(CONFIG, GridConfig(modules_per_level=(2, 2)))
Paths = tuple[list[PathModel], SharedDecoder, list[AdapterDecoder]]


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.4


@pytest.fixture(scope="module")
def paths():
    tensors = {name: drawn(shape, number) for number, (name, shape) in enumerate(base_shapes(CONFIG).items())}
    base = FrozenBase(tensors, "float32")
    shared = SharedDecoder(PathModel(CONFIG.without_adapters, base), ADAPTERS.scale, slots=6)
    models = [PathModel(CONFIG, base).eval() for _ in range(4)]
    for path, model in enumerate(models):
        load_path(model, GRID, path, states_of(path))
    return models, shared, [shared.path(states_of(path)) for path in range(4)]


def states_of(path):
    states = {}
    for module in GRID.modules_of_path(path):
        layout = layout_of(GRID, module)
        flat = drawn((layout.size,), 100 + GRID.modules().index(module))
        states[module] = genesis_state(module, layout, layout.views(flat))
    return states


@pytest.mark.parametrize("count", [3, 6])  # both ways to multiply
def test_texts_of_several_paths_get_their_tokens_together(count, paths):
    models, shared, decoders = paths
    texts = [[5 + (3 * number + place) % 50 for place in range(9)] for number in range(count)]
    of = [decoders[number % 4] for number in range(count)]
    slots = [number // 4 for number in range(count)]
    for number, text in enumerate(texts):
        found = torch.cat(list(of[number].read(slots[number], text[: 3 + number % 3], every=True)))
        wanted = logits_of(models[number % 4], text)[: 3 + number % 3]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for _ in range(2):
        tokens = [[None, None] for _ in decoders]
        for number, text in enumerate(texts):
            tokens[number % 4][slots[number]] = text[of[number].lengths[slots[number]]]
        found = step_together(decoders, tokens)
        for number, text in enumerate(texts):
            length = of[number].lengths[slots[number]]
            wanted = logits_of(models[number % 4], text)[length - 1]
            torch.testing.assert_close(found[number % 4][slots[number]], wanted, rtol=1e-4, atol=1e-4)
    for number in range(count):
        of[number].free(slots[number])
    assert len(shared.free) == 6


def test_a_text_that_waits_is_left_as_it_is(paths):
    models, _, decoders = paths
    list(decoders[0].read(0, [7, 8, 9]))
    list(decoders[1].read(0, [17, 18]))
    decoders[1].step([19])
    found = decoders[0].step([10])[0]
    torch.testing.assert_close(found, logits_of(models[0], [7, 8, 9, 10])[-1], rtol=1e-4, atol=1e-4)
    for decoder in decoders[:2]:
        decoder.free(0)


def test_paths_over_one_base_are_mixed_as_others_are(paths):
    models, shared, decoders = paths
    mixture, alike = MixedDecoder(decoders[:2]), decoder_of(models[:2], slots=2)
    assert mixture.free_slots == 3
    wanted = MixedDecoder([Decoder(model, 2) for model in models[:2]])
    for one in (mixture, alike, wanted):
        list(one.read(0, [5, 9, 20]))
    expected = wanted.step([21])
    for one in (mixture, alike):
        torch.testing.assert_close(one.step([21]), expected, rtol=1e-4, atol=1e-4)
    mixture.free(0)
    assert len(shared.free) == 6


def test_paths_that_share_a_module_hold_it_once(paths):
    _, _, decoders = paths
    assert decoders[3]._modules[0] is decoders[2]._modules[0]
    assert decoders[3]._modules[1] is decoders[1]._modules[1]


def test_a_base_in_16_bits_is_near(paths):
    models, _, _ = paths
    base = models[0].base
    assert base is not None
    whole = PathModel(CONFIG.without_adapters, base)
    shared = SharedDecoder(whole, ADAPTERS.scale, 2, torch.bfloat16)
    decoder = shared.path(states_of(0))
    found = torch.cat(list(decoder.read(0, [7, 8, 9, 10], every=True)))
    wanted = logits_of(models[0], [7, 8, 9, 10])
    other = logits_of(models[1], [7, 8, 9, 10])
    assert float((found - wanted).abs().max()) < 0.1 * float((other - wanted).abs().max())
