"""Small paths of every kind, with weights so large that each of them matters."""

import torch

from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import ModelConfig

KINDS = [
    {"family": "llama", "kv_head_count": 2},
    {"family": "llama", "attention_bias": True, "feed_forward_bias": True},
    {"family": "qwen2", "tied_embedding": False},
    {"family": "qwen3", "kv_head_count": 1, "head_width": 6},
]


def small_path(seed=0, **kind):
    shape = {"block_count": 2, "head_count": 4, "feed_forward_size": 48, "sequence_length": 24}
    model = PathModel(ModelConfig(vocabulary_size=64, hidden_size=32, **(shape | kind)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return model.eval()


@torch.no_grad()
def logits_of(model, tokens):
    return model(torch.tensor([tokens]))[0]
