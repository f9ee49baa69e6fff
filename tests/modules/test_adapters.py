"""Adapters over a frozen base: what is trained, what lies where, and that the base is the one."""

import hashlib
from pathlib import Path

import pytest
import torch

from dipaco.base.errors import IntegrityError
from dipaco.base.files import sha256_of_file
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.modules.adapters import initial_adapters
from dipaco.modules.canonical_file import MAX_HEADER_BYTES
from dipaco.modules.compose import load_path
from dipaco.modules.frozen_base import Nf4Weight
from dipaco.modules.frozen_file import open_base, write_base
from dipaco.modules.layout import layout_of, parameter_counts, parameter_shapes
from dipaco.modules.memory import pass_bytes
from dipaco.modules.state import genesis_state
from dipaco.modules.transformer import PathModel, token_losses
from dipaco.protocol.config import AdaptersConfig, GridConfig
from dipaco.protocol.grid import Grid
from support.runs.foreign_base import make_foreign_base

TOKENS = torch.arange(4, 36).view(2, 16)


def model_of(imported, base_format="bf16", rank=4):
    adapters = AdaptersConfig(rank=rank, base_format=base_format)
    return imported.model.model_copy(update={"adapters": adapters, "sequence_length": 32})


def base_in(folder, imported, model):
    file = folder / f"base-{model.adapters.base_format}"
    write_base(imported.folder, model.adapters.base_format, file)
    return file, sha256_of_file(file)


def opened(folder, imported, model):
    return open_base(*base_in(folder, imported, model), model)


@pytest.fixture(params=["smollm2", "llama", "qwen2", "qwen3"])
def imported(request, tmp_path):
    make_foreign_base(tmp_path / "checkpoint", request.param)
    return ImportedBase(tmp_path / "checkpoint")


@pytest.fixture
def smollm2(tmp_path):
    make_foreign_base(tmp_path / "checkpoint", "smollm2")
    return ImportedBase(tmp_path / "checkpoint")


def filled(model, base, seed=0):
    """Return a model whose adapters do something."""
    path = PathModel(model, base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in path.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return path


def test_only_adapters_are_parameters(smollm2):
    model = model_of(smollm2)
    shapes = parameter_shapes(model)
    assert len(shapes) == 7 * 2 * model.block_count
    assert shapes["model.layers.0.self_attn.q_proj.lora_A.weight"] == (4, 32)
    assert shapes["model.layers.1.mlp.down_proj.lora_B.weight"] == (32, 4)
    grid = Grid(model, GridConfig(modules_per_level=(1, 4)))
    assert parameter_counts(grid)["path"] == sum(a * b for a, b in shapes.values())
    assert all("lora_" in name for name in layout_of(grid, "L1.E3").names)


def test_adapters_begin_as_the_base_itself(imported, tmp_path):
    model = model_of(imported, "float32")
    base = opened(tmp_path, imported, model)
    whole = PathModel(imported.model)
    whole.load_state_dict(imported.parameters())
    path = PathModel(model, base)
    grid = Grid(model, GridConfig(modules_per_level=(2, 2)))
    first = initial_adapters(model, seed=7)
    states = {m: genesis_state(m, layout_of(grid, m), first) for m in grid.modules()}
    assert torch.equal(states["L0.E0"].parameters, states["L0.E1"].parameters)
    load_path(path, grid, 2, states)
    bound = model.hidden_size**-0.5
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    drawn = path.get_parameter(name)
    assert 0.8 * bound < float(drawn.detach().abs().max()) <= bound
    assert not torch.equal(drawn, initial_adapters(model, 8)[name])
    with torch.no_grad():
        assert torch.equal(path(TOKENS), whole(TOKENS))
        assert torch.equal(PathModel(model.without_adapters, base)(TOKENS), whole(TOKENS))


def test_base_and_adapters_are_added_up(imported, tmp_path):
    model = model_of(imported)
    path = filled(model, opened(tmp_path, imported, model))
    merged = PathModel(model.without_adapters)
    merged.load_state_dict(path.whole_parameters())
    with torch.no_grad():
        torch.testing.assert_close(path(TOKENS), merged(TOKENS), atol=1e-3, rtol=1e-3)


def test_gradients_are_those_of_the_merged_model(imported, tmp_path):
    """dL/dA and dL/dB follow from dL/dW: with a base in bf16, fp32, recomputed or not."""
    for base_format in ("bf16", "float32"):
        model = model_of(imported, base_format)
        path = filled(model, opened(tmp_path, imported, model))
        merged = PathModel(model.without_adapters)
        merged.load_state_dict(path.whole_parameters())
        for recomputes in (False, True):
            path.recomputes = recomputes
            path.zero_grad()
            token_losses(path, TOKENS).sum().backward()
            merged.zero_grad()
            token_losses(merged, TOKENS).sum().backward()
            for block in range(model.block_count):
                name = f"model.layers.{block}.mlp.up_proj"
                whole = merged.get_parameter(f"{name}.weight").grad
                a, b = (path.get_parameter(f"{name}.lora_{x}.weight") for x in "AB")
                torch.testing.assert_close(b.grad, 2 * whole @ a.detach().T, atol=2e-3, rtol=1e-3)
                torch.testing.assert_close(a.grad, 2 * b.detach().T @ whole, atol=2e-3, rtol=1e-3)


def test_a_pass_in_16_bits(smollm2, tmp_path):
    """As on a GPU: nothing is converted, and the loss is about the same."""
    model = model_of(smollm2)
    path = filled(model, opened(tmp_path, smollm2, model))
    exact = token_losses(path, TOKENS).mean()
    with torch.autocast("cpu", torch.bfloat16):
        rough = token_losses(path, TOKENS).mean()
    rough.backward()
    torch.testing.assert_close(rough, exact, atol=0.1, rtol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in path.parameters())


def test_all_models_stand_on_one_mapped_base(smollm2, tmp_path):
    model = model_of(smollm2)
    file, sha256 = base_in(tmp_path, smollm2, model)
    first, second = (PathModel(model, open_base(file, sha256, model)) for _ in range(2))
    table = first.model.embed_tokens.weight
    assert table.data_ptr() == second.model.embed_tokens.weight.data_ptr()
    assert not table.requires_grad
    assert table.dtype == torch.bfloat16
    mapped = Path("/proc/self/maps").read_text()
    assert str(file) in mapped
    assert first.to("cpu").model.embed_tokens.weight is table


def test_nf4_is_close_to_the_base(smollm2, tmp_path):
    model = model_of(smollm2, "nf4")
    path = filled(model, opened(tmp_path, smollm2, model))
    near = filled(model_of(smollm2), opened(tmp_path, smollm2, model_of(smollm2)))
    assert isinstance(path.get_submodule("model.layers.0.mlp.up_proj").weight, Nf4Weight)
    losses = token_losses(path, TOKENS)
    losses.sum().backward()
    torch.testing.assert_close(losses.mean(), token_losses(near, TOKENS).mean(), atol=0.5, rtol=0.1)
    assert all(p.grad is not None for p in path.parameters())


def test_another_base_is_refused_in_one_line(smollm2, tmp_path):
    model = model_of(smollm2)
    file, sha256 = base_in(tmp_path, smollm2, model)
    other = model.model_copy(update={"block_count": 3})
    with pytest.raises(IntegrityError, match=r"lacks 'model.layers.2"):
        open_base(file, sha256, other)
    with pytest.raises(IntegrityError, match=r"as torch.bfloat16 .* but this run's model"):
        open_base(file, sha256, model_of(smollm2, "float32"))
    content = bytearray(file.read_bytes())
    longer = content[:8] + b" " * MAX_HEADER_BYTES + content[8:]
    longer[:8] = (MAX_HEADER_BYTES + int.from_bytes(content[:8], "little")).to_bytes(8, "little")
    file.write_bytes(longer)
    with pytest.raises(IntegrityError, match=r"its header would be 419\d{4} bytes, and 4194304 are the most"):
        open_base(file, hashlib.sha256(longer).hexdigest(), model)
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"is not the base of this run: it has the SHA-256"):
        open_base(file, sha256, model)


def test_what_a_pass_keeps_is_as_estimated(smollm2, tmp_path):
    """The base's tensors are not kept again, in whatever format a pass is."""
    model = model_of(smollm2)
    path = filled(model, opened(tmp_path, smollm2, model))
    held = {tensor.untyped_storage()._cdata for tensor in path.tensors()}
    for in_16_bits in (True, False):
        kept = {}

        def keep(tensor, kept=kept):
            storage = tensor.untyped_storage()
            if storage._cdata not in held:
                kept[storage._cdata] = storage
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=in_16_bits),
        ):
            hidden = path.hidden_states(torch.arange(4, 36)[None])
        found = sum(storage.nbytes() for storage in kept.values()) + 8 * hidden.numel()
        assert pass_bytes(model, in_16_bits=in_16_bits) == pytest.approx(found, rel=0.05)
