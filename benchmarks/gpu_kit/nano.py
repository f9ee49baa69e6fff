"""A GPT and its training loop as people write them for one GPU: what a path is measured beside.

LayerNorm, one matrix for queries, keys and values, GELU, learned positions, a head tied to the
embedding, all logits at once, bf16 autocast, fused AdamW, `torch.compile` around the whole model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from dipaco.modules.device import autocast_for, sent, training_format
from dipaco.protocol.config import ModelConfig


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width, bias=False)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.after_attention = nn.Linear(width, width, bias=False)
        self.before_inside = nn.LayerNorm(width, bias=False)
        self.inside = nn.Linear(width, 4 * width, bias=False)
        self.after_inside = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.attention(self.before_attention(hidden)).split(width, dim=2)
        queries, keys, values = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        hidden = hidden + self.after_attention(mixed)
        return hidden + self.after_inside(F.gelu(self.inside(self.before_inside(hidden))))


class NanoGPT(nn.Module):
    """Tokens and targets in, the mean loss out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocabulary_size, width)
        self.positions = nn.Embedding(config.sequence_length, width)
        self.blocks = nn.ModuleList(
            _Block(width, config.head_count) for _ in range(config.block_count)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, T] and targets [B, T] to the mean loss."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def multiplied_parameters(self) -> int:
        """Return the parameters of matrix products: all but the positions and the norms."""
        return (
            sum(p.numel() for p in self.parameters() if p.ndim > 1) - self.positions.weight.numel()
        )


def plain_step(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    model: nn.Module,
    device: torch.device,
    at_once: int,
    rate: float = 4e-4,
    *,
    exact: bool = False,
) -> Callable[[torch.Tensor], None]:
    """Return the step of a plain loop: pieces of `at_once` sequences, clipping, fused AdamW.

    With `exact` a CPU computes in fp32, as our own loop does.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)

    def step(batch: torch.Tensor) -> None:
        pieces = batch.split(at_once)
        for piece in pieces:
            tokens = sent(piece, device)
            with autocast_for(device, training_format(device, exact=exact)):
                loss = loss_of(tokens, tokens.roll(-1, 1))
            (loss / len(pieces)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
