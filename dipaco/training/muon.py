"""Muon: a momentum whose singular values are all made about one, for the matrices of blocks.

Jordan et al. (2024, kellerjordan.github.io/posts/muon) with the scale of Liu et al. (2025, arXiv
2502.16982), by which it takes the learning rates and the weight decay of AdamW. It keeps one number
a parameter, AdamW two. `torch.optim.Muon` is the same, but from torch 2.9 on, and in bf16 on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from dipaco.modules.device import number_format

# As in the reference implementation of Muon.
_MOMENTUM = 0.95
# Of a step of the iteration x <- a x + (b s + c s^2) x with s = x x^T, and how many are made.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
# Root mean square of AdamW's updates, about.
_UPDATE_SIZE = 0.2


def is_for_muon(name: str, shape: Sequence[int]) -> bool:
    """Tell whether a parameter is a matrix of a block. Queries, keys, values, gate and up each have
    their own; what embeds or predicts tokens, and all vectors, is AdamW's."""
    return ".layers." in name and len(shape) == 2


class Muon(torch.optim.Optimizer):
    """Updates `matrices`, each [rows, columns], with Nesterov momentum and decoupled decay.

    As fused optimizers of PyTorch do, it leaves a step out where its `found_inf`, which is on the
    device, is 1.
    """

    _step_supports_amp_scaling = True

    def __init__(self, matrices: Iterable[torch.Tensor], *, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; there is no closure."""
        assert closure is None
        live = 1.0 - getattr(self, "found_inf", 0.0)
        for group in self.param_groups:
            rate: float = group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                gradient = matrix.grad.nan_to_num_()
                momentum = state["momentum"].lerp_(gradient, (1.0 - _MOMENTUM) * live)
                update = orthogonal(gradient.lerp(momentum, _MOMENTUM))
                matrix.mul_(1.0 - rate * group["weight_decay"] * live)
                longer = max(matrix.shape)
                matrix.add_(update * live, alpha=-rate * _UPDATE_SIZE * math.sqrt(longer))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix [rows, columns] with the same singular vectors and values of about 0.7 to
    1.2, in bf16 where the device has it and in fp32 elsewhere. Values near 0 stay smaller."""
    in_bf16 = number_format(matrix.device) == torch.bfloat16
    x = matrix.bfloat16() if in_bf16 else matrix
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if is_tall else x).to(matrix.dtype)
