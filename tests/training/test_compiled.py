"""What is compiled: one graph for the blocks, one for the head, and few of each over a run."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dipaco.modules import transformer
from dipaco.modules.adapters import initial_adapters
from dipaco.modules.frozen_base import FrozenBase
from dipaco.modules.transformer import PathModel, RMSNorm, head_pieces, rotation_of
from dipaco.protocol.config import AdaptersConfig
from support.runs.inner_loops import MODEL, batch_of, loop_of, model_of

QWEN3 = {"family": "qwen3", "kv_head_count": 1}


def whole(function):
    """Compile without code being made; what cannot be one graph is an error."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def adapted_model():
    """Return a path of adapters over a random base in 16 bits."""
    base = {
        name: tensor.detach().bfloat16() if tensor.ndim > 1 else tensor.detach()
        for name, tensor in model_of().named_parameters()
    }
    model = MODEL.model_copy(update={"adapters": AdaptersConfig(rank=2)})
    path = PathModel(model, FrozenBase(base, "bf16"))
    with torch.no_grad():
        for name, values in initial_adapters(model, 0).items():
            path.get_parameter(name).copy_(values)
    return path


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["plain", "qwen3", "adapters"])
def test_blocks_and_head_are_a_graph_each(kind, recomputes):
    changes = QWEN3 if kind == "qwen3" else {}
    model = model_of(MODEL.model_copy(update=changes)) if kind != "adapters" else adapted_model()
    loop = loop_of(model)
    # As on a GPU.
    loop.dtype = torch.bfloat16
    loop.model.recomputes = recomputes
    tokens = batch_of()
    given = (tokens, None, rotation_of(MODEL, tokens.shape[1], tokens.device))
    hidden = whole(loop._blocks)(*given)
    hidden.sum().backward()
    torch.testing.assert_close(hidden, loop._blocks(*given), rtol=0.05, atol=0.05)
    [(part, targets)] = head_pieces(MODEL, hidden.detach(), tokens)
    loss = whole(loop._head)(part.requires_grad_(), targets)
    loss.backward()
    torch.testing.assert_close(loss, loop._head(part, targets), rtol=0.01, atol=0.01)


def test_blocks_do_not_compute_cosines():
    """A compiler would have every block compute them anew, for every number."""
    graphs = []

    def kept(graph, _):
        graphs.append(str(graph.graph))
        return graph

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=kept))
        loop_of(compile_model=True).step(batch_of(), 0)
    assert len(graphs) == 2
    assert not any("target=cos]" in graph for graph in graphs)


def test_a_run_compiles_each_three_times_at_most(monkeypatch):
    """Once for the size of the first pieces, once for any, and once for a single sequence."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    # Pieces of three sizes, and pieces of logits of several.
    monkeypatch.setattr(transformer, "LOGITS_AT_ONCE", 64 * 40)
    loop = loop_of(compile_model=True, micro_batch_size=3, batch_sequences=8)
    for step in range(8):
        loop.model.train(step % 2 == 0)
        loop.step(batch_of(step, rows=(8, 7, 5)[step % 3]), step)
        if step == 4:
            loop.load_state_dict(loop.state_dict())
    assert counter.frame_count <= 6


def test_norms_hand_on_what_products_compute_in():
    norm, hidden = RMSNorm(16, 1e-5), torch.randn(2, 3, 16)
    exact = norm(hidden)
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(hidden), exact.bfloat16())
        assert norm(hidden.bfloat16()).dtype == torch.bfloat16


def test_the_head_has_larger_pieces_on_a_gpu():
    model = MODEL.model_copy(update={"vocabulary_size": 2**20})

    def pieces(device):
        hidden = torch.empty(4, 64, 1, device=device)
        return len(list(head_pieces(model, hidden, torch.ones(4, 64, dtype=torch.int64))))

    assert (pieces("cpu"), pieces("meta")) == (8, 2)
