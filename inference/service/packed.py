"""The linear maps of a path as oneDNN keeps them: packed once, when the path is loaded.

On a CPU that is faster for one row and for many, and a row is computed alike however many are
beside it (`dipaco.inference.service.slots.steady_widths` makes sure of that). Elsewhere, and in
builds of PyTorch without oneDNN, a path stays as it is.
"""

from __future__ import annotations

import functools

import torch
from dipaco.modules.config import ModelConfig
from dipaco.modules.transformer import PathModel
from torch import nn


class PackedLinear(nn.Module):
    """A linear map that nothing can be loaded into any more: its dense weight is gone.

    :param weight: [outputs, inputs], fp32 on the CPU
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = None if bias is None else bias.detach()
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs]."""
        mapped: torch.Tensor = self._linear(hidden, self._weight, self._bias, "none", [], "")
        return mapped


def pack(model: PathModel) -> PathModel:
    """Replace the linear maps of a model that only computes from here on; return the model.

    A model on another device, or of another type, is left alone.
    """
    embedding = model.model.embed_tokens.weight
    if embedding.device.type != "cpu" or embedding.dtype != torch.float32 or not can_pack():
        return model
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child.weight, child.bias))
    if model.config.tied_embedding:
        model.lm_head = PackedLinear(embedding, None)
    return model


def packed_bytes(model: ModelConfig, device: torch.device) -> int:
    """Return what a packed path takes beyond 4 bytes a parameter: a head of its own, if tied."""
    is_packed = device.type == "cpu" and can_pack()
    return 4 * model.vocabulary_size * model.hidden_size * (is_packed and model.tied_embedding)


@functools.cache
def can_pack() -> bool:
    """Return whether this build of PyTorch packs linear maps, by trying it."""
    weight = torch.linspace(-1, 1, 12).view(4, 3)
    rows = torch.linspace(0, 1, 6).view(2, 3)
    try:
        found = PackedLinear(weight, None)(rows)
    except (AttributeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return torch.allclose(found, rows @ weight.T, atol=1e-5)
