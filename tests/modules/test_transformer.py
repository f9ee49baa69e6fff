"""The path model against a slow reference in float64, its cache, and its losses."""

import numpy as np
import pytest
import torch

from dipaco.modules import transformer
from dipaco.modules.transformer import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    PathModel,
    head_pieces,
    initialise,
    target_mask,
    token_losses,
)
from dipaco.protocol.config import PAD_TOKEN, ModelConfig
from dipaco.training.scoring import sum_losses


def config_of(**overrides):
    values = {
        "vocabulary_size": 40,
        "block_count": 2,
        "hidden_size": 16,
        "head_count": 4,
        "kv_head_count": 2,
        "feed_forward_size": 24,
        "sequence_length": 16,
    }
    return ModelConfig.model_validate({**values, **overrides})


def model_of(seed=0, **overrides):
    model = PathModel(config_of(**overrides))
    initialise(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms of one would hide mistakes
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
            elif "proj" in name:
                parameter.mul_(8)
    return model


def tokens_of(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 40, (batch, length), generator=generator)


def reference_logits(model, tokens):
    """A Llama written out position by position and head by head."""
    config = model.config
    weights = {k: v.detach().numpy().astype(np.float64) for k, v in model.named_parameters()}
    width = config.hidden_size // config.head_count

    def norm(x, weight):
        return weight * x / np.sqrt((x**2).mean() + config.norm_epsilon)

    def turn(x, position):
        out = np.empty_like(x)
        for i in range(width // 2):
            angle = position / config.rope_theta ** (2 * i / width)
            a, b = x[i], x[i + width // 2]
            out[i] = a * np.cos(angle) - b * np.sin(angle)
            out[i + width // 2] = b * np.cos(angle) + a * np.sin(angle)
        return out

    stream = [weights[EMBEDDING][token] for token in tokens]
    for block in range(config.block_count):
        at = f"model.layers.{block}."

        def w(name, at=at):
            return weights[f"{at}{name}.weight"]

        normed = [norm(x, w("input_layernorm")) for x in stream]
        queries = [w("self_attn.q_proj") @ x for x in normed]
        keys = [w("self_attn.k_proj") @ x for x in normed]
        values = [w("self_attn.v_proj") @ x for x in normed]
        for t in range(len(tokens)):
            mixed = []
            for head in range(config.head_count):
                shared = head // (config.head_count // config.kv_heads)
                mine, theirs = (slice(i * width, (i + 1) * width) for i in (head, shared))
                query = turn(queries[t][mine], t)
                scores = np.array([query @ turn(keys[s][theirs], s) for s in range(t + 1)])
                scores = np.exp(scores / np.sqrt(width))
                scores /= scores.sum()
                mixed.append(sum(scores[s] * values[s][theirs] for s in range(t + 1)))
            stream[t] = stream[t] + w("self_attn.o_proj") @ np.concatenate(mixed)
        for t, x in enumerate(stream):
            y = norm(x, w("post_attention_layernorm"))
            gate = w("mlp.gate_proj") @ y
            gated = gate / (1 + np.exp(-gate)) * (w("mlp.up_proj") @ y)
            stream[t] = x + w("mlp.down_proj") @ gated
    head = weights[HEAD] if HEAD in weights else weights[EMBEDDING]
    return np.stack([head @ norm(x, weights[FINAL_NORM]) for x in stream])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_logits_equal_the_reference(tied, kv_heads):
    model = model_of(tied_embedding=tied, kv_head_count=kv_heads)
    tokens = tokens_of(1, 9)
    with torch.no_grad():
        logits = model(tokens)
    expected = reference_logits(model, tokens[0].tolist())
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_parameter_names_are_those_of_a_llama_checkpoint():
    names = {name for name, _ in PathModel(config_of(block_count=1)).named_parameters()}
    assert names == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(
            f"model.layers.0.{part}.weight"
            for part in (
                "input_layernorm",
                "post_attention_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        ),
    }
    assert HEAD in dict(PathModel(config_of(tied_embedding=False)).named_parameters())
    assert not list(PathModel(config_of()).buffers())


def test_later_tokens_do_not_change_earlier_logits():
    model, tokens = model_of(), tokens_of(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = tokens_of(2, 5, seed=9)
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_hidden_states_come_before_the_final_norm():
    model, tokens = model_of(), tokens_of(2, 8)
    with torch.no_grad():
        hidden = model.hidden_states(tokens)
        logits = model.model.norm(hidden) @ model.model.embed_tokens.weight.T
        torch.testing.assert_close(logits, model(tokens))
    assert hidden.shape == (2, 8, 16)


def test_initialise_is_a_function_of_the_seed_alone():
    first, second, other = (PathModel(config_of(block_count=8)) for _ in range(3))
    before = torch.get_rng_state()
    initialise(first, 3)
    torch.randn(5)
    initialise(second, 3)
    initialise(other, 4)
    torch.set_rng_state(before)
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), second.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name
    weights = dict(first.named_parameters())
    assert weights[EMBEDDING].std().item() == pytest.approx(0.02, rel=0.15)
    down = torch.stack([weights[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(8)])
    assert down.std().item() == pytest.approx(0.02 / 4, rel=0.1)


def test_building_a_model_spends_no_randomness():
    before = torch.get_rng_state()
    PathModel(config_of())
    assert torch.equal(before, torch.get_rng_state())


def test_loss_counts_targets_after_the_prefix_and_no_padding():
    model, tokens = model_of(), tokens_of(3, 10)
    tokens[1, 6:] = PAD_TOKEN
    tokens[2, :] = PAD_TOKEN
    with torch.no_grad():
        likelihoods = torch.log_softmax(model(tokens).double(), dim=-1)
        for skip in (0, 1, 2, 4, 10, 20):
            counted = [
                -likelihoods[row, t - 1, tokens[row, t]].item()
                for row in range(3)
                for t in range(max(1, skip), 10)
                if tokens[row, t] != PAD_TOKEN
            ]
            total, count = sum_losses(model, tokens, skip)
            assert count == len(counted)
            assert total == pytest.approx(sum(counted), rel=1e-5)


@pytest.mark.parametrize("logits", [1, 7 * 40, 40 * 11, 40 * 12])
def test_logits_in_pieces_give_the_same_losses(logits, monkeypatch):
    model, tokens = model_of(), tokens_of(2, 6)
    expected = token_losses(model, tokens)
    monkeypatch.setattr(transformer, "LOGITS_AT_ONCE", logits)
    torch.testing.assert_close(token_losses(model, tokens), expected)
    pieces = list(head_pieces(model.config, model.hidden_states(tokens), tokens))
    assert sum(len(targets) for _, targets in pieces) == tokens.numel()
    assert max(len(targets) for _, targets in pieces) <= max(1, logits // 40)


def test_uniform_logits_cost_the_log_of_the_vocabulary():
    tokens = tokens_of(2, 6)
    losses = token_losses(PathModel(config_of()), tokens)
    torch.testing.assert_close(losses, torch.full((2, 5), float(np.log(40))))
    assert target_mask(tokens, PAD_TOKEN, 3).sum() == 2 * 3


@pytest.mark.parametrize(
    ("total_gib", "share", "least", "most"),
    [(8, 1.0, 2**27, 2**27), (24, None, 2**27, 2**27), (140, None, 2**29, 2**30), (141, 0.2, 2**27, 2**27)],
)
def test_a_large_gpu_computes_more_logits_at_once(monkeypatch, total_gib, share, least, most):
    memory = (0, total_gib * 2**30)
    monkeypatch.setattr(transformer, "free_and_total_bytes", lambda device: memory)
    monkeypatch.setattr(transformer, "permitted_share", lambda device: share)
    # Another number for each: what a GPU has is asked once.
    found = transformer.logits_at_once(torch.device("cuda", total_gib))
    assert least <= found <= most
